"""A segment computed in tiles is the segment: outputs, losses and every gradient, on any grid."""

from collections.abc import Callable, Sequence
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from stowplan.capture import Captured, capture
from stowplan.errors import NotTileable
from stowplan.geometry import Rect
from stowplan.run.parts.losses import TiledLoss
from stowplan.techniques.tiles.plan.rounds import refusal
from stowplan.techniques.tiles.plan.segment import Segment
from stowplan.techniques.tiles.run.sweep import Sweep
from tests.support.in_tiles import (
    error_in_tiles,
    errors_in_float32,
    in_tiles,
    random_inputs,
    relative_error,
    stretch,
    whole,
)
from tests.support.models import images
from tests.support.nets import NETS

pytestmark = [pytest.mark.slow, pytest.mark.torch]
EXACT = 1e-12


def captured_net(name: str, **settings: int) -> Captured:
    return capture(*NETS[name].build("tiny", device="cpu", dtype=torch.float64, seed=0, **settings))


@pytest.mark.parametrize("parts", [(1, 1, 2, 2), (2, 1, 3, 4), (1, 1, 8, 1), (2, 1, 1, 1), (1, 2, 1, 1)])
def test_vgg_features(parts: tuple[int, ...]) -> None:
    captured = captured_net("vgg16")
    segment = stretch(captured, "convolution", "max_pool2d_with_indices_2")
    assert error_in_tiles(captured, segment, parts) < EXACT


@pytest.mark.parametrize("parts", [(2, 1, 1, 1), (1, 1, 2, 3), (2, 1, 4, 4)])
def test_unet_with_its_skips_and_its_loss(parts: tuple[int, ...]) -> None:
    captured = captured_net("unet", batch=2, resolution=220)
    assert error_in_tiles(captured, stretch(captured), parts) < EXACT


def test_several_outputs_that_the_segment_reads_itself() -> None:
    captured = captured_net("unet", batch=2, resolution=220)
    segment = stretch(captured, "convolution", "relu_7")
    assert segment.outputs == ("relu_1", "relu_3", "relu_5", "relu_7")
    assert error_in_tiles(captured, segment, (2, 1, 2, 3)) < EXACT


@pytest.mark.parametrize("parts", [(2, 1, 1), (2, 4, 1), (2, 16, 1)])
def test_gpt_feed_forward_over_tokens(parts: tuple[int, ...]) -> None:
    captured = captured_net("gpt")
    assert error_in_tiles(captured, stretch(captured, "native_layer_norm_1", "add_2"), parts) < EXACT


@pytest.mark.parametrize("tiles", [2, 3, 8])
def test_head_and_loss_over_tokens(tiles: int) -> None:
    captured = captured_net("gpt", batch=1)
    segment = stretch(captured, "native_layer_norm_4", "nll_loss_forward")
    assert error_in_tiles(captured, segment, (tiles, 1)) < EXACT


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.conv(x))


LAYERS: st.SearchStrategy[Callable[[int], nn.Module]] = st.sampled_from(
    [
        lambda c: nn.Conv2d(c, 3, 3, padding=1),
        lambda c: nn.Conv2d(c, 4, 3, stride=2, padding=1),
        lambda c: nn.Conv2d(c, 2, 5, padding=2, bias=False),
        lambda c: nn.Conv2d(c, 2, 3, padding=2, dilation=2),
        lambda c: nn.Conv2d(c, c, 3, padding=1, groups=c),
        lambda c: nn.Conv2d(c, 3, (1, 4), stride=(1, 3), padding=(0, 2)),
        lambda c: nn.Conv2d(c, 3, 2),
        lambda c: nn.ConvTranspose2d(c, 3, 2, stride=2),
        lambda c: nn.ConvTranspose2d(c, 2, 3, stride=2, padding=1, output_padding=1),
        lambda c: nn.ConvTranspose2d(c, 2, 4, stride=1, padding=2, dilation=1),
        lambda _: nn.MaxPool2d(2),
        lambda _: nn.MaxPool2d(3, 2, 1),
        lambda _: nn.MaxPool2d(3, 2, ceil_mode=True),
        lambda _: nn.AvgPool2d(3, 2, 1),
        lambda _: nn.AvgPool2d(3, 1, 1, count_include_pad=False),
        lambda _: nn.ZeroPad2d((1, 2, 0, 3)),
        lambda _: nn.ConstantPad2d((0, 1, 2, 0), 1.5),
        lambda _: nn.GELU(),
        Residual,
    ]
)


def channels_after(layer: nn.Module, channels: int) -> int:
    return int(getattr(layer, "out_channels", channels))


@settings(max_examples=80)
@given(st.lists(LAYERS, min_size=1, max_size=3), st.integers(0, 10**6))
def test_random_networks_on_random_grids(makers: list[Callable[[int], nn.Module]], seed: int) -> None:
    random, layers, channels = Random(seed), list[nn.Module](), 2
    for make in makers:
        layers.append(make(channels))
        channels = channels_after(layers[-1], channels)
    model = nn.Sequential(*layers).double()
    x = images(2, 2, random.randint(28, 34), random.randint(28, 34)).double().requires_grad_()
    captured = capture(model, (x,))
    segment = stretch(captured)
    shape = captured.graph.tensors[segment.outputs[0]].shape or ()
    parts = tuple(random.randint(1, min(4, size)) if dim != 1 else 1 for dim, size in enumerate(shape))
    reason = refusal(segment, parts)
    if reason:
        assert "padding" in reason
    else:
        assert error_in_tiles(captured, segment, parts) < EXACT


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("net", "last", "parts"),
    [("vgg16", "max_pool2d_with_indices_2", (2, 1, 4, 4)), ("unet", None, (1, 1, 2, 2))],
)
def test_float32_is_within_twice_eagers_own_error(net: str, last: str | None, parts: tuple[int, ...]) -> None:
    """Over a few draws: the error of one is as much chance as rounding."""
    captured = capture(*NETS[net].build("tiny"))
    erred, eagers = errors_in_float32(captured, stretch(captured, "convolution", last), parts)
    assert erred <= 2 * eagers


def test_a_halo_one_too_small_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = captured_net("vgg16")
    segment = stretch(captured, "convolution", "relu_3")
    clip = Rect.clip

    def nearer(self: Rect, shape: tuple[int, ...]) -> Rect:
        inside = clip(self, shape)
        if inside.ndim == 4 and inside.lo[2] > 0:
            return Rect((*inside.lo[:2], inside.lo[2] + 1, inside.lo[3]), inside.hi)
        return inside

    monkeypatch.setattr(Rect, "clip", nearer)
    with pytest.raises(RuntimeError):
        error_in_tiles(captured, segment, (1, 1, 2, 2))


def test_lost_padding_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = captured_net("vgg16")
    segment = stretch(captured, "convolution", "relu_3")

    def none(self: Rect, _: Sequence[int]) -> tuple[tuple[int, int], ...]:
        return ((0, 0),) * self.ndim

    monkeypatch.setattr(Rect, "overhang", none)
    with pytest.raises(RuntimeError):
        error_in_tiles(captured, segment, (1, 1, 2, 2))


def tokens_of_unequal_weight() -> tuple[Captured, Segment, list[Tensor]]:
    """Tiles of 5 and 6 tokens, one of them ignored."""
    captured = captured_net("gpt", batch=1, sequence=11)
    segment = stretch(captured, "native_layer_norm_4", "nll_loss_forward")
    inputs = random_inputs(segment, torch.float64)
    next(tensor for tensor in inputs if tensor.dtype == torch.int64).view(-1)[3] = -100
    return captured, segment, inputs


def test_tiles_of_unequal_weight() -> None:
    captured, segment, inputs = tokens_of_unequal_weight()
    expected = whole(captured, segment, inputs, torch.float64)
    found = in_tiles(Sweep(segment, captured.program.calls, (2, 1)), inputs, torch.float64)
    assert relative_error(found.outputs, expected.outputs) < EXACT
    assert relative_error(found.gradients, expected.gradients) < EXACT


def test_a_mean_of_means_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, segment, inputs = tokens_of_unequal_weight()
    expected = whole(captured, segment, inputs, torch.float64)
    quotient = TiledLoss.of

    def mean_of_tile(self: TiledLoss, operands: list[Tensor]) -> tuple[Tensor, Tensor]:
        total, weight = quotient(self, operands)
        return total / weight, torch.ones_like(weight)

    monkeypatch.setattr(TiledLoss, "of", mean_of_tile)
    found = in_tiles(Sweep(segment, captured.program.calls, (2, 1)), inputs, torch.float64)
    assert relative_error(found.outputs, expected.outputs) > 1e-4
    assert relative_error(found.gradients, expected.gradients) > 1e-4


def test_what_must_be_whole_is_not_cut() -> None:
    gpt = captured_net("gpt")
    assert "no rect of what it reshapes" in refusal(stretch(gpt, "view_6", "view_9"), (1, 4, 1))
    with pytest.raises(NotTileable, match="not tiled"):
        Sweep(stretch(gpt, "view_6", "view_9"), gpt.program.calls, (1, 4, 1))


@pytest.mark.parametrize("parts", [(2, 1, 1), (2, 4, 1), (2, 3, 1)])
def test_gpt_attention_over_tokens(parts: tuple[int, ...]) -> None:
    captured = captured_net("gpt")
    assert error_in_tiles(captured, stretch(captured, "native_layer_norm", "view_5"), parts) < EXACT


class Counted(nn.Module):
    """An embedding whose gradients are divided by how often a token comes."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(5, 3, scale_grad_by_freq=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.rows(tokens)).sum()


def test_gradients_divided_by_counts_over_all_tokens_are_refused() -> None:
    captured = capture(Counted(), (torch.tensor([1, 2, 1, 4]),))
    assert "counts over all tokens" in refusal(stretch(captured), (2, 1))
