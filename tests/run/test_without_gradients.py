"""Calls without gradients: of a frozen model, and the evaluation of one that is trained."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy
from io import BytesIO
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stowplan
from stowplan.errors import BadUse, BudgetTooSmall, CaptureError
from stowplan.plan.draft import Exactness
from stowplan.run.call_planner import CallPlanner
from stowplan.run.measure.check import check
from stowplan.run.measure.measure import measure
from stowplan.run.planning.planner import DraftedStep, Subject, draft_step
from stowplan.run.target import Target
from stowplan.torch_private import pytree

MODES: list[Callable[[], AbstractContextManager[Any]]] = [
    torch.enable_grad,
    torch.no_grad,
    torch.inference_mode,
]
pytestmark = pytest.mark.slow
EXACT = ("recompute",)
X = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(0))


class Keeps(nn.Module):
    """Holds what it no longer needs, as variables of Python do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.last = nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        second = torch.relu(first)
        third = torch.relu(self.second(second))
        last: Tensor = self.last(third)
        return last


class Block(nn.Module):
    """A residual block with group norms, as in decoders."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(2))
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for norm, conv in zip(self.norms, self.convs, strict=True):
            h = conv(F.silu(norm(h)))
        return x + h


def decoder() -> nn.Module:
    torch.manual_seed(0)
    up = nn.Upsample(scale_factor=2.0, mode="nearest")
    net = nn.Sequential(
        nn.Conv2d(4, 16, 3, padding=1), Block(16), up, Block(16), nn.Conv2d(16, 3, 3, padding=1)
    )
    return net.requires_grad_(False).eval()


def held(model: nn.Module, *args: Tensor) -> list[Tensor]:
    return [*model.parameters(), *model.buffers(), *args]


def peak_of(call: Callable[[], object], tensors: list[Tensor]) -> int:
    return measure(call, device="cpu", before=tensors).measured_peak_bytes


def agree(one: object, other: object) -> bool:
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("mode", MODES)
def test_a_plan_frees_what_python_holds(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    eager, x = Keeps().requires_grad_(False), torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        plain = peak_of(lambda: eager(x), held(eager, x))
    fitted = stowplan.fit(eager, (x,), budget=plain - 200_000, allow=EXACT)
    (plan,) = stowplan.plans_of(fitted)
    with mode():
        planned, expected = fitted(x), eager(x)
        measured = peak_of(lambda: fitted(x), held(eager, x))
    assert torch.equal(planned, expected)
    assert not planned.requires_grad
    assert planned.is_inference() == expected.is_inference()
    assert measured == plan.projected_peak_bytes <= plan.allowed_bytes


def test_a_budget_that_is_too_small_names_the_smallest() -> None:
    model, x = Keeps().requires_grad_(False), torch.randn(1, 3, 64, 64)
    with pytest.raises(BudgetTooSmall) as refusal:
        stowplan.fit(model, (x,), budget="100KiB", allow=EXACT)
    least = refusal.value.minimum_bytes
    stowplan.fit(model, (x,), budget=least, allow=EXACT)
    with pytest.raises(BudgetTooSmall):
        stowplan.fit(model, (x,), budget=least - 4096, allow=EXACT)


class Returns(nn.Module):
    """Changes a buffer and an attribute; returns its argument, its parameter and a view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> dict[str, object]:
        self.count += 1
        self.kept = h = (x * self.weight).relu()
        return {"x": x, "weight": self.weight, "h": h, "view": h[0], "count": self.count, "number": 3}


class Writes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x[:, 0] = x.mul_(2)[:, 1]
        return x.sum()


class Asks(nn.Module):
    """Asks which mode it runs in."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (2 + torch.is_grad_enabled() + 3 * torch.is_inference_mode_enabled())


def norms() -> nn.Module:
    return nn.Sequential(nn.Conv1d(8, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.BatchNorm1d(8), nn.Dropout())


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "batch norm and dropout, training": (norms, True),
    "batch norm and dropout, evaluating": (norms, False),
    "transformer, whose evaluation has kernels of its own": (transformer, False),
    "lstm": (lambda: nn.LSTM(16, 8, 2, batch_first=True, dropout=0.3), True),
    "results": (Returns, False),
    "an argument that is written": (Writes, False),
    "modes": (Asks, False),
}


@pytest.mark.parametrize("name", MODELS)
def test_results_changes_and_draws_are_eagers(name: str) -> None:
    make, is_training = MODELS[name]
    torch.manual_seed(0)
    eager = make().train(is_training).requires_grad_(False)
    model = deepcopy(eager)
    args, others = (X.clone(),), (X.clone(),)
    fitted = stowplan.fit(model, others, budget="1GiB")
    for mode in MODES:
        with mode():
            found = []
            for module, given in ((eager, args), (fitted, others)):
                torch.manual_seed(1)
                found.append((module(*given), torch.get_rng_state(), given, module.state_dict()))
            assert agree(*found), mode


def test_tiles_with_norms_inside_are_exact_and_have_no_seam() -> None:
    model, z = decoder(), torch.randn(1, 4, 96, 96)
    with torch.no_grad():
        whole = model(z)
        plain = peak_of(lambda: model(z), held(model, z))
    standing = sum(tensor.nbytes for tensor in held(model, z))
    fitted = stowplan.fit(model, (z,), budget=standing + (plain - standing) // 4, allow=("tile",))
    (plan,) = stowplan.plans_of(fitted)
    with torch.no_grad():
        tiled = fitted(z)
        measured = peak_of(lambda: fitted(z), held(model, z))
        exact = deepcopy(model).double()(z.double())
    assert plan.is_tiled
    assert plan.exactness is Exactness.ROUNDING
    assert measured <= plan.allowed_bytes
    difference = (tiled - whole).abs()
    assert difference.max() <= 2 * (whole - exact).abs().max()
    rows = plan.tile_maps[-1].parts[2]
    borders = [192 * n // rows for n in range(1, rows)]
    at_borders = torch.cat([difference[:, :, row - 1 : row + 1].flatten() for row in borders])
    assert at_borders.max() <= 1.5 * difference.max()
    assert at_borders.mean() <= 1.5 * difference.mean()


def test_a_loss_over_a_vocabulary_is_computed_in_tiles() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.head = nn.Embedding(4000, 32), nn.Linear(32, 4000, bias=False)

        def forward(self, ids: Tensor) -> dict[str, Tensor]:
            logits = self.head(torch.tanh(self.embed(ids[:, :-1])))
            return {"loss": F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())}

    model, ids = Head().requires_grad_(False), torch.randint(0, 4000, (2, 257))
    fitted = stowplan.fit(model, (ids,), budget="5MiB", allow=("tile",))
    (plan,) = stowplan.plans_of(fitted)
    assert plan.is_tiled
    with torch.no_grad():
        torch.testing.assert_close(fitted(ids), model(ids))
        assert peak_of(lambda: fitted(ids), held(model, ids)) <= plan.allowed_bytes < plan.plain_peak_bytes


def trained(budget: str = "1GiB", batch: int = 2) -> tuple[nn.Module, nn.Module, Tensor]:
    """A model in eager, the same fitted for training, and a batch."""
    eager, x = Keeps(), torch.randn(batch, 3, 64, 64)
    return eager, stowplan.fit(deepcopy(eager), (x,), budget=budget, loss=_square, allow=EXACT), x


def _square(output: Tensor) -> Tensor:
    return output.square().mean()


def same_step(eager: nn.Module, fitted: nn.Module, x: Tensor) -> bool:
    _square(eager(x)).backward()  # type: ignore[no-untyped-call]
    fitted(x).backward()
    pairs = zip(eager.parameters(), fitted.parameters(), strict=True)
    return all(
        torch.equal(one.grad, other.grad)
        for one, other in pairs
        if one.grad is not None and other.grad is not None
    )


def test_evaluation_that_fits_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    eager, fitted, x = trained()
    with caplog.at_level(logging.WARNING), torch.no_grad():
        for batch in (x, x[:1], torch.cat([x, x]), x):
            assert torch.equal(fitted.eval()(batch), _square(eager.eval()(batch)))
    assert not caplog.records
    assert len(stowplan.plans_of(fitted)) == 1
    assert same_step(eager, fitted, x)


def test_evaluation_that_does_not_fit_runs_by_a_plan_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    eager, fitted, x = trained("4.5MiB")
    large = torch.randn(5, 3, 64, 64)
    with torch.no_grad():
        plain = peak_of(lambda: eager(large), held(eager, large))
        for _ in range(2):
            assert torch.equal(fitted(large), _square(eager(large)))
        measured = peak_of(lambda: fitted(large), held(fitted, large))
    assert measured <= 4.5 * 2**20 < plain
    said = [record.getMessage() for record in caplog.records if "without gradients" in record.getMessage()]
    assert len(said) == 1
    assert "run by a plan" in said[0]
    assert [plan.has_backward for plan in stowplan.plans_of(fitted)] == [True, False]
    assert same_step(eager, fitted, x)


def test_evaluation_that_no_plan_fits_runs_as_it_is_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    eager, fitted, _ = trained("3MiB")
    for rows in (64, 65):
        large = torch.randn(16, 3, rows, 64)
        with torch.no_grad():
            assert torch.equal(fitted(large), _square(eager(large)))
    said = [record.getMessage() for record in caplog.records if "runs as it is" in record.getMessage()]
    assert len(said) == 1
    assert "the smallest plan found needs" in said[0]


def test_calls_that_grow_are_captured_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, fitted, _ = trained()
    plan, planned = CallPlanner.plan, list[object]()

    def counted(self: Any, *args: Any) -> object:
        planned.append(args)
        return plan(self, *args)

    monkeypatch.setattr(CallPlanner, "plan", counted)
    with torch.no_grad():
        for rows in range(8, 40):
            x = torch.randn(1, 3, rows, 16)
            assert torch.equal(fitted(x), _square(eager(x)))
    assert len(planned) == 1


class Cache:
    """Keys of earlier calls, in an object."""

    def __init__(self) -> None:
        self.keys = torch.zeros(2, 0, 4)


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        cache.keys = torch.cat([cache.keys, self.lin(x)], 1)
        return cache.keys.sum(1), cache


def test_a_growing_cache_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    eager = Remembers().requires_grad_(False)
    with pytest.raises(CaptureError, match="returns a Cache"):
        stowplan.fit(eager, (torch.ones(2, 1, 4), Cache()), budget="1GiB")
    model = nn.Sequential(nn.Linear(4, 4))
    fitted = stowplan.fit(_Holds(eager, model), (torch.ones(2, 1, 4),), budget="1GiB")
    caches = [Cache(), Cache()]
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(2, 1, 4)
            mine, theirs = fitted(x, caches[0])[0], eager(x, caches[1])[0]
            assert torch.equal(mine, theirs)
            assert torch.equal(caches[0].keys, caches[1].keys)
    said = [record.getMessage() for record in caplog.records if "runs as it is" in record.getMessage()]
    assert len(said) == 1


class _Holds(nn.Module):
    """Trains one part; called with a cache, it is the other one."""

    def __init__(self, remembers: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.remembers, self.head = remembers, head

    def forward(self, x: Tensor, cache: Cache | None = None) -> Any:
        return self.head(x).sum() if cache is None else self.remembers(x, cache)


def test_tensors_of_inference_mode_may_be_arguments() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).requires_grad_(False)
    with torch.inference_mode():
        x = X + 0
        fitted = stowplan.fit(model, (x,), budget="1GiB")
        assert torch.equal(fitted(x), model(x))
    with torch.no_grad():
        assert torch.equal(fitted(x), model(x))


def test_copies_and_files_plan_their_own_calls() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).requires_grad_(False)
    fitted = stowplan.fit(model, (X,), budget="1GiB")
    file = BytesIO()
    torch.save(fitted, file)
    file.seek(0)
    for other in (deepcopy(fitted), torch.load(file, weights_only=False)):
        with torch.no_grad():
            assert torch.equal(other(X), model(X))
        assert stowplan.plans_of(other)


def test_a_model_that_is_trained_later_gets_a_plan_with_a_backward_half() -> None:
    eager = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).requires_grad_(False)
    model = deepcopy(eager)
    fitted = stowplan.fit(model, (X,), budget="1GiB", outputs="all")
    for module in (eager, model):
        module.requires_grad_(True)
    for module in (eager, fitted):
        module(X).square().mean().backward()
    assert agree([p.grad for p in eager.parameters()], [p.grad for p in model.parameters()])
    assert [plan.has_backward for plan in stowplan.plans_of(fitted)] == [False, True]


def test_an_optimizer_has_nothing_to_update() -> None:
    model = nn.Linear(16, 4).requires_grad_(False)
    with pytest.raises(BadUse, match="nothing wants a gradient"):
        stowplan.fit(model, (X,), budget="1GiB", optimizer=torch.optim.SGD(model.parameters()))


def test_check_compares_results_and_finds_what_differs() -> None:
    target = Target(Keeps().requires_grad_(False), (torch.randn(1, 3, 16, 16),))

    def planning(subject: Subject) -> DraftedStep:
        return draft_step(subject, 2**20)

    record = check(target, planning, steps=2, rounds=1)
    assert record.holds
    assert {"result", "first.weight"} <= {difference.tensor for difference in record.differences}
    calls = iter(range(10**6))

    class Drifts(Keeps):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + (1.0 if next(calls) > 1 else 0.0)

    target = Target(Drifts().requires_grad_(False), target.args)
    with pytest.raises(CaptureError):  # it advances an iterator
        stowplan.fit(target.model, target.args, budget="1MiB")
    assert not check(target, planning, steps=2, rounds=1).holds
