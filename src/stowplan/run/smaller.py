"""Smaller calls: the model runs as it is where a planned step of larger sizes shows that the call fits.

Such a call is neither captured nor planned. The first of a kind is watched, with the larger step L:

    same program   each op of its forward is the captured one of L, and no result is larger than there
    forward        before each op, the bytes that are alive and those that the op took in L are within the
                   budget
    backward       storage s of L counts as n(s) bytes. Forward has shown n(s) for what it makes. A gradient
                   with the shape of tensors of forward counts as the largest of these is now, any other
                   storage as in L
    accept         if L's curve with n(s), L's workspace, and what is alive after forward beyond the storages
                   that L keeps for backward, are within the budget

At the first difference the call ends, buffers and generators are put back as they were, and the call is
captured like any other. Two things are taken for granted. Kernels take no more workspace at smaller sizes,
and in PyTorch's formulas a gradient has the shape of a tensor of forward at every size. If a function in
Python differentiates, which may do anything, backward counts as in L.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from stowplan.capture.capture import Span
from stowplan.capture.stand_ins import TensorLook, contiguous_stride, torch_dtype
from stowplan.capture.watching import Event, nodes_below
from stowplan.run.cost.machine import rng_state, set_rng_state
from stowplan.run.measure.agreement import changes_nothing
from stowplan.run.measure.living import LivingStorages
from stowplan.run.step.function import BuffersBefore
from stowplan.torch_private import OpOverload, TorchDispatchMode, pytree

if TYPE_CHECKING:
    from stowplan.run.call_planner import KindOfCall, Planned

Sizes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class CallSizes:
    """A kind of call as its family, which is equal for calls that differ in sizes alone, and its sizes."""

    family: object
    sizes: Sizes

    @staticmethod
    def of(kind: "KindOfCall") -> "CallSizes | None":
        """None where sizes alone do not say how a tensor lies in memory, or where two share it."""
        sizes, family, places = list[tuple[int, ...]](), list[object](), iter(kind.shared)
        for look in kind.looks:
            if not isinstance(look, TensorLook):
                family.append(look)
                continue
            owner, _, _ = next(places)
            dense = look.stride == contiguous_stride(look.shape)
            if not dense or owner != len(sizes):
                return None
            sizes.append(look.shape)
            family.append(look._replace(shape=(len(look.shape),), stride=()))
        return CallSizes((tuple(family), kind.spec, kind.casts, kind.records), tuple(sizes))

    def share_of(self, larger: "CallSizes") -> float:
        """The number of elements over that of the larger call, in the tensor where they are most alike."""
        pairs = zip(self.sizes, larger.sizes, strict=True)
        shares = [prod(one) / max(1, prod(other)) for one, other in pairs if one != other]
        return max(shares, default=1.0)

    def is_within(self, larger: "CallSizes") -> bool:
        """Whether it is of the same family, and no dim of any tensor is longer."""
        pairs = zip(self.sizes, larger.sizes, strict=False)
        shorter = all(one <= other for shapes in pairs for one, other in zip(*shapes, strict=False))
        return self.family == larger.family and shorter


class Unlike(BaseException):
    """The call runs other ops, or too large ones. No Exception: the user's code might take it for its own."""


def watched(
    run: Callable[[], object],
    larger: "Planned",
    held: Sequence[Tensor],
    given: Sequence[object],
    written: Iterable[Tensor],
) -> object:
    """Run a forward that is like the larger one; raises Unlike, with everything as it was before.

    `held` are the model's tensors, `given` the leaves of the call, `written` the tensors that it changes.
    """
    devices = {torch.device("cpu"), *(tensor.device for tensor in held)}
    states = [(device, rng_state(device)) for device in devices]
    watch = _Watch(larger, held, given)
    try:
        with BuffersBefore(written), watch:
            result = run()
            watch.finish(result)
            return result
    except BaseException:
        for device, state in states:
            set_rng_state(device, state)
        raise


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves __init_subclass__ untyped
    """Runs ops as long as they are the expected ones, make nothing larger and have room."""

    supports_higher_order_operators = True  # so that they come here: none was captured

    def __init__(self, larger: "Planned", held: Sequence[Tensor], given: Sequence[object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # so is this
        captured, plan = larger.step.captured, larger.step.plan
        events = enumerate(captured.forward)
        self._expected = iter([(n, event) for n, event in events if not changes_nothing(event.target)])
        self._captured, self._allowed = captured, plan.allowed_bytes
        self._workspaces = plan.pricing.workspace_bytes
        self._workspace = captured.eager.workspace_of_events(self._workspaces)
        self._spans = {span.storage: span for span in captured.eager.spans}
        self._seen: dict[int, int] = {}  # bytes by L's number of the storage
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}  # the largest that L's shape is now
        self._living = LivingStorages()
        arguments = [leaf for leaf in given if isinstance(leaf, Tensor)]
        self._living.add_read((*held, *arguments))
        for tensor in held:
            self._note_shape(tuple(tensor.shape), tensor)
        looks = (look for look in larger.kind.looks if isinstance(look, TensorLook))
        for look, tensor in zip(looks, arguments, strict=True):
            self._note_shape(look.shape, tensor)

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if isinstance(func, OpOverload) and changes_nothing(func):
            return func(*args, **(kwargs or {}))
        position, event = next(self._expected, (0, None))
        if event is None or event.target is not func:
            raise Unlike
        if self._living.nbytes + self._taken_in_larger(position, event) > self._allowed:
            raise Unlike
        result = func(*args, **(kwargs or {}))
        made = tuple(result) if isinstance(result, (tuple, list)) else (result,)
        if len(made) != len(event.results):
            raise Unlike
        for value, expected in zip(made, event.results, strict=True):
            if not isinstance(value, Tensor):
                continue
            if expected is None or not _is_within(value, expected.shape):
                raise Unlike
            self._note_shape(expected.shape, value)
            if expected.storage in self._spans:  # and no constant
                self._living.add((value,))
                self._seen[expected.storage] = value.untyped_storage().nbytes()
        return result

    def _taken_in_larger(self, position: int, event: Event) -> int:
        storages = {view.storage for view in event.results if view is not None}
        made = (span for s in storages if (span := self._spans.get(s)) and span.first == position)
        return self._workspace[position] + sum(span.nbytes for span in made)

    def _note_shape(self, larger: tuple[int, ...], tensor: Tensor) -> None:
        known = self._shapes.get(larger)
        self._shapes[larger] = tuple(map(max, known, tensor.shape)) if known else tuple(tensor.shape)

    def finish(self, result: object) -> None:
        """At the end of forward no op is left, and backward has room beside what is alive."""
        if next(self._expected, None) is not None:
            raise Unlike
        turn = len(self._captured.forward)
        outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        in_python = any(isinstance(node, BackwardCFunction) for node in nodes_below(outputs))
        spans = [
            span if in_python and span.first >= turn else replace(span, nbytes=self._bytes_of(span))
            for span in self._captured.eager.spans
        ]
        kept = sum(span.nbytes for span in spans if span.first < turn <= span.last)
        peak = replace(self._captured.eager, spans=tuple(spans)).peak_bytes(self._workspaces)
        if peak + max(0, self._living.nbytes - kept) > self._allowed:
            raise Unlike

    def _bytes_of(self, span: Span) -> int:
        """No less than the storage of a span takes now."""
        if span.storage in self._seen:
            return self._seen[span.storage]
        tensor = self._captured.graph.tensors.get(span.tensor)
        if tensor is None or tensor.shape not in self._shapes:
            return span.nbytes
        itemsize = torch_dtype(tensor.dtype).itemsize
        is_whole = span.nbytes == prod(tensor.shape) * itemsize
        return prod(self._shapes[tensor.shape]) * itemsize if is_whole else span.nbytes


def _is_within(tensor: Tensor, larger: Sequence[int]) -> bool:
    return tensor.dim() == len(larger) and all(map(int.__le__, tensor.shape, larger))
