"""What a compiled function is held to before a kernel runs it, and whether it gives eager's bits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stowplan.capture.stand_ins import same_strides
from stowplan.run.cost.machine import free_bytes
from stowplan.run.cost.probe import LARGE_BYTES, Operand, Signature, operands_of
from stowplan.techniques.kernels.run.kernel import Function, Kernel, fused_call
from stowplan.techniques.kernels.run.known import KernelVerdict
from stowplan.torch_private import storage_id

NO_ROOM = "memory is too short to compare it with its ops"
_RELATIVE = 1e-3  # of the largest number: what is further off is wrong, not rounded
_ERRORS, _ULPS = 2.0, 4.0  # times the error of the ops, and units in the last place of the largest number
_ROOM = 8  # this many times the operands' bytes must be free: for them, and for results of both


_ADOPTED: dict[tuple[str, int], tuple[Function, bool]] = {}  # in this process, by name and threads


def reuse(kernel: Kernel) -> bool:
    """Whether this process had the same kernel before; it then runs the same function."""
    found = _ADOPTED.get((kernel.name, torch.get_num_threads()))
    if found is not None:
        kernel.compiled, kernel.is_exact = found
    return found is not None


def adopt(kernel: Kernel, function: Function, known: KernelVerdict | None = None) -> str:
    """Let the kernel run `function` from now on; if it may not, the reason why.

    Unless that is known, it is called on two sets of operands, one of numbers from 0 to 1 and one of both
    signs, and compared with the ops. On the first set these run in float64 as well: its error may be twice
    that of eager's kernels, on operands in this layout or in row-major layout, whichever error is smaller.
    """
    fault, is_exact = (known.fault, known.is_exact) if known else _compared(kernel, function)
    if not fault:
        kernel.compiled, kernel.is_exact = function, is_exact
        _ADOPTED[kernel.name, torch.get_num_threads()] = function, is_exact
    return fault


def checked_by_ops(kernel: Kernel) -> KernelVerdict:
    """Whether its ops are as near to float64 in the layout of its operands as in row-major layout."""
    if any(_bytes_of(look) > LARGE_BYTES for look in kernel.looks):
        return KernelVerdict("its operands are too large to compare", is_exact=False)
    return KernelVerdict(*_compared(kernel, kernel.by_ops))


def _compared(kernel: Kernel, function: Function) -> tuple[str, bool]:
    """What is wrong with the function, and whether it gives the bits of the ops."""
    signature = _signature(kernel)
    if _ROOM * signature.operand_bytes > free_bytes(torch.device("cpu")):
        return NO_ROOM, False
    is_exact = all(_bytes_of(look) <= LARGE_BYTES for look in kernel.looks)  # larger ones are all zero
    operands = operands_of(signature)
    for number in range(2):
        expected = kernel.by_ops(operands)
        made = list(function(list(operands)))
        if fault := _fault_of(kernel, operands, made, expected):
            return fault, False
        usual = kernel.by_ops([operand.contiguous() for operand in operands])
        same = [_have_same_bits(*pair) for pair in zip(made, usual, strict=True)]
        is_exact = is_exact and all(same)
        if number == 0 and not all(same) and (fault := _error_of(kernel, operands, made, (expected, usual))):
            return fault, False
        for tensor, look in zip(operands, kernel.looks, strict=True):
            if tensor.is_floating_point():
                tensor.as_strided((look.extent,), (1,)).mul_(8).sub_(4)
    return "", is_exact


def _signature(kernel: Kernel) -> Signature:
    call = fused_call(kernel, [f"%{number}" for number in range(len(kernel.looks))], ())
    return Signature(call, kernel.looks, kernel.name)


def _bytes_of(look: Operand) -> int:
    return look.extent * look.dtype.itemsize


def _fault_of(
    kernel: Kernel, operands: Sequence[Tensor], made: Sequence[Tensor], expected: Sequence[Tensor]
) -> str:
    storages = [storage_id(tensor.untyped_storage()) for tensor in (*operands, *made)]
    if len(set(storages)) < len(storages):
        return "a result shares memory with another tensor"
    for tensor, look, right in zip(made, kernel.result_looks, expected, strict=True):
        alike = (tuple(tensor.shape), tensor.dtype) == (look.shape, look.dtype)
        if not alike or not same_strides(look.shape, tensor.stride(), look.stride):
            return f"a result of {tuple(tensor.shape)} by {tensor.stride()} is not {look}"
        if tensor.untyped_storage().nbytes() != right.untyped_storage().nbytes():
            return "a result is part of a larger storage"
        if not _is_near(tensor, right):
            return "a result is far from what the ops give"
    return ""


def _error_of(
    kernel: Kernel, operands: Sequence[Tensor], made: Sequence[Tensor], by_ops: Sequence[Sequence[Tensor]]
) -> str:
    """Why a function is not as near to float64 as the ops are; empty if it is, or if float64 cannot tell."""
    try:
        right = kernel.by_ops([t.double() if t.is_floating_point() else t for t in operands])
    except RuntimeError:  # an op that takes its dtype from an argument
        return ""
    for one, exact, *others in zip(made, right, *by_ops, strict=True):
        if one.is_floating_point() and one.numel():
            own = min(_largest(other - exact) for other in others)
            error, scale = _largest(one - exact), _largest(exact)
            if error > _ERRORS * own + _ULPS * torch.finfo(one.dtype).eps * scale:
                return f"a result is {error / own.clamp_min(1e-300):.1f} times as far from float64 as eager's"
    return ""


def _largest(tensor: Tensor) -> Tensor:
    return tensor.nan_to_num_(0.0, 0.0, 0.0).abs().max()


def _is_near(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    scale = _largest(other.clone()).item() if other.numel() else 0.0
    return torch.allclose(one, other, rtol=_RELATIVE, atol=_RELATIVE * scale, equal_nan=True)


def _have_same_bits(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | (one.isnan() & other.isnan())).all())
