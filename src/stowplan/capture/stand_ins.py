"""Stand-ins: tensors with a shape, strides and a device but no data, in place of a model's own.

A parameter with two names in a model has one stand-in, so tied weights stay tied. Tensors that share a
storage have stand-ins that share one of its size, because a slice keeps the whole storage alive. Small
integer arguments may keep their values: their stand-ins are copies. The stand-in of a tensor that an op made
before the step is no leaf either: autograd hands its gradient on as it is, and copies that of a leaf into
the leaf's strides.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from stowplan.errors import CaptureError
from stowplan.torch_private import FakeTensor, FakeTensorMode, storage_id

_KNOWN_BYTES = 1 << 19  # of a storage whose values are known


class StandIns:
    """Makes one stand-in for each of `tensors` and remembers the original.

    Storages that contain nothing but `known` tensors, which must be small integers, are copied.
    """

    def __init__(
        self, device: torch.device, tensors: Iterable[Tensor] = (), known: Iterable[Tensor] = ()
    ) -> None:
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._device = device
        self._made: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # also holds the original, so that its id stays unique
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # likewise
        self._begins: dict[int, int] = {}  # by storage, the first byte in use
        self._known: set[int] = set()  # storages whose stand-ins have values
        self._results: dict[Tensor, _Gradient] = {}  # of the stand-ins that are no leaves
        values = {id(tensor) for tensor in known if is_small_integer(tensor)}
        unknown: set[int] = set()
        for tensor in filter(_is_plain, tensors):
            storage = storage_id(tensor.untyped_storage())
            if id(tensor) in values and storage not in unknown:
                self._known.add(storage)
            else:
                unknown.add(storage)
                self._known.discard(storage)
            self._begins[storage] = min(self._begins.get(storage, _first_byte(tensor)), _first_byte(tensor))

    def of(self, tensor: Tensor) -> Tensor:
        """The stand-in of `tensor`; for a tensor on the meta device, on the device of the step."""
        if id(tensor) not in self._made:
            self._made[id(tensor)] = tensor, self._make(tensor)
        return self._made[id(tensor)][1]

    def gradient_of(self, stand_in: Tensor) -> Tensor | None:
        """What backward left for a stand-in that requires a gradient."""
        return self._results[stand_in].arrived if stand_in in self._results else stand_in.grad

    def has_new_history(self, stand_in: Tensor) -> bool:
        """Whether the step wrote into a tensor that autograd then follows as the result of that write."""
        return stand_in in self._results and stand_in.grad_fn is not self._results[stand_in].node

    def _make(self, tensor: Tensor) -> Tensor:
        if not _is_plain(tensor):
            raise CaptureError(f"{type(tensor).__name__} is a tensor subclass, which cannot be captured")
        device = self._device if tensor.is_meta else tensor.device
        if storage_id(tensor.untyped_storage()) in self._known:
            return self._copy_of(tensor)
        storage, offset = self._storage_of(tensor), self._offset_of(tensor)
        with torch.no_grad():
            meta = torch.empty(0, dtype=tensor.dtype, device="meta")
            meta.set_(storage, offset, tensor.shape, tensor.stride())
        made = FakeTensor(self.fakes, meta, device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, requires_grad=tensor.requires_grad)
        if tensor.is_leaf:
            return made.requires_grad_(tensor.requires_grad)
        gradient = _Gradient()
        result = _as_result(torch.empty(0, requires_grad=True), made, gradient)
        gradient.node, self._results[result] = result.grad_fn, gradient
        return result

    def _copy_of(self, tensor: Tensor) -> Tensor:
        original = tensor.untyped_storage()
        if storage_id(original) not in self._storages:
            held = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(original)
            used = held[self._begins[storage_id(original)] :]
            made = torch.zeros_like(held)
            made[: len(used)] = used
            self._storages[storage_id(original)] = original, made.untyped_storage()
        storage, offset = self._storages[storage_id(original)][1], self._offset_of(tensor)
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(storage, offset, tensor.shape, tensor.stride())

    def _storage_of(self, tensor: Tensor) -> torch.UntypedStorage:
        original = tensor.untyped_storage()
        if storage_id(original) not in self._storages:
            made = torch.empty(original.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
            self._storages[storage_id(original)] = original, made
        return self._storages[storage_id(original)][1]

    def _offset_of(self, tensor: Tensor) -> int:
        """Counted from the first tensor in the storage: the next batch may lie elsewhere in it."""
        first = _first_byte(tensor)
        begin = self._begins.get(storage_id(tensor.untyped_storage()), first)
        offset, odd = divmod(first - begin, tensor.element_size())
        if odd:
            raise CaptureError(
                f"a tensor of {tensor.dtype} shares memory with others and begins between their elements",
                advice="pass a copy of it",
            )
        return offset

    def inside(self, model: nn.Module) -> AbstractContextManager[None]:
        """Within, the parameters and buffers of `model` are stand-ins; afterwards its own."""
        return with_tensors(model, self.of)


@dataclass(slots=True, eq=False)
class _Gradient:
    """The gradient of a tensor that is no leaf, when it has come to the node of that tensor."""

    arrived: Tensor | None = None
    node: Node | None = None


class _Result(torch.autograd.Function):
    """Stands for the op that made a tensor before the step."""

    @staticmethod
    def forward(ctx: Any, before: Tensor, made: Tensor, gradient: _Gradient) -> Tensor:
        del before  # autograd differentiates the result because of it
        ctx.gradient = gradient
        ctx.mark_dirty(made)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        (ctx.gradient.arrived,) = gradients
        return None, None, None


_as_result: Callable[..., Tensor] = _Result.apply


@contextmanager
def with_tensors(model: nn.Module, other: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within, each parameter and buffer of `model` is replaced by `other` of it."""
    tables = [
        cast(dict[str, Tensor | None], table)
        for module in model.modules()
        for table in (module._parameters, module._buffers)
    ]
    originals = [dict(table) for table in tables]
    try:
        for table in tables:
            table.update({name: other(held) for name, held in table.items() if held is not None})
        yield
    finally:
        for table, original in zip(tables, originals, strict=True):
            table.clear()
            table.update(original)


def is_small_integer(tensor: Tensor) -> bool:
    """Whether the values of a tensor are few and whole, so that they can be known."""
    small = tensor.untyped_storage().nbytes() <= _KNOWN_BYTES
    return small and not tensor.is_meta and not tensor.dtype.is_floating_point and not tensor.dtype.is_complex


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter)


def _first_byte(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()
