"""Workspace of kernels on a CUDA device in addition to operands and results, as PyTorch allocates it.

Only ops with large workspace have a rule. What cuDNN takes for a convolution depends on the algorithm that it
chooses on the card: it has no rule here, and counts as nothing. The rules do what PyTorch's host code does,
and `tests/hollow_card` holds them to what that asks for.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

from stowplan.ir import DType, Tensor
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


Workspace = tuple[int, ...]
"""Requests of an op in order: `n` allocates, `-n` frees a block of n bytes; its end frees the rest."""

Rule = Callable[[Chip], Workspace]


def peak_of(workspace: Workspace) -> int:
    """The most bytes that are alive at once."""
    return max(accumulate(workspace), default=0)


def _nothing(_: Site) -> Rule:
    return lambda _: ()


def _always(*requests: int) -> Rule:
    """What does not depend on the chip."""
    kept = tuple(filter(None, requests))
    return lambda _: kept


cuda_workspace_of: Table[Rule] = Table("workspace on a CUDA device", default=_nothing)


@cuda_workspace_of.entry("aten._scaled_dot_product_flash_attention_backward.default")
def flash_attention_adjoint(site: Site) -> Rule:
    """The queries' gradient and a factor for each row in float32; keys and values that heads share, apart."""
    _, query, key, value, *_ = site.inputs
    batch, heads, rows, features = shape_of(query)
    rows = _up(rows, _FLASH_ROWS)
    factors = batch * heads * rows * _FLOAT
    shared = heads // shape_of(key)[1]
    apart = [shared * elements_of(t) * itemsize_of(t) for t in (key, value)] if shared > 1 else []
    return _always(factors, factors * _up(features, _FLASH_FEATURES), *apart)


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
    apart = (batch * heads * columns * features * (2 if narrow else _FLOAT),) * 2 if of_heads else ()
    whole = elements_of(query) * _FLOAT
    product = (factors,) if narrow else (whole, factors, factors, -factors, -whole)

    def on(chip: Chip) -> Workspace:
        block, width, sums_apart = _attention_blocks(chip, features, narrow=narrow)
        sums = _count(rows, block) * _count(features, width) * (16 + block * width * _FLOAT)
        others = 2 * _up(columns, 64) * _up(features, block) * _FLOAT if sums_apart else 0
        return *apart, *product, batch * heads * (sums + others)

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
    return _always(*(count * _INDEX,) * 4, partial) if count > _FEW_INDICES else _nothing(site)


_MOST_THREADS = 512
_LEAST_VALUES, _MOST_VALUES = 16, 256  # of a thread
_VECTOR = 4


@cuda_workspace_of.entry("aten.sum.dim_IntList")
def sum_over_dims(site: Site) -> Rule:
    """Large sums are split over blocks that meet in memory, if there are few of them."""
    return _sum_over(site.inputs[0], site.attributes.get("dim"))


@cuda_workspace_of.entry("aten.sum.default", "aten.mean.default")
def sum_of_all(site: Site) -> Rule:
    """As a sum along memory."""
    summed = elements_of(site.inputs[0])
    return lambda chip: _bytes_of_sum(chip, summed, 1, along=True) if summed else ()


@cuda_workspace_of.entry("aten.convolution_backward.default")
def convolution_adjoint(site: Site) -> Rule:
    """Beside cuDNN's own: a dense copy of the gradient, then the sum that is the bias's gradient."""
    gradient, wanted = site.inputs[0], site.attributes.get("output_mask")
    copy = 0 if is_dense(gradient) else elements_of(gradient) * itemsize_of(gradient)
    if not isinstance(wanted, tuple) or not wanted[-1]:
        return _always(copy)
    channels = shape_of(gradient)[1]
    beside = max(0, copy - channels * itemsize_of(gradient))  # the bias's gradient is made after the copy
    summed = _sum_over(gradient, (0, *range(2, len(shape_of(gradient)))))
    return lambda chip: (*((beside, -beside) if beside else ()), *summed(chip))


def _sum_over(tensor: Tensor, dims: object) -> Rule:
    shape, strides = shape_of(tensor), strides_of(tensor)
    over = (
        {dim % len(shape) for dim in dims if isinstance(dim, int)} if isinstance(dims, tuple) else set[int]()
    )
    kept = prod(size for dim, size in enumerate(shape) if dim not in over)
    if not over or len(over) == len(shape) or not kept:
        return lambda _: ()
    wide = [dim for dim in range(len(shape)) if shape[dim] > 1]
    fastest = min(wide, key=lambda dim: strides[dim], default=0)
    summed, along = prod(shape) // kept, fastest in over
    return lambda chip: _bytes_of_sum(chip, summed, kept, along=along)


def _bytes_of_sum(chip: Chip, summed: int, kept: int, *, along: bool) -> Workspace:
    """As PyTorch configures a reduction: `along` the fastest dim of memory, or with that dim kept."""
    vector = 1 if along else next(size for size in (_VECTOR, 2, 1) if kept % size == 0)
    threads, columns = _MOST_THREADS // vector, kept // vector
    first, second = (summed, columns) if along else (columns, summed)
    across, down = (min(threads, _power_of_two_in(size)) for size in (first, second))
    width = min(across, _WARP)
    height = min(down, threads // width)
    width = min(across, threads // height)
    values, grid = (_count(summed, width), columns) if along else (summed, _count(columns, width))
    if values < min(height * 16, _MOST_VALUES):
        return ()  # no block sums over more than one thread
    values = _count(values, height)
    target = chip.multiprocessors * (chip.threads_of_multiprocessor // (width * height))
    if values < _MOST_VALUES or grid > target:
        return ()
    parts = max(min(_count(target, grid), _count(values, _LEAST_VALUES)), _count(values, _MOST_VALUES))
    each = _FLOAT * (1 if along else width * vector)
    return (kept * parts * each, _FLOAT * grid) if parts > 1 else ()


_MANY_ROWS = 65536
_ROWS_OF_BLOCK, _MOST_BLOCKS = 32, 32768


@cuda_workspace_of.entry("aten.native_layer_norm.default")
def layer_norm(site: Site) -> Rule:
    """A dense copy of the input."""
    image = site.inputs[0]
    return _always(0 if is_contiguous(image) else elements_of(image) * itemsize_of(image))


@cuda_workspace_of.entry("aten.native_layer_norm_backward.default")
def layer_norm_adjoint(site: Site) -> Rule:
    """Partial sums of the gradients of weight and bias, where rows are many."""
    return _norm_adjoint(site, weights=2)


@cuda_workspace_of.entry("aten._fused_rms_norm_backward.default")
def rms_norm_adjoint(site: Site) -> Rule:
    """Partial sums of the weight's gradient, where rows are many."""
    return _norm_adjoint(site, weights=1)


def _norm_adjoint(site: Site, weights: int) -> Rule:
    gradient, shape = site.inputs[0], site.attributes.get("normalized_shape")
    columns = prod(size for size in shape if isinstance(size, int)) if isinstance(shape, tuple) else 0
    if not columns or elements_of(gradient) // columns <= _MANY_ROWS:
        return _nothing(site)
    parts = _count(elements_of(gradient) // columns, _ROWS_OF_BLOCK)
    parts = min(parts, _MOST_BLOCKS // _count(columns, _WARP))
    row = columns * itemsize_of(gradient)

    def on(chip: Chip) -> Workspace:
        if columns // _WARP >= chip.multiprocessors // 2:
            return ()
        return *(parts * row,) * weights, row, *_bytes_of_sum(chip, parts, columns, along=False)

    return on


@cuda_workspace_of.entry("aten.native_group_norm.default")
def group_norm(site: Site) -> Rule:
    """A scale and a shift for each channel of each sample."""
    samples, channels = shape_of(site.inputs[0])[:2]
    each = samples * channels * _FLOAT if len(site.inputs) > 1 and _pixels(site) > 1 else 0
    return _always(each, each)


@cuda_workspace_of.entry("aten.native_group_norm_backward.default")
def group_norm_adjoint(site: Site) -> Rule:
    """Three numbers for each channel of each sample, and two for each of its groups."""
    samples, channels = shape_of(site.inputs[0])[:2]
    groups = site.attributes.get("group")
    if not isinstance(groups, int) or _pixels(site) <= 1:
        return _nothing(site)
    of_channel, of_group = samples * channels * _FLOAT, samples * groups * _FLOAT
    return _always(of_channel, of_channel, of_channel, of_group, of_group)


def _pixels(site: Site) -> int:
    return prod(shape_of(site.inputs[0])[2:])


@cuda_workspace_of.entry("aten.roll.default")
def roll(site: Site) -> Rule:
    """Each dim but the last is rolled into a tensor of its own."""
    image, dims = site.inputs[0], site.attributes.get("dims")
    others = len(dims) - 1 if isinstance(dims, tuple) and dims else 0
    return _always(*(elements_of(image) * itemsize_of(image),) * others)


@cuda_workspace_of.entry("aten._softmax_backward_data.default")
def softmax_adjoint(site: Site) -> Rule:
    """The gradient times the result."""
    result = site.inputs[1]
    return _always(elements_of(result) * itemsize_of(result))


@cuda_workspace_of.entry("aten._safe_softmax.default")
def safe_softmax(site: Site) -> Rule:
    """Where scores are minus infinity, which rows have only these, and a zero."""
    scores = site.inputs[0]
    rows = elements_of(scores) // shape_of(scores)[-1]
    return _always(elements_of(scores), rows, itemsize_of(scores))


@cuda_workspace_of.entry("aten.mse_loss.default")
def mse_loss(site: Site) -> Rule:
    """Differences and their squares, before the loss is there."""
    if elements_of(site.outputs[0]) > 1:
        return _nothing(site)
    difference = elements_of(site.inputs[0]) * itemsize_of(site.inputs[0])
    return _always(difference, difference - itemsize_of(site.inputs[0]))


@cuda_workspace_of.entry("aten.index_put.default", "aten.index_put_.default")
def index_put(site: Site) -> Rule:
    """Indices that add up are sorted with their places; values are made dense."""
    if not site.attributes.get("accumulate"):
        return _nothing(site)
    indices, values = site.inputs[1:-1], site.inputs[-1]
    count = max(map(elements_of, indices), default=0)
    dense = 0 if is_contiguous(values) else elements_of(values) * itemsize_of(values)
    return _always(*(count * _INDEX,) * 4, dense)


def strides_of(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a tensor, as its layout says."""
    if tensor.layout:
        return tuple(int(number) for number in tensor.layout.strip("()").split(",") if number.strip())
    shape = shape_of(tensor)
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def is_contiguous(tensor: Tensor) -> bool:
    """Whether memory has its elements in the order of its dims, without gaps."""
    strides, whole = strides_of(tensor), strides_of(replace(tensor, layout=""))
    sizes = zip(shape_of(tensor), strides, whole, strict=True)
    return all(size == 1 or stride == expected for size, stride, expected in sizes)


def is_dense(tensor: Tensor) -> bool:
    """Whether memory has its elements without gaps, in any order of dims."""
    expected = 1
    for stride, size in sorted(zip(strides_of(tensor), shape_of(tensor), strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def itemsize_of(tensor: Tensor) -> int:
    """Bytes of one element."""
    return tensor.dtype.itemsize if tensor.dtype else _FLOAT


def _power_of_two_in(count: int) -> int:
    return 1 << (count.bit_length() - 1) if count else 1


def _count(size: int, step: int) -> int:
    return -(-size // step)


def _up(count: int, step: int) -> int:
    return _count(count, step) * step
