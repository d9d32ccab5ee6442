"""Signature: what makes two calls cost the same, whichever tensors they are about."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from stowplan.capture import Argument, Call, Handle, Ref
from stowplan.capture.program import inputs_of
from stowplan.capture.storage_views import contiguous_stride, extent_of, stride_of, torch_dtype
from stowplan.ir import Graph, Tensor
from stowplan.ops.table import shape_of


@dataclass(frozen=True, slots=True)
class Operand:
    """How a tensor that a call reads looks; its contents are not part of it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def extent(self) -> int:
        """How many elements there are from the first to the last."""
        return extent_of(self.shape, self.stride)

    def __str__(self) -> str:
        dense = self.stride == contiguous_stride(self.shape)
        layout = "" if dense else f" by {_joined(self.stride)}"
        return f"{_bare(self.dtype)}[{_joined(self.shape)}]{layout} on {self.device.type}"


@dataclass(frozen=True, slots=True)
class Signature:
    """A call on anonymous tensors: `Ref("%0")` is the first of the operands, which come in order of use.

    `text` has one spelling for one signature: `aten.mm.default(%0, %1) of float32[2,3] on cpu; ...`.
    """

    call: Call
    operands: tuple[Operand, ...]
    text: str

    @property
    def operand_bytes(self) -> int:
        """The bytes of all operands."""
        return sum(operand.extent * operand.dtype.itemsize for operand in self.operands)


def call_signature(graph: Graph, call: Call) -> Signature:
    """The signature of one of the calls that `graph` was captured with."""
    names = list(dict.fromkeys(inputs_of(call)))
    numbers = {name: f"%{number}" for number, name in enumerate(names)}
    args = tuple(anonymous(value, numbers) for value in call.args)
    kwargs = {name: anonymous(value, numbers) for name, value in sorted(call.kwargs.items())}
    operands = tuple(operand_of(graph.tensors[name]) for name in names)
    given = [
        *map(spelled_argument, args),
        *(f"{name}={spelled_argument(value)}" for name, value in kwargs.items()),
    ]
    copied = ".clone()" if call.copied else ""
    text = f"{call.target}({', '.join(given)}){copied} of {'; '.join(map(str, operands))}"
    return Signature(replace(call, args=args, kwargs=kwargs, outputs=()), operands, text)


def anonymous(value: Argument, numbers: Mapping[str, str]) -> Argument:
    """An argument with other names for its tensors."""
    match value:
        case Ref(name):
            return Ref(numbers[name])
        case tuple():
            return tuple(anonymous(item, numbers) for item in value)
        case torch.Generator():
            return None  # the default generator draws at the same price
        case _:
            return value


def operand_of(tensor: Tensor) -> Operand:
    """How a tensor of a graph looks."""
    dtype, device = torch_dtype(tensor.dtype), torch.device(tensor.device)
    return Operand(shape_of(tensor), stride_of(tensor), dtype, device)


def spelled_argument(value: Argument) -> str:
    """One spelling for one argument."""
    match value:
        case Ref(name):
            return name
        case tuple():
            return f"[{', '.join(map(spelled_argument, value))}]"
        case Handle():
            return repr(value.name)
        case _:
            return repr(value)


def _joined(sizes: tuple[int, ...]) -> str:
    return ",".join(map(str, sizes))


def _bare(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
