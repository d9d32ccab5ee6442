"""Steps that differ in dtype or layout alone are tiled in one process, and none sees a sweep of another."""

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from stowplan import Search
from stowplan.capture import capture
from stowplan.capture.program import handle_of, living_handles
from stowplan.errors import BadUse, BudgetTooSmall
from stowplan.ir import Phase
from stowplan.run.fit import fit, plans_of
from stowplan.techniques.tiles.plan.segment import segment_of
from stowplan.techniques.tiles.run.sweep import Sweep

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.usefixtures("one_thread", "fresh_cache")]

TILES = ("recompute", "tile")
IMAGE = (1, 2, 48, 48)


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def network(
    dtype: torch.dtype = torch.float32, memory_format: torch.memory_format = torch.contiguous_format
) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(8)
    ).to(dtype)
    for weight in (p for p in net.parameters() if p.dim() == 4):
        weight.data = weight.data.contiguous(memory_format=memory_format)
    return net


def image(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(IMAGE, generator=torch.Generator().manual_seed(1)).to(dtype)


def least_bytes(model: nn.Module, x: Tensor) -> int:
    with pytest.raises(BudgetTooSmall) as refusal:
        fit(model, (x,), budget=1, allow=TILES, search=Search(moves=50))
    return refusal.value.minimum_bytes


def in_tiles(model: nn.Module, x: Tensor) -> nn.Module:
    fitted = fit(model, (x,), budget=int(least_bytes(model, x) * 1.05), allow=TILES, search=Search(moves=50))
    assert plans_of(fitted)[0].tile_maps, "the budget was to be one that asks for tiles"
    return fitted


def step(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad(set_to_none=True)
    made = model(x)
    made.square().sum().backward()
    return made.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def assert_like_eager(fitted: nn.Module, model: nn.Module, x: Tensor) -> None:
    expected, gradients = step(model, x)
    made, found = step(fitted, x)
    assert (made.dtype, made.stride()) == (expected.dtype, expected.stride())
    torch.testing.assert_close(made, expected)
    torch.testing.assert_close(found, gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "memory_format"),
    [(torch.float64, torch.contiguous_format), (torch.float32, torch.channels_last)],
)
def test_twins_of_another_dtype_or_layout_take_turns(
    dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    one, other = network(), network(dtype, memory_format)
    x, like_x = image(), image(dtype).contiguous(memory_format=memory_format)
    first = in_tiles(one, x)
    assert_like_eager(first, one, x)
    second = in_tiles(other, like_x)
    for _ in range(2):
        assert_like_eager(first, one, x)
        assert_like_eager(second, other, like_x)


def test_two_fits_of_one_step_have_plans_of_the_same_names_and_sweeps_of_their_own() -> None:
    model, x = network(), image()
    first, second = in_tiles(model, x), in_tiles(model, x)  # the second plan comes from the cache
    assert [op.attributes for op in plans_of(first)[0].graph.ops] == [
        op.attributes for op in plans_of(second)[0].graph.ops
    ]
    before = living_handles()
    del first
    gc.collect()
    assert living_handles() < before
    assert_like_eager(second, model, x)


def test_sweeps_go_with_the_step_they_belong_to() -> None:
    model, x = network(), image()
    budget = int(least_bytes(model, x) * 1.05)
    counts = []
    for _ in range(3):
        fitted = fit(model, (x,), budget=budget, allow=TILES, search=Search(moves=50))
        step(fitted, x)
        gc.collect()
        counts.append(living_handles())
        del fitted
    gc.collect()
    assert counts[0] == counts[1] == counts[2] > living_handles()


def test_backward_runs_though_the_fitted_model_is_gone() -> None:
    model, x = network(), image()
    fitted = in_tiles(model, x)
    loss = fitted(x).square().sum()
    del fitted
    gc.collect()
    model.zero_grad(set_to_none=True)
    loss.backward()
    found = [p.grad for p in model.parameters()]
    torch.testing.assert_close(found, step(model, x)[1], rtol=1e-4, atol=1e-5)


def sweep_of(x: Tensor, model: nn.Module) -> Sweep:
    captured = capture(model, (x,))
    forward = [op.id for op in captured.graph.ops if op.phase is Phase.FORWARD]
    return Sweep(segment_of(captured.graph, forward[:2]), captured.program.calls, (1, 1, 2, 2))


def test_a_name_tells_dtype_and_layout_and_is_the_same_each_time() -> None:
    layout = torch.channels_last
    names = [
        sweep_of(image(), network()).name,
        sweep_of(image(torch.float64), network(torch.float64)).name,
        sweep_of(image().contiguous(memory_format=layout), network(memory_format=layout)).name,
    ]
    assert len(set(names)) == len(names)
    assert sweep_of(image(), network()).name == names[0]


def test_a_key_is_of_one_sweep_and_refused_when_it_is_gone() -> None:
    one, other = sweep_of(image(), network()), sweep_of(image(), network())
    assert one.key != other.key
    assert handle_of(one.key) is one
    gone = other.key
    del other
    gc.collect()
    with pytest.raises(BadUse, match="belongs to a step that no longer exists"):
        handle_of(gone)
