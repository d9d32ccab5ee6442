"""What a budget counts, and that a loop hears of what it does not count before it takes more."""

import copy
import gc
import logging
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from stowplan import Search
from stowplan.capture import capture
from stowplan.errors import BudgetTooSmall
from stowplan.ops.cublas import cublas_workspaces, workspace_bytes
from stowplan.plan.cards import card_named
from stowplan.run.fit import fit, plans_of
from stowplan.units import parse_bytes

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread", "alone_here")]


@pytest.fixture
def alone_here() -> Iterator[None]:
    """Models of earlier tests, which a traceback may keep alive, are not there for whoever looks."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Layers(nn.Module):
    """Gradients, and each half of AdamW's state, take as much as the parameters: `PARAMETERS`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(96, 96), nn.GELU())))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.net(x).square().mean()
        return loss


X = torch.randn(512, 96)
PARAMETERS = sum(p.nbytes for p in Layers().parameters())


@cache
def step_bytes() -> int:
    """What the step takes if nothing is recomputed."""
    return plans_of(planned(Layers(), budget="1GiB"))[0].projected_peak_bytes


def ample() -> int:
    """Enough for the step, and for little beside it."""
    return step_bytes() + 10_000


@pytest.fixture
def words(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What the user has heard so far."""
    caplog.set_level(logging.WARNING, logger="stowplan")
    return lambda: [record.getMessage() for record in caplog.records]


def planned(model: nn.Module, **options: object) -> nn.Module:
    how = {
        "budget": options.get("budget") or ample(),
        "allow": ["recompute"],
        "search": Search(moves=3),
    } | options
    return fit(model, (X,), **how)  # type: ignore[arg-type]


def test_a_loop_within_its_budget_hears_nothing(words: Callable[[], list[str]]) -> None:
    fitted = planned(Layers())
    optimizer = SGD(fitted.parameters())
    for _ in range(4):
        fitted(X).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert words() == []


def test_state_of_an_optimizer_made_later_is_told_before_it_is_there(words: Callable[[], list[str]]) -> None:
    fitted = planned(Layers())
    optimizer = AdamW(fitted.parameters())
    loss = fitted(X)
    (word,) = words()
    assert "state that AdamW keeps" in word
    assert "optimizer=" in word
    for _ in range(3):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = fitted(X)
    assert len(words()) == 1


def test_an_optimizer_that_was_loaded_is_told_with_its_state(words: Callable[[], list[str]]) -> None:
    model = Layers()
    before = AdamW(model.parameters())
    model(X).backward()
    before.step()
    before.zero_grad()
    saved = before.state_dict()
    del before
    fitted = planned(model)
    optimizer = AdamW(fitted.parameters())
    optimizer.load_state_dict(saved)
    fitted(X)
    (word,) = words()
    assert "state of AdamW" in word


@pytest.mark.parametrize("in_place", [False, True], ids=["accumulated", "zeroed in place"])
def test_gradients_that_stay_are_told_before_the_second_forward(
    words: Callable[[], list[str]], in_place: bool
) -> None:
    fitted = planned(Layers())
    fitted(X).backward()
    assert words() == []
    if in_place:
        fitted.zero_grad(set_to_none=False)
    fitted(X)
    (word,) = words()
    assert "gradients of earlier backwards" in word
    assert f"({plans_of(fitted)[0].projected_peak_bytes + PARAMETERS} bytes)" in word


@pytest.mark.parametrize("kind", ["module", "dict"])
def test_copies_of_the_parameters_are_told(words: Callable[[], list[str]], kind: str) -> None:
    fitted = planned(Layers())
    kept = copy.deepcopy(fitted) if kind == "module" else dict(fitted.state_dict())
    if isinstance(kept, dict):
        kept = {name: tensor.clone() for name, tensor in kept.items()}
    fitted(X)
    (word,) = words()
    assert ("other parameters of Layers" if kind == "module" else "copies of the parameters") in word


def test_data_is_not_counted(words: Callable[[], list[str]]) -> None:
    batches = [torch.randn(512, 96) for _ in range(4)]
    fitted = planned(Layers())
    for x in batches:
        fitted(x).backward()
        fitted.zero_grad()
    assert words() == []


@pytest.mark.parametrize("loop", ["adamw", "accumulated", "ema"])
def test_the_reserve_that_is_advised_is_enough(words: Callable[[], list[str]], loop: str) -> None:
    fitted, kept = planned(Layers()), list[object]()
    reserve = ""
    for _ in range(2):
        optimizer = AdamW(fitted.parameters()) if loop == "adamw" else SGD(fitted.parameters())
        kept = [copy.deepcopy(fitted)] if loop == "ema" else []
        for _ in range(3):
            fitted(X).backward()
            optimizer.step()
            if loop != "accumulated":
                optimizer.zero_grad()
        if not reserve:
            reserve = words()[-1].split('reserve="')[1].split('"')[0]
            heard = len(words())
            del optimizer, fitted
            kept.clear()
            fitted = planned(Layers(), budget=ample() + parse_bytes(reserve), reserve=reserve)
    assert len(words()) == heard
    assert parse_bytes(reserve) < 2.2 * PARAMETERS


def test_fit_plans_for_gradients_and_state_that_it_finds(words: Callable[[], list[str]]) -> None:
    model = Layers()
    optimizer = AdamW(model.parameters())
    model(X).backward()
    (plan,) = plans_of(planned(model, budget=step_bytes() + 4 * PARAMETERS))
    assert plan.allowed_bytes <= step_bytes() + PARAMETERS
    assert words() == []
    (plan,) = plans_of(planned(model, budget=step_bytes() + 2 * PARAMETERS))
    assert plan.projected_peak_bytes <= step_bytes() - PARAMETERS
    (word,) = words()
    assert "state that AdamW keeps" in word
    assert "gradients in .grad" in word
    with pytest.raises(BudgetTooSmall, match=r"gradients in \.grad"):
        planned(model, budget=PARAMETERS)
    del optimizer


def test_with_optimizer_its_state_is_the_plans_own(words: Callable[[], list[str]]) -> None:
    model = Layers()
    optimizer = AdamW(model.parameters())
    fitted = planned(model, budget=step_bytes() + 3 * PARAMETERS, optimizer=optimizer)
    for _ in range(3):
        fitted(X).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert words() == []


def test_a_slice_counts_what_it_reads() -> None:
    data = torch.randn(40 * 512, 96)
    whole, part = planned(Layers()), fit(Layers(), (data[512:1024],), budget=ample(), search=Search(moves=3))
    assert plans_of(part)[0].projected_peak_bytes == plans_of(whole)[0].projected_peak_bytes
    assert plans_of(part)[0].time_ratio == 1
    captured = capture(Layers(), (data[:512],))
    assert captured.slices == {"x": data.nbytes}
    assert captured.eager.peak_bytes() == capture(Layers(), (X,)).eager.peak_bytes()


def test_columns_and_expanded_rows_count_their_elements() -> None:
    wide = torch.randn(512, 960)
    assert capture(Layers(), (wide[:, 96:192],)).graph.tensors["x"].nbytes == X.nbytes
    assert capture(Layers(), (torch.randn(1, 96).expand(512, 96),)).graph.tensors["x"].nbytes == 96 * 4


class Shifted(Layers):
    """Adds a slice of a table that is an ordinary attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.row = torch.randn(1000, 96)[:1]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.row)


def test_an_attribute_that_is_a_slice_counts_what_forward_reads() -> None:
    (plan,) = plans_of(planned(Shifted(), budget=2 * ample()))
    assert plan.allowed_bytes == 2 * ample() - 96 * 4


def test_autocast_after_fit_is_said_and_planned_once(words: Callable[[], list[str]]) -> None:
    fitted = planned(Layers(), budget=2 * ample())
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            fitted(X).backward()
        fitted.zero_grad()
    (word,) = words()
    assert 'inside torch.autocast("cpu", torch.bfloat16)' in word
    assert "call fit in the same autocast" in word
    assert len(plans_of(fitted)) == 2


@pytest.mark.parametrize(
    ("capability", "config", "expected"),
    [
        (8.0, None, 8_519_680),
        (9.0, None, 33_554_432),
        (12.0, None, 33_554_432),
        (8.0, ":4096:8", 33_554_432),
        (9.0, ":16:8", 131_072),
        (8.0, ":4096:2:16:8", 8_519_680),
        (8.0, "4096", 8_519_680),  # PyTorch ignores it
        (8.0, ":0:0", 0),
    ],
)
def test_workspaces_of_cublas(capability: float, config: str | None, expected: int) -> None:
    environment = {} if config is None else {"CUBLAS_WORKSPACE_CONFIG": config}
    assert workspace_bytes(capability, environment) == expected
    ops = capture(Layers(), (X,)).graph.ops
    assert cublas_workspaces(ops, capability, environment) == (expected, expected)
    pointwise = [op for op in ops if "mm" not in op.type]
    assert cublas_workspaces(pointwise, capability, environment) == ()


def test_cards_count_the_workspaces_of_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = capture(Layers(), (X,)).graph
    assert sum(card_named("a100-80gb").lasting_bytes(graph)) == 17_039_360
    assert sum(card_named("h100-80gb").lasting_bytes(graph)) == 67_108_864
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert sum(card_named("h100-80gb").lasting_bytes(graph)) == 262_144
