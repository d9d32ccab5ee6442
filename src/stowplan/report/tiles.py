"""The map of a tiled segment: its regions op by op, its halo, its work."""

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stowplan.plan.explain.explain import TiledTensor
from stowplan.plan.tile_map import TileMap
from stowplan.report.terminal import INDENT, print_section, print_trimmed
from stowplan.units import format_bytes, format_count


def show_tile_map(tiled: TileMap, console: Console, *, heading: str = "", depth: int = 1) -> None:
    """Print a map, and those of the segments that are tiled inside its tiles."""
    title = heading or f"{tiled.sweep}: {tiled.tiles} tiles, {_by(tiled.parts)}"
    print_trimmed(console, Padding(Text(title, "bold"), (0, 0, 0, INDENT * (depth - 1))))
    print_trimmed(console, Padding(_facts(tiled), (0, 0, 0, INDENT * depth)))
    print_trimmed(console, Padding(_levels(tiled), (0, 0, 1, INDENT * depth)))
    for inner in tiled.within:
        show_tile_map(inner, console, depth=depth + 1)


def show_tiled_tensor(found: TiledTensor, console: Console) -> None:
    """A tensor that is never whole."""
    rows = (
        ("decided", f"never whole: {found.told.sweep} computes it in {_by(found.told.parts)} tiles"),
        ("made by", found.told.labels().op(found.level.op)),
        ("whole", _by(found.level.whole)),
        ("largest part", _by(found.level.part)),
        ("made in all", f"{found.level.work:.3f} of it; over 1 because tiles overlap"),
        *((("in each tile", "recomputed for its backward"),) if found.recomputed else ()),
    )
    table = Table.grid(padding=(0, 2))
    for name, text in rows:
        table.add_row(Text(name, "cyan"), text)
    print_section(console, found.tensor, table)


def _facts(tiled: TileMap) -> str:
    again = f", {len(tiled.again)} tensors recomputed in each" if tiled.again else ""
    again += (
        f"; for its backward, its inputs are recomputed from {', '.join(tiled.made_of)}"
        if tiled.made_of
        else ""
    )
    return (
        f"grid {_by(tiled.parts)}, halo {tiled.halo_share:.1%} of the forward work, "
        f"{format_count(tiled.extra_macs)} multiply-accumulates more than whole, "
        f"{format_bytes(tiled.backward_peak_bytes)} in the largest tile{again}"
    )


def _levels(tiled: TileMap) -> Table:
    labels = tiled.labels()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="cyan")
    for heading in (*(("module",) if labels.captured else ()), "op", "whole", "largest part"):
        table.add_column(heading, overflow="fold")
    for heading in ("made in all", "MACs"):
        table.add_column(heading, justify="right")
    for level in tiled.levels:
        module = (labels.module_of(level.tensor),) if labels.captured else ()
        sizes = _by(level.whole), _by(level.part)
        table.add_row(*module, level.op, *sizes, f"{level.work:.3f}", format_count(level.macs))
    return table


def _by(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes)) or "one number"
