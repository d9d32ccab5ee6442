"""Workspace of kernels on a CUDA device in addition to operands and results, as PyTorch allocates it.

Only ops with large workspace have a rule. What cuDNN takes for a convolution depends on the algorithm that it
chooses on the card: it has no rule here, and counts as nothing. The rules do what PyTorch's host code does,
and `tests/hollow_card` holds them to what that asks for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from stowplan.ir import DType
from stowplan.ops.table import Site, Table, elements_of, shape_of

_FLOAT = 4
_FLASH_ROWS, _FLASH_FEATURES = 128, 32  # to which flash attention rounds up queries and features
_INDEX = 8
_WARP = 32


@dataclass(frozen=True, slots=True)
class Chip:
    """What workspaces depend on: compute capability, as 8.6, and the number of multiprocessors."""

    capability: float
    multiprocessors: int

    @property
    def has_large_shared_memory(self) -> bool:
        """At least 163 KiB for a block: data center chips from Ampere on."""
        return self.capability in (8.0, 8.7) or 9.0 <= self.capability < 12.0

    @property
    def threads_of_multiprocessor(self) -> int:
        by_capability = {7.5: 1024, 8.6: 1536, 8.7: 1536, 8.9: 1536, 12.0: 1536}
        return by_capability.get(self.capability, 2048)


Rule = Callable[[Chip], int]


def _nothing(_: Site) -> Rule:
    return lambda _: 0


cuda_workspace_of: Table[Rule] = Table("workspace on a CUDA device", default=_nothing)


@cuda_workspace_of.entry("aten._scaled_dot_product_flash_attention_backward.default")
def flash_attention_adjoint(site: Site) -> Rule:
    """The queries' gradient and a factor for each row in float32; keys and values that heads share, apart."""
    _, query, key, value, *_ = site.inputs
    batch, heads, rows, features = shape_of(query)
    rows = _up(rows, _FLASH_ROWS)
    sums = batch * heads * rows * (_up(features, _FLASH_FEATURES) + 1) * _FLOAT
    shared = heads // shape_of(key)[1]
    apart = shared * sum(t.nbytes or 0 for t in (key, value)) if shared > 1 else 0
    return lambda _: sums + apart


@cuda_workspace_of.entry("aten._scaled_dot_product_efficient_attention_backward.default")
def efficient_attention_adjoint(site: Site) -> Rule:
    """A factor for each row, whose product in float32 is made first; then sums of the kernel's blocks.

    Each block of queries and columns has its sum of the queries' gradient with a lock. Gradients of keys and
    values are summed apart if they are narrow and do not fit beside it. Those that heads share are made for
    each head.
    """
    query, key = site.inputs[1], site.inputs[2]
    batch, heads, rows, features = shape_of(query)
    narrow = query.dtype in (DType.FLOAT16, DType.BFLOAT16)
    columns = shape_of(key)[2]
    factors = batch * heads * rows * _FLOAT
    of_heads = shape_of(key)[1] != heads
    apart = 2 * batch * heads * columns * features * (2 if narrow else _FLOAT) if of_heads else 0
    product = 0 if narrow else elements_of(query) * _FLOAT + factors

    def on(chip: Chip) -> int:
        block, width, sums_apart = _attention_blocks(chip, features, narrow=narrow)
        sums = _count(rows, block) * _count(features, width) * (16 + block * width * _FLOAT)
        others = 2 * _up(columns, 64) * _up(features, block) * _FLOAT if sums_apart else 0
        return factors + apart + max(product, batch * heads * (sums + others))

    return on


def _attention_blocks(chip: Chip, features: int, *, narrow: bool) -> tuple[int, int, bool]:
    """Queries and columns of a block, and whether gradients of keys and values are summed apart."""
    if features <= 64:
        return 64, 64, False
    if not narrow:
        return (128 if chip.has_large_shared_memory else 64), 64, False
    if features > 128:
        return 128, 64, True
    if chip.has_large_shared_memory:
        return 128, 128, False
    if chip.capability < 8.0 or (features <= 96 and chip.capability in (8.6, 8.9)):
        return 128, 64, False
    return 64, 64, True


_FEW_INDICES = 3072  # for which one kernel adds up the gradient, without sorting


@cuda_workspace_of.entry("aten.embedding_dense_backward.default")
def embedding_adjoint(site: Site) -> Rule:
    """Many indices are sorted with their places, and have at most one partial sum in float32 each."""
    gradient, indices = site.inputs[:2]
    count = elements_of(indices)
    partial = count * _up(shape_of(gradient)[-1], _WARP) * _FLOAT
    size = partial + 4 * count * _INDEX if count > _FEW_INDICES else 0
    return lambda _: size


_MOST_THREADS = 512
_LEAST_VALUES, _MOST_VALUES = 16, 256  # of a thread
_VECTOR = 4


@cuda_workspace_of.entry("aten.sum.dim_IntList")
def sum_over_dims(site: Site) -> Rule:
    """Sums over leading dims, as for a bias, are split over blocks that meet in memory if there are few."""
    shape, kept = shape_of(site.inputs[0]), elements_of(site.outputs[0])
    dims = site.attributes.get("dim")
    leading = isinstance(dims, tuple) and sorted(d % len(shape) for d in dims if isinstance(d, int))
    is_plain = not site.inputs[0].layout and leading == list(range(len(leading or ())))
    if not leading or not is_plain or len(leading) == len(shape) or not kept:
        return _nothing(site)
    summed = prod(shape) // kept
    return lambda chip: _bytes_of_sum(chip, summed, kept)


def _bytes_of_sum(chip: Chip, summed: int, kept: int) -> int:
    """As PyTorch configures a reduction whose fastest dim is kept."""
    vector = next(size for size in (_VECTOR, 2, 1) if kept % size == 0)
    threads = _MOST_THREADS // vector
    across, down = (min(threads, _power_of_two_in(size)) for size in (kept // vector, summed))
    width = min(across, _WARP)
    height = min(down, threads // width)
    width = min(across, threads // height)
    values = summed
    if values < min(height * 16, _MOST_VALUES):
        return 0  # no block sums over more than one thread
    values = _count(values, height)
    grid = _count(kept // vector, width)
    target = chip.multiprocessors * (chip.threads_of_multiprocessor // (width * height))
    if values < _MOST_VALUES or grid > target:
        return 0
    parts = max(min(_count(target, grid), _count(values, _LEAST_VALUES)), _count(values, _MOST_VALUES))
    return _FLOAT * kept * parts * width * vector + _FLOAT * grid if parts > 1 else 0


def _power_of_two_in(count: int) -> int:
    return 1 << (count.bit_length() - 1) if count else 1


def _count(size: int, step: int) -> int:
    return -(-size // step)


def _up(count: int, step: int) -> int:
    return _count(count, step) * step
