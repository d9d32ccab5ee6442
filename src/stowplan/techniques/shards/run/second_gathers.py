"""Second gathers: parameters that are dropped after forward and gathered once more for backward.

Workers that have plans of their own cannot decide about a gather one by one, for all of them take part in it.
A second gather is therefore an op of the step that runs once: it follows the same collective of backward on
all workers, and passes the token on. What to gather a second time is decided by all workers together.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from stowplan.capture import Call, Captured
from stowplan.capture.program import reading
from stowplan.ir import Graph, Op, Phase, Tensor, Use, validate
from stowplan.ops.effects import BEGIN_IN_ORDER, GATHER_IN_ORDER

GATHERS_IN_ORDER = (BEGIN_IN_ORDER, GATHER_IN_ORDER)
SCATTER_SUM_IN_ORDER = "stowplan.scatter_sum_in_order.default"
_IN_BACKWARD = frozenset(
    (
        *(
            f"stowplan.{name}.default"
            for name in ("exchange_back", "begin_exchange_back", "total", "norm_back", "softmax_back")
        ),
        SCATTER_SUM_IN_ORDER,
    )
)
NEVER = 2**31
"""In place of a number of collectives, for parameters that backward does not read."""


def first_needs(captured: Captured) -> list[int]:
    """By gather, how many collectives of backward come before the first op that reads what it made."""
    collectives, graph = _collectives(captured.graph), captured.graph
    first: dict[str, int] = {}
    for position, op in enumerate(graph.ops):
        if op.phase is Phase.BACKWARD:
            for name in op.reads():
                first.setdefault(graph.storage_of(name), position)
    return [
        min((bisect_left(collectives, first[name]) for name in _wholes(op) if name in first), default=NEVER)
        for op in _gathers(graph)
    ]


def with_second_gathers(captured: Captured, after: Mapping[int, int]) -> Captured:
    """The step with second gathers; `after` has, by gather, the number of collectives that come before it.

    Backward reads what they make.
    """
    if not after:
        return captured
    collectives, gathers = _collectives(captured.graph), list(_gathers(captured.graph))
    made = _Made(captured)
    for number in sorted(after, reverse=True):
        made.repeat(gathers[number], collectives[after[number] - 1])
    return made.captured()


def _gathers(graph: Graph) -> Iterator[Op]:
    return (op for op in graph.ops if op.type in GATHERS_IN_ORDER)


def _wholes(gather: Op) -> list[str]:
    """The parameters that a gather makes, or the buffer they are views of; the token is its last output."""
    return [use.tensor for use in gather.outputs[:-1]]


def _collectives(graph: Graph) -> list[int]:
    """The positions of those in backward, which are the same on all workers in number and order."""
    return [
        position
        for position, op in enumerate(graph.ops)
        if op.phase is Phase.BACKWARD and op.type in _IN_BACKWARD
    ]


@dataclass(slots=True)
class _Made:
    """A step that grows by second gathers."""

    step: Captured
    tensors: dict[str, Tensor]
    calls: dict[str, Call]
    after: dict[int, list[Op]]  # by position
    names: dict[str, str]  # what backward reads, by what it would have read

    def __init__(self, step: Captured) -> None:
        self.step, self.tensors, self.calls = step, dict(step.graph.tensors), dict(step.program.calls)
        self.after, self.names = {}, {}

    def repeat(self, gather: Op, position: int) -> None:
        """Gather a second time after the op at this position, with views that forward has made of it."""
        given, token = gather.inputs[-1].tensor, self.step.graph.ops[position].outputs[-1].tensor
        added = self.after.setdefault(position, [])
        added.append(self._again(gather, {given: self.names.get(token, token)}))
        self.names[token] = added[-1].outputs[-1].tensor
        self.names.update(zip(_wholes(gather), _wholes(added[-1]), strict=True))
        added += (self._view_again(op) for op in self._views(set(_wholes(gather))))

    def _views(self, wholes: set[str]) -> list[Op]:
        """The ops of forward whose results are views of these and are read in backward, in order."""
        graph = self.step.graph
        wanted = {
            name
            for op in graph.ops
            if op.phase is Phase.BACKWARD
            for name in op.reads()
            if graph.storage_of(name) in wholes
        }
        found: list[Op] = []
        for op in reversed(graph.ops):
            if (
                op.phase is Phase.FORWARD
                and op.type not in GATHERS_IN_ORDER
                and not wanted.isdisjoint(op.writes())
            ):
                found.append(op)
                wanted.update(op.reads())
        return found[::-1]

    def _view_again(self, op: Op) -> Op:
        made = self._again(op, self.names)
        self.names.update(zip(op.writes(), made.writes(), strict=True))
        return made

    def _again(self, op: Op, names: Mapping[str, str]) -> Op:
        """The op with other inputs, and with outputs of other names."""
        outputs = {name: f"{name} again" for name in op.writes()}
        for name, other in outputs.items():
            base = self.tensors[name].alias_of
            alias = None if base is None else names.get(base, base)
            self.tensors[other] = replace(self.tensors[name], id=other, alias_of=alias)
        call, number = reading(self.calls[op.id], names), f"{op.id}_again"
        self.calls[number] = replace(
            call, outputs=tuple(None if name is None else outputs[name] for name in call.outputs)
        )
        uses = tuple(replace(use, tensor=outputs[use.tensor]) for use in op.outputs)
        return replace(op, id=number, phase=Phase.BACKWARD, inputs=_renamed(op.inputs, names), outputs=uses)

    def captured(self) -> Captured:
        """The step with what was added."""
        ops: list[Op] = []
        for position, op in enumerate(self.step.graph.ops):
            own = op
            if op.phase is Phase.BACKWARD:
                own = replace(op, inputs=_renamed(op.inputs, self.names))
                self.calls[op.id] = reading(self.calls[op.id], self.names)
                self._follow(op.writes())
            ops += (own, *self.after.get(position, ()))
        graph = replace(self.step.graph, tensors=self.tensors, ops=tuple(ops))
        validate(graph)
        return replace(self.step, graph=graph, program=replace(self.step.program, calls=self.calls))

    def _follow(self, names: Iterable[str]) -> None:
        """Views that backward makes are of what it reads now."""
        for name in names:
            base = self.tensors[name].alias_of
            if base in self.names:
                self.tensors[name] = replace(self.tensors[name], alias_of=self.names[base])


def _renamed(uses: Iterable[Use], names: Mapping[str, str]) -> tuple[Use, ...]:
    return tuple(replace(use, tensor=names.get(use.tensor, use.tensor)) for use in uses)
