"""Ops that must know where their part lies: interpolation, causal attention. Products that need not run."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stowplan.capture import Captured, capture
from stowplan.run.parts import kernels, resizing
from stowplan.run.parts.pooling import max_of_slices
from stowplan.techniques.tiles.plan.not_needed import not_needed_in_backward
from stowplan.techniques.tiles.plan.rounds import refusal
from tests.support.in_tiles import error_in_tiles, stretch
from tests.support.models import images

pytestmark = pytest.mark.torch
EXACT = 1e-12
CONVOLUTIONS: Mapping[int, Callable[..., nn.Module]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class Resized(nn.Module):
    """An interpolation between an activation and a convolution."""

    def __init__(self, ndim: int, settings: dict[str, Any]) -> None:
        super().__init__()
        self.settings = settings
        self.mix = CONVOLUTIONS[ndim](2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.mix(F.interpolate(torch.tanh(x), **self.settings))
        return made


def resized(ndim: int, **settings: Any) -> Captured:
    x = images(2, 2, *(13, 10, 6)[:ndim]).double().requires_grad_()
    return capture(Resized(ndim, settings).double(), (x,))


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("size", [{"scale_factor": 2}, {"scale_factor": 1.7}, {"size": (29, 7)}])
@pytest.mark.slow
def test_bilinear(corners: bool, size: dict[str, object]) -> None:
    captured = resized(2, mode="bilinear", align_corners=corners, **size)
    for parts in ((1, 1, 2, 3), (2, 1, 4, 1)):
        assert error_in_tiles(captured, stretch(captured), parts) < EXACT


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("size", [{"scale_factor": 2}, {"scale_factor": 2.3}, {"size": (31, 7)}])
def test_nearest(mode: str, size: dict[str, object]) -> None:
    captured = resized(2, mode=mode, **size)
    assert error_in_tiles(captured, stretch(captured), (2, 1, 3, 2)) < EXACT


def test_one_and_three_dims() -> None:
    line = resized(1, mode="linear", scale_factor=2)
    assert error_in_tiles(line, stretch(line), (1, 1, 4)) < EXACT
    volume = resized(3, mode="trilinear", scale_factor=2, align_corners=True)
    assert error_in_tiles(volume, stretch(volume), (1, 1, 3, 2, 2)) < EXACT


def test_cubic_interpolation_is_refused() -> None:
    captured = resized(2, mode="bicubic", scale_factor=2)
    assert "size of the whole image" in refusal(stretch(captured), (1, 1, 2, 2))


def test_positions_of_the_part_alone_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = resized(2, mode="bilinear", scale_factor=1.7)
    sampled = resizing._sampled

    def off(part: Tensor, dim: int, positions: Tensor, *, is_between: bool) -> Tensor:
        return sampled(part, dim, (positions - 0.01).clamp(min=0), is_between=is_between)

    monkeypatch.setattr(resizing, "_sampled", off)
    assert error_in_tiles(captured, stretch(captured), (1, 1, 2, 2)) > 1e-4


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(2),
        nn.MaxPool2d(3, 2, padding=1),
        nn.MaxPool2d((2, 3), (3, 2), dilation=(2, 1)),
        nn.MaxPool2d((2, 3), (3, 2), ceil_mode=True),
        nn.MaxPool3d(3, 2),
    ],
)
def test_max_pools(pool: nn.Module) -> None:
    """With windows side by side or not, and over the border."""
    ndim = 3 if isinstance(pool, nn.MaxPool3d) else 2
    x = images(2, 2, *(13, 10, 9)[:ndim]).double().requires_grad_()
    captured = capture(nn.Sequential(nn.Tanh(), pool, nn.Tanh()), (x,))
    for parts in ((1, 1, 2, 3, 2), (2, 1, 4, 1, 1)):
        assert error_in_tiles(captured, stretch(captured), parts[: 2 + ndim]) < EXACT


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [(2, 2), (3, 2), (1, 3)])
def test_of_equals_the_first_has_the_gradient_of_a_max_pool(
    size: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    image = torch.randint(0, 3, (2, 3, 13, 12)).to(dtype).requires_grad_()
    expected, found = F.max_pool2d(image, size), max_of_slices(image, size, size, (1, 1))
    incoming = torch.randn_like(expected)
    incoming[0, 0, 0, 0] = torch.inf
    gradients = [torch.autograd.grad(made, image, incoming)[0] for made in (expected, found)]
    assert torch.equal(found, expected)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("pad", [nn.ReflectionPad2d((3, 1, 0, 2)), nn.ReplicationPad2d((1, 4, 2, 0))])
def test_padding_with_what_is_there(pad: nn.Module) -> None:
    captured = capture(nn.Sequential(pad, nn.Tanh()), (images(2, 2, 11, 9).double().requires_grad_(),))
    assert error_in_tiles(captured, stretch(captured), (2, 1, 3, 4)) < EXACT


@pytest.mark.parametrize(
    ("shuffle", "parts"), [(nn.PixelShuffle(2), (1, 1, 3, 2)), (nn.PixelUnshuffle(2), (1, 1, 2, 3))]
)
def test_shuffled_pixels(shuffle: nn.Module, parts: tuple[int, ...]) -> None:
    captured = capture(nn.Sequential(nn.Tanh(), shuffle), (images(1, 4, 12, 6).double().requires_grad_(),))
    segment = stretch(captured)
    assert refusal(segment, parts) or error_in_tiles(captured, segment, parts) < EXACT
    assert error_in_tiles(captured, segment, (1, 1, 3, 3)) < EXACT


class Attention(nn.Module):
    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.tanh(F.scaled_dot_product_attention(query, key, value, is_causal=self.causal))


def attention(*, causal: bool) -> Captured:
    parts = torch.randn(3, 2, 3, 12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return capture(Attention(causal=causal), tuple(part.clone().requires_grad_() for part in parts))


@pytest.mark.parametrize("parts", [(1, 1, 4, 1), (2, 3, 5, 1), (1, 1, 12, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_by_tiles_of_queries(causal: bool, parts: tuple[int, ...]) -> None:
    captured = attention(causal=causal)
    assert error_in_tiles(captured, stretch(captured), parts) < EXACT


def test_a_mask_that_counts_from_the_tile_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = kernels._mask
    monkeypatch.setattr(kernels, "_mask", lambda query, key, first: mask(query, key, first - 1))
    captured = attention(causal=True)
    assert error_in_tiles(captured, stretch(captured), (1, 1, 4, 1)) > 1e-4


def test_products_whose_results_no_gradient_reads_are_idle() -> None:
    layers = (nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 2, 3))
    ends_linear = stretch(capture(nn.Sequential(*layers), (images(1, 2, 9, 9),)))
    assert not_needed_in_backward(ends_linear) == {"convolution_1"}
    ends_curved = stretch(capture(nn.Sequential(*layers, nn.Tanh()), (images(1, 2, 9, 9),)))
    assert not_needed_in_backward(ends_curved) == frozenset()
