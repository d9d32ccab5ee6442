"""Norms behind products: their statistics and gradients by the covariances of what the product reads."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from stowplan.capture import Captured, capture
from stowplan.run.parts.part import Index
from stowplan.techniques.tiles.plan.rounds import rounds_of
from stowplan.techniques.tiles.run.gathering import Covariances, OfProduct
from tests.support.in_tiles import error_in_tiles, errors_in_float32, stretch
from tests.support.models import images

pytestmark = pytest.mark.torch
EXACT = 1e-12
GRID = (1, 1, 2, 3)


class Widened(nn.Module):
    """The end of a bottleneck: few channels widened to many beside a shortcut that does the same."""

    def __init__(self, stride: int = 1, *, bias: bool = False) -> None:
        super().__init__()
        self.narrow = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.expand = nn.Sequential(nn.Conv2d(4, 16, 1, stride, bias=bias), nn.BatchNorm2d(16))
        self.shortcut = nn.Sequential(nn.Conv2d(2, 16, 1, stride, bias=bias), nn.BatchNorm2d(16))
        self.reduce = nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.reduce(torch.relu(self.expand(self.narrow(x)) + self.shortcut(x)))
        return made


def captured(model: nn.Module, dtype: torch.dtype = torch.float64) -> Captured:
    return capture(model.to(dtype), (images(3, 2, 15, 18).to(dtype).requires_grad_(),))


def norms_behind_products(found: Captured, parts: tuple[int, ...]) -> int:
    return sum(len(each.products) for each in rounds_of(stretch(found), parts))


@pytest.mark.parametrize("parts", [GRID, (3, 1, 1, 1), (2, 1, 3, 1), (1, 1, 4, 5)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.slow
def test_gradients_are_the_same(stride: int, bias: bool, parts: tuple[int, ...]) -> None:
    found = captured(Widened(stride, bias=bias))
    assert norms_behind_products(found, parts) == 2
    assert error_in_tiles(found, stretch(found), parts) < EXACT


@pytest.mark.slow
def test_volumes_and_lines_too() -> None:
    line = nn.Sequential(nn.Conv1d(2, 8, 1), nn.BatchNorm1d(8), nn.Tanh())
    volume = nn.Sequential(nn.Conv3d(2, 8, 1), nn.BatchNorm3d(8), nn.Tanh())
    for model, shape, parts in ((line, (2, 2, 40), (1, 1, 3)), (volume, (2, 2, 6, 5, 4), (1, 1, 2, 2, 1))):
        found = capture(model.double(), (torch.randn(shape, dtype=torch.float64).requires_grad_(),))
        assert norms_behind_products(found, parts) == 1
        assert error_in_tiles(found, stretch(found), parts) < EXACT


OTHERS: Mapping[str, nn.Module] = {
    "places that meet": nn.Conv2d(2, 16, 3, padding=1, bias=False),
    "padding": nn.Conv2d(2, 16, 1, padding=1, bias=False),
    "groups": nn.Conv2d(2, 16, 1, groups=2, bias=False),
    "fewer channels": nn.Sequential(nn.Conv2d(2, 16, 3), nn.Conv2d(16, 16, 1, bias=False)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_such_a_product_is_made_to_know_its_norm(name: str) -> None:
    found = captured(nn.Sequential(OTHERS[name], nn.BatchNorm2d(16), nn.Tanh()))
    assert not norms_behind_products(found, GRID)
    assert error_in_tiles(found, stretch(found), GRID) < EXACT


def test_rounded_products_and_cut_channels_are_not_either() -> None:
    assert not norms_behind_products(captured(Widened(), torch.bfloat16), GRID)
    model = nn.Sequential(nn.Conv2d(2, 16, 1), nn.BatchNorm2d(16), nn.Tanh())
    found = captured(model)
    assert norms_behind_products(found, GRID) == 1
    assert not norms_behind_products(found, (1, 2, 2, 1))
    assert error_in_tiles(found, stretch(found), (1, 2, 2, 1)) < EXACT


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.slow
def test_float32_is_within_twice_eagers_own_error(offset: float) -> None:
    """Also where the mean is large against the deviations."""
    found = capture(Widened(), (images(2, 2, 40, 40).requires_grad_(),))
    erred, eagers = errors_in_float32(found, stretch(found), (1, 1, 3, 3), offset)
    assert erred <= 2 * eagers


def test_covariances_of_one_tile_alone_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    add = Covariances.add

    def forget(self: Covariances, part: Tensor, place: Index) -> None:
        for so_far in (self.count, self.mean, self.deviations):
            so_far.zero_()
        add(self, part, place)

    monkeypatch.setattr(Covariances, "add", forget)
    found = captured(Widened())
    assert error_in_tiles(found, stretch(found), GRID) > 1e-3


def test_other_places_than_the_product_reads_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile that begins between two strides looks at its first place."""

    def from_the_first(self: OfProduct, _: object) -> Index:
        return (slice(None), slice(None), *(slice(None, None, step) for step in self.product.strides))

    monkeypatch.setattr(OfProduct, "place", from_the_first)
    found = captured(Widened(2))
    assert error_in_tiles(found, stretch(found), (1, 1, 5, 1)) > 1e-3
