"""The summary of an inspection: one row per figure, with what it means beside it."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from rich.table import Table
from rich.text import Text

from stowplan.analyse.inspection import Inspection
from stowplan.ir import Kind
from stowplan.report.terminal import wrapped
from stowplan.units import format_bytes, format_count

Row: TypeAlias = tuple[str, str, str]  # what, how much, and what that means

_NAMES = 8
_LEFT = 30  # the width that labels and figures take


def summary_table(inspection: Inspection, width: int) -> Table:
    """All rows that a document has something to say for."""
    table = Table.grid(padding=(0, 2))
    parts = (
        _contents(inspection, width - _LEFT),
        _peaks(inspection),
        _packing(inspection),
        _facets(inspection),
    )
    for label, figure, meaning in (row for rows in parts for row in rows):
        table.add_row(Text(label, "cyan"), Text(figure, justify="right"), meaning)
    return table


def _contents(inspection: Inspection, width: int) -> Iterator[Row]:
    graph, costs = inspection.document.graph, inspection.facts.costs
    yield "ops", f"{len(graph.ops):,}", _commonest((op.phase for op in graph.ops), width)
    yield "", "", _commonest((op.type for op in graph.ops), width)
    yield "tensors", f"{len(graph.tensors):,}", _commonest((t.kind for t in graph.tensors.values()), width)
    yield "work", format_count(costs.step_macs), f"MACs, {format_count(costs.forward_macs)} of them forward"


def _commonest(names: Iterable[str], width: int) -> str:
    counts = Counter(names).most_common()
    more = [f"{len(counts) - _NAMES} more"] if len(counts) > _NAMES else []
    return wrapped([*(f"{count:,} {name}" for name, count in counts[:_NAMES]), *more], width)


def _peaks(inspection: Inspection) -> Iterator[Row]:
    """The peak, those others that differ from it (constants only if they matter), and the bound."""
    facts = inspection.facts
    plain, constants = facts.peak.bytes, facts.bytes_by_kind[Kind.CONSTANT]
    yield _size("peak", plain, _running(inspection))
    if 100 * constants > plain:
        yield _size("", plain + constants, f"with {format_bytes(constants)} of constants")
    if inspection.in_place_peak_bytes < plain:
        yield _size("", inspection.in_place_peak_bytes, "if ops overwrite inputs that die")
    if inspection.without_layout_peak_bytes is not None:
        yield _size("", inspection.without_layout_peak_bytes, "without changes of layout")
    yield _size("lower bound", facts.lower_bound_bytes, "without tiles: no order of ops needs less")


def _size(label: str, size: int, meaning: str) -> Row:
    return label, format_bytes(size), f"{size:,} B {meaning}"


def _running(inspection: Inspection) -> str:
    """Which op makes the peak, with its type where its name is but a number."""
    for op in inspection.document.graph.ops:
        if op.id == inspection.facts.peak.op:
            return f"while {op.id} runs" + (f" ({op.type})" if op.id.isdecimal() else "")
    return "as nothing runs"


def _packing(inspection: Inspection) -> Iterator[Row]:
    packing = inspection.packing
    if packing is None:
        yield "packed", "-", "not tried with so many tensors; --pack takes the time"
    else:
        meaning = f"in one arena, {packing.gap:.2%} over the most alive at once"
        yield _size("packed", packing.arena_bytes, meaning)


def _facets(inspection: Inspection) -> Iterator[Row]:
    """What a document carries beside its graph."""
    if addresses := inspection.addresses:
        starts = f"starts of {addresses.tensors:,} tensors in {format_bytes(addresses.touched_bytes)}"
        shared = f"{len(addresses.overlaps)} overlap while alive, {len(addresses.views)} as a view"
        yield "addresses", f"{addresses.start_addresses:,}", f"{starts}; {shared}"
    if regions := inspection.document.regions:
        count = len(regions.tensors) + len(regions.ops)
        yield "regions", f"{count:,}", f"of {len(regions.tensors)} tensors and {len(regions.ops)} ops"
    if tiles := inspection.tile_costs:
        work = f"{tiles.forward_macs:,} forward MACs against {tiles.untiled_macs:,} untiled"
        yield "tiles", f"{tiles.tiles:,}", f"{work}; {tiles.writes:,} writes for {tiles.cells:,} cells"
