"""A tile's two tables of box records, f_info and b_info: made from its steps, and read back into them."""

from collections.abc import Iterator, Sequence

from stowplan.errors import BadInput
from stowplan.formats.tilelog.network import Stage
from stowplan.formats.tilelog.records import FAKE, LAST, BoxRecord, Numbers, box_of
from stowplan.geometry import Point, Rect
from stowplan.ir import Op, Shape, TileStep

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
