"""What the log's lines say: the network's layers, the tables of each tile, the verdict on the gradient."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from stowplan.errors import BadInput
from stowplan.formats.tilelog.records import RECORD_LINES, BoxRecord, is_record, parse_record
from stowplan.formats.tilelog.streams import Line
from stowplan.ir import Shape

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


def parse_log(lines: Sequence[Line]) -> Log:
    """Go through the lines once; those that print tensors or sizes along the way say nothing new."""
    log = Log()
    at = 0
    while at < len(lines):
        at = _take(log, lines, at)
    if not (log.image and log.layers and log.forward):
        what = "no network with tiles: expected `Input`, `L-->R current op` and `f_info {` lines"
        raise BadInput(what, where=lines[-1].where)
    return log


def _take(log: Log, lines: Sequence[Line], at: int) -> int:
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


def _table(lines: Sequence[Line], at: int) -> list[BoxRecord]:
    records = [parse_record(lines, at)]
    while True:
        at += RECORD_LINES
        if at >= len(lines):
            raise BadInput("the table is not closed", where=records[0].where)
        if lines[at].text == "}":
            return records
        records.append(parse_record(lines, at))


def _layer(name: str, lines: Sequence[Line], at: int) -> Announcement:
    after = _AFTER.fullmatch(lines[at + 1].text) if at + 1 < len(lines) else None
    if after is None:
        raise BadInput(f"op {name}: expected `after TYPE NxCxHxW` on the next line", where=lines[at].where)
    return Announcement(name, after[1], _shape(after[2]), lines[at + 1].where)


def _shape(text: str) -> Shape:
    return tuple(int(size) for size in text.split("x"))
