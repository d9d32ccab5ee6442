"""Storage views: a storage with shape, strides and offset. Tensors with equal storage views are one value."""

import ast
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stowplan.errors import CaptureError
from stowplan.ir import DType
from stowplan.ir import Tensor as GraphTensor
from stowplan.torch_private import storage_id


@dataclass(frozen=True, slots=True)
class StorageView:
    """A storage, by number, and the shape, strides and offset at which a tensor reads it."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    flipped: tuple[bool, bool] = (False, False)  # lazily conjugated, lazily negated

    def is_dense(self) -> bool:
        """Whether its elements fill a block of memory without gaps or overlaps, in some order of dims."""
        expected = 1
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def extent_bytes(self) -> int:
        """Bytes from its first element to its last."""
        return extent_of(self.shape, self.stride) * self.dtype.itemsize

    def is_contiguous(self) -> bool:
        """Whether its elements lie in the order of its dims."""
        return self.stride == contiguous_stride(self.shape) or (
            self.is_dense() and list(self.stride) == sorted(self.stride, reverse=True)
        )


def extent_of(shape: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements there are from the first to the last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a row-major tensor, as PyTorch computes them."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


@dataclass(slots=True)
class Lifetime:
    """A storage's bytes, the event that made it (-1: it existed before) and the last event it saw."""

    nbytes: int
    born: int
    died: int | None = None


class StorageBook:
    """Numbers storages as they appear and records when they are freed, as eager would free them."""

    def __init__(self, now: Callable[[], int]) -> None:
        self.lifetimes: list[Lifetime] = []
        self._now = now
        self._open: dict[
            int, tuple[int, object]
        ] = {}  # address -> number and the weak reference that closes it

    def knows(self, tensor: Tensor) -> bool:
        """Whether the storage of `tensor` has been seen."""
        return storage_id(tensor.untyped_storage()) in self._open

    def view_of(self, tensor: Tensor, *, born: int = -1) -> StorageView:
        """The storage view of `tensor`; a new storage is recorded as born at event `born`."""
        if tensor.layout is not torch.strided:
            raise CaptureError(
                f"a tensor of shape {tuple(tensor.shape)} has the layout {tensor.layout}",
                advice="only dense tensors are supported: embeddings take sparse=False",
            )
        return StorageView(
            self._number_of(tensor.untyped_storage(), born),
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.device,
            (tensor.is_conj(), tensor.is_neg()),
        )

    def living_bytes(self) -> int:
        """Bytes of the storages that exist now."""
        return sum(self.lifetimes[number].nbytes for number, _ in self._open.values())

    def _number_of(self, storage: torch.UntypedStorage, born: int) -> int:
        address = storage_id(storage)
        if address in self._open:
            return self._open[address][0]
        number = len(self.lifetimes)
        self.lifetimes.append(Lifetime(storage.nbytes(), born))
        self._open[address] = number, weakref.ref(storage, lambda _: self._close(address, number))
        return number

    def _close(self, address: int, number: int) -> None:
        self._open.pop(address, None)
        self.lifetimes[number].died = self._now() - 1


def stride_of(tensor: GraphTensor) -> tuple[int, ...]:
    """The strides of a graph's tensor; row-major unless the layout states them."""
    found: tuple[int, ...] = (
        ast.literal_eval(tensor.layout) if tensor.layout else contiguous_stride(tensor.shape or ())
    )
    return found


def torch_dtype(dtype: DType | None) -> torch.dtype:
    """PyTorch's dtype for a graph's."""
    name = "float8_e4m3fn" if dtype is DType.FLOAT8 else str(dtype)
    found: torch.dtype = getattr(torch, name)
    return found


def same_strides(shape: tuple[int, ...], one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether two strides place the elements alike; the stride of a dim of size 1 does not matter."""
    return all(a == b for size, a, b in zip(shape, one, other, strict=True) if size > 1)
