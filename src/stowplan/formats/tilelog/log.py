"""The content of a tile log: the layers, the tables of each tile, the comparison of gradients, the network.

The log prints no kernel, stride or padding: they follow from the boxes of a few tiles.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from stowplan.errors import BadInput, StowplanError
from stowplan.formats.tilelog.network import Layer, network_graph
from stowplan.formats.tilelog.records import RECORD_LINES, BoxRecord, LogLine, is_record, parse_record
from stowplan.geometry import Rect
from stowplan.ir import Graph, Shape
from stowplan.ops.windows import Window, windows_of

_SHAPE = r"((?:[0-9]{1,6}x){3}[0-9]{1,6})"
_INPUT = re.compile(f"Input {_SHAPE}")
_OP = re.compile(r"L-->R current op ([0-9]{1,18})")
_AFTER = re.compile(rf"after ([a-z0-9]{{1,40}}) {_SHAPE}")
_SEPARATOR = re.compile(r"&{20,60}")
_REFERENCE = re.compile(r"Inside [A-Za-z0-9]{1,40} backward")
_VERDICT = re.compile(r" precentile ([0-9]{1,15}) / ([0-9]{1,15}) = [0-9.e+-]{1,30}")


@dataclass(frozen=True, slots=True)
class Announcement:
    """A layer as the log announces it: its id, its type and the shape after it."""

    id: str
    type: str
    output: Shape
    where: str


@dataclass(slots=True)
class Log:
    """Everything the reader uses of a log, in the log's order.

    `repeated` are the records that the tiled backward prints again as it uses them; `verdict` is how many
    elements of the input's gradient differ from the untiled reference, and of how many.
    """

    image: Shape = ()
    layers: list[Announcement] = field(default_factory=list)
    forward: list[list[BoxRecord]] = field(default_factory=list)
    backward: list[list[BoxRecord]] = field(default_factory=list)
    repeated: list[BoxRecord] = field(default_factory=list)
    separators: int = 0
    reference_ops: int = 0
    verdict: tuple[int, int] | None = None


def parse_log(lines: Sequence[LogLine]) -> Log:
    """Go through the lines once; those that print tensors or sizes along the way say nothing new."""
    log = Log()
    at = 0
    while at < len(lines):
        at = _take(log, lines, at)
    if not (log.image and log.layers and log.forward):
        what = "no network with tiles: expected `Input`, `L-->R current op` and `f_info {` lines"
        raise BadInput(what, where=lines[-1].where)
    return log


def _take(log: Log, lines: Sequence[LogLine], at: int) -> int:
    """File what starts at this line, and say where the next thing starts."""
    text = lines[at].text
    if text.startswith(("f_info {", "b_info {")):
        records = _table(lines, at)
        (log.forward if text.startswith("f") else log.backward).append(records)
        return at + RECORD_LINES * len(records) + 1
    if is_record(lines[at]):
        log.repeated.append(parse_record(lines, at))
        return at + RECORD_LINES
    if match := _INPUT.fullmatch(text):
        log.image = _shape(match[1])
    elif match := _OP.fullmatch(text):
        log.layers.append(_layer(match[1], lines, at))
    elif match := _VERDICT.fullmatch(text):
        log.verdict = int(match[1]), int(match[2])
    log.separators += _SEPARATOR.fullmatch(text) is not None
    log.reference_ops += _REFERENCE.fullmatch(text) is not None
    return at + 1


def _table(lines: Sequence[LogLine], at: int) -> list[BoxRecord]:
    records = [parse_record(lines, at)]
    while True:
        at += RECORD_LINES
        if at >= len(lines):
            raise BadInput("the table is not closed", where=records[0].where)
        if lines[at].text == "}":
            return records
        records.append(parse_record(lines, at))


def _layer(name: str, lines: Sequence[LogLine], at: int) -> Announcement:
    after = _AFTER.fullmatch(lines[at + 1].text) if at + 1 < len(lines) else None
    if after is None:
        raise BadInput(f"op {name}: expected `after TYPE NxCxHxW` on the next line", where=lines[at].where)
    return Announcement(name, after[1], _shape(after[2]), lines[at + 1].where)


def _shape(text: str) -> Shape:
    return tuple(int(size) for size in text.split("x"))


def fitted_graph(log: Log) -> Graph:
    """The network whose windows give the log's boxes and whose shapes are those it announces."""
    layers, image = [], log.image
    for index, announced in enumerate(log.layers):
        if announced.type not in windows_of:
            raise BadInput(f"no window is known for {announced.type!r}", where=announced.where)
        layers.append(_fitted_layer(announced, image, _samples(log, len(log.layers) - index)))
        image = announced.output
    return _agreeing(log, layers)


def _samples(log: Log, position: int) -> list[tuple[Rect, BoxRecord]]:
    """For the op at this position of the forward tables: the region it makes and the record of its input."""
    tables = [table for table in log.forward if len(table) > position]
    return [(table[position - 1].inside, table[position]) for table in tables]


def _fitted_layer(announced: Announcement, image: Shape, samples: Sequence[tuple[Rect, BoxRecord]]) -> Layer:
    if not samples:
        raise BadInput("no tile has a record of this layer", where=announced.where)
    rows, columns = (
        _window(samples, dim, image[2 + dim] // max(1, announced.output[2 + dim])) for dim in (0, 1)
    )
    return Layer(
        announced.id,
        announced.type,
        kernel=(rows.kernel, columns.kernel),
        stride=(rows.stride, columns.stride),
        padding=(rows.before, columns.before),
        channels=announced.output[1],
    )


def _window(samples: Sequence[tuple[Rect, BoxRecord]], dim: int, ratio: int) -> Window:
    """Two tiles that start apart give the stride; where all start at one place, the ratio of sizes does."""
    result, record = samples[0]
    apart = next((pair for pair in samples if pair[0].lo[dim] != result.lo[dim]), None)
    stride = max(1, ratio)
    if apart is not None:
        stride = (apart[1].wanted.lo[dim] - record.wanted.lo[dim]) // (apart[0].lo[dim] - result.lo[dim])
    padding = stride * result.lo[dim] - record.wanted.lo[dim]
    kernel = record.wanted.hi[dim] + padding - stride * (result.hi[dim] - 1)
    try:
        return Window(kernel, stride, padding, padding)
    except StowplanError as error:
        raise BadInput(str(error), where=record.where) from None


def _agreeing(log: Log, layers: Sequence[Layer]) -> Graph:
    graph = network_graph(log.image, layers)
    for announced in log.layers:
        shape = graph.tensors[f"{announced.id}.output"].shape
        if shape != announced.output:
            raise BadInput(
                f"the boxes make an output of {shape}, announced is {announced.output}", where=announced.where
            )
    return graph
