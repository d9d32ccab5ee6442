"""Tiles that are only run, with norms in convolutions and sums over what dies: values are the same."""

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stowplan.capture import Captured, capture
from stowplan.run.parts.folding import factors_of
from stowplan.run.parts.part import LocalCall
from stowplan.techniques.tiles.run.sweep import Sweep
from tests.support.in_tiles import error_in_tiles, random_inputs, relative_error, stretch, whole
from tests.support.models import images

pytestmark = pytest.mark.torch
EXACT = 1e-12
GRID = (1, 1, 2, 3)


class Joined(nn.Module):
    """Two branches that are normalised and joined, as `join` does it."""

    def __init__(
        self,
        join: Callable[[Tensor, Tensor, Tensor], Tensor],
        kernel: int = 3,
        *,
        bias: bool = True,
        groups: int = 1,
    ) -> None:
        super().__init__()
        first = nn.Conv2d(8, 8, kernel, padding=kernel // 2, bias=bias, groups=groups)
        self.one = nn.Sequential(first, nn.BatchNorm2d(8))
        self.other = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8, affine=False))
        self.join = join

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self.one(x), self.other(x), x)


def twice(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
    return torch.relu(a) * (a + b)


JOINS: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "a sum": lambda a, b, _: torch.relu(a + b),
    "a weighted sum": lambda a, b, _: torch.relu(torch.add(a, b, alpha=2)) + torch.add(b, a, alpha=3),
    "what is read twice": twice,
    "a sum with an input": lambda a, b, x: torch.relu(x) + (x + (a + b)),
    "a sum with less": lambda a, b, _: torch.relu(a.mean((2, 3), keepdim=True) + b) + a,
    "a sum with itself": lambda a, b, _: torch.relu((a + b) + (a + b)),
    "a part of a sum": lambda a, b, _: F.avg_pool2d(torch.relu(a + b), 3, 1) + b[:, :, 1:-1, 1:-1],
}


def captured(model: nn.Module) -> Captured:
    return capture(model.double(), (images(3, 8, 15, 18).double().requires_grad_(),))


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("name", JOINS)
@pytest.mark.slow
def test_values_are_the_same_and_inputs_stay_as_they_are(name: str, kernel: int) -> None:
    """With and without a halo, which makes a tile hold more of an input than a sum reads."""
    found = captured(Joined(JOINS[name], kernel))
    segment = stretch(found)
    inputs = random_inputs(segment, torch.float64)
    before = [tensor.clone() for tensor in inputs]
    sweep = Sweep(segment, found.program.calls, GRID)
    given = dict(zip(segment.inputs, inputs, strict=True))
    made = sweep.forward(inputs, sweep.gather([given[name] for name in sweep.looks_at]))
    assert relative_error(made, whole(found, segment, inputs, torch.float64).outputs) < EXACT
    assert all(torch.equal(now, then) for now, then in zip(inputs, before, strict=True))


@pytest.mark.parametrize(("bias", "groups"), [(False, 1), (True, 1), (False, 2)])
def test_gradients_behind_it_are_the_same(bias: bool, groups: int) -> None:
    found = captured(Joined(JOINS["a sum"], bias=bias, groups=groups))
    assert error_in_tiles(found, stretch(found), GRID) < EXACT


def test_strided_convolutions_of_single_places() -> None:
    for stride, size in ((2, 15), (3, 16)):
        model = nn.Sequential(nn.Conv2d(4, 8, 1, stride, bias=False), nn.Tanh(), nn.Conv2d(8, 3, 1, stride))
        found = capture(model.double(), (images(2, 4, size, 18).double().requires_grad_(),))
        assert error_in_tiles(found, stretch(found), (1, 1, 2, 1)) < EXACT


def test_a_norm_that_is_folded_wrongly_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the shift of the mean."""

    def unshifted(call: LocalCall, norm: LocalCall, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        factors = factors_of(call, norm, values)
        return {**factors, "bias": torch.zeros_like(factors["bias"])}

    monkeypatch.setattr("stowplan.run.parts.kernels.factors_of", unshifted)
    found = captured(Joined(JOINS["a sum"]))
    assert error_in_tiles(found, stretch(found), GRID) > 1e-3
