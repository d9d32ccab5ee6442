"""Statistics of a whole tensor, gathered of its parts: the norms, means and buffers that eager has."""

import copy
from collections.abc import Callable, Mapping
from random import Random

import pytest
import torch
from torch import Tensor, nn

from stowplan.capture import Captured, capture
from stowplan.run.parts.normalise import normalised
from stowplan.run.parts.part import Index
from stowplan.techniques.tiles.plan.rounds import refusal, rounds_of
from stowplan.techniques.tiles.run.gathering import Moments, Totals
from tests.support.in_tiles import (
    error_in_tiles,
    errors_in_float32,
    gradients_of,
    relative_error,
    step_in_tiles,
    stretch,
)
from tests.support.models import images
from tests.support.nets import NETS

pytestmark = [pytest.mark.slow, pytest.mark.torch]
EXACT = 1e-12


class Excited(nn.Module):
    """Squeeze and excitation: channels scaled by what their means say."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.excite = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.excite(x.mean((2, 3), keepdim=True)))


NORMS: Mapping[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm2d(4),
    "batch norm without weights": lambda: nn.BatchNorm2d(4, affine=False),
    "batch norm without buffers": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "instance norm": lambda: nn.InstanceNorm2d(4, affine=True),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "group norm of one group": lambda: nn.GroupNorm(1, 4),
    "squeeze and excitation": lambda: Excited(4),
    "one after the other": lambda: nn.Sequential(
        nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), Excited(4)
    ),
}


def around(norm: nn.Module) -> Captured:
    """A norm between two convolutions, captured in float64."""
    layers = (nn.Conv2d(2, 4, 3, padding=1), norm, nn.Tanh(), nn.Conv2d(4, 3, 3, stride=2, padding=1))
    return capture(nn.Sequential(*layers).double(), (images(3, 2, 15, 18).double().requires_grad_(),))


@pytest.mark.parametrize("parts", [(1, 1, 2, 3), (3, 1, 1, 1), (2, 1, 3, 1), (1, 1, 8, 9)])
@pytest.mark.parametrize("name", NORMS)
def test_norms_between_convolutions(name: str, parts: tuple[int, ...]) -> None:
    captured = around(NORMS[name]())
    assert error_in_tiles(captured, stretch(captured), parts) < EXACT


def test_rounds_are_as_many_as_statistics_that_stand_one_after_the_other() -> None:
    assert len(rounds_of(stretch(around(NORMS["one after the other"]())), (1, 1, 2, 2))) == 4
    assert len(rounds_of(stretch(around(NORMS["group norm"]())), (3, 1, 1, 1))) == 1
    beside = capture(Beside(), (images(2, 2, 8, 8),))
    assert len(rounds_of(stretch(beside), (1, 1, 2, 2))) == 2


class Beside(nn.Module):
    """Two branches, each with its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.other = nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.one(x) + self.other(x))


class Pooled(nn.Module):
    """A mean over all places at the end, and a layer on it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.flatten(nn.functional.adaptive_avg_pool2d(self.body(x), 1), 1))
        return scores


@pytest.mark.parametrize("parts", [(1, 1, 2, 3), (2, 1, 4, 1)])
def test_a_segment_that_ends_in_a_mean_over_all_places(parts: tuple[int, ...]) -> None:
    captured = capture(Pooled().double(), (images(2, 2, 12, 10).double().requires_grad_(),))
    assert error_in_tiles(captured, stretch(captured), parts) < EXACT


def test_a_part_of_the_channels_of_a_group_is_refused() -> None:
    captured = capture(nn.GroupNorm(2, 4), (images(2, 4, 6, 6),))
    assert "over channels" in refusal(stretch(captured), (1, 2, 2, 1))


def resnet_stages(dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return NETS["resnet50"].build("tiny", dtype=dtype, resolution=32, layers=(1, 1))


def test_a_step_of_resnet_has_eagers_gradients_and_buffers() -> None:
    model, args = resnet_stages(torch.float64)
    twin = copy.deepcopy(model)
    norms = [op.id for op in capture(model, args).graph.ops if "batch_norm_legit" in op.type]
    cuts = (
        ("convolution", "max_pool2d_with_indices", (1, 1, 2, 2)),
        (norms[1], "convolution_2", (2, 1, 2, 1)),
        (norms[2], "convolution_3", (1, 1, 2, 3)),
    )
    step = step_in_tiles(model, args, *cuts)
    for _ in range(2):
        loss, gradients = gradients_of(twin, twin, args)
        found, in_tiles = gradients_of(step, model, args)
        assert relative_error([found, *in_tiles], [loss, *gradients]) < EXACT
        buffers = [b.double() for b in twin.buffers()]
        assert relative_error([b.double() for b in model.buffers()], buffers) < EXACT
    assert all(int(b) == 2 for name, b in model.named_buffers() if name.endswith("tracked"))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["batch norm", "instance norm", "group norm"])
def test_float32_is_within_twice_eagers_own_error(name: str) -> None:
    layers = (nn.Conv2d(2, 4, 3, padding=1, bias=False), NORMS[name](), nn.Tanh(), nn.Conv2d(4, 3, 3))
    captured = capture(nn.Sequential(*layers), (images(2, 2, 40, 40).requires_grad_(),))
    erred, eagers = errors_in_float32(captured, stretch(captured), (1, 1, 3, 3))
    assert erred <= 2 * eagers


def test_statistics_of_one_tile_alone_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    add = Moments.add

    def forget(self: Moments, part: Tensor, place: Index) -> None:
        self.sums.zero_()
        add(self, part, place)

    captured = around(nn.BatchNorm2d(4))
    monkeypatch.setattr(Moments, "add", forget)
    for seed in range(5):
        parts = (1, 1, 2, Random(seed).randint(1, 4))
        assert error_in_tiles(captured, stretch(captured), parts) > 1e-3


@pytest.mark.parametrize("name", ["batch norm", "squeeze and excitation"])
def test_a_mean_of_means_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 7 and 8 rows count alike."""
    merge, total = Moments.add, Totals.add

    def alike(self: Moments, part: Tensor, place: Index) -> None:
        merge(self, part[:, :, :7], place)

    def average(self: Totals, part: Tensor, place: Index) -> None:
        total(self, part.mean(2, keepdim=True) * (15 / 2), place)

    captured = around(NORMS[name]())
    assert error_in_tiles(captured, stretch(captured), (1, 1, 2, 1)) < EXACT
    monkeypatch.setattr(Moments, "add", alike)
    monkeypatch.setattr(Totals, "add", average)
    assert error_in_tiles(captured, stretch(captured), (1, 1, 2, 1)) > 1e-4


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_one_pixel_of_a_group_norm_has_the_gradients_of_its_formula(groups: int) -> None:
    torch.manual_seed(0)
    pixel, incoming = torch.randn(2, 1, 8, 1, 1, dtype=torch.float64)
    mean, variance = torch.rand(2, 1, groups, dtype=torch.float64)
    weight, bias = (torch.randn(8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    spread = (variance + 1e-5).rsqrt()
    shift, scale = (s.repeat_interleave(8 // groups, 1)[..., None, None] for s in (mean, spread))
    formula = (pixel - shift) * scale * weight[:, None, None] + bias[:, None, None]
    made = normalised(pixel, mean, variance, weight, bias, 1e-5)
    expected, found = (torch.autograd.grad(y, (weight, bias), incoming) for y in (formula, made))
    for one, other in zip(expected, found, strict=True):
        assert torch.allclose(one, other, rtol=EXACT)
