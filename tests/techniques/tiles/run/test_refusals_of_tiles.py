"""Trying tiles never breaks a step: what cannot be tiled is told, what is a fault surfaces."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stowplan import Search
from stowplan.errors import BudgetTooSmall
from stowplan.run.fit import fit, plans_of
from stowplan.run.measure.measure import measure
from stowplan.techniques.tiles.run.candidates import TiledCandidate

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.usefixtures("one_thread", "fresh_cache")]

TILES = ("recompute", "tile")
SHAPE = (2, 6, 12, 12)


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


class Net(nn.Module):
    """A convolution, something, and a convolution."""

    def __init__(self, between: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self._between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self._between(self.first(x).tanh(), x)).square().sum()  # type: ignore[no-any-return]


def dropped(a: Tensor, _: Tensor) -> Tensor:
    return F.dropout(a, 0.5)


def copied(a: Tensor, _: Tensor) -> Tensor:
    return torch.empty_like(a).copy_(a)


def shifted(a: Tensor, x: Tensor) -> Tensor:
    moved = torch.zeros_like(a)
    moved[..., 1:] = a[..., :-1]
    moved[..., :1].copy_(x[..., :1])
    return moved


def drawn_over(a: Tensor, _: Tensor) -> Tensor:
    return a + (2 * a).bernoulli_(0.5) + a.clone().normal_()


def smoothed(a: Tensor, x: Tensor) -> Tensor:
    return F.avg_pool2d(F.dropout(a, 0.3) + x, 3, 1, 1, count_include_pad=False)


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    loss = model(x)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def too_little(model: nn.Module, x: Tensor) -> int:
    """A budget for parameters, gradients, buffers and the input: too little, but refused after a search."""
    held = (*model.parameters(), *model.buffers())
    return 2 * sum(tensor.nbytes for tensor in held) + x.nbytes + 64


def refusal_of(model: nn.Module, x: Tensor, allow: tuple[str, ...] = ("recompute", "tile")) -> BudgetTooSmall:
    with pytest.raises(BudgetTooSmall) as refusal:
        fit(model, (x,), budget=too_little(model, x), allow=allow, search=Search(moves=50))
    return refusal.value


@pytest.mark.parametrize("between", [dropped, copied, shifted, drawn_over, smoothed])
@pytest.mark.parametrize("layout", ["rows", "channels last", "transposed"])
def test_a_step_runs_at_the_smallest_budget_that_tiles_are_said_to_have(
    between: Callable[[Tensor, Tensor], Tensor], layout: str
) -> None:
    x = torch.randn(SHAPE)
    if layout == "channels last":
        x = x.contiguous(memory_format=torch.channels_last)
    if layout == "transposed":
        x = torch.randn(2, 12, 6, 12).transpose(1, 2)
    model = Net(between)
    fitted = fit(model, (x,), budget=refusal_of(model, x).minimum_bytes, allow=TILES, search=Search(moves=50))
    torch.testing.assert_close(step(fitted, x), step(model, x), rtol=1e-4, atol=1e-4)


class Masked(nn.Module):
    """Dropout of what comes in as it lies in memory: its mask is drawn over a tensor that is not dense."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.dropout = nn.Parameter(torch.rand(6, 1, 1)), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(self.dropout(x)) * self.weight).sum()


@pytest.mark.parametrize("seed", range(2))
def test_a_mask_in_another_layout_is_planned_with_tiles_allowed(seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(2, 12, 6, 12).transpose(1, 2) if seed else torch.randn(SHAPE).mT
    model = Masked()
    budget = refusal_of(model, x, ("recompute",)).minimum_bytes - 1
    least = refusal_of(model, x).minimum_bytes
    assert least <= budget + 1
    fitted = fit(model, (x,), budget=least, allow=TILES, search=Search(moves=50))
    torch.testing.assert_close(step(fitted, x), step(model, x))


def test_a_refusal_tells_by_stretch_why_tiles_did_not_help() -> None:
    x = torch.randn(SHAPE)
    refusal = refusal_of(Net(lambda a, _: a.sort(-1).values), x)
    assert refusal.untiled == ("first to sum: aten.sort.default has no region rule",)
    assert str(refusal).endswith("\nTiles were tried:\n  first to sum: aten.sort.default has no region rule")


def test_a_refusal_tells_what_the_step_needs_in_tiles() -> None:
    refusal = refusal_of(Net(dropped), torch.randn(SHAPE))
    assert any("in tiles the step still needs at least about" in line for line in refusal.untiled)


class Watched(nn.Module):
    """A norm beside the step, called for its running statistics alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = Net(lambda a, _: a.sigmoid()), nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        self.norm(self.net.first(x).tanh())
        return self.net(x)  # type: ignore[no-any-return]


def test_a_norm_whose_output_nobody_reads_is_not_tiled() -> None:
    model, plain, x = Watched(), Watched(), torch.randn(SHAPE)
    plain.load_state_dict(model.state_dict())
    refusal = refusal_of(model, x, ("tile",))
    assert any("nobody reads" in line for line in refusal.untiled)
    fitted = fit(model, (x,), budget=refusal.minimum_bytes, allow=("tile",), search=Search(moves=50))
    torch.testing.assert_close(step(fitted, x), step(plain, x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.norm.running_var, plain.norm.running_var)


class Centred(nn.Module):
    """Reads a buffer, or what came in, after it was updated in place."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.net, self._name = Net(self._between), name
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(6))

    def _between(self, a: Tensor, _: Tensor) -> Tensor:
        if self._name == "x":
            return a
        self.mean.mul_(0.9).add_(a.detach().mean((0, 2, 3)), alpha=0.1)
        return a - self.mean[:, None, None]

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.mul_(0.5) if self._name == "x" else x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["mean", "x"])
def test_a_step_that_reads_what_it_updated_is_planned_without_tiles(name: str) -> None:
    model, plain, x = Centred(name), Centred(name), torch.randn(SHAPE)
    plain.load_state_dict(model.state_dict())
    refusal = refusal_of(model, x)
    assert any(f"{name}.updated, which the step overwrites" in line for line in refusal.untiled)
    fitted = fit(model, (x,), budget=refusal.minimum_bytes, allow=TILES, search=Search(moves=50))
    same = x.clone()
    torch.testing.assert_close(step(fitted, x), step(plain, same), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close((x, model.mean), (same, plain.mean))


def with_nothing(a: Tensor, x: Tensor) -> Tensor:
    return torch.cat([a, a[:, :0]], 1) + x[:0].sum()


def test_a_stretch_with_a_tensor_of_no_elements_is_not_tiled() -> None:
    model, x = Net(with_nothing), torch.randn(SHAPE)
    refusal = refusal_of(model, x)
    assert any("has no elements to cut" in line for line in refusal.untiled)
    fitted = fit(model, (x,), budget=refusal.minimum_bytes, allow=TILES, search=Search(moves=50))
    torch.testing.assert_close(step(fitted, x), step(model, x), rtol=1e-4, atol=1e-4)


def test_a_refusal_is_silent_on_tiles_where_they_are_not_allowed() -> None:
    refusal = refusal_of(Net(dropped), torch.randn(SHAPE), ("recompute",))
    assert refusal.untiled == ()
    assert "Tiles" not in str(refusal)


def test_a_refusal_tells_of_a_handful_of_stretches() -> None:
    lines = tuple(f"block {number}: too large" for number in range(8))
    refusal = BudgetTooSmall("no", allowed_bytes=1, minimum_bytes=2, binding=(), untiled=lines)
    assert str(refusal).endswith("block 4: too large\n  and 3 more")
    with_reserve = refusal.beside(10, "the reserve")
    assert with_reserve.untiled == lines
    assert str(with_reserve).startswith("no; with 10 bytes")


def test_a_fault_in_a_candidate_is_no_reason_to_go_without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(_: TiledCandidate) -> int:
        raise KeyError("a fault")

    monkeypatch.setattr(TiledCandidate, "floor_bytes", property(faulty))
    with pytest.raises(KeyError, match="a fault"):
        refusal_of(Net(dropped), torch.randn(SHAPE))


class Halved(torch.autograd.Function):
    """An op whose gradient is not that of what it computes."""

    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        return torch.frexp(x).mantissa * x

    @staticmethod
    def backward(_: object, *gradients: Tensor) -> Tensor:
        return gradients[0] / 2


def test_a_step_with_a_gradient_of_its_own_is_planned_without_tiles() -> None:
    x, model = torch.randn(SHAPE), Net(lambda a, _: Halved.apply(a))  # type: ignore[no-untyped-call]
    refusal = refusal_of(model, x)
    assert any("the whole step" in line and "in its own way" in line for line in refusal.untiled)
    fitted = fit(model, (x,), budget=refusal.minimum_bytes, allow=TILES, search=Search(moves=50))
    assert not plans_of(fitted)[0].tile_maps
    torch.testing.assert_close(step(fitted, x), step(model, x))


class Pooled(nn.Module):
    """Pools, made large again, and a loss: small tiles, of which each leaves little behind."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6, 1, 1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        once = F.interpolate(F.max_pool2d(x, 2), scale_factor=2.0, mode="nearest")
        twice = F.interpolate(F.max_pool2d(once, 2), scale_factor=2.0, mode="nearest")
        small = F.avg_pool2d(twice, 2)
        large = F.interpolate(small, size=(8, 8), mode="bilinear", align_corners=True)
        return (large * self.weight + (once.mean() + twice.mean()) * 0.01).square().mean()


def test_a_tile_leaves_nothing_behind_for_the_next() -> None:
    model, x = Pooled(), torch.randn(1, 6, 8, 8, dtype=torch.float64)
    budget = refusal_of(model, x, ("tile",)).minimum_bytes
    fitted = fit(model, (x,), budget=budget, allow=("tile",), search=Search(moves=50))
    assert plans_of(fitted)[0].tile_maps
    measured = measure(lambda: fitted(x).backward(), before=[*model.parameters(), x])
    assert measured.measured_peak_bytes <= budget


class Grouped(nn.Module):
    """A kernel that copies the part it reads: tiles in the middle take more than those at borders."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 8, 3, padding=1, groups=4, bias=False)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return F.mse_loss(self.first(x).square(), z)


def test_the_tile_that_reads_most_keeps_to_the_budget() -> None:
    model, z = Grouped().double(), torch.randn(2, 8, 8, 8, dtype=torch.float64)
    x = torch.randn_like(z).contiguous(memory_format=torch.channels_last).requires_grad_()
    with pytest.raises(BudgetTooSmall) as refusal:
        fit(model, (x, z), budget=1, allow=("tile",), search=Search(moves=50))
    budget = refusal.value.minimum_bytes
    fitted = fit(model, (x, z), budget=budget, allow=("tile",), search=Search(moves=50))
    assert plans_of(fitted)[0].tile_maps
    measured = measure(lambda: fitted(x, z).backward(), before=[*model.parameters(), x, z])
    assert measured.measured_peak_bytes <= budget
