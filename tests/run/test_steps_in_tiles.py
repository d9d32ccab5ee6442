"""A training step with sweeps in it trains as eager does, and holds nothing of what is inside them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stowplan.capture import capture
from stowplan.errors import NotTileable
from stowplan.run.measure.measure import measure
from stowplan.run.planning.recapture import check_differentiable
from tests.support.in_tiles import gradients_of, relative_error, step_in_tiles
from tests.support.nets import NETS

pytestmark = [pytest.mark.slow, pytest.mark.torch]


def error_of_step(
    model: nn.Module, args: tuple[Tensor, ...], *cuts: tuple[str | None, str | None, tuple[int, ...]]
) -> float:
    step = step_in_tiles(model, args, *cuts)
    loss, gradients = gradients_of(model, model, args)
    found, in_tiles = gradients_of(step, model, args)
    return relative_error([found, *in_tiles], [loss, *gradients])


def test_unet_draws_the_masks_that_eager_draws() -> None:
    model, args = NETS["unet"].build("tiny", dtype=torch.float64, batch=2, resolution=220)
    assert error_of_step(model, args, (None, None, (2, 1, 1, 1))) < 1e-12
    cuts = (("convolution", "relu_7", (2, 1, 2, 3)), ("convolution_8", "nll_loss2d_forward", (1, 1, 2, 2)))
    assert error_of_step(model, args, *cuts) < 1e-12


def test_gpt_with_its_feed_forwards_and_its_head_in_tiles() -> None:
    model, args = NETS["gpt"].build("tiny", dtype=torch.float64)
    cuts = (
        ("native_layer_norm_1", "add_2", (2, 2, 1)),
        ("native_layer_norm_3", "add_4", (2, 4, 1)),
        ("native_layer_norm_4", "nll_loss_forward", (4, 1)),
    )
    assert error_of_step(model, args, *cuts) < 1e-12


def test_batch_norms_with_fixed_statistics_in_tiles() -> None:
    model, args = NETS["resnet50"].build("tiny", dtype=torch.float64)
    for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
        norm.eval().reset_running_stats()
        assert norm.running_mean is not None
        assert norm.running_var is not None
        norm.running_mean.uniform_(-0.1, 0.1)
        norm.running_var.uniform_(0.5, 2.0)
    cuts = ((None, "max_pool2d_with_indices", (1, 1, 2, 2)), ("convolution_1", "relu_3", (1, 1, 2, 2)))
    assert error_of_step(model, args, *cuts) < 1e-12


def test_results_are_detached_in_tiles_as_in_eager() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            h = self.net(x)
            return h.square().mean(), h, h.detach(), h.detach().amax((2, 3))

    model, x = Net(), torch.randn(2, 3, 12, 12)
    results: Any = step_in_tiles(model, (x,), ("convolution", "convolution_1", (1, 1, 2, 2)))(x)
    assert [each.requires_grad for each in results] == [each.requires_grad for each in model(x)]


def test_the_step_holds_one_tile_at_a_time() -> None:
    model, args = NETS["vgg16"].build("tiny", resolution=128, batch=1, width=8)
    step = step_in_tiles(model, args, ("convolution", "max_pool2d_with_indices_1", (1, 1, 4, 4)))

    def rise_of(run: object) -> int:
        def once() -> None:
            assert callable(run)
            run(*args).backward()

        once()
        model.zero_grad(set_to_none=True)
        rise = measure(once, before=()).measured_rise_bytes
        model.zero_grad(set_to_none=True)
        return rise

    assert rise_of(step) < 0.6 * rise_of(model)


def test_a_sweep_is_one_line_of_source() -> None:
    model, args = NETS["vgg16"].build("tiny")
    step = step_in_tiles(model, args, ("convolution", "max_pool2d_with_indices", (1, 1, 2, 2)))
    lines = [line for line in step.source.splitlines() if "stowplan.sweep" in line]
    assert len(lines) == 2
    assert all("'convolution to max_pool2d_with_indices in 1x1x2x2 tiles (" in line for line in lines)
    assert step.source.count("aten.convolution.default(") == 11  # of thirteen
    assert "# network.features.0  vgg.py:" in step.source
    assert "insertions.py" not in step.source


@pytest.mark.parametrize("name", ["unet", "vgg16", "resnet50", "gpt", "llama", "vit", "diffusion"])
def test_autograd_does_with_the_calls_what_the_step_does(name: str) -> None:
    model, args = NETS[name].build("tiny")
    check_differentiable(capture(model, args), model, args)


class StraightThrough(torch.autograd.Function):
    """Rounds, and lets gradients pass as if it did not."""

    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        return torch.round(x)

    @staticmethod
    def backward(_: object, gradient: Tensor) -> Tensor:
        return gradient


class Rounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        rounded: Tensor = StraightThrough.apply(self.fc(x))  # type: ignore[no-untyped-call]
        return rounded.square().sum()


def test_a_step_with_a_gradient_of_its_own_is_refused() -> None:
    model, args = Rounded(), (torch.randn(2, 3),)
    with pytest.raises(NotTileable, match="differentiates in its own way"):
        check_differentiable(capture(model, args), model, args)
