"""Random ops as the five documents spell them, each beside PyTorch code of the same meaning."""

from collections.abc import Callable, Mapping
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

from stowplan.ir import Attribute
from tests.support.op_samples import Sample, Sampler, indices, numbers, some


def chainer_convolution(random: Random) -> Sample:
    """Plain or transposed, as Chainer writes it."""
    (kh, kw), (sy, sx), (ph, pw) = some(random, 2, 1, 3), some(random, 2, 1, 2), some(random, 2, 0, 1)
    ph, pw = min(ph, kh - 1), min(pw, kw - 1)
    attributes: dict[str, Attribute] = {
        "sy": sy,
        "sx": sx,
        "ph": ph,
        "pw": pw,
        "dy": 1,
        "dx": 1,
        "groups": 1,
        "cover_all": False,
    }
    image, bias = numbers(2, 2, *some(random, 2, 3, 5)), numbers(3)
    if random.random() < 0.5:
        weight = numbers(3, 2, kh, kw)
        run = _bound(F.conv2d, stride=(sy, sx), padding=(ph, pw))
        return Sample("Convolution2DFunction", (image, weight, bias), attributes, run)
    weight, run = numbers(2, 3, kh, kw), _bound(F.conv_transpose2d, stride=(sy, sx), padding=(ph, pw))
    outh, outw = run(image, weight, bias).shape[2:]
    attributes |= {"outh": outh, "outw": outw}
    return Sample("Deconvolution2DFunction", (image, weight, bias), attributes, run)


def _bound(function: Callable[..., Tensor], **named: object) -> Callable[..., Tensor]:
    return lambda *tensors: function(*tensors, **named)


def chainer_other(random: Random) -> Sample:
    """The ops around Chainer's convolutions."""
    image = numbers(2, 3, 5, 5)
    pool: dict[str, Attribute] = {"kh": 2, "kw": 2, "sy": 2, "sx": 2, "ph": 0, "pw": 0, "cover_all": True}
    slices = ((None, None, None), (1, None, None), (1, -1, None), (0, 5, 2))
    loss: dict[str, Attribute] = {"reduce": "mean", "ignore_label": -1}
    return random.choice(
        (
            Sample("MaxPooling2D", (image,), pool, _bound(F.max_pool2d, kernel_size=2, ceil_mode=True)),
            Sample("GetItem", (image,), {"slices": slices}, lambda x: x[:, 1:, 1:-1, 0:5:2]),
            Sample("GetItem", (image,), {"slices": (0, (1, None, None))}, lambda x: x[0, 1:]),
            Sample("Concat", (image, numbers(2, 1, 5, 5)), {"axis": 1}, lambda *x: torch.cat(x, 1)),
            Sample("ReLU", (image,), {}, F.relu),
            Sample("SoftmaxCrossEntropy", (image, indices(3, 2, 5, 5)), loss, F.cross_entropy),
        )
    )


def megengine(random: Random) -> Sample:
    """Convolutions with groups in the weight, pools, products, reductions."""
    size, stride, pad = random.randint(1, 3), random.randint(1, 2), random.randint(0, 1)
    pad = min(pad, size // 2)
    slid: dict[str, Attribute] = {"stride_h": stride, "stride_w": stride, "pad_h": pad, "pad_w": pad}
    image = numbers(2, 4, 4, 5)
    convolve = _bound(F.conv2d, stride=stride, padding=pad)
    grouped = _bound(F.conv2d, stride=stride, padding=pad, groups=2)
    pool = slid | {"window_h": size, "window_w": size, "mode": "MAX"}
    return random.choice(
        (
            Sample("ConvolutionForward", (image, numbers(3, 4, size, size)), slid, convolve),
            Sample(
                "ConvolutionForward",
                (image, numbers(2, 3, 2, size, size)),
                slid,
                lambda x, w: grouped(x, w.flatten(0, 1)),
            ),
            Sample(
                "PoolingForward",
                (image,),
                pool,
                _bound(F.max_pool2d, kernel_size=size, stride=stride, padding=pad),
            ),
            Sample("Elemwise", (image, numbers(1, 4, 1, 1)), {"mode": "ADD"}, torch.add),
            Sample("MatrixMul", (numbers(3, 4), numbers(2, 4)), {"transposeB": True}, lambda a, b: a @ b.T),
            Sample("MatrixMul", (numbers(4, 3), numbers(4, 2)), {"transposeA": True}, lambda a, b: a.T @ b),
            Sample("Reduce", (image,), {"mode": "SUM"}, lambda x: x.sum(1, keepdim=True)),
            Sample("Reshape", (image,), {}, lambda x: x.flatten(1)),
        )
    )


def tensorflow(random: Random) -> Sample:
    """Convolutions and pools in both layouts, with SAME or VALID padding, and what is around them."""
    size, stride = random.randint(1, 3), random.randint(1, 2)
    padding, layout = random.choice(("SAME", "VALID")), random.choice(("NHWC", "NCHW"))
    image = numbers(2, 5, 6, 3) if layout == "NHWC" else numbers(2, 3, 5, 6)
    strides = (1, stride, stride, 1) if layout == "NHWC" else (1, 1, stride, stride)
    windows = (1, size, size, 1) if layout == "NHWC" else (1, 1, size, size)
    attributes: dict[str, Attribute] = {
        "strides": strides,
        "ksize": windows,
        "padding": padding,
        "data_format": layout,
    }
    run = _as_tensorflow(layout, padding, size, stride)
    return random.choice(
        (
            Sample("Conv2D", (image, numbers(size, size, 3, 2)), attributes, run),
            Sample("MaxPool", (image,), attributes, run),
            Sample("BiasAdd", (numbers(2, 3, 4, 4), numbers(3)), {}, lambda x, b: x + b[:, None, None]),
            Sample("Transpose", (numbers(2, 3, 3, 4),), {}, lambda x: x.permute(0, 3, 1, 2)),
            Sample("LRN", (numbers(2, 2, 2, 4),), {}, _local_response_norm),
        )
    )


def _as_tensorflow(layout: str, padding: str, size: int, stride: int) -> Callable[..., Tensor]:
    """A convolution if given a filter, else a pool: channels first, the odd pad of SAME behind."""

    def run(image: Tensor, filters: Tensor | None = None) -> Tensor:
        x = image.permute(0, 3, 1, 2) if layout == "NHWC" else image
        if padding == "SAME":
            x = F.pad(
                x, _same(x.shape[3], size, stride) + _same(x.shape[2], size, stride), value=_fill(filters)
            )
        y = (
            F.max_pool2d(x, size, stride)
            if filters is None
            else F.conv2d(x, filters.permute(3, 2, 0, 1), None, stride)
        )
        return y.permute(0, 2, 3, 1) if layout == "NHWC" else y

    return run


def _fill(filters: Tensor | None) -> float:
    return float("-inf") if filters is None else 0.0


def _same(inputs: int, size: int, stride: int) -> tuple[int, int]:
    total = max(0, (-(-inputs // stride) - 1) * stride + size - inputs)
    return total // 2, total - total // 2


def _local_response_norm(x: Tensor) -> Tensor:
    return F.local_response_norm(x.permute(0, 3, 1, 2), 3).permute(0, 2, 3, 1)


def drawn(random: Random) -> Sample:
    """The layers of a drawn graph: untied filters, scaling, a linear layer, a classifier."""
    image, filters = numbers(2, 2, 4, 5), numbers(3, 1, 1, 2, 2, 3, 3, 3)
    return random.choice(
        (
            Sample("filter", (image, filters), {}, _untied),
            Sample("filterA", (image, numbers(1), numbers(1, 2, 4, 5)), {}, lambda x, a, b: a * x + b),
            Sample(
                "linear",
                (image, numbers(3, 2, 4, 5)),
                {},
                lambda x, w: torch.einsum("nchw,ochw->no", x, w)[..., None, None],
            ),
            Sample("softmax", (numbers(3, 4, 1, 1), indices(4, 3, 1, 1, 1)), {}, _classified),
        )
    )


def _untied(image: Tensor, filters: Tensor) -> Tensor:
    patches = image.unfold(2, filters.shape[4], 1).unfold(3, filters.shape[5], 1)
    return torch.einsum("nihwkl,oiklhw->nohw", patches, filters[:, 0, 0])


def _classified(scores: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    loss = F.cross_entropy(scores.flatten(1), labels.flatten(), reduction="sum")
    return scores.softmax(1), loss.view(1, 1, 1, 1)


def tiled_log(random: Random) -> Sample:
    """The two ops of a tile log."""
    stride, padding = some(random, 2, 1, 2), some(random, 2, 0, 1)
    image = numbers(1, 1, 6, 6)
    attributes = {
        "kernel_size": (3, 2),
        "stride": tuple(stride),
        "padding": tuple(padding),
        "dilation": (1, 1),
    }
    if random.random() < 0.5:
        return Sample(
            "conv2d",
            (image, numbers(1, 1, 3, 2)),
            attributes,
            _bound(F.conv2d, stride=stride, padding=padding),
        )
    run = _bound(F.max_pool2d, kernel_size=(3, 2), stride=stride, padding=padding)
    return Sample("maxpool2d", (image,), attributes, run)


DOCUMENT_SAMPLERS: Mapping[str, Sampler] = {
    sampler.__name__: sampler
    for sampler in (
        chainer_convolution,
        chainer_other,
        megengine,
        tensorflow,
        drawn,
        tiled_log,
    )
}
