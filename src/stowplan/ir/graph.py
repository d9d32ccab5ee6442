"""Tensor, Op, Graph: what a training step reads, writes and runs, in an executable order."""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]
Attribute: TypeAlias = "bool | int | float | str | tuple[Attribute, ...] | Mapping[str, Attribute] | None"
Attributes: TypeAlias = Mapping[str, Attribute]


class Kind(StrEnum):
    """The part that a tensor has in the training step."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    CONSTANT = "constant"
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    MASK = "mask"
    WORKSPACE = "workspace"


class Phase(StrEnum):
    """Which part of the training step an op belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"
    TRANSFER = "transfer"
    LAYOUT = "layout"


class Role(StrEnum):
    """How an op uses a tensor.

    Inputs: DATA is read; SAVED is read and was kept from the forward half for it; SHAPE needs only the
    shape, CONTROL only the order: neither keeps the tensor alive.
    Outputs: DATA is made by the op; ACCUMULATE is added into a tensor that an earlier op made.
    """

    DATA = "data"
    SAVED = "saved"
    SHAPE = "shape"
    CONTROL = "control"
    ACCUMULATE = "accumulate"


class DType(StrEnum):
    """Element types, by PyTorch's names."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8 = "float8"
    COMPLEX128 = "complex128"
    COMPLEX64 = "complex64"
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    UINT64 = "uint64"
    UINT32 = "uint32"
    UINT16 = "uint16"
    UINT8 = "uint8"
    BOOL = "bool"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]


_ITEMSIZE = {
    DType.FLOAT64: 8,
    DType.FLOAT32: 4,
    DType.FLOAT16: 2,
    DType.BFLOAT16: 2,
    DType.FLOAT8: 1,
    DType.COMPLEX128: 16,
    DType.COMPLEX64: 8,
    DType.INT64: 8,
    DType.INT32: 4,
    DType.INT16: 2,
    DType.INT8: 1,
    DType.UINT64: 8,
    DType.UINT32: 4,
    DType.UINT16: 2,
    DType.UINT8: 1,
    DType.BOOL: 1,
}


def bytes_of_shape(shape: Shape, dtype: DType) -> int:
    """Bytes of a dense tensor."""
    return prod(shape) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Tensor:
    """One value or gradient. A reader may not know `shape` and `nbytes`; inference fills them in.

    `gradient_of` names the tensor whose gradient this is; `alias_of` the tensor whose storage it shares.
    """

    id: str
    kind: Kind
    shape: Shape | None = None
    dtype: DType | None = None
    nbytes: int | None = None
    name: str = ""
    layout: str = ""
    device: str = ""
    gradient_of: str | None = None
    alias_of: str | None = None


@dataclass(frozen=True, slots=True)
class Use:
    """One tensor in one op's list of inputs or outputs."""

    tensor: str
    role: Role = Role.DATA


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. `adjoint_of` names the forward op that a backward op differentiates.

    `scope` is the path of the module it came from and `source` the user's "file:line", where known.
    """

    id: str
    type: str
    phase: Phase
    inputs: tuple[Use, ...] = ()
    outputs: tuple[Use, ...] = ()
    attributes: Attributes = field(default_factory=dict)
    device: str = ""
    adjoint_of: str | None = None
    scope: str = ""
    source: str = ""

    def reads(self) -> Iterator[str]:
        """The tensors whose values the op needs while it runs."""
        return (use.tensor for use in self.inputs if use.role in (Role.DATA, Role.SAVED))

    def writes(self) -> Iterator[str]:
        """The tensors the op makes or adds into."""
        return (use.tensor for use in self.outputs)


@dataclass(frozen=True, slots=True)
class Graph:
    """Tensors by id and ops in an executable order.

    `held` are the tensors that are held outside when the step ends: results, parameter gradients, and inputs
    that the caller keeps. Parameters, buffers and constants are held without being named.
    """

    tensors: Mapping[str, Tensor]
    ops: tuple[Op, ...]
    held: frozenset[str] = frozenset()
    name: str = ""
    _storages: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    def storage_of(self, name: str) -> str:
        """The tensor that owns the storage of tensor `name`: the end of its chain of `alias_of`."""
        owner = self._storages.get(name)
        if owner is None:
            base = self.tensors[name].alias_of
            owner = self._storages[name] = name if base is None else self.storage_of(base)
        return owner


def attribute_of(value: object) -> Attribute:
    """A decoded JSON value as an attribute: lists become tuples, at every depth."""
    if isinstance(value, list | tuple):
        return tuple(attribute_of(item) for item in value)
    if isinstance(value, dict):
        return {str(key): attribute_of(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} is not an attribute")


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector while a graph is built: all of its many objects stay alive."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def object_without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object from its members (`object_pairs_hook`); a repeated key is a ValueError."""
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} comes twice")
        found[key] = value
    return found
