"""An inspection for people: the content of a file, its memory, and the notes of its reader."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from os.path import basename
from typing import TypeAlias

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from stowplan.analyse.inspection import Inspection
from stowplan.ir import Kind, Note, Tensor
from stowplan.ir.text import Labels, shape_text
from stowplan.report.terminal import (
    INDENT,
    Bar,
    blocks_of,
    in_module,
    memory_curve_drawing,
    module_columns,
    modules_table,
    print_section,
    wrapped,
)
from stowplan.units import format_bytes, format_count, format_seconds

_GROUPS = 8
_PARTICULARS = re.compile(r"'[^']*'|[\w.]*[0-9._][\w.]*|\b[A-Z]\w+")  # quoted, dotted, numbered, Capitalised


def notes_table(notes: Sequence[Note], *, everything: bool) -> Table | None:
    """The notes, or the first of each group of similar notes."""
    if not notes:
        return None
    table = Table.grid(padding=(0, 2))
    groups = [[note] for note in notes] if everything else _groups(notes)
    shown = groups if everything else groups[:_GROUPS]
    for group in shown:
        table.add_row(group[0].kind, group[0].where, _told(group))
    left = sum(map(len, groups[len(shown) :]))
    if left:
        table.add_row("", "", f"... and {left} more: --notes shows all")
    return table


def _groups(notes: Sequence[Note]) -> list[list[Note]]:
    """Notes that differ only in names and numbers, the largest group first."""
    groups: dict[tuple[str, str], list[Note]] = {}
    for note in notes:
        groups.setdefault((note.kind, _PARTICULARS.sub("_", note.what)), []).append(note)
    return sorted(groups.values(), key=len, reverse=True)


def _told(group: Sequence[Note]) -> str:
    return group[0].what + (f"  (and {len(group) - 1} like it)" if len(group) > 1 else "")


Row: TypeAlias = tuple[str, str, str]  # what, how much, and what that means

_NAMES = 8
_LABELS, _FIGURES = 15, 15  # the widths that labels and figures take
_NARROW = 60  # then figures stand above what they mean


def summary_table(inspection: Inspection, width: int) -> Table:
    """All rows that a document has something to say for."""
    table, is_narrow = Table.grid(padding=(0, 2)), width < _NARROW
    parts = (
        _contents(inspection, width - _LABELS - (0 if is_narrow else _FIGURES)),
        _peaks(inspection),
        _packing(inspection),
        _facets(inspection),
    )
    for label, figure, meaning in (row for rows in parts for row in rows):
        if is_narrow:
            table.add_row(Text(label, "cyan"), f"{figure}\n{meaning}" if figure else meaning)
        else:
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
    """The op at the peak, with its type where its name is only a number."""
    for op in inspection.document.graph.ops:
        if op.id == inspection.facts.peak.op:
            name = Labels(inspection.document.graph).op(op.id)
            return f"while {name} runs" + (f" ({op.type})" if op.id.isdecimal() else "")
    return "as nothing runs"


def _packing(inspection: Inspection) -> Iterator[Row]:
    packing = inspection.packing
    if packing is None:
        yield "packed", "-", "too many tensors; --pack packs them anyway"
    else:
        meaning = f"in one arena, {packing.gap:.2%} over the most alive at once"
        yield _size("packed", packing.arena_bytes, meaning)


def _facets(inspection: Inspection) -> Iterator[Row]:
    """The document's addresses, regions and tiles."""
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


_LARGEST = 10
_LONGEST = 4
_BAR = 50


def show_inspection(inspection: Inspection, console: Console, *, title: str, all_notes: bool = False) -> None:
    """Print an inspection section by section; one without content is left out."""
    document, width, blocks = inspection.document, console.width - INDENT, blocks_of(console)
    curve = inspection.facts.curve_bytes.tolist()
    sections: list[tuple[str, RenderableType | None]] = [
        (f"{basename(title)}: {document.format}", summary_table(inspection, width)),
        ("memory while each op runs", memory_curve_drawing(curve, document.graph.ops, width, blocks)),
        ("bytes by kind", _kinds(inspection, blocks)),
        ("largest tensors at the peak", _largest(inspection)),
        ("time in kernels", _times(inspection, blocks)),
        (f"notes of the reader ({len(document.notes)})", notes_table(document.notes, everything=all_notes)),
    ]
    for heading, body in sections:
        if body is not None:
            print_section(console, heading, body)


def _kinds(inspection: Inspection, blocks: str) -> Table | None:
    sizes = sorted(inspection.facts.bytes_by_kind.items(), key=lambda item: -item[1])
    return _bars([(str(kind), size, format_bytes(size)) for kind, size in sizes if size], blocks)


def _bars(rows: list[tuple[str, float, str]], blocks: str) -> Table | None:
    """A line per quantity: name, figure, and a bar against the largest."""
    if not rows:
        return None
    largest = max(0, *(size for _, size, _ in rows)) or 1
    table = Table.grid(padding=(0, 2))
    for name, size, figure in rows:
        table.add_row(name, Text(figure, justify="right"), Bar(size / largest, _BAR, blocks))
    return table


def _largest(inspection: Inspection) -> Table | None:
    tensors, alive = inspection.document.graph.tensors, inspection.facts.peak.tensors
    if not alive:
        return None
    labels = Labels(inspection.document.graph)
    if labels.captured:
        return modules_table(labels.groups(alive), _LARGEST)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="cyan")
    table.add_column("bytes", justify="right")
    table.add_column("kind")
    for heading in ("shape", "tensor"):
        table.add_column(heading, overflow="fold")
    for tensor in (tensors[name] for name in alive[:_LARGEST]):
        table.add_row(format_bytes(tensor.nbytes or 0), tensor.kind, shape_text(tensor), _label(tensor))
    if len(alive) > _LARGEST:
        rest = sum(tensors[name].nbytes or 0 for name in alive[_LARGEST:])
        table.add_row(format_bytes(rest), f"{len(alive) - _LARGEST:,} more")
    return table


def _label(tensor: Tensor) -> Text:
    """Id and name on one line, cut short if they must be."""
    name = f"  {tensor.name}" if tensor.name and tensor.name != tensor.id else ""
    return Text(tensor.id + name, no_wrap=True, overflow="ellipsis")


def _times(inspection: Inspection, blocks: str) -> Group | None:
    """Per clock its span, the op types that take the time, and the longest single ops."""
    parts: list[RenderableType] = []
    labels = Labels(inspection.document.graph)
    for clock, times in inspection.times.items():
        types = islice(times.seconds_by_type.items(), _LONGEST)
        bars = _bars([(name, seconds, format_seconds(seconds)) for name, seconds in types], blocks)
        span = f"{clock}: {format_seconds(times.span_seconds)} in all"
        if labels.captured:
            parts += [span, bars or "", _slowest(labels, times.seconds_by_op)]
            continue
        ops = islice(times.seconds_by_op.items(), _LONGEST)
        longest = ", ".join(f"{op} ({format_seconds(seconds)})" for op, seconds in ops)
        parts += [f"{span}; longest ops {longest}", bars or ""]
    return Group(*parts) if parts else None


def _slowest(labels: Labels, seconds_by_op: Mapping[str, float]) -> Table:
    """The modules of a captured step whose ops take the longest."""
    groups = labels.op_groups(seconds_by_op)[:_LONGEST]
    table = module_columns(("time", "n"))
    for group in groups:
        where = in_module(group.module, group.what, group.line)
        table.add_row(format_seconds(group.seconds), f"{group.count:,}", where)
    return table
