"""Strides that PyTorch's shape functions have wrong: steps that write by them follow the kernels."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stowplan
from stowplan import Search
from stowplan.capture import layouts
from stowplan.errors import BudgetTooSmall
from stowplan.torch_private import FakeTensor, FakeTensorMode, storage_id


class Rolling(nn.Module):
    """`roll` keeps channels last, which its shape function does not say; then every other row is doubled."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8, 1, 1, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        rolled = x.roll(-1, 3)
        doubled = rolled + 1
        doubled[:, :, ::2] *= 2.0
        return (F.leaky_relu(doubled, 0.1) * self.weight).square().mean()


@pytest.mark.parametrize("share", [0.0, 10.0], ids=["smallest budget", "roomy"])
@pytest.mark.slow
def test_a_write_into_a_part_goes_where_the_kernel_has_it(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "_LEARNED", {})
    monkeypatch.setattr(layouts, "_seen", set())
    x = torch.randn(1, 8, 4, 4).to(memory_format=torch.channels_last)
    model = Rolling()
    with pytest.raises(BudgetTooSmall) as refusal:
        stowplan.fit(model, (x,), budget=1, allow=("recompute",), search=Search(moves=30))
    budget = int(refusal.value.minimum_bytes * (1 + share))
    expected = model(x)
    (gradient,) = torch.autograd.grad(expected, model.weight)
    fitted = stowplan.fit(model, (x,), budget=budget, allow=("recompute",), search=Search(moves=30))
    found = fitted(x)
    assert torch.equal(found, expected)
    assert torch.equal(torch.autograd.grad(found, fitted.weight)[0], gradient)


class Transposed(nn.Module):
    """The gradient of smooth_l1_loss lies by rows whatever its operands do, and autograd copies it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale = nn.Linear(6, 6), nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        output = self.layer(x).transpose(-1, -2) * self.scale
        return F.smooth_l1_loss(output, torch.zeros_like(output))


def test_a_backward_kernel_with_a_layout_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "_LEARNED", {})
    monkeypatch.setattr(layouts, "_seen", set())
    x, model = torch.randn(2, 8, 6, 6), Transposed()
    fitted = stowplan.fit(model, (x,), budget="1GiB", allow=("recompute",), search=Search(moves=30))
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    found = torch.autograd.grad(fitted(x), list(fitted.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


class Softplus(nn.Module):
    """The gradient comes by rows, the activation with channels last: the kernel follows the gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale = nn.Conv2d(4, 4, 1, groups=2), nn.Parameter(torch.rand(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (F.softplus(self.layer(x)) * self.scale).square().mean()


def test_a_backward_kernel_that_follows_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "_LEARNED", {})
    monkeypatch.setattr(layouts, "_seen", set())
    x = torch.randn(8, 4, 6, 6, dtype=torch.float64).to(memory_format=torch.channels_last)
    model = Softplus().double()
    fitted = stowplan.fit(model, (x,), budget="1GiB", allow=("recompute",), search=Search(moves=30))
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    found = torch.autograd.grad(fitted(x), list(fitted.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def image(*shape: int) -> Tensor:
    return torch.rand(shape or (2, 4, 6, 6))


def calls() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Calls of ops that compute gradients, and of some others."""
    x, half, wide, channels = image(), image(2, 4, 3, 3), image(2, 4, 8, 8), torch.rand(4)
    indices = torch.ops.aten.max_pool2d_with_indices(x, [2, 2])[1]
    for name in ("sigmoid", "tanh", "silu", "mish", "gelu", "hardswish", "hardsigmoid"):
        yield f"{name}_backward", (image(), x)
    yield "softplus_backward", (image(), x, 1, 20)
    yield "elu_backward", (image(), 1.0, 1.0, 1.0, False, x)
    yield "hardtanh_backward", (image(), x, -1.0, 1.0)
    yield "threshold_backward", (image(), x, 0.5)
    yield "leaky_relu_backward", (image(), x, 0.1, False)
    yield "logit_backward", (image(), x, 1e-6)
    yield "hardshrink_backward", (image(), x, 0.5)
    yield "softshrink_backward", (image(), x, 0.5)
    yield "rrelu_with_noise_backward", (image(), x, image(), 0.1, 0.3, True, False)
    yield "_prelu_kernel_backward", (image(), x, image())
    yield "glu_backward", (image(2, 2, 6, 6), x, 1)
    yield "log_sigmoid_backward", (image(), x, image())
    yield "_softmax_backward_data", (image(), x, 1, torch.float32)
    yield "_log_softmax_backward_data", (image(), x, 1, torch.float32)
    yield "native_dropout_backward", (image(), x > 0.5, 2.0)
    for loss in ("mse", "soft_margin"):
        yield f"{loss}_loss_backward", (image(), x, image(), 0)
    for loss in ("huber", "smooth_l1"):
        yield f"{loss}_loss_backward", (image(), x, image(), 0, 1.0)
    yield "binary_cross_entropy_backward", (image(), x, image(), None, 0)
    yield "avg_pool2d_backward", (half, x, [2, 2], [], [0, 0], False, True, None)
    yield "max_pool2d_with_indices_backward", (half, x, [2, 2], [], [0, 0], [1, 1], False, indices)
    yield "_adaptive_avg_pool2d_backward", (half, x)
    yield "reflection_pad2d_backward", (wide, x, [1, 1, 1, 1])
    yield "replication_pad2d_backward", (wide, x, [1, 1, 1, 1])
    for kind, rest in (("nearest2d", ()), ("bilinear2d", (False,)), ("bicubic2d", (False,))):
        yield f"upsample_{kind}_backward", (image(2, 4, 12, 12), [12, 12], [2, 4, 6, 6], *rest)
    statistics, all_three = [channels] * 5, [True, True, True]
    yield "native_batch_norm_backward", (image(), x, *statistics, True, 1e-5, all_three)
    pair = torch.rand(2, 2)
    yield "native_group_norm_backward", (image(), x, pair, pair, channels, 2, 4, 36, 2, all_three)
    rows, by_row = torch.rand(6), torch.rand(2, 4, 6, 1)
    yield (
        "native_layer_norm_backward",
        (image(), x, [6], by_row, by_row, rows, rows, all_three),
    )
    yield (
        "convolution_backward",
        (image(), x, image(4, 4, 3, 3), [4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, all_three),
    )
    yield "grid_sampler_2d_backward", (image(), x, image(2, 6, 6, 2), 0, 0, False, [True, True])
    for name in ("mul", "add", "div", "maximum", "copysign", "xlogy", "atan2"):
        yield name, (image(), x)
    yield "where", (x > 0.5, image(), x)
    yield "masked_fill", (image(), x > 0.5, 0.0)


LAYOUTS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x,
    lambda x: x.to(memory_format=torch.channels_last),
    lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
)


@pytest.mark.parametrize(
    ("name", "args"), tuple(calls()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_kernels_whose_strides_differ_are_known(name: str, args: tuple[Any, ...]) -> None:
    """PyTorch's shape functions agree with the kernels in every layout of the operands, or are suspects."""
    op = getattr(torch.ops.aten, name)
    places = [place for place, value in enumerate(args) if isinstance(value, Tensor) and value.dim() == 4]
    for chosen in product(LAYOUTS, repeat=len(places)):
        laid_out = list(args)
        for place, layout in zip(places, chosen, strict=True):
            laid_out[place] = layout(args[place])
        with suppress(ValueError):  # a shape function may refuse a layout that no kernel hands it
            if strides_of(op(*laid_out)) != strides_without_data(op, laid_out):
                assert op in layouts.SUSPECTS


def strides_of(results: Any) -> list[tuple[int, ...] | None]:
    several = results if isinstance(results, (tuple, list)) else (results,)
    return [None if result is None else result.stride() for result in several]


def strides_without_data(op: Any, args: list[Any]) -> list[tuple[int, ...] | None]:
    with FakeTensorMode() as mode:
        return strides_of(op(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args)))


def is_view_of(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors share their memory."""
    return storage_id(one.untyped_storage()) == storage_id(other.untyped_storage())


def operands_of(name: str) -> Iterator[tuple[Any, ...]]:
    """Arguments for an op whose shape function is trusted: row-major, permuted, expanded and strided ones."""
    wide = torch.rand(4, 6, 8)
    for x in (wide, wide.permute(2, 0, 1), wide[:1].expand(4, 6, 8), wide[:, ::2], wide.to(torch.bfloat16)):
        rest: dict[str, tuple[Any, ...]] = {
            "view": ((*x.shape[:2], 1, x.shape[2]),),
            "_unsafe_view": ((*x.shape[:2], 1, x.shape[2]),),
            "transpose": (0, 2),
            "permute": ((1, 2, 0),),
            "expand": ((3, *x.shape),),
            "slice": (1, 1, -1, 2),
            "select": (1, -1),
            "unsqueeze": (-1,),
            "squeeze": (0,),
            "split": (3, 1),
            "unbind": (1,),
            "pow": (2,),
            "threshold_backward": (x.flip(0).contiguous(), 0.5),
            "sum": ([0, 2], True),
            "mean": ([1],),
        }
        if name in ("t", "mm", "addmm"):
            flat = x[0]
            yield {"t": (flat,), "mm": (flat, flat.t()), "addmm": (flat[:, 0], flat, flat.t())}[name]
        elif name == "bmm":
            yield x, x.transpose(1, 2)
        elif name in ("add", "sub", "mul", "div"):
            yield x, 3.0
            yield x, x[0]
            yield x, torch.rand(x.shape)
        elif name in ("tanh_backward", "gelu_backward"):
            yield x, x.contiguous()
        else:
            yield (x, *rest.get(name, ()))


@pytest.mark.parametrize("op", sorted(layouts.SHAPED_BY_KERNELS, key=str), ids=str)
def test_the_shape_functions_that_are_trusted_agree_with_kernels(op: Any) -> None:
    fakes = FakeTensorMode()
    for args in operands_of(op.overloadpacket.__name__):
        without = tuple(fakes.from_tensor(a) if isinstance(a, Tensor) else a for a in args)
        made, expected = layouts.made_without_data(fakes, op, without, {}, {}), op(*args)
        both = ((each,) if isinstance(each, Tensor) else each for each in (made, expected))
        pairs = zip(*both, strict=True)
        for found, real in pairs:
            assert isinstance(found, FakeTensor)
            looks = [(t.shape, t.stride(), t.storage_offset(), t.dtype, t.device) for t in (found, real)]
            assert looks[0] == looks[1]
            assert is_view_of(found, without[0]) == is_view_of(real, args[0])


def norms_of_narrow_numbers() -> Iterator[tuple[Any, ...]]:
    """Norms as autocast calls them: an input of bfloat16, and weights and statistics of float32."""
    ops, weight, pair = torch.ops.aten, torch.rand(4), torch.rand(2, 2)
    for layout in LAYOUTS[:2]:
        x = layout(torch.rand(2, 4, 3, 3)).to(torch.bfloat16)
        for own, running, training in product((weight, None), (weight, None), (True, False)):
            if running is not None or training:
                given = (x, own, own, running, running, training, 0.1, 1e-5)
                yield ops.native_batch_norm.default, *given
                yield ops._native_batch_norm_legit_functional.default, *given
        yield ops.native_group_norm.default, x, weight, weight, 2, 4, 9, 2, 1e-5
        yield ops.native_group_norm_backward.default, x, x, pair, pair, weight, 2, 4, 9, 2, [True] * 3
        yield ops.native_layer_norm.default, x, [3], weight[:3], weight[:3], 1e-5
    yield ops.native_layer_norm.default, torch.rand(5, 4).to(torch.bfloat16), [4], weight, weight, 1e-5


def test_the_dtypes_of_norms_are_those_of_kernels() -> None:
    fakes, seen = FakeTensorMode(), 0
    for op, *args in norms_of_narrow_numbers():
        try:
            expected = op(*args)
        except (RuntimeError, TypeError):  # no kernel for these
            continue
        without = tuple(fakes.from_tensor(a) if isinstance(a, Tensor) else a for a in args)
        found = layouts.made_without_data(fakes, op, without, {}, {})
        assert [t.dtype for t in found] == [t.dtype for t in expected], (op, args)  # type: ignore[attr-defined]
        assert not isinstance(found, FakeTensor)
        seen += 1
    assert seen >= 15


X, WEIGHT = torch.rand(4, 8, 6, 6), torch.rand(8)
MASKED = {
    torch.ops.aten.native_batch_norm_backward.default: (X, X, *[WEIGHT] * 5, True, 1e-5),
    torch.ops.aten.native_layer_norm_backward.default: (X, X, [6], *[X[..., :1]] * 2, *[WEIGHT[:6]] * 2),
    torch.ops.aten.native_group_norm_backward.default: (
        X,
        X,
        *[X[..., 0, :2].sum(1)] * 2,
        WEIGHT,
        4,
        8,
        36,
        2,
    ),
    torch.ops.aten.convolution_backward.default: (
        *(X, X, torch.rand(8, 8, 3, 3), [8]),
        *([1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    ),
}


@pytest.mark.parametrize("op", MASKED, ids=str)
@pytest.mark.parametrize("mask", list(product([True, False], repeat=3))[:-1], ids=str)
def test_a_gradient_that_no_kernel_makes_is_not_captured(op: Any, mask: tuple[bool, ...]) -> None:
    args = (*MASKED[op], list(mask))
    fakes = FakeTensorMode()
    without = tuple(fakes.from_tensor(a) if isinstance(a, Tensor) else a for a in args)
    made = layouts.made_without_data(fakes, op, without, {}, {})
    assert isinstance(made, tuple)
    for found, real in zip(made, op(*args), strict=True):
        assert real is not None or found is None


def plain_calls(name: str) -> Iterator[tuple[Any, ...]]:
    """Calls of an op that gives row-major results: with operands of several shapes, dtypes and layouts."""
    for shape, dtype in product([(4, 6, 8), (4, 1, 8), (1, 6, 1), (3, 5)], [torch.float32, torch.float64]):
        x, labels = torch.rand(shape, dtype=dtype), torch.zeros(shape[:-1], dtype=torch.int64)
        turned, number, size = x.transpose(0, -1), x.new_tensor(0.5), x.shape[-1:]
        flat, rows, statistics, scales = (
            x.flatten(0, -2),
            labels.flatten(),
            x.sum(-1, keepdim=True),
            x.new_ones(size),
        )
        unary: list[tuple[Any, ...]] = [(x,), (turned,)]
        along = [(x, dim, False) for dim in (0, -1)]
        pairs = [
            (x, x),
            (x, x > 0.5),
            (x, number),
            (number, x),
            (x, x[:1]),
            (labels, number),
            (turned, turned),
        ]
        norm = (x, x, size, statistics, statistics, scales, scales)
        calls: dict[str, list[tuple[Any, ...]]] = {
            "where": [(x > 0.5, x, x), (x > 0.5, x, number), (turned > 0.5, number, turned)],
            "pow": [(x, 2), (x, 0.5), (turned, 2)],
            "tanh": unary,
            "gelu": unary,
            "tanh_backward": [(x, x)],
            "gelu_backward": [(x, x)],
            "_softmax": along,
            "_log_softmax": along,
            "_safe_softmax": [(x, 0), (x, -1)],
            "_softmax_backward_data": [(x, x, -1, dtype)],
            "_log_softmax_backward_data": [(x, x, 0, dtype)],
            "native_layer_norm": [
                (x, size, scales, None, 1e-5),
                (x, size, None, None, 1e-5),
                (x, x.shape[1:], x[0].clone(), x[0].clone(), 1e-5),
            ],
            "native_layer_norm_backward": [(*norm, [True, True, True]), (*norm, [True, False, True])],
            "nll_loss_forward": [(flat, rows, None, reduction, -100) for reduction in (0, 1, 2)],
            "nll_loss_backward": [
                (flat.sum(1), flat, rows, None, 0, -100, flat.sum()),
                (flat.sum(), flat, rows, None, 1, -100, flat.sum()),
            ],
            "embedding": [(flat, labels)],
            "embedding_dense_backward": [(x, labels, 7, -1, False)],
        }
        yield from calls.get(name, [(x, 3.0), (x, 2), *pairs])


@pytest.mark.parametrize("op", sorted(layouts.ROW_MAJOR, key=str), ids=str)
def test_results_that_are_row_major_for_row_major_operands_agree_with_kernels(op: Any) -> None:
    fakes, known = FakeTensorMode(), 0
    for args in plain_calls(op.overloadpacket.__name__):
        if op is torch.ops.aten.mul.Scalar and isinstance(args[1], Tensor):
            continue
        sizes = layouts.row_major_sizes(op, args, {})
        without = tuple(fakes.from_tensor(a) if isinstance(a, Tensor) else a for a in args)
        made, expected = layouts.made_without_data(fakes, op, without, {}, {}), op(*args)
        several = [(each,) if isinstance(each, Tensor) else each for each in (made, expected)]
        for found, real in zip(*several, strict=True) if sizes is not None else ():
            assert isinstance(found, FakeTensor)
            assert (found.shape, found.stride(), found.dtype) == (real.shape, real.stride(), real.dtype)
            known += 1
    assert known


def test_an_illegal_call_is_left_to_pytorch() -> None:
    """Our own shape functions know legal calls only, so PyTorch's raise what eager raises."""
    x, labels, aten = torch.rand(4, 6), torch.zeros(5, dtype=torch.int64), torch.ops.aten
    calls: tuple[tuple[Any, tuple[Any, ...]], ...] = (
        (aten.add.Tensor, (x, torch.rand(3, 6))),
        (aten.where.self, (x, x, x)),
        (aten._softmax.default, (x, 2, False)),
        (aten.native_layer_norm.default, (x, [5], None, None, 1e-5)),
        (aten.nll_loss_forward.default, (x, labels, None, 1, -100)),
        (aten.embedding.default, (x, torch.rand(3))),
    )
    for op, args in calls:
        with pytest.raises((RuntimeError, IndexError)):
            op(*args)
        assert layouts.row_major_sizes(op, args, {}) is None, op
    assert layouts.row_major_sizes(aten.add.Tensor, (x, x), {"alpha": True}) is None
