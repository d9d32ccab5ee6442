"""Probing one call: an op, or a part of one, runs alone on generated operands and shows its cost.

Operands are real tensors with contents that every op accepts. Floating point numbers lie between 0 and 1, so
that roots, logarithms and probabilities are all legal. Integers are 0, which is an index into anything. What
is large is 0 as well, and takes memory only where it is touched: a sweep over a few tiles of it touches
little.

On large tensors an op takes as long as all its parts together, so one part is probed. Probing an op on
gigabytes takes as long as the op takes in the step, and may need more memory than is free. The same op on
operands that are shorter along one dim costs in proportion, as long as they are far larger than any cache.
PyTorch's count of operations, on tensors without data, shows whether the work is in proportion.
"""

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from stowplan.capture.program import filled
from stowplan.capture.schema import ASKING_FOR_GRADIENTS, as_in_forward
from stowplan.run.cost.machine import free_bytes, least_seconds, seconds_of
from stowplan.run.cost.probe_cache import Cost
from stowplan.run.cost.signature import Operand, Signature
from stowplan.run.measure.measure import measure
from stowplan.torch_private import pytree, storage_id

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


OP_LIMIT_SECONDS = 0.1  # an op that takes longer is run twice in all
_LONG_SECONDS = 2.0  # and one that takes longer than this once
_ROOM = 4  # this many times the operands' bytes must be free, because results and workspace may be larger


PROBES: dict[str, Callable[[Signature, torch.device], Cost | None]] = {}
"""By op type, the probes of ops that techniques add: running these whole would take too long."""


def cost_of_call(signature: Signature, device: torch.device, *, repeats: int) -> Cost | None:
    """The cost of a call; None if the op refuses the operands, or memory is too short to probe it."""
    if own := PROBES.get(str(signature.call.target)):
        return own(signature, device)
    fraction = fraction_of(signature)
    if fraction and (part := cost_of_call(fraction.signature, device, repeats=repeats)):
        return fraction.whole(part)
    if _ROOM * signature.operand_bytes > free_bytes(device):
        return None
    return probed_cost(signature, device, repeats=repeats)


def probed_cost(signature: Signature, device: torch.device, *, repeats: int) -> Cost | None:
    """The measured cost of a call; None if the op refuses the generated operands."""
    with undisturbed(device):
        try:
            return _cost(signature, device, repeats)
        except (RuntimeError, ValueError, IndexError):
            return None


def _cost(signature: Signature, device: torch.device, repeats: int) -> Cost:
    operands = operands_of(signature)
    run = call_on(signature, operands)
    first = measure(lambda: seconds_of(run, device), device=device, before=operands)
    if first.result > _LONG_SECONDS:
        return Cost(first.result, first.measured_rise_bytes)
    seconds = first.result
    if seconds < OP_LIMIT_SECONDS:
        seconds = least_seconds(run, device, repeats=repeats, limit_seconds=OP_LIMIT_SECONDS)
    # Memory comes last, for a first call also builds what kernels keep; a slow op is timed here again, warm.
    last = measure(lambda: seconds_of(run, device), device=device, before=operands)
    return Cost(min(seconds, last.result), last.measured_rise_bytes)


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Random ops draw from copies of the generators; no backward is recorded, nothing is cast on the way."""
    accelerators = [] if device.type == "cpu" else [device]
    with (
        torch.random.fork_rng(accelerators, device_type=device.type if accelerators else "cuda"),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        yield


_SIDE = 64  # an operand smaller than the largest by this factor, such as a weight, stays whole
_MARGIN = 1024  # results // this are added as a margin: a step of 25 GiB took 2 kB more than its parts
_META = torch.device("meta")
_ATEN = torch.ops.aten
_UNCOUNTED = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: lambda q, k, *_, **__: q.numel() * k[-2],
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: lambda _, q, k, *__, **___: q.numel() * k[-2],
}  # operations that PyTorch has no count of, though they grow with the square


@dataclass(frozen=True, slots=True)
class Fraction:
    """A part of an op, and how many of them are the whole."""

    signature: Signature
    parts: int
    result_bytes: int  # of the part
    whole_result_bytes: int

    def whole(self, part: Cost) -> Cost:
        """The cost of the whole op from the cost of a part: workspace in proportion, results as known."""
        workspace = self.parts * max(0, part.rise_bytes - self.result_bytes)
        margin = self.whole_result_bytes // _MARGIN
        return Cost(self.parts * part.seconds, workspace + self.whole_result_bytes + margin)


@dataclass(frozen=True, slots=True)
class _Made:
    """The results and the work of an op, found without data."""

    shapes: tuple[tuple[int, ...], ...]
    new_bytes: int
    operations: int


def fraction_of(signature: Signature, *, large_bytes: int = LARGE_BYTES) -> Fraction | None:
    """A part of the op whose operands are not large; None if they are not, or if it has no such part.

    What ops other than PyTorch's own do with a part of their operands is not known.
    """
    largest = max(signature.operands, key=_bytes_of, default=None)
    if signature.call.target.namespace != "aten" or largest is None or _bytes_of(largest) <= large_bytes:
        return None
    parts = 1 << (_bytes_of(largest) // large_bytes).bit_length()
    whole = _made(signature)
    for operands in _shorter(signature.operands, largest, parts):
        part = replace(signature, operands=operands)
        made = whole and _made(part)
        if whole and made and _is_fraction(made, whole, parts):
            return Fraction(part, parts, made.new_bytes, whole.new_bytes)
    return None


def _bytes_of(operand: Operand) -> int:
    return prod(operand.shape) * operand.dtype.itemsize


def _shorter(operands: Sequence[Operand], largest: Operand, parts: int) -> Iterator[tuple[Operand, ...]]:
    """All but small operands shorter along one dim, counted from the first or, as they broadcast, the last.

    Long dims come first: short ones may be channels, whose number other arguments state as well.
    """
    least, rank = _bytes_of(largest) // _SIDE, len(largest.shape)
    for dim in sorted((*range(rank), *range(-rank, 0)), key=lambda dim: -largest.shape[dim]):
        if largest.shape[dim] % parts == 0:
            yield tuple(_cut(each, dim, parts) if _bytes_of(each) >= least else each for each in operands)


def _cut(operand: Operand, dim: int, parts: int) -> Operand:
    if not -len(operand.shape) <= dim < len(operand.shape) or operand.shape[dim] % parts:
        return operand
    shape = list(operand.shape)
    shape[dim] //= parts
    return replace(operand, shape=tuple(shape), stride=_dense(shape, operand.stride))


def _dense(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps, in the order of others; what was the same along a dim still is."""
    stride, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (like[dim], -dim)):
        if like[dim]:
            stride[dim], step = step, step * shape[dim]
    return tuple(stride)


def _made(signature: Signature) -> _Made | None:
    """None if the op refuses such operands."""
    tensors = [
        torch.empty_strided(operand.shape, operand.stride, dtype=operand.dtype, device=_META)
        for operand in signature.operands
    ]
    try:
        with FlopCounterMode(display=False, custom_mapping=_UNCOUNTED) as counter:
            results = [
                made for made in pytree.tree_leaves(call_on(signature, tensors)()) if torch.is_tensor(made)
            ]
    except (RuntimeError, ValueError, IndexError):
        return None
    given = {storage_id(tensor.untyped_storage()) for tensor in tensors}
    new = {storage_id(r.untyped_storage()): r.untyped_storage().nbytes() for r in results}
    new_bytes = sum(size for storage, size in new.items() if storage not in given)
    return _Made(tuple(tuple(r.shape) for r in results), new_bytes, counter.get_total_flops())


def _is_fraction(made: _Made, whole: _Made, parts: int) -> bool:
    """Whether each result is shorter along one dim, or a sum over it, and the work is so much less."""
    pairs = zip(made.shapes, whole.shapes, strict=True)
    return made.operations * parts == whole.operations and all(
        _is_shorter(part, of, parts) or part == of for part, of in pairs
    )


def _is_shorter(part: Sequence[int], whole: Sequence[int], parts: int) -> bool:
    differing = [(a, b) for a, b in zip(part, whole, strict=True) if a != b]
    return len(differing) == 1 and differing[0][0] * parts == differing[0][1]
