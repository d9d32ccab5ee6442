"""Random calls of ATen ops on tiny tensors, one sampler per family of region rules."""

from collections.abc import Mapping
from random import Random

import torch
from torch._ops import OpOverload

from tests.support.op_samples import NAN, NUMBERS, Sample, Sampler, aten, indices, numbers, some

ops = torch.ops.aten


def convolution(random: Random) -> Sample:
    """1-d to 3-d, plain or transposed, with stride, padding, dilation, groups and maybe a bias."""
    ndim, groups = random.choice((1, 1, 2, 2, 3)), random.choice((1, 1, 2))
    transposed = random.random() < 0.4
    ins, outs = (groups * random.randint(1, 2) for _ in range(2))
    sizes = some(random, ndim, 3, (9, 5, 4)[ndim - 1])
    kernel = [random.randint(1, min(3, size)) for size in sizes]
    stride = some(random, ndim, 1, 3)
    dilation = [random.randint(1, 2) if (k - 1) * 2 < n else 1 for k, n in zip(kernel, sizes, strict=True)]
    padding = [random.randint(0, (k - 1) * d) for k, d in zip(kernel, dilation, strict=True)]
    extra = [random.randint(0, s - 1) if transposed else 0 for s in stride]
    if transposed:
        padding = [min(p, 1) if n > 1 else 0 for p, n in zip(padding, sizes, strict=True)]
    weight = numbers(ins, outs // groups, *kernel) if transposed else numbers(outs, ins // groups, *kernel)
    bias = numbers(outs) if random.random() < 0.5 else None
    image = numbers(random.randint(1, 2), ins, *sizes)
    return aten(
        ops.convolution.default, image, weight, bias, stride, padding, dilation, transposed, extra, groups
    )


def max_pool(random: Random) -> Sample:
    """2-d or 3-d, with padding, dilation and ceil_mode."""
    ndim = random.choice((2, 2, 3))
    kernel = some(random, ndim, 1, 3)
    padding = [random.randint(0, k // 2) for k in kernel]
    dilation = [random.randint(1, 2) for _ in kernel]
    target = ops.max_pool2d_with_indices.default if ndim == 2 else ops.max_pool3d_with_indices.default
    stride = some(random, ndim, 1, 3) if random.random() < 0.8 else []
    image = numbers(1, random.randint(1, 2), *some(random, ndim, 5, 6 if ndim == 2 else 5))
    return aten(target, image, kernel, stride, padding, dilation, random.random() < 0.5)


def average_pool(random: Random) -> Sample:
    """1-d to 3-d."""
    ndim = random.randint(1, 3)
    kernel = some(random, ndim, 1, 3)
    padding = [random.randint(0, k // 2) for k in kernel]
    target = (ops.avg_pool1d.default, ops.avg_pool2d.default, ops.avg_pool3d.default)[ndim - 1]
    image = numbers(1, 2, *some(random, ndim, 3, 5))
    return aten(target, image, kernel, some(random, ndim, 1, 3), padding, random.random() < 0.5)


def adaptive_pool(random: Random) -> Sample:
    """Average or maximum, to fewer or more outputs than inputs."""
    ndim = random.randint(2, 3)
    sizes = [1] * ndim if random.random() < 0.3 else some(random, ndim, 1, 5)
    target = random.choice(
        (
            (ops._adaptive_avg_pool2d.default, ops.adaptive_max_pool2d.default),
            (ops._adaptive_avg_pool3d.default,),
        )[ndim - 2]
    )
    return aten(target, numbers(1, 2, *some(random, ndim, 3, 5)), sizes)


def interpolation(random: Random) -> Sample:
    """Nearest, exact nearest, linear and cubic; by sizes or by factors; corners aligned or not."""
    ndim = random.choice((1, 2, 2, 3))
    image = numbers(1, 1, *some(random, ndim, 1, (12, 6, 4)[ndim - 1]))
    sizes: list[int] | None = some(random, ndim, 1, (20, 9, 6)[ndim - 1])
    factors: list[float] | None = None
    if random.random() < 0.4:
        sizes, factors = None, [random.choice((0.5, 1.5, 2.0, 2.7, 3.0)) for _ in range(ndim)]
        factors = [max(f, 1.0) if n < 2 else f for f, n in zip(factors, image.shape[2:], strict=True)]
    kind = random.choice(("nearest", "_exact", "linear", "cubic" if ndim == 2 else "linear"))
    if kind in ("nearest", "_exact"):
        name = f"upsample_nearest{ndim}d" if kind == "nearest" else f"_upsample_nearest_exact{ndim}d"
        return aten(getattr(ops, name).vec, image, sizes, factors)
    name = "bicubic2d" if kind == "cubic" else f"{('', 'bi', 'tri')[ndim - 1]}linear{ndim}d"
    return aten(getattr(ops, f"upsample_{name}").vec, image, sizes, random.random() < 0.5, factors)


def sized_interpolation(random: Random) -> Sample:
    """The overloads with sizes, as they are dispatched."""
    image, sizes = numbers(1, 1, *some(random, 2, 1, 6)), some(random, 2, 1, 9)
    if random.random() < 0.5:
        return aten(ops.upsample_nearest2d.default, image, sizes)
    return aten(ops.upsample_bilinear2d.default, image, sizes, random.random() < 0.5)


def pad(random: Random) -> Sample:
    """Constant (also cropping), reflecting, replicating, circular."""
    mode = random.choice(("constant", "reflect", "replicate", "circular"))
    image = numbers(1, 2, *some(random, 2, 4, 6))
    amounts = some(random, 4, -1 if mode == "constant" else 0, 3)
    if mode == "constant":
        return aten(ops.constant_pad_nd.default, image, amounts, 1.5)
    if mode == "circular":
        return aten(ops._pad_circular.default, image, amounts)
    return aten(
        getattr(ops, f"{'reflection' if mode == 'reflect' else 'replication'}_pad2d").default, image, amounts
    )


def pixel_shuffle(random: Random) -> Sample:
    """In both directions."""
    side = random.randint(1, 3)
    if random.random() < 0.5:
        return aten(ops.pixel_shuffle.default, numbers(1, 2 * side**2, 2, 3), side)
    return aten(ops.pixel_unshuffle.default, numbers(1, 2, 2 * side, 3 * side), side)


def reshape(random: Random) -> Sample:
    """The same elements in another split into dims, with ones anywhere."""
    before, after = (_split(random, (2, 2, 3, 4)) for _ in range(2))
    return aten(ops.view.default, numbers(*before), after)


def _split(random: Random, factors: tuple[int, ...]) -> list[int]:
    """Neighbouring factors merged at random, ones put in between."""
    sizes: list[int] = [factors[0]]
    for factor in factors[1:]:
        if random.random() < 0.5:
            sizes[-1] *= factor
        else:
            sizes.append(factor)
        if random.random() < 0.2:
            sizes.insert(random.randint(0, len(sizes)), 1)
    return random.sample(sizes, len(sizes)) if random.random() < 0.2 else sizes


def transposition(random: Random) -> Sample:
    """A permutation of dims, in any of its spellings."""
    image = numbers(*some(random, 3, 2, 4))
    if random.random() < 0.3:
        return aten(ops.t.default, image[0])
    if random.random() < 0.5:
        return aten(ops.transpose.int, image, random.randint(-3, 2), random.randint(-3, 2))
    return aten(ops.permute.default, image, random.sample(range(-3, 0), 3))


def slicing(random: Random) -> Sample:
    """A slice or one index of a dim."""
    image = numbers(*some(random, 3, 4, 5))
    dim = random.randint(-3, 2)
    if random.random() < 0.3:
        return aten(ops.select.int, image, dim, random.randint(-4, 3))
    start = random.choice((None, random.randint(-5, 2)))
    return aten(ops.slice.Tensor, image, dim, start, random.choice((None, 5, -1)), random.randint(1, 3))


def splitting(random: Random) -> Sample:
    """Into equal parts, given parts, or single indices."""
    image = numbers(3, 6, 2)
    kind = random.randint(0, 2)
    if kind == 0:
        return aten(ops.split.Tensor, image, random.randint(1, 4), random.randint(-3, 2))
    if kind == 1:
        return aten(ops.split_with_sizes.default, image, [1, 3, 2], 1)
    return aten(ops.unbind.int, image, random.randint(-3, 2))


def joining(random: Random) -> Sample:
    """Concatenation along a dim, or along a new one."""
    count, dim = random.randint(2, 3), random.randint(-3, 2)
    if random.random() < 0.4:
        shape = some(random, 2, 2, 3)
        return aten(ops.stack.default, [numbers(*shape) for _ in range(count)], dim)
    shapes = [[3, 3, 3] for _ in range(count)]
    for shape in shapes:
        shape[dim] = random.randint(1, 3)
    return aten(ops.cat.default, [numbers(*shape) for shape in shapes], dim)


def repeating(random: Random) -> Sample:
    """Expanded, repeated, interleaved, rolled."""
    kind = random.randint(0, 3)
    if kind == 0:
        return aten(ops.expand.default, numbers(3, 1, 2), [2, 3, random.randint(2, 4), 2])
    if kind == 1:
        return aten(ops.repeat.default, numbers(2, 3), some(random, random.randint(2, 3), 1, 3))
    if kind == 2:
        return aten(
            ops.repeat_interleave.self_int, numbers(3, 4), random.randint(1, 3), random.randint(-2, 1)
        )
    return aten(ops.roll.default, numbers(4, 5), some(random, 2, -6, 6), [0, -1])


_POINTWISE: tuple[tuple[OpOverload, int], ...] = (
    (ops.relu.default, 1),
    (ops.gelu.default, 1),
    (ops.silu.default, 1),
    (ops.tanh.default, 1),
    (ops.leaky_relu.default, 1),
    (ops.softplus.default, 1),
    (ops.exp.default, 1),
    (ops.rsqrt.default, 1),
    (ops.triu.default, 1),
    (ops.clone.default, 1),
    (ops.add.Tensor, 2),
    (ops.mul.Tensor, 2),
    (ops.div.Tensor, 2),
    (ops.maximum.default, 2),
    (ops.atan2.default, 2),
    (ops.lerp.Tensor, 3),
    (ops.addcmul.default, 3),
)


def pointwise(random: Random) -> Sample:
    """Of one to three operands, broadcast to each other."""
    target, count = random.choice(_POINTWISE)
    full = some(random, 3, 2, 3)
    shapes = [full] + [
        [1 if random.random() < 0.3 else n for n in full][random.randint(0, 2) :] for _ in range(2)
    ]
    return aten(target, *(numbers(*shape) for shape in shapes[:count]))


def choosing(random: Random) -> Sample:
    """Where a condition, broadcast, says so."""
    condition = numbers(*([3, 1] if random.random() < 0.5 else [2, 3, 4])) > 0
    if random.random() < 0.5:
        return aten(ops.where.self, condition, numbers(2, 3, 4), numbers(4))
    return aten(ops.masked_fill.Scalar, numbers(2, 3, 4), condition, 0.5)


def dropout(random: Random) -> Sample:
    """The output and its mask."""
    return aten(ops.native_dropout.default, numbers(*some(random, 3, 2, 4)), 0.5, True)


def matrix_product(random: Random) -> Sample:
    """Plain, batched, broadcast, with something added."""
    m, k, n, b = some(random, 4, 1, 4)
    return random.choice(
        (
            lambda: aten(ops.mm.default, numbers(m, k), numbers(k, n)),
            lambda: aten(ops.bmm.default, numbers(b, m, k), numbers(b, k, n)),
            lambda: aten(ops.addmm.default, numbers(random.choice((1, m)), n), numbers(m, k), numbers(k, n)),
            lambda: aten(ops.baddbmm.default, numbers(b, m, n), numbers(b, m, k), numbers(b, k, n)),
            lambda: aten(ops.linear.default, numbers(b, m, k), numbers(n, k), numbers(n)),
            lambda: aten(ops.matmul.default, numbers(2, b, m, k), numbers(1, k, n)),
        )
    )()


def attention(random: Random) -> Sample:
    """Full or causal, masked, with shared heads of keys, in both spellings."""
    batch, heads, rows, keys = 2, 2, random.randint(2, 5), random.randint(2, 5)
    causal = random.random() < 0.5
    query = numbers(batch, heads, rows, 2)
    groups = random.choice((1, heads)) if random.random() < 0.5 else heads
    key, value = (numbers(batch, groups, keys, 2) for _ in range(2))
    mask = None if causal or random.random() < 0.5 else numbers(random.choice((1, batch)), 1, rows, keys)
    if groups == heads and random.random() < 0.5:
        fused = ops._scaled_dot_product_flash_attention_for_cpu.default
        return aten(
            fused, query, key, value, 0.0, causal, attn_mask=mask, disturbances=NUMBERS if causal else NAN
        )
    target = ops.scaled_dot_product_attention.default
    return aten(
        target,
        query,
        key,
        value,
        mask,
        0.0,
        causal,
        enable_gqa=groups != heads,
        disturbances=NUMBERS if causal else NAN,
    )


def batch_norm(random: Random) -> Sample:
    """While training or not, with and without weights and running statistics."""
    channels = random.randint(1, 3)
    image = numbers(2, channels, *some(random, random.randint(0, 2), 2, 3))
    weights = (numbers(channels), numbers(channels)) if random.random() < 0.7 else (None, None)
    if random.random() < 0.3:
        return aten(ops._native_batch_norm_legit.no_stats, image, *weights, True, 0.1, 1e-5)
    running = (numbers(channels), numbers(channels).abs())
    training = random.random() < 0.7
    target = ops._native_batch_norm_legit_functional.default
    return aten(target, image, *weights, *running, training, 0.1, 1e-5)


def group_norm(random: Random) -> Sample:
    """One group, several, or one per channel."""
    groups = random.randint(1, 3)
    channels = groups * random.randint(1, 2)
    image = numbers(2, channels, *some(random, random.randint(1, 2), 2, 3))
    weights = (numbers(channels), numbers(channels)) if random.random() < 0.7 else (None, None)
    size = image[0, 0].numel()
    return aten(ops.native_group_norm.default, image, *weights, 2, channels, size, groups, 1e-5)


def layer_norm(random: Random) -> Sample:
    """LayerNorm or RMSNorm over the last one or two dims."""
    shape = some(random, 3, 2, 3)
    normalised = shape[random.randint(1, 2) :]
    weight, bias = (numbers(*normalised) if random.random() < 0.7 else None for _ in range(2))
    if random.random() < 0.5:
        return aten(ops._fused_rms_norm.default, numbers(*shape), normalised, weight, 1e-5)
    bias = None if weight is None else bias
    return aten(ops.native_layer_norm.default, numbers(*shape), normalised, weight, bias, 1e-5)


_REDUCTIONS = (ops.sum.dim_IntList, ops.mean.dim, ops.amax.default, ops.amin.default, ops.logsumexp.default)


def reduction(random: Random) -> Sample:
    """Over some dims or all, kept or not."""
    image, keeps = numbers(*some(random, 3, 2, 3)), random.random() < 0.5
    dims = random.sample(range(-3, 0), random.randint(1, 3))
    return random.choice(
        (
            lambda: aten(random.choice(_REDUCTIONS), image, dims, keeps),
            lambda: aten(random.choice((ops.sum.default, ops.mean.default)), image),
            lambda: aten(ops.var_mean.correction, image, dims, correction=0, keepdim=keeps),
            lambda: aten(ops.max.dim, image, dims[0], keeps),
        )
    )()


def line_op(random: Random) -> Sample:
    """Softmax and running sums along a dim."""
    image, dim = numbers(*some(random, 3, 2, 4)), random.randint(-3, 2)
    kind = random.randint(0, 2)
    if kind == 0:
        return aten(ops.cumsum.default, image, dim, disturbances=NUMBERS)
    return aten((ops._softmax.default, ops._log_softmax.default)[kind - 1], image, dim, False)


def pointwise_loss(random: Random) -> Sample:
    """Mean, sum, or per element."""
    target = random.choice((ops.mse_loss.default, ops.smooth_l1_loss.default, ops.huber_loss.default))
    shape, how = some(random, 2, 2, 4), random.randint(0, 2)
    if random.random() < 0.3:
        weight = numbers(shape[1]) if random.random() < 0.5 else None
        share = numbers(*shape).sigmoid()
        return aten(ops.binary_cross_entropy_with_logits.default, numbers(*shape), share, weight, None, how)
    return aten(target, numbers(*shape), numbers(*shape), how)


def class_loss(random: Random) -> Sample:
    """Over labels of samples or of pixels, with weights and an ignored label."""
    classes, how = random.randint(2, 4), random.randint(0, 2)
    weight = numbers(classes).abs() if random.random() < 0.5 else None
    if random.random() < 0.5:
        return aten(ops.nll_loss_forward.default, numbers(4, classes), indices(classes, 4), weight, how, 1)
    image = numbers(2, classes, 2, 3)
    return aten(ops.nll_loss2d_forward.default, image, indices(classes, 2, 2, 3), weight, how, 1)


def indexing(random: Random) -> Sample:
    """Reading and writing where indices point."""
    dim = random.randint(-2, 1)
    table = numbers(4, 5)
    size = table.shape[dim]
    return random.choice(
        (
            lambda: aten(ops.embedding.default, table, indices(4, 2, 3)),
            lambda: aten(ops.index_select.default, table, dim, indices(size, 3)),
            lambda: aten(ops.gather.default, table, dim, indices(size, 3, 2)),
            lambda: aten(ops.scatter.src, table, dim, torch.randperm(4)[:, None] % size, numbers(4, 1)),
            lambda: aten(ops.index_copy.default, table, 1, torch.randperm(5)[:3], numbers(4, 3)),
            lambda: aten(ops.index.Tensor, numbers(3, 4, 2), [None, indices(4, 3)]),
            lambda: aten(ops.index.Tensor, numbers(3, 4, 2), [indices(3, 2, 2), indices(4, 2)]),
            lambda: aten(ops.index.Tensor, numbers(3, 4, 2), [indices(3, 3), None, indices(2, 3)]),
        )
    )()


ATEN_SAMPLERS: Mapping[str, Sampler] = {
    sampler.__name__: sampler
    for sampler in (
        convolution,
        max_pool,
        average_pool,
        adaptive_pool,
        interpolation,
        sized_interpolation,
        pad,
        pixel_shuffle,
        reshape,
        transposition,
        slicing,
        splitting,
        joining,
        repeating,
        pointwise,
        choosing,
        dropout,
        matrix_product,
        attention,
        batch_norm,
        group_norm,
        layer_norm,
        reduction,
        line_op,
        pointwise_loss,
        class_loss,
        indexing,
    )
}
