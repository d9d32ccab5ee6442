"""Updates as ops of a captured step: what they read, where they may run, and what they take.

An update reads gradients, their parameters and the state of these, and changes the parameters in place.
Gradients that it consumes end with it, so the graph no longer holds them. In backward it comes after the
last op that may read the parameter, recomputed ops included, and after the last one that touches the
gradient. `verify` holds every plan to that: after an update its parameters no longer hold their value.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stowplan.analyse.facts import Storages, storages_of
from stowplan.capture import Call, Captured, Handle, Ref
from stowplan.capture.capture import EagerMemory, Span
from stowplan.capture.program import attributes_of
from stowplan.errors import BadUse
from stowplan.ir import DType, Graph, Kind, Op, Phase, Use
from stowplan.ir import Tensor as GraphTensor
from stowplan.ops.effects import SECOND_FORWARD, UPDATE
from stowplan.plan.pricing import Tier
from stowplan.plan.problem import can_recompute, outdated_tensors
from stowplan.run.cost.machine import Cost, least_seconds
from stowplan.run.cost.probe import PROBES, Signature
from stowplan.run.measure.measure import rise_while
from stowplan.run.optimizers import tensors_in, without_hooks
from stowplan.run.step.literals import grouped
from stowplan.techniques.iteration.run.one_by_one import OneByOne, UpdateBook, UpdateBytes
from stowplan.torch_private import pytree

_MOST_TIMED = 2**18  # elements of a parameter whose update is timed; of larger ones, that many

torch.library.define(
    "stowplan::update", "(Tensor[] gradients, Tensor[] parameters, str update, str when) -> ()"
)


@torch.library.impl("stowplan::update", "CompositeExplicitAutograd")
def _nothing(gradients: list[Tensor], parameters: list[Tensor], update: str, when: str) -> None:
    """Generated code does not call the op: it hands the gradients on."""


class When(StrEnum):
    """Where an update runs."""

    BACKWARD = "in backward"  # as soon as nothing else needs gradients and parameters
    LATER = "later"  # in backward gradients are only added to those of earlier backwards
    STEP = "one by one in the step"  # when the user calls `optimizer.step()`
    TOGETHER = "in the step"  # by `optimizer.step()` itself; the gradients stay


@dataclass(frozen=True, slots=True)
class Trained:
    """A parameter that the optimizer updates, and its group there."""

    parameter: Tensor
    group: Mapping[str, Any]


def state_of(parameter: str) -> str:
    """The name of a parameter's state in a graph."""
    return f"state of {parameter}"


class Update(Handle):
    """The update of some parameters, to be priced."""

    def __init__(
        self,
        optimizer: Optimizer,
        trained: Sequence[Trained],
        book: UpdateBook,
        when: When,
        tier: Tier | None = None,
    ) -> None:
        """`tier` has the state of `trained` but for the time of the update."""
        named = "; ".join(dict.fromkeys(_named(optimizer, each.group) for each in trained))
        super().__init__(f"{named}, state from {tier.name}" if tier else named, "update")
        self._optimizer, self._trained, self._book, self._when = optimizer, trained, book, when
        self._tier = tier
        if tier and when in (When.BACKWARD, When.STEP):
            taken = (book.of(each.parameter, each.group) for each in trained)
            moved = [nbytes for each in taken for nbytes in each.movable_bytes]
            self.added_seconds = sum(tier.store_seconds(n) + tier.load_seconds(n) for n in moved)

    def cost(self, device: torch.device) -> Cost:
        """Stand-ins show the temporaries. Seconds and hidden bytes are measured on a part and scaled up."""
        if self._when is When.LATER:
            return Cost(0.0, 0)
        timed = [self._timed(each, device) for each in self._trained]
        unseen = max(cost.rise_bytes for cost in timed)
        return Cost(
            sum(cost.seconds for cost in timed) + self.added_seconds,
            self._temporary_bytes(self._taken()) + unseen,
        )

    def projected_cost(self, seconds_of: Callable[[UpdateBytes], float]) -> Cost:
        """On a device that is not here: `seconds_of` gives the seconds of what an update takes."""
        if self._when is When.LATER:
            return Cost(0.0, 0)
        taken = self._taken()
        return Cost(sum(map(seconds_of, taken)) + self.added_seconds, self._temporary_bytes(taken))

    def _taken(self) -> list[UpdateBytes]:
        """By what is updated at a time."""
        if self._when is When.TOGETHER:
            return [self._book.together([each.parameter for each in self._trained])]
        return [self._book.of(each.parameter, each.group) for each in self._trained]

    def _temporary_bytes(self, taken: Iterable[UpdateBytes]) -> int:
        return max(each.temporary_bytes + (sum(each.movable_bytes) if self._tier else 0) for each in taken)

    def _timed(self, trained: Trained, device: torch.device) -> Cost:
        """The seconds of one update, and the bytes that its kernels take and stand-ins do not show."""
        parameter, shape = trained.parameter, _timed_part(trained.parameter)
        look = parameter.dtype, id(trained.group), min(parameter.numel(), _MOST_TIMED)
        if look not in self._book.costs:
            self._book.costs[look] = self._cost_of_part(trained, shape, device)
        part, parts = self._book.costs[look], max(1.0, parameter.numel() / max(1, prod(shape)))
        return Cost(part.seconds * parts, ceil(part.rise_bytes * parts))

    def _cost_of_part(self, trained: Trained, shape: tuple[int, ...], device: torch.device) -> Cost:
        """Of a parameter of this shape."""
        parameter = trained.parameter
        scratch = nn.Parameter(torch.ones(shape, dtype=parameter.dtype, device=device))
        scratch.grad = torch.ones_like(scratch)
        twin, group = without_hooks(self._optimizer), {**trained.group, "params": [scratch]}
        twin.state = defaultdict(dict)
        if known := self._optimizer.state.get(parameter):  # some make it before the first step
            twin.state[scratch] = pytree.tree_map_only(
                Tensor, lambda t: _shortened(t, parameter, shape), known
            )
        single = OneByOne(twin)
        with torch.no_grad():
            single.update(scratch, group)
            owned = [scratch, scratch.grad, *tensors_in(twin.state.values())]
            _, rise = rise_while(lambda: single.update(scratch, group), device=device, before=owned)
            seconds = least_seconds(
                lambda: single.update(scratch, group), device, repeats=3, limit_seconds=0.1
            )
        shown = UpdateBook(twin, device).of(scratch, group).temporary_bytes
        return Cost(seconds, max(0, rise - shown))


def _timed_part(parameter: Tensor) -> tuple[int, ...]:
    """The shape of as many whole rows of a parameter as are timed."""
    if parameter.ndim == 0 or parameter.numel() <= _MOST_TIMED:
        return tuple(parameter.shape)
    row = prod(parameter.shape[1:])
    return max(1, _MOST_TIMED // row), *parameter.shape[1:]


def _shortened(tensor: Tensor, parameter: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor of the state; one that has the parameter's shape in this shape, the first rows."""
    is_alike = tensor.shape == parameter.shape
    if tensor.is_meta:  # it waits in a tier
        return torch.zeros(shape if is_alike else tensor.shape, dtype=tensor.dtype).to(parameter.device)
    return tensor[: shape[0]].clone() if is_alike and shape else tensor.clone()


def _named(optimizer: Optimizer, group: Mapping[str, Any]) -> str:
    """The kind of an optimizer and what decides over its memory: options that are flags, or not 0."""
    options = (
        f"{name}={value}"
        if value is None or isinstance(value, bool)
        else f"{name}{'=0' if value == 0 else ''}"
        for name, value in sorted(group.items())
        if value is None or isinstance(value, (bool, int, float))
        if name not in ("lr", "initial_lr", "eps")
    )
    return f"{type(optimizer).__name__}({', '.join(options)})"


def _probed(signature: Signature, device: torch.device) -> Cost | None:
    update = signature.call.args[2]
    assert isinstance(update, Update), update
    return update.cost(device)


PROBES[UPDATE] = _probed


def with_updates(
    captured: Captured,
    optimizer: Optimizer,
    trained: Mapping[str, Trained],
    *,
    stays: frozenset[str],
    in_backward: bool,
    accumulates: bool,
    repeats: bool = False,
    tier: Tier | None = None,
    device: torch.device | None = None,
    resting_bytes: int = 0,
) -> Captured:
    """The step with an op for the update of each of `trained`, parameters by id, and with their state.

    The gradients of `stays` are not consumed. With `accumulates`, a set of gradients from earlier backwards
    is there all along; if the step `repeats`, so are its buffers and the generator as before forward. With a
    `tier`, the state of consumed gradients waits there. Updates in the step begin with the smallest, so that
    the largest state meets the fewest gradients. Parameters on the meta device are taken to live on `device`.
    `resting_bytes` of state are of parameters that the step does not train.
    """
    book = UpdateBook(optimizer, device)
    made = _Made(captured, optimizer, trained, book, tier, resting_bytes)
    left = made.consumable(stays)
    made.move_state(left)
    consumed = sorted((name for name in trained if name in left), key=lambda n: trained[n].parameter.nbytes)
    rest = [name for name in trained if name not in left]
    if consumed and (in_backward or accumulates):
        made.insert_in_backward(consumed, When.BACKWARD if in_backward else When.LATER)
    if not in_backward:
        for name in consumed:
            made.append([name], When.STEP, consumes=not accumulates)
    if rest:
        made.append(rest, When.TOGETHER, consumes=False)
    return made.captured(accumulates, repeats)


class _Made:
    """A captured step that grows by updates."""

    def __init__(
        self,
        captured: Captured,
        optimizer: Optimizer,
        trained: Mapping[str, Trained],
        book: UpdateBook,
        tier: Tier | None,
        resting_bytes: int,
    ) -> None:
        self._resting_bytes = resting_bytes
        self._captured, self._optimizer, self._trained, self._book = captured, optimizer, trained, book
        self._tier = tier
        self._graph, self._program = captured.graph, captured.program
        self._storages: Storages = storages_of(self._graph)
        self._after: dict[int, list[Op]] = {}  # by position in the graph
        self._calls: dict[str, Call] = {}
        self._gone: set[str] = set()
        self._last = len(self._graph.ops) - 1
        self._taken = {name: book.of(each.parameter, each.group) for name, each in trained.items()}
        self._state = {
            name: _block(state_of(name), each.state_bytes, self._device) for name, each in self._taken.items()
        }
        self._eager_state = list(self._state.values())

    @property
    def _device(self) -> str:
        return self._graph.ops[0].device

    def consumable(self, stays: frozenset[str]) -> frozenset[str]:
        """The parameters whose gradients may end with the update: nobody else holds them or the parameter."""
        number_of, gradients = self._storages.number_of, self._program.gradients
        mine = {gradients[name] for name in self._trained if name not in stays}
        held = {number_of[name] for name in self._graph.held if name not in mine}
        return frozenset(
            name
            for name in self._trained
            if name not in stays and held.isdisjoint((number_of[name], number_of[gradients[name]]))
        )

    def move_state(self, names: Iterable[str]) -> None:
        """Let the state of these wait in the tier, if there is one."""
        for name in names if self._tier else ():
            left = self._taken[name].state_bytes - sum(self._taken[name].movable_bytes)
            self._state[name] = _block(state_of(name), left, self._device)

    def insert_in_backward(self, names: Sequence[str], when: When) -> None:
        """An update after each place where enough gradients are final; the largest comes first in it."""
        last, number_of = _last_needs(self._graph, self._storages), self._storages.number_of
        by_storage: dict[int, list[str]] = {}
        places: dict[int, int] = {}
        for name in names:
            number = number_of[self._program.gradients[name]]
            by_storage.setdefault(number, []).append(name)
            place = max(last.get(number_of[name], -1), last.get(number, -1))
            places[number] = max(places.get(number, -1), place)
        nbytes = {number: int(self._storages.nbytes[number]) for number in by_storage}
        for place, numbers in grouped(places, nbytes):
            largest_first = sorted(numbers, key=lambda number: -nbytes[number])
            updated = [name for number in largest_first for name in by_storage[number]]
            self._add(place, updated, when, consumes=True)

    def append(self, names: Sequence[str], when: When, *, consumes: bool) -> None:
        """An update after everything else."""
        self._add(self._last, names, when, consumes=consumes)

    def _add(self, place: int, names: Sequence[str], when: When, *, consumes: bool) -> None:
        gradients = tuple(dict.fromkeys(self._program.gradients[name] for name in names))
        gradients = gradients if consumes or when is When.TOGETHER else ()
        tier = None if when is When.TOGETHER else self._tier
        update = Update(self._optimizer, [self._trained[name] for name in names], self._book, when, tier)
        names = () if when is When.LATER else names
        refs = tuple(tuple(map(Ref, tensors)) for tensors in (gradients, names))
        call = Call(torch.ops.stowplan.update.default, (*refs, update, str(when)), {}, (), single=True)
        number = len(self._calls)
        reads = (*gradients, *names, *(self._state[name].id for name in names))
        op = Op(
            id=f"update_{number}",
            type=UPDATE,
            phase=Phase.UPDATE,
            inputs=tuple(map(Use, reads)),
            attributes=attributes_of(call),
            device=self._device,
        )
        self._calls[op.id] = call
        self._after.setdefault(place, []).append(op)
        if consumes:
            self._gone.update(gradients)

    def captured(self, accumulates: bool, repeats: bool) -> Captured:
        """The step with what was added."""
        graph, added = self._graph, list(self._state.values())
        eager_added = self._eager_state
        if self._resting_bytes:
            added.append(_block("state of parameters that rest", self._resting_bytes, self._device))
            eager_added = [*eager_added, added[-1]]
        if accumulates:
            numbers = {self._storages.number_of[self._program.gradients[name]] for name in self._trained}
            nbytes = sum(int(self._storages.nbytes[number]) for number in numbers)
            added.append(_block("gradients of earlier backwards", nbytes, self._device))
            eager_added = [*eager_added, added[-1]]
        if self._tier:
            added.append(_block("staging of the tier", self._tier.staging_bytes, self._device))
        if repeats:
            updated = sum(graph.tensors[name].nbytes or 0 for name in self._program.updates)
            nbytes = updated + 2 * torch.get_rng_state().nbytes
            added.append(_block(SECOND_FORWARD, nbytes, self._device))
        if repeated := next((tensor.id for tensor in added if tensor.id in graph.tensors), None):
            raise BadUse(f"a tensor of the model is called {repeated!r}, which names optimizer state here")
        ops = (op for place, own in enumerate(graph.ops) for op in (own, *self._after.get(place, ())))
        graph = replace(
            graph,
            tensors={**graph.tensors, **{tensor.id: tensor for tensor in added}},
            ops=tuple(ops),
            held=graph.held - self._gone,
        )
        program = replace(self._program, calls={**self._program.calls, **self._calls})
        return replace(self._captured, graph=graph, program=program, eager=self._eager(eager_added))

    def _eager(self, added: Iterable[GraphTensor]) -> EagerMemory:
        """The memory of eager with the state all along and, after backward, the optimizer's own step."""
        eager = self._captured.eager
        end = len(eager.ops)
        spans = [replace(s, last=end) if s.last == end - 1 and self._rests(s) else s for s in eager.spans]
        spans += (Span(tensor.id, tensor.nbytes or 0, 0, end) for tensor in added)
        together = self._book.together([each.parameter for each in self._trained.values()])
        spans.append(Span("", together.temporary_bytes, end, end))
        return EagerMemory((*eager.ops, ()), tuple(spans))

    def _rests(self, span: Span) -> bool:
        """Whether something is there after backward."""
        tensor = self._graph.tensors.get(span.tensor)
        if tensor is None:
            return False
        held = {self._storages.number_of[name] for name in self._graph.held}
        outside = tensor.kind in (Kind.PARAMETER, Kind.BUFFER, Kind.INPUT)
        return outside or self._storages.number_of[span.tensor] in held


def _block(name: str, nbytes: int, device: str) -> GraphTensor:
    """Memory that is there all along."""
    return GraphTensor(name, Kind.BUFFER, (nbytes,), DType.UINT8, nbytes, name, device=device)


def _last_needs(graph: Graph, storages: Storages) -> Mapping[int, int]:
    """By storage, the position of the last op for which it is read or written, perhaps to recompute."""
    number_of, outdated = storages.number_of, outdated_tensors(graph)
    until = list(range(len(graph.ops)))  # by op: the last for which it may be recomputed
    readers: dict[int, list[int]] = {}
    for position, op in reversed(list(enumerate(graph.ops))):
        if can_recompute(graph, op, outdated):
            users = (reader for name in op.writes() for reader in readers.get(number_of[name], ()))
            until[position] = max((until[reader] for reader in users), default=position)
        for number in {number_of[name] for name in op.reads()}:
            readers.setdefault(number, []).append(position)
    last: dict[int, int] = {}
    for position, op in enumerate(graph.ops):
        for name in (*op.reads(), *op.writes()):
            last[number_of[name]] = max(last.get(number_of[name], -1), until[position])
    return last
