"""The log's box records and their tables. A box record is one op of one tile, as printed.

Boxes are [left, right, top, bottom], inclusive. A tile has two tables: f_info forward, b_info backward. The
log interleaves two streams, the lines of the tiling program and those of autograd, which split the former.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from stowplan.errors import BadInput
from stowplan.formats.tilelog.network import Stage
from stowplan.geometry import Point, Rect
from stowplan.ir import Op, Shape, TileStep

_ENGINE = "[torch/csrc/autograd/engine.cpp] call_function "


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of the program's stream and the number of the file's line it starts on."""

    number: int
    text: str

    @property
    def where(self) -> str:
        return f"line {self.number}"


def separate(text: str) -> tuple[tuple[LogLine, ...], tuple[str, ...]]:
    """The program's lines, made whole again, and the functions that autograd called."""
    lines: list[LogLine] = []
    calls: list[str] = []
    fragments: list[str] = []
    for number, raw in enumerate(text.split("\n"), start=1):
        before, engine, called = raw.partition(_ENGINE)
        fragments.append(before)
        if engine:
            calls.append(called)
        else:
            lines.append(LogLine(number - len(fragments) + 1, "".join(fragments)))
            fragments = []
    if "".join(fragments):
        lines.append(LogLine(number - len(fragments) + 1, "".join(fragments)))
    return tuple(lines), tuple(calls)


Numbers: TypeAlias = tuple[int, ...]

FAKE = -11  # the key and next_id of the record a walk starts from
LAST = -99  # the next_id of a walk's first op

_HEADER = re.compile(
    r"(?:, |f_info \{|b_info \{|f_info :: | )?(?:(?P<key>-?[0-9]{1,18}): )?(?P<name>[a-z][a-z0-9-]{0,60})"
    r"\[(?P<i>-?[0-9]{1,9}),(?P<j>-?[0-9]{1,9})\] PI\( <(?P<row>[0-9]{1,9}),(?P<column>[0-9]{1,9}),>,"
)
_LIST = re.compile(r" <([a-z]+) ((?:-?[0-9]{1,9},){0,4})>, ?")
_LENGTHS = {
    "otileshape": (2,),
    "padding": (0, 4),
    "inpslidx": (4,),
    "internal": (0, 4),
    "realidx": (4,),
    "ndtsize": (0, 2),
}
_LOCAL_FIRST = {"  local_first False": False, "  local_first True": True}
_NEXT = re.compile(r" next_id (-?[0-9]{1,18})\)")
RECORD_LINES = 9


@dataclass(frozen=True, slots=True)
class BoxRecord:
    """What one op of one tile reads: `realidx` as wanted, `inpslidx` as clipped to the tensor.

    `name` is the op's type and id, `position` its place in the walk and in its run of convolutions. `key` is
    what a table files it under: the id again, or FAKE.
    """

    name: str
    position: Numbers
    coord: Numbers
    otileshape: Numbers
    padding: Numbers
    inpslidx: Numbers
    internal: Numbers
    realidx: Numbers
    ndtsize: Numbers
    local_first: bool
    next_id: int
    key: int = field(default=FAKE, compare=False)
    where: str = field(default="", compare=False)

    @property
    def wanted(self) -> Rect:
        return rect_of(self.realidx)

    @property
    def inside(self) -> Rect:
        return rect_of(self.inpslidx)


def rect_of(box: Numbers) -> Rect:
    """[left, right, top, bottom] with both ends as a half-open rect over (H, W)."""
    left, right, top, bottom = box
    return Rect((top, left), (bottom + 1, right + 1))


def box_of(rect: Rect) -> Numbers:
    """The reverse of `rect_of`."""
    (top, left), (bottom, right) = rect.lo, rect.hi
    return (left, right - 1, top, bottom - 1)


def is_record(line: LogLine) -> bool:
    """Whether a record starts on this line."""
    return _HEADER.fullmatch(line.text) is not None


def parse_record(lines: Sequence[LogLine], at: int) -> BoxRecord:
    """The record that starts at position `at` of the lines."""
    where = lines[at].where
    header = _HEADER.fullmatch(lines[at].text)
    if header is None:
        raise BadInput("not the first line of a box record", where=where)
    if header["key"] and int(header["key"]) != FAKE and not header["name"].endswith(header["key"]):
        raise BadInput(f"{header['name']!r} is filed under {header['key']}", where=where)
    if at + RECORD_LINES > len(lines):
        raise BadInput("the box record is cut short", where=where)
    *lists, local_first, next_id = lines[at + 1 : at + RECORD_LINES]
    otileshape, padding, inpslidx, internal, realidx, ndtsize = map(_numbers, lists, _LENGTHS)
    return BoxRecord(
        name=header["name"],
        position=(int(header["i"]), int(header["j"])),
        coord=(int(header["row"]), int(header["column"])),
        otileshape=otileshape,
        padding=padding,
        inpslidx=inpslidx,
        internal=internal,
        realidx=realidx,
        ndtsize=ndtsize,
        local_first=_flag(local_first),
        next_id=_next_id(next_id),
        key=int(header["key"] or FAKE),
        where=where,
    )


def _numbers(line: LogLine, name: str) -> Numbers:
    match = _LIST.fullmatch(line.text)
    if match is None or match[1] != name:
        raise BadInput(f"expected <{name} ..>", where=line.where)
    numbers = tuple(int(number) for number in match[2].split(",")[:-1])
    if len(numbers) not in _LENGTHS[name]:
        raise BadInput(f"<{name} ..> has {len(numbers)} numbers", where=line.where)
    return numbers


def _flag(line: LogLine) -> bool:
    if line.text not in _LOCAL_FIRST:
        raise BadInput("expected local_first True or False", where=line.where)
    return _LOCAL_FIRST[line.text]


def _next_id(line: LogLine) -> int:
    match = _NEXT.fullmatch(line.text)
    if match is None:
        raise BadInput("expected next_id", where=line.where)
    return int(match[1])


def text_of(record: BoxRecord) -> str:
    """The record as the log prints it, without the key that stands before it in a table."""
    row, column = record.coord
    i, j = record.position
    return (
        f"{record.name}[{i},{j}] PI( <{row},{column},>,\n"
        f" <otileshape {_list(record.otileshape)}>,\n"
        f" <padding {_list(record.padding)}>,\n"
        f" <inpslidx {_list(record.inpslidx)}>, \n"
        f" <internal {_list(record.internal)}>, \n"
        f" <realidx {_list(record.realidx)}>, \n"
        f" <ndtsize {_list(record.ndtsize)}>, \n"
        f"  local_first {record.local_first}\n"
        f" next_id {record.next_id})\n"
    )


def _list(numbers: Numbers) -> str:
    return "".join(f"{number}," for number in numbers)


_CONVOLUTION = "conv2d"


def forward_table(
    stages: Sequence[Stage], grid: Point, coord: Point, steps: Sequence[TileStep]
) -> Iterator[BoxRecord]:
    """f_info: the region a tile ends with, then each op from the last to the first."""
    yield _start("fake", coord, steps[0].result, _width_height(steps[0].result.shape))
    walk = list(reversed(stages))
    for index, (stage, step) in enumerate(zip(walk, steps, strict=True)):
        padding, internal = _margins(stage, step, stage.inputs)
        yield BoxRecord(
            name_of(stage.op),
            position=(index, _place_in_run(walk, index)),
            coord=coord,
            otileshape=_width_height(step.result.shape),
            padding=padding,
            inpslidx=box_of(step.inside),
            internal=internal,
            realidx=box_of(step.wanted),
            ndtsize=(stage.outputs[1] // grid[1], stage.outputs[0] // grid[0]),
            local_first=_starts_run(walk, index),
            next_id=int(walk[index - 1].op.id) if index else LAST,
            key=int(stage.op.id),
        )


def backward_table(stages: Sequence[Stage], coord: Point, steps: Sequence[TileStep]) -> Iterator[BoxRecord]:
    """b_info: the region of the input a tile owns, then each op from the first to the last."""
    yield _start("fake-bp", coord, steps[0].result, steps[0].result.shape)
    for index, (stage, step) in enumerate(zip(stages, steps, strict=True)):
        padding, internal = _margins(stage, step, stage.outputs)
        yield BoxRecord(
            f"bk-{name_of(stage.op)}",
            position=(index, _place_in_run(stages, index)),
            coord=coord,
            otileshape=_width_height(step.inside.shape),
            padding=padding,
            inpslidx=box_of(step.inside),
            internal=internal,
            realidx=box_of(step.wanted),
            ndtsize=(),
            local_first=False,
            next_id=int(stages[index - 1].op.id) if index else LAST,
            key=int(stage.op.id),
        )


def steps_of(records: Sequence[BoxRecord], ops: Sequence[Op], prefix: str) -> Iterator[TileStep]:
    """The steps a table describes; its records must name `ops` one by one after the start."""
    names = [f"{prefix}{name_of(op)}" for op in ops]
    found = [record.name for record in records[1:]]
    if found != names:
        raise BadInput(f"the table lists {found}, not the network's {names}", where=records[0].where)
    result = records[0].inside
    for op, record in zip(ops, records[1:], strict=True):
        yield TileStep(op.id, result, record.wanted, record.inside)
        result = record.inside


def name_of(op: Op) -> str:
    """An op's name in the log: its type and id in one word."""
    return f"{op.type}{op.id}"


def _start(name: str, coord: Point, rect: Rect, size: Numbers) -> BoxRecord:
    box, none = box_of(rect), ()
    return BoxRecord(name, (FAKE, FAKE), coord, size, none, box, none, box, none, False, FAKE)


def _width_height(shape: Shape) -> Numbers:
    return shape[::-1]


def _margins(stage: Stage, step: TileStep, sizes: Shape) -> tuple[Numbers, Numbers]:
    """Of a convolution's pad on each side: what lies outside the tensor, and what other tiles own."""
    if stage.op.type != _CONVOLUTION:
        return (), ()
    (top, bottom), (left, right) = step.wanted.overhang(sizes)
    rows, columns = stage.windows
    outside = (left, right, top, bottom)
    pads = (columns.before, columns.after, rows.before, rows.after)
    return outside, tuple(pad - beyond for pad, beyond in zip(pads, outside, strict=True))


def _place_in_run(walk: Sequence[Stage], index: int) -> int:
    """How many convolutions stand right before this one in the walk; -1 for a pool."""
    place = -1
    while place < index and walk[index - place - 1].op.type == _CONVOLUTION:
        place += 1
    return place


def _starts_run(walk: Sequence[Stage], index: int) -> bool:
    """Whether this convolution of a backwards walk is the first after a pool or the input."""
    ends = index + 1 == len(walk) or walk[index + 1].op.type != _CONVOLUTION
    return ends and walk[index].op.type == _CONVOLUTION
