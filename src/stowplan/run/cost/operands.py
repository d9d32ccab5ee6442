"""Operands: real tensors to try an op on, with contents that every op accepts.

Floating point numbers lie between 0 and 1, so that roots, logarithms and probabilities are all legal.
Integers are 0, which is an index into anything. What is large is 0 as well, and takes memory only where it is
touched: a sweep over a few tiles of it touches little.
"""

import mmap
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stowplan.capture.program import filled
from stowplan.capture.schema import ASKING_FOR_GRADIENTS, as_in_forward
from stowplan.run.cost.signature import Operand, Signature

LARGE_BYTES = 2**28
# Their workspace grows with what a mask selects, so all is selected.
_SELECTING = (torch.ops.aten.index.Tensor, torch.ops.aten.masked_select.default)
_BLOCK = 2**16  # numbers that are drawn; a larger tensor repeats them


def operands_of(signature: Signature) -> list[Tensor]:
    """Tensors that look as the signature says."""
    found = [
        _values(operand.extent, operand).as_strided(operand.shape, operand.stride)
        for operand in signature.operands
    ]
    if signature.call.target in _SELECTING:
        for tensor in found:
            if tensor.dtype is torch.bool:
                tensor.fill_(True)
    return found


def call_on(signature: Signature, operands: Sequence[Tensor]) -> Callable[[], object]:
    """The signature's op on these tensors, ready to be called."""
    named = {f"%{number}": tensor for number, tensor in enumerate(operands)}
    call = signature.call
    args = [filled(value, named) for value in call.args]
    kwargs = {name: filled(value, named) for name, value in call.kwargs.items()}
    if call.target in ASKING_FOR_GRADIENTS:
        return lambda: as_in_forward(call.target, *args, **kwargs)
    if call.copied:
        return lambda: call.target(*args, **kwargs).clone()
    return lambda: call.target(*args, **kwargs)


def _values(count: int, operand: Operand) -> Tensor:
    if count * operand.dtype.itemsize > LARGE_BYTES and operand.device.type == "cpu":
        return torch.frombuffer(mmap.mmap(-1, count * operand.dtype.itemsize), dtype=operand.dtype)
    if operand.dtype is torch.bool:
        return _repeated((_drawn(count) < 0.5).to(operand.device), count)
    if operand.dtype.is_floating_point or operand.dtype.is_complex:
        return _repeated(_drawn(count).to(operand.device, operand.dtype), count)
    return torch.zeros(count, dtype=operand.dtype, device=operand.device)


def _drawn(count: int) -> Tensor:
    return torch.rand(min(count, _BLOCK), generator=torch.Generator().manual_seed(0))


def _repeated(block: Tensor, count: int) -> Tensor:
    if count == len(block):
        return block
    whole = block.new_empty(count)
    for start in range(0, count, len(block)):
        part = whole[start : start + len(block)]
        part.copy_(block[: len(part)])
    return whole
