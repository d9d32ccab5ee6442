"""A fraction of an op: on large tensors an op takes as long as all its parts together, so one part is probed.

Probing an op on gigabytes takes as long as the op takes in the step, and may need more memory than is free.
The same op on operands that are shorter along one dim costs in proportion, as long as they are far larger
than any cache. PyTorch's count of operations, on tensors without data, shows whether the work is in
proportion.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch.utils.flop_counter import FlopCounterMode

from stowplan.run.cost.operands import LARGE_BYTES, call_on
from stowplan.run.cost.probe_cache import Cost
from stowplan.run.cost.signature import Operand, Signature
from stowplan.torch_private import pytree, storage_id

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
