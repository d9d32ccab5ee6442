"""An inspection for people: what is in a file, where its memory goes, and what its reader had to say."""

from itertools import islice
from os.path import basename

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stowplan.analyse.inspection import Inspection
from stowplan.ir import Tensor
from stowplan.report.curve import memory_curve_drawing
from stowplan.report.notes import notes_table
from stowplan.report.summary import summary_table
from stowplan.report.terminal import bar, blocks_of, print_trimmed
from stowplan.units import format_bytes, format_seconds

_LARGEST = 10
_LONGEST = 4
_BAR = 50
_INDENT = 2


def show_inspection(inspection: Inspection, console: Console, *, title: str, all_notes: bool = False) -> None:
    """Print an inspection section by section; one without content is left out."""
    document, width, blocks = inspection.document, console.width - _INDENT, blocks_of(console)
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
            print_trimmed(console, Text(heading, "bold"), Padding(body, (0, 0, 1, _INDENT)))


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
        table.add_row(name, Text(figure, justify="right"), Text(bar(size / largest, _BAR, blocks), "green"))
    return table


def _largest(inspection: Inspection) -> Table | None:
    tensors, alive = inspection.document.graph.tensors, inspection.facts.peak.tensors
    if not alive:
        return None
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="cyan")
    table.add_column("bytes", justify="right")
    for heading in ("kind", "shape", "tensor"):
        table.add_column(heading)
    for tensor in (tensors[name] for name in alive[:_LARGEST]):
        table.add_row(format_bytes(tensor.nbytes or 0), tensor.kind, _shape(tensor), _label(tensor))
    if len(alive) > _LARGEST:
        rest = sum(tensors[name].nbytes or 0 for name in alive[_LARGEST:])
        table.add_row(format_bytes(rest), f"{len(alive) - _LARGEST:,} more")
    return table


def _shape(tensor: Tensor) -> str:
    sizes = "?" if tensor.shape is None else "x".join(map(str, tensor.shape)) or "scalar"
    return f"{tensor.dtype or '?'} {sizes}"


def _label(tensor: Tensor) -> Text:
    """Id and name on one line, cut short if they must be."""
    name = f"  {tensor.name}" if tensor.name and tensor.name != tensor.id else ""
    return Text(tensor.id + name, no_wrap=True, overflow="ellipsis")


def _times(inspection: Inspection, blocks: str) -> Group | None:
    """Per clock its span, the op types that take the time, and the longest single ops."""
    parts: list[RenderableType] = []
    for clock, times in inspection.times.items():
        ops = islice(times.seconds_by_op.items(), _LONGEST)
        longest = ", ".join(f"{op} ({format_seconds(seconds)})" for op, seconds in ops)
        types = islice(times.seconds_by_type.items(), _LONGEST)
        bars = _bars([(name, seconds, format_seconds(seconds)) for name, seconds in types], blocks)
        parts += [f"{clock}: {format_seconds(times.span_seconds)} in all; longest ops {longest}", bars or ""]
    return Group(*parts) if parts else None
