"""Watching a step: it runs once on stand-ins without data, and every dispatched op is recorded.

Nothing is rewritten, so the recording is what eager runs: the same kernels in the same order, the same
tensors kept by autograd, the same moments at which storages are freed. Small integer tensors that depend on
no stand-in are computed for real, because models branch on them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import Node

from stowplan.capture.layouts import as_made
from stowplan.capture.origins import Origin, Origins
from stowplan.capture.schema import extra_bytes, leaves, returns_tensors, written_arguments, written_names
from stowplan.capture.storage_views import StorageBook, StorageView
from stowplan.errors import CaptureError
from stowplan.torch_private import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    nodes_made,
    running_node,
    sequence_number,
)

_KNOWN_ELEMENTS = 1 << 16


class KnownOverwritten(Exception):
    """A tensor with known values received unknown values: record again without known values."""


class Rehearsal:
    """Runs ops on stand-ins.

    With `knowing`, small integer tensors that depend on no stand-in are computed for real: positions and
    masks of positions. Models that branch on them behave as in eager.
    """

    def __init__(self, fakes: FakeTensorMode, *, knowing: bool) -> None:
        self._fakes, self._knowing = fakes, knowing

    def run(self, target: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """The result of an op, without data unless its values are known."""
        if self._is_known(target, args, kwargs):
            return target(*args, **kwargs)
        self._refuse_writing_data(target, args, kwargs)
        with self._fakes:
            return as_made(target, args, kwargs, target(*args, **kwargs))

    def _is_known(self, target: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
        if not self._knowing or torch.Tag.nondeterministic_seeded in target.tags:
            return False
        if not all(map(_is_small_integer, _tensors_in((args, tuple(kwargs.values()))))):
            return False
        if not returns_tensors(target):
            return True
        with self._fakes:
            foreseen = target(*args, **kwargs)
        return all(map(_is_integer_of_size, _tensors_in(foreseen)))

    def _refuse_writing_data(
        self, target: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> None:
        for tensor in _tensors_in(tuple(written_arguments(target, args, kwargs).values())):
            if isinstance(tensor, FakeTensor):
                continue
            if self._knowing:
                raise KnownOverwritten
            raise CaptureError(
                f"{target} writes into a tensor of shape {tuple(tensor.shape)} that is no buffer",
                advice="make it one with register_buffer",
            )


def _tensors_in(value: object) -> Iterable[Tensor]:
    return (leaf for leaf in leaves(value) if isinstance(leaf, Tensor))


def _is_small_integer(tensor: Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and _is_integer_of_size(tensor)


def _is_integer_of_size(tensor: Tensor) -> bool:
    inexact = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return not inexact and tensor.numel() <= _KNOWN_ELEMENTS


@dataclass(frozen=True, slots=True)
class Event:
    """One op as it was dispatched, its tensors replaced by their storage views.

    `nodes` are the autograd nodes that it created; `node` is the one whose backward it runs in. `merges`
    marks an addition of autograd's engine that sums two gradients of one tensor.
    """

    target: OpOverload
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    results: tuple[StorageView | None, ...]
    single: bool
    origin: Origin
    nodes: range
    node: int | None
    merges: bool


@dataclass(frozen=True, slots=True)
class Incoming:
    """The gradients that an autograd node receives for the outputs of its op, before event `position`."""

    node: int
    position: int
    gradients: tuple[StorageView | None, ...]


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves __init_subclass__ untyped
    """Records each op as an Event, and when each storage is allocated and freed."""

    supports_higher_order_operators = True  # so that they arrive here and are refused

    def __init__(self, rehearsal: Rehearsal, origins: Origins) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # so is this
        self.events: list[Event] = []
        self.book = StorageBook(lambda: len(self.events))
        self.constants: dict[int, Tensor] = {}  # by storage number
        self.literals: set[int] = set()  # constants written in code
        self.looks_at_values = False  # of integers that are known
        self.incoming: list[Incoming] = []
        self.between_nodes = False  # then ops are the engine's sums of gradients
        self._rehearsal, self._origins = rehearsal, origins
        self._nodes_made = nodes_made()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if not isinstance(func, OpOverload):
            raise CaptureError(
                f"{func} branches or loops while the step runs",
                advice="branch in Python before the step, or unroll it",
            )
        given = dict(kwargs or {})
        if not returns_tensors(func) and not written_names(func):
            self.looks_at_values |= func.namespace == "aten"  # prim.device and its like read no values
            return self._rehearsal.run(func, args, given)
        if func is torch.ops.aten.lift_fresh.default:
            self._enter_literal(args[0])
        placed = tuple(self._placed(value) for value in args)  # before it runs: it may change their shapes
        placed_by_name = {name: self._placed(value) for name, value in given.items()}
        result = self._rehearsal.run(func, args, given)
        self._note(func, placed, placed_by_name, result)
        return result

    def enter_node(self, node: int, gradients: Sequence[Tensor | None]) -> None:
        """Autograd is about to differentiate the op of this node."""
        self.between_nodes = False
        views = tuple(None if gradient is None else self.book.view_of(gradient) for gradient in gradients)
        self.incoming.append(Incoming(node, len(self.events), views))

    def _note(
        self, target: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object], result: object
    ) -> None:
        now = len(self.events)
        returned = tuple(result) if isinstance(result, (tuple, list)) else (result,)
        event = Event(
            target,
            args,
            kwargs,
            tuple(self.book.view_of(v, born=now) if isinstance(v, Tensor) else None for v in returned),
            isinstance(result, Tensor),
            self._origins.here(),
            range(self._nodes_made, nodes_made()),
            running_node(),
            self.between_nodes,
        )
        for view, nbytes in extra_bytes(target, args, kwargs, event.results):
            self.book.lifetimes[view.storage].nbytes += nbytes
        self._nodes_made = event.nodes.stop
        self.events.append(event)

    def _placed(self, value: object) -> object:
        if isinstance(value, (tuple, list)):
            return tuple(self._placed(item) for item in value)
        if not isinstance(value, Tensor):
            return value
        if not self.book.knows(value):
            self._enter_constant(value)
        return self.book.view_of(value)

    def _enter_literal(self, value: object) -> None:
        if isinstance(value, Tensor) and not self.book.knows(value):
            self._enter_constant(value)
            self.literals.add(self.book.view_of(value).storage)

    def _enter_constant(self, tensor: Tensor) -> None:
        if tensor.requires_grad:
            raise CaptureError(
                f"a tensor of shape {tuple(tensor.shape)} requires a gradient but is no parameter or input",
                advice="register it as a parameter of the model or pass it in",
            )
        self.constants[self.book.view_of(tensor).storage] = tensor


@contextmanager
def followed(watch: Watch, outputs: Sequence[Tensor]) -> Iterator[None]:
    """Within, `watch` learns when autograd enters a node, with which gradients, and when it leaves it."""

    def leave(_inputs: object, _outputs: object) -> None:
        watch.between_nodes = True

    for node in _nodes_below(outputs):
        node.register_prehook(partial(watch.enter_node, sequence_number(node)))
        node.register_hook(leave)
    yield
    watch.between_nodes = False


def _nodes_below(outputs: Sequence[Tensor]) -> Iterator[Node]:
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)
