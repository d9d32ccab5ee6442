"""A step in an arena: which of its tensors can lie there, and the code that puts them there.

A tensor can lie in an arena if an op of PyTorch's makes it and nobody else keeps it beyond its last use: not
what the step returns, nor what moves to a tier, nor what an op of another library reads or makes, nor the
gradients of a step with an optimizer. Other gradients leave the step, and nothing is written over them. Each
run of a step has an arena of its own, which ends with its last tensor, so two forwards, a second thread or a
backward that never comes share nothing.

An op writes into the arena itself if it has a kernel for that, which was seen to give the same bits here.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage

from stowplan.capture import Call, Captured, Program, Ref
from stowplan.capture.program import ASKING_FOR_GRADIENTS, filled, inputs_of
from stowplan.capture.stand_ins import same_strides, stride_of, torch_dtype
from stowplan.errors import BadUse
from stowplan.ir import Graph, Op, Role
from stowplan.ir import Tensor as GraphTensor
from stowplan.ops.effects import UPDATE, Effect, effect_of
from stowplan.ops.table import site_of
from stowplan.plan.steps import Load, Step, Store
from stowplan.run.cost.machine import free_bytes, prefer_large_pages
from stowplan.run.cost.probe import call_on, call_signature, may_draw, operands_of, undisturbed
from stowplan.run.measure.measure import out_of_sight, rise_while
from stowplan.run.step.literals import expression, out_name, out_target
from stowplan.run.step.placing import Placing
from stowplan.techniques.arena.plan.layout import ArenaLayout, Copy, Placement
from stowplan.torch_private import schema_of, storage_id
from stowplan.units import format_bytes

_OUT = "%out"  # stands for the memory that a call is given
_ROOM = 4  # this many times the operands' bytes must be free to probe a call
_SLACK_BYTES = 4096  # of memory beyond what the op took with a result of its own
_aten = torch.ops.aten
# oneDNN's LSTM copies the state of its cells if it shares a storage with the hidden state, as in an arena.
_COPYING_ITS_CELLS, _CELLS = ("aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward"), 6


class WritingCall(NamedTuple):
    """A call that writes the result of another to the tensor `_OUT`, which may have to be zero before."""

    call: Call
    zeroed: bool = False


def into(call: Call) -> WritingCall | None:
    """`call` as one that writes to given memory; None if no kernel does."""
    if not call.single or call.fresh or call.copied or call.target in ASKING_FOR_GRADIENTS:
        return None
    target, args = call.target, call.args
    if target in (_aten.clone.default, _aten._to_copy.default):
        return WritingCall(replace(call, target=_aten.copy_.default, args=(Ref(_OUT), args[0]), kwargs={}))
    if target is _aten.relu.default:  # which has no such kernel, and is this one
        return WritingCall(
            replace(call, target=_aten.clamp_min.out, args=(*args, 0), kwargs={"out": Ref(_OUT)})
        )
    if target is _aten.embedding_dense_backward.default and args[3:] == (-1, False):  # nothing is left out
        added = Ref(_OUT), (args[1],), args[0], True
        return WritingCall(replace(call, target=_aten.index_put_.default, args=added, kwargs={}), zeroed=True)
    writing = out_target(target)
    if writing is None:
        return None
    return WritingCall(replace(call, target=writing, kwargs={**call.kwargs, out_name(writing): Ref(_OUT)}))


_writing: dict[str, bool] = {}  # by how a call looks: whether its kernel writes the same bits to given memory


def placements_of(
    captured: Captured,
    steps: Iterable[Step],
    workspace_bytes: Mapping[str, int],
    device: torch.device,
    *,
    probed: bool = True,
) -> dict[str, Placement]:
    """How each tensor that owns its storage comes into an arena, without those that must not lie there.

    If kernels are not `probed`, they are trusted: for a projection, which runs nothing.
    """
    graph, program = captured.graph, captured.program
    barred = _barred(graph, program, steps)
    placements = {}
    for op in graph.ops:
        call = program.calls[op.id]
        for name in _owners(graph, op):
            if name not in barred and _lies_dense(graph.tensors[name], device):
                if probed:
                    written = _is_written(graph, op, call, name, workspace_bytes.get(op.id, 0), device)
                else:
                    written = into(call) is not None
                placements[name] = Placement.WRITTEN if written else Placement.COPIED
    return placements


def _owners(graph: Graph, op: Op) -> Iterator[str]:
    """The outputs that own their storages."""
    made = (use.tensor for use in op.outputs if use.role is Role.DATA)
    return (name for name in made if graph.tensors[name].alias_of is None)


def _barred(graph: Graph, program: Program, steps: Iterable[Step]) -> set[str]:
    """The owners of storages that others may keep, or that are read by their place in a storage."""
    seen = {leaf.tensor for leaf in program.outputs if isinstance(leaf, Ref)}
    for step in steps:
        if isinstance(step, Store | Load):
            seen.update(step.tensors)
    if any(op.type == UPDATE for op in graph.ops):
        seen.update(program.gradients.values())  # an optimizer may keep them, and its first step takes all
    for op in graph.ops:
        call = program.calls[op.id]
        name = schema_of(call.target).name
        made = [made for made in call.outputs if made is not None]
        if not name.startswith("aten::") or call.fresh:
            seen.update(made)
        if not name.startswith(("aten::", "stowplan::")) or "as_strided" in name:
            seen.update((*made, *inputs_of(call)))
        if name in _COPYING_ITS_CELLS:
            seen.update(leaf.tensor for leaf in call.args[_CELLS : _CELLS + 1] if isinstance(leaf, Ref))
        owners = [graph.storage_of(output) for output in made]
        seen.update(owner for owner in made if owners.count(owner) > 1)
    return {graph.storage_of(name) for name in seen}


def _lies_dense(tensor: GraphTensor, device: torch.device) -> bool:
    shape, stride = tensor.shape or (), stride_of(tensor)
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    fits = bool(prod(shape)) and extent * torch_dtype(tensor.dtype).itemsize <= (tensor.nbytes or 0)
    return fits and torch.device(tensor.device) == device


def _is_written(
    graph: Graph, op: Op, call: Call, name: str, workspace_bytes: int, device: torch.device
) -> bool:
    writing = into(call)
    if writing is None or effect_of(site_of(graph, op)) & Effect.RANDOM:
        return False
    signature = call_signature(graph, call)
    tensor = graph.tensors[name]
    key = f"{signature.text} to {tensor.layout}"
    if key not in _writing:
        fits = _ROOM * (signature.operand_bytes + (tensor.nbytes or 0)) <= free_bytes(device)
        same = partial(_gives_the_same, graph, call, writing, tensor, workspace_bytes, device)
        _writing[key] = fits and out_of_sight(same)
    return _writing[key]


def _gives_the_same(
    graph: Graph,
    call: Call,
    writing: WritingCall,
    tensor: GraphTensor,
    workspace_bytes: int,
    device: torch.device,
) -> bool:
    """Whether a call writes the same bits to given memory, and allocates no more than the op does."""
    signature, names = call_signature(graph, call), list(dict.fromkeys(inputs_of(call)))
    with undisturbed(device, drawing=may_draw(call)):
        try:
            operands = operands_of(signature)
            expected = call_on(signature, operands)()
            assert isinstance(expected, Tensor)
            given = torch.empty_strided(
                expected.shape, stride_of(tensor), dtype=expected.dtype, device=expected.device
            )
            given.fill_(0 if writing.zeroed else float("nan") if given.is_floating_point() else 1)
            found = {**dict(zip(names, operands, strict=True)), _OUT: given}
            args = [filled(value, found) for value in writing.call.args]
            kwargs = {name: filled(value, found) for name, value in writing.call.kwargs.items()}
            there = [*operands, expected, given]
            _, rise_bytes = rise_while(
                lambda: writing.call.target(*args, **kwargs), device=device, before=there
            )
        except (RuntimeError, ValueError, IndexError):
            return False
    alike = same_strides(tuple(given.shape), expected.stride(), given.stride())
    enough = workspace_bytes + _SLACK_BYTES + expected.nbytes // 64
    return alike and _same_bits(expected, given) and rise_bytes <= enough


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))


@dataclass(frozen=True, slots=True)
class _Look:
    """A slot as a tensor: where it begins, in elements, and how it lies."""

    dtype: torch.dtype
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Arena:
    """The storage of one run. Generated code names its slots by number."""

    def __init__(self, looks: tuple[_Look, ...], nbytes: int, device: torch.device) -> None:
        self._looks, self._device = looks, device
        self.storage = torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()
        if device.type == "cpu":  # new memory at each step, unlike what malloc keeps
            prefer_large_pages(self.storage)

    def at(self, number: int) -> Tensor:
        """The slot, with whatever it contains."""
        look = self._looks[number]
        view = torch.empty(0, dtype=look.dtype, device=self._device)
        return view.set_(self.storage, look.start, look.shape, look.stride)

    def zeros(self, number: int) -> Tensor:
        """The slot, cleared."""
        return self.at(number).zero_()

    def take(self, number: int, made: Tensor) -> Tensor:
        """The slot with a copy of what an op has made."""
        return self.at(number).copy_(made)

    def beside(self, made: Tensor) -> None:
        """Refuse a result that is said to lie beside the arena and is a view into it."""
        if storage_id(made.untyped_storage()) == storage_id(self.storage):
            raise BadUse(
                f"an op returned a view of its operand, {tuple(made.shape)}, where a tensor of its own was"
                " expected: in an arena it would be overwritten; leave arena=True out"
            )


@dataclass(slots=True)
class _Past:
    """An arena that was made: its storage, and the object through which code reaches it."""

    number: int
    storage: "weakref.ref[UntypedStorage]"
    arena: "weakref.ref[Arena]"


class InArena(Placing):
    """The slots of a layout, for generated code, and the arenas that still exist."""

    begun_with: Mapping[str, str] = {"arena": "placing.new()"}
    only_one_backward = (
        "the step runs in an arena, where backward writes over it: leave out arena=True, or add up the losses"
        " before one backward"
    )

    def __init__(self, captured: Captured, layout: ArenaLayout, device: torch.device) -> None:
        self.captured, self.layout, self.device = captured, layout, device
        self._numbers: dict[Copy, int] = {copy: number for number, copy in enumerate(layout.slots)}
        tensors = captured.graph.tensors
        self._looks = tuple(_look_of(tensors[name], slot.offset) for (name, _), slot in layout.slots.items())
        self._computed = Counter[str]()
        self._past: list[_Past] = []

    def new(self) -> Arena:
        """For one run."""
        arena = Arena(self._looks, self.layout.use.nbytes, self.device)
        self._past = [past for past in self._past if past.storage() is not None]
        number = storage_id(arena.storage)
        self._past.append(_Past(number, weakref.ref(arena.storage), weakref.ref(arena)))
        return arena

    def lines(
        self,
        op: Op,
        call: Call,
        overwrites: Mapping[str, str],
        names: Mapping[str, str],
        wanted: Collection[str],
    ) -> list[str]:
        """The op writes its results into their slots, or they are copied there."""
        made = [n for n in _owners(self.captured.graph, op) if n in overwrites or n in wanted]
        copies: dict[str, Copy] = {name: (name, self._computed[name]) for name in made}
        self._computed.update(made)
        new = [name for name in made if name not in overwrites]
        placed = [name for name in new if copies[name] in self._numbers]
        if [self.layout.slots[copies[name]].placement for name in placed] == [Placement.WRITTEN]:
            (name,) = placed
            writing = into(call)
            assert writing is not None, f"{call.target} does not write to given memory"
            slot = f"arena.{'zeros' if writing.zeroed else 'at'}({self._numbers[copies[name]]})"
            return [f"{names[name]} = {expression(writing.call, {**names, _OUT: slot})}"]
        taken = (f"{names[n]} = arena.take({self._numbers[copies[n]]}, {names[n]})" for n in placed)
        beside = (f"arena.beside({names[n]})" for n in new if n not in placed)
        return [*super().lines(op, call, overwrites, names, wanted), *taken, *beside]

    def begins(self, given: Iterable[Tensor], say_once: Callable[[str], None] | None) -> None:
        """Move gradients out of earlier arenas, and warn of one that somebody still holds."""
        if (held_bytes := self.release(given)) and say_once:
            say_once(
                f"views of gradients of an earlier step keep its arena of {format_bytes(held_bytes)}: the"
                " budget is for one arena. Clone gradients that you keep"
            )

    def release(self, given: Iterable[Tensor]) -> int:
        """Move gradients out of arenas whose steps are done; the bytes of arenas that someone still holds.

        `given` are the tensors whose gradients the step computes. A gradient that is kept for the next
        backward would else keep the whole arena.
        """
        past = [past for past in self._past if past.storage() is not None]
        if not past:
            return 0
        theirs = {each.number for each in past}
        for tensor in given:
            gradient = tensor.grad if tensor.is_leaf else None
            if gradient is not None and storage_id(gradient.untyped_storage()) in theirs:
                gradient.data = gradient.detach().clone()
            del gradient
        left = (each for each in past if each.storage() is not None and each.arena() is None)
        return sum(self.layout.use.nbytes for _ in left)


def _look_of(tensor: GraphTensor, offset: int) -> _Look:
    dtype = torch_dtype(tensor.dtype)
    return _Look(dtype, offset // dtype.itemsize, tensor.shape or (), stride_of(tensor))
