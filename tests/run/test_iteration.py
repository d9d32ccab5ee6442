"""The whole iteration under one budget: the user's loop, eager's bits, the projected peak."""

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, NAdam, Optimizer, RMSprop

from stowplan import Iteration, Search
from stowplan.api import check, planner_for
from stowplan.errors import BadUse, BudgetTooSmall, IllegalPlan
from stowplan.ops.effects import UPDATE
from stowplan.plan.draft import Draft
from stowplan.plan.judge.verify import verify
from stowplan.plan.options import PlanOptions
from stowplan.plan.plan import Plan
from stowplan.plan.steps import Compute
from stowplan.run.fit import fit, plans_of
from stowplan.run.largest import largest_of
from stowplan.run.measure.measure import measure
from stowplan.run.planning.planner import step_planner
from stowplan.run.target import Target, subject_of
from stowplan.techniques.iteration.run.iteration import RunningIteration
from stowplan.techniques.iteration.run.one_by_one import OneByOne, refuse_unless_one_by_one
from stowplan.techniques.iteration.run.planner import IterationPlanner
from stowplan.techniques.iteration.run.state_elsewhere import StateElsewhere
from stowplan.techniques.offload.run.disk import DiskTier
from tests.support.asking import asked
from tests.support.iterations import ROOMY as AMPLE
from tests.support.iterations import Loop, differing

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]

ROOMY = 10**9
ASKED: dict[str, Any] = {"allow": ("recompute",)}  # however slow


class Tower(nn.Module):
    """Equal layers with dropout, far heavier than what is computed by them, after running statistics."""

    def __init__(self, layers: int = 4, width: int = 48, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.scale = nn.Parameter(torch.ones(1))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for layer in self.layers:
            x = self.dropout(torch.tanh(layer(x)))
        return (self.scale * x).square().mean()


class Words(nn.Module):
    """A table of words that is read first and last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm, self.inner = nn.Embedding(40, 24), nn.LayerNorm(24), nn.Linear(24, 24)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.inner(self.table(words))))
        logits = nn.functional.linear(hidden, self.table.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten())


class Pictures(nn.Module):
    """Convolutions with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        found: Tensor = self.head(torch.relu(self.second(x)).mean((2, 3)))
        return found.square().mean()


class Sign(Optimizer):
    """Like Lion: an optimizer that PyTorch does not have."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, group["lr"])

    def update(self, p: Tensor, gradient: Tensor, lr: float) -> None:
        mean = self.state[p].setdefault("mean", torch.zeros_like(p))
        p.add_(mean.mul(0.9).add(gradient, alpha=0.1).sign_(), alpha=-lr)
        mean.lerp_(gradient, 0.01)


class Coupled(Sign):
    """Divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in every]).norm()
        for p in every:
            p.sub_(p.grad / norm)


class Noisy(Sign):
    """Draws noise for one parameter after the other."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.add_(torch.randn_like(p))


class Masters(Sign):
    """Updates copies of narrow parameters in float32, and rounds them."""

    def update(self, p: Tensor, gradient: Tensor, lr: float) -> None:
        master = self.state[p].setdefault("master", p.detach().float())
        mean = self.state[p].setdefault("mean", torch.zeros_like(master))
        p.copy_(master.sub_(mean.lerp_(gradient.float(), 0.1), alpha=lr))


def tower_batch() -> Tensor:
    return torch.randn(8, 48, generator=torch.Generator().manual_seed(3))


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "tower": (Tower, tower_batch),
    "words": (Words, lambda: torch.arange(12).view(2, 6)),
    "pictures": (Pictures, lambda: torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)),
}
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "momentum": lambda p: SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: AdamW(p, lr=0.01),
    "foreach": lambda p: AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: Adagrad(p, lr=0.01),
    "rmsprop": lambda p: RMSprop(p, lr=0.01, momentum=0.9),
    "nadam": lambda p: NAdam(p, lr=torch.tensor(0.01)),
    "sign": Sign,
}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices, and what is not one."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() <= 1], "lr": 0.005},
    ]


def loop(
    run: nn.Module, optimizer: Optimizer, x: Tensor, iterations: int, seed: int = 1, **how: Any
) -> list[float]:
    """The usual loop, with a scheduler; the losses."""
    torch.manual_seed(seed)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
    losses = []
    for _ in range(iterations):
        for _ in range(how.get("accumulate", 1)):
            loss = run(x)
            loss.backward()
            losses.append(loss.detach().item())
        if how.get("clip"):
            nn.utils.clip_grad_norm_(run.parameters(), how["clip"])
        if how.get("clip_value"):
            nn.utils.clip_grad_value_(run.parameters(), how["clip_value"])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return losses


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Parameters, buffers and state by name."""
    found = dict(model.state_dict())
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"{number} {name}": v for name, v in state.items() if isinstance(v, Tensor)}
    return found


def same(one: tuple[nn.Module, Optimizer], other: tuple[nn.Module, Optimizer]) -> bool:
    first, second = state_of(*one), state_of(*other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def fitted_pair(
    kind: Callable[..., Optimizer] = OPTIMIZERS["adamw"], *, iterations: int = 0, **options: Any
) -> tuple[nn.Module, Optimizer, nn.Module]:
    """A tower, its optimizer, and the tower fitted with it, after some iterations: the first keeps all."""
    model = Tower(dropout=0.0)
    optimizer = kind(model.parameters())
    how = asked({"optimizer": optimizer, "moves": 2, **options})
    fitted = fit(model, (tower_batch(),), budget=ROOMY, **how)
    loop(fitted, optimizer, tower_batch(), iterations)
    return model, optimizer, fitted


@pytest.mark.parametrize("kind", ["momentum", "adamw", "foreach", "fused"])
def test_the_entries_of_the_state_come_in_eagers_order(kind: str) -> None:
    found = list[list[object]]()
    for is_fitted in (False, True):
        model = Tower(dropout=0.0)
        model.layers[1].requires_grad_(False)
        optimizer = OPTIMIZERS[kind](groups_of(model)[::-1])
        run: nn.Module = model
        for trains in (False, True):  # what is trained later comes later
            model.layers[1].requires_grad_(trains)
            if is_fitted:
                run = fit(model, (tower_batch(),), budget=ROOMY, optimizer=optimizer, search=Search(moves=2))
            loop(run, optimizer, tower_batch(), 2)
        state = optimizer.state_dict()["state"]
        found.append([(number, list(entries)) for number, entries in state.items()])
    assert found[0] == found[1]


def smallest(model: nn.Module, x: Tensor, optimizer: Optimizer, **options: Any) -> int:
    """The smallest budget of an iteration."""
    with pytest.raises(BudgetTooSmall) as refusal:
        fit(model, (x,), budget=1, **asked({"optimizer": optimizer, "moves": 3, **ASKED, **options}))
    return refusal.value.minimum_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("net", "kind"),
    [
        ("tower", "adamw"),
        ("tower", "fused"),
        ("words", "nadam"),
        ("pictures", "momentum"),
        ("pictures", "sign"),
    ],
)
def test_twenty_iterations_and_a_resume_have_eagers_bits(net: str, kind: str) -> None:
    """Roomy in the first half; resumed from saved state in the smallest budget for the second."""
    make, batch = NETS[net]
    x, eager = batch(), make()
    eager_optimizer = OPTIMIZERS[kind](groups_of(eager))
    expected = [*loop(eager, eager_optimizer, x, 10), *loop(eager, eager_optimizer, x, 10, seed=2)]
    model = make()
    optimizer = OPTIMIZERS[kind](groups_of(model))
    fitted = fit(model, (x,), budget=ROOMY, optimizer=optimizer, search=Search(moves=3))
    losses = loop(fitted, optimizer, x, 10)
    resumed = make()
    other = OPTIMIZERS[kind](groups_of(resumed))
    resumed.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    tight = fit(
        resumed, (x,), budget=smallest(resumed, x, other), optimizer=other, search=Search(moves=3), **ASKED
    )
    losses += loop(tight, other, x, 10, seed=2)
    assert losses == expected
    assert same((eager, eager_optimizer), (resumed, other))
    assert all(parameter.grad is None for parameter in resumed.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("allow", [("recompute",), ("recompute", "offload")])
def test_masters_of_narrow_parameters_are_state_like_any_other(allow: tuple[str, ...]) -> None:
    x = tower_batch().bfloat16()
    eager = Tower().bfloat16()
    plain = Masters(eager.parameters())
    expected = loop(eager, plain, x, 4)
    model = Tower().bfloat16()
    optimizer = Masters(model.parameters())
    budget = smallest(model, x, optimizer, allow=allow)
    fitted = fit(model, (x,), budget=budget, optimizer=optimizer, search=Search(moves=3), allow=allow)
    there = [*model.parameters(), *model.buffers(), x]
    measured = measure(lambda: loop(fitted, optimizer, x, 4), before=there)
    assert measured.result == expected
    assert same((eager, plain), (model, optimizer))
    assert measured.measured_peak_bytes <= budget


@pytest.mark.slow
@pytest.mark.parametrize(
    "loop",
    [
        Loop("gpt", "single", accumulate=4),
        Loop("vit", "momentum", clips=True),
        Loop("lstm", "foreach", clips=True, accumulate=4),
        Loop("resnet50", "fused"),
        Loop("vgg16", "single", clips=True),
    ],
    ids=str,
)
def test_networks_have_eagers_bits_after_twenty_iterations(loop: Loop) -> None:
    assert not differing(loop.in_eager(20), loop.planned(20, AMPLE))


@pytest.mark.slow
def test_networks_have_eagers_bits_in_the_smallest_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clipped in two backwards. The norm of the iteration before, if it is used, is found."""
    loop = Loop("vit", "fused", clips=True)
    expected, plan = loop.in_eager(20), loop.smallest_plan()
    assert not differing(expected, loop.planned(20, plan=plan))
    with pytest.raises(IllegalPlan, match=r"another step.*second forward"):
        Loop("vit", "fused").planned(1, plan=plan)
    norms, clip = list[Tensor](), nn.utils.clip_grads_with_norm_

    def stale(parameters: Any, most: float, norm: Tensor) -> None:
        if not norms or norm is not norms[-1]:
            norms.append(norm)
        clip(parameters, most, norms[max(0, len(norms) - 2)])

    monkeypatch.setattr(nn.utils, "clip_grads_with_norm_", stale)
    assert differing(expected, loop.planned(20, plan=plan))
    assert len(norms) == 20


@pytest.mark.slow
def test_an_update_before_the_last_micro_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop("gpt", "momentum", accumulate=2)
    counts = RunningIteration._counts

    def early(self: RunningIteration) -> None:
        counts(self)
        self._progress.is_last = True

    monkeypatch.setattr(RunningIteration, "_counts", early)
    with pytest.raises(BadUse, match=r"updated in backward, and optimizer\.step\(\) was not called"):
        loop.planned(3, AMPLE)
    monkeypatch.setattr(RunningIteration, "refuse_between", lambda self: self._between.close())
    assert differing(loop.in_eager(3), loop.planned(3, AMPLE))


def iteration_peak(fitted: nn.Module, optimizer: Optimizer, x: Tensor) -> int:
    """Of an iteration after the first, everything counted."""

    def iteration() -> None:
        torch.autograd.backward(fitted(x))
        optimizer.step()
        optimizer.zero_grad()

    iteration()
    iteration()
    state = [
        v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor) and not v.is_meta
    ]
    return measure(iteration, before=[*fitted.parameters(), x, *state]).measured_peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["momentum", "adamw", "foreach", "fused"])
def test_the_peak_of_an_iteration_is_as_projected(kind: str) -> None:
    x, model = tower_batch(), Tower(dropout=0.0)
    optimizer = OPTIMIZERS[kind](model.parameters())
    budget = smallest(model, x, optimizer)
    assert not optimizer.state
    fitted = fit(model, (x,), budget=budget, optimizer=optimizer, search=Search(moves=3), **ASKED)
    plan, measured = plans_of(fitted)[0], iteration_peak(fitted, optimizer, x)
    assert abs(measured - plan.projected_peak_bytes) <= 0.005 * measured
    assert measured <= 1.005 * budget < plan.plain_peak_bytes


class HalfUsed(Tower):
    """A tower beside which there is a layer that forward does not call."""

    def __init__(self) -> None:
        super().__init__(layers=2, dropout=0.0)
        self.unused = nn.Linear(64, 64)


@pytest.mark.parametrize("frozen", [False, True])
def test_state_of_parameters_that_rest_counts(*, frozen: bool) -> None:
    x, model = tower_batch(), HalfUsed()
    optimizer = Adagrad(model.parameters())  # has its state from the beginning
    model.unused.requires_grad_(not frozen)
    budget = smallest(model, x, optimizer)
    fitted = fit(model, (x,), budget=budget, optimizer=optimizer, search=Search(moves=3), **ASKED)
    assert iteration_peak(fitted, optimizer, x) <= 1.005 * budget


@pytest.mark.slow
def test_the_first_iteration_stays_below_the_peak_too() -> None:
    model, optimizer, fitted = fitted_pair()
    x = tower_batch()

    def iteration() -> None:
        torch.autograd.backward(fitted(x))
        optimizer.step()
        optimizer.zero_grad()

    measured = measure(iteration, before=[*model.parameters(), x]).measured_peak_bytes
    assert measured <= plans_of(fitted)[0].projected_peak_bytes


@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 0.01},
        {"accumulate": 3},
        {"clip_norm": 0.01, "accumulate": 2},
        {"clip_value": 1e-4},
        {"clip_value": 1e-4, "keep_gradients": True},
    ],
)
@pytest.mark.slow
def test_clipping_and_accumulation_have_eagers_bits(options: dict[str, Any]) -> None:
    x, eager = tower_batch(), Tower(dropout=0.0)
    eager_optimizer = OPTIMIZERS["adamw"](eager.parameters())
    times = options.get("accumulate", 1)
    clips: dict[str, Any] = {"clip": options.get("clip_norm"), "clip_value": options.get("clip_value")}
    expected = loop(eager, eager_optimizer, x, 4, accumulate=times, **clips)
    unclipped = Tower(dropout=0.0)
    loop(unclipped, own := OPTIMIZERS["adamw"](unclipped.parameters()), x, 4, accumulate=times)
    assert any(clips.values()) != same((eager, eager_optimizer), (unclipped, own))
    model, optimizer, fitted = fitted_pair(**options)
    assert loop(fitted, optimizer, x, 4, accumulate=times) == expected
    assert same((eager, eager_optimizer), (model, optimizer))
    if times > 1:  # an epoch may end with fewer
        for run, own in ((eager, eager_optimizer), (fitted, optimizer)):
            torch.autograd.backward(run(x))
            if "clip_norm" in options and run is eager:
                nn.utils.clip_grad_norm_(run.parameters(), options["clip_norm"])
            own.step()
            own.zero_grad()
        assert same((eager, eager_optimizer), (model, optimizer))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adamw", "momentum"])
def test_where_gradients_do_not_fit_a_second_backward_clips(kind: str) -> None:
    make, batch = NETS["tower"]
    x, eager = batch(), make()
    eager_optimizer = OPTIMIZERS[kind](groups_of(eager))
    expected = loop(eager, eager_optimizer, x, 6, clip=0.01)
    model = make()
    optimizer = OPTIMIZERS[kind](groups_of(model))
    budget = smallest(model, x, optimizer, clip_norm=0.01)
    assert budget < smallest(model, x, optimizer, clip_norm=0.01, keep_gradients=True)
    tight = fit(
        model,
        (x,),
        budget=budget,
        optimizer=Iteration(optimizer, clip_norm=0.01),
        search=Search(moves=3),
        **ASKED,
    )
    assert loop(tight, optimizer, x, 6) == expected
    assert same((eager, eager_optimizer), (model, optimizer))
    peak = iteration_peak(tight, optimizer, x)
    assert peak <= 1.005 * budget


def scaled_loop(
    run: nn.Module, optimizer: Optimizer, x: Tensor, clip: float | None = None
) -> tuple[list[float], float]:
    """Six iterations with a GradScaler, the third of which overflows; losses and the scale at the end."""
    torch.manual_seed(1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    losses = list[float]()
    for number in range(6):
        loss = run(x)
        scaler.scale(loss * (1e38 if number == 2 else 1.0)).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(run.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.detach().item())
    return losses, scaler.get_scale()


@pytest.mark.parametrize("kind", ["adamw", "fused"])
@pytest.mark.slow
def test_a_scaler_skips_an_overflow_as_in_eager(kind: str) -> None:
    """With all gradients kept, or kept until their norm is known. Consumed ones are refused by name."""
    x = tower_batch()
    for options in ({"keep_gradients": True}, {"clip_norm": 0.01}):
        clip = options.get("clip_norm")
        if clip is not None and kind == "fused":
            continue  # it unscales in its own step, after the norm
        eager = Tower(dropout=0.0)
        eager_optimizer = OPTIMIZERS[kind](eager.parameters())
        expected = scaled_loop(eager, eager_optimizer, x, clip)
        model, optimizer, fitted = fitted_pair(OPTIMIZERS[kind], **options)
        assert scaled_loop(fitted, optimizer, x) == expected
        assert same((eager, eager_optimizer), (model, optimizer))
        assert next(iter(optimizer.state.values()))["step"] == 5
    _, optimizer, fitted = fitted_pair(OPTIMIZERS[kind])
    with pytest.raises(BadUse, match="keep_gradients=True with a GradScaler"):
        scaled_loop(fitted, optimizer, x)


@pytest.mark.slow
def test_a_scaler_is_refused_where_two_backwards_clip() -> None:
    """It sees the one gradient that stays, and would unscale its norm alone."""
    x, model = tower_batch(), Tower(dropout=0.0)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    budget = smallest(model, x, optimizer, clip_norm=0.01)
    tight = fit(
        model,
        (x,),
        budget=budget,
        optimizer=Iteration(optimizer, clip_norm=0.01),
        search=Search(moves=3),
        **ASKED,
    )
    with pytest.raises(BadUse, match="Nothing has been updated yet"):
        scaled_loop(tight, optimizer, x)


@pytest.fixture
def spills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A tier of this test alone."""
    tier = DiskTier(tmp_path, chunk_bytes=4096)
    monkeypatch.setattr("stowplan.techniques.iteration.run.planner.tier_for", lambda _: tier)
    yield
    tier.close()


OFFLOAD = ("recompute", "offload")


@pytest.mark.slow
@pytest.mark.usefixtures("spills")
@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.01, "accumulate": 2}])
def test_state_in_a_tier_has_eagers_bits(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved in the middle, and resumed. A state that is written back late is found."""
    x, eager = tower_batch(), Tower()
    eager_optimizer = OPTIMIZERS["adamw"](groups_of(eager))
    clips = {"accumulate": options.get("accumulate", 1), "clip": options.get("clip_norm")}
    expected = loop(eager, eager_optimizer, x, 4, **clips)
    middle = copied(eager, eager_optimizer)
    expected += loop(eager, eager_optimizer, x, 4, seed=2, **clips)
    model = Tower()
    optimizer = OPTIMIZERS["adamw"](groups_of(model))
    budget = smallest(model, x, optimizer, allow=OFFLOAD, **options)
    how = asked({"optimizer": optimizer, "moves": 3, "allow": OFFLOAD, **options})
    fitted = fit(model, (x,), budget=budget, **how)
    times = {"accumulate": options.get("accumulate", 1)}
    losses = loop(fitted, optimizer, x, 4, **times)
    weight = model.get_parameter("layers.0.weight")
    assert optimizer.state[weight]["exp_avg"].is_meta
    assert plans_of(fitted)[0].time_ratio > 1  # the updates wait for transfers
    saved = optimizer.state_dict()
    losses += loop(fitted, optimizer, x, 4, seed=2, **times)
    assert losses == expected
    assert same((eager, eager_optimizer), (model, optimizer))
    before = middle[1]["state"][0]["exp_avg"]
    assert torch.equal(before, saved["state"][0]["exp_avg"])  # what was saved did not change meanwhile
    peak = iteration_peak(fitted, optimizer, x)
    assert 0.85 * budget <= peak <= budget  # the staging is there before

    model.load_state_dict(middle[0])
    optimizer.load_state_dict(middle[1])
    late, right = dict[Tensor, Any](), StateElsewhere.store

    def stores_late(self: StateElsewhere, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            before = late.get(parameter)
            late[parameter] = {n: t.clone() for n, t in optimizer.state[parameter].items() if not t.is_meta}
            if before and parameter is weight:
                optimizer.state[parameter].update(before)
            right(self, [parameter])

    monkeypatch.setattr(StateElsewhere, "store", stores_late)
    loop(fitted, optimizer, x, 4, seed=2, **times)
    assert not same((eager, eager_optimizer), (model, optimizer))


def test_gradients_that_are_kept_are_eagers() -> None:
    x, eager = tower_batch(), Tower(dropout=0.0)
    loop(eager, SGD(eager.parameters(), lr=0.1), x, 1)
    torch.autograd.backward(eager(x))
    kept_name = "layers.1.weight"
    model, _, fitted = fitted_pair(lambda p: SGD(p, lr=0.1), keep_gradients=[kept_name], iterations=1)
    torch.autograd.backward(fitted(x))
    kept, expected = model.get_parameter(kept_name).grad, eager.get_parameter(kept_name).grad
    assert kept is not None
    assert expected is not None
    assert torch.equal(kept, expected)
    with pytest.raises(BadUse, match=r"the gradient of 'layers.0.weight' was read"):
        _ = model.get_parameter("layers.0.weight").grad
    with pytest.raises(BadUse, match="no parameter of the model"):
        fitted_pair(keep_gradients=["layers.9.weight"])


def test_a_loop_that_clips_is_refused_before_anything_is_updated() -> None:
    model, optimizer, fitted = fitted_pair()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    torch.autograd.backward(fitted(tower_batch()))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(BadUse, match=r"clip_norm=1\.0.*Nothing has been updated yet"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


def between(name: str, model: nn.Module, optimizer: Optimizer, fitted: nn.Module) -> None:
    """Something that a loop may do between backward and the optimizer's step."""
    match name:
        case "clips":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        case "clips data":
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.data.clamp_(-1e-6, 1e-6)
        case "sets lr":
            optimizer.param_groups[0]["lr"] = 0.5
        case "changes a parameter":
            with torch.no_grad():
                model.get_parameter("layers.0.weight").clamp_(-0.1, 0.1)
        case "adds a loss":
            model.get_parameter("layers.0.weight").norm().backward()
        case "calls forward":
            fitted(tower_batch())
        case "clears gradients":
            optimizer.zero_grad()


@pytest.mark.parametrize(
    "name",
    [
        "clips",
        "clips data",
        "sets lr",
        "changes a parameter",
        "adds a loss",
        "calls forward",
        "clears gradients",
    ],
)
@pytest.mark.slow
def test_what_comes_between_backward_and_the_step_is_refused(name: str) -> None:
    model, optimizer, fitted = fitted_pair(lambda p: SGD(p, lr=0.1), iterations=1)
    torch.autograd.backward(fitted(tower_batch()))
    with pytest.raises(BadUse, match=r"optimizer\.step"):  # noqa: PT012 -- one of the two refuses
        between(name, model, optimizer, fitted)
        optimizer.step()


class Alike(nn.Module):
    """Weights of one size, none of them small."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.mean(self.layers(x).square())


def test_clipping_is_seen_where_no_parameter_is_small() -> None:
    model, x = Alike(), torch.randn(4, 16)
    optimizer = SGD(model.parameters(), lr=0.1)
    fitted = fit(model, (x,), budget=ROOMY, optimizer=optimizer, search=Search(moves=3))
    loop(fitted, optimizer, x, 1)
    fitted(x).backward()
    with pytest.raises(BadUse, match="was read between backward"):
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def test_a_second_backward_and_old_gradients_are_refused() -> None:
    _, optimizer, fitted = fitted_pair()
    x = tower_batch()
    torch.autograd.backward(fitted(x))
    with pytest.raises(BadUse, match="accumulate=2"):
        torch.autograd.backward(fitted(x))
    optimizer.zero_grad()
    torch.autograd.backward(fitted(x))
    optimizer.step()
    with pytest.raises(BadUse, match="zero_grad"):
        torch.autograd.backward(fitted(x))


def test_a_closure_is_run_once_in_the_step() -> None:
    x, eager = tower_batch(), Tower(dropout=0.0)
    model, optimizer, fitted = fitted_pair()
    results = []
    for run, own in ((eager, OPTIMIZERS["adamw"](eager.parameters())), (fitted, optimizer)):

        def closure(run: nn.Module = run, own: Optimizer = own) -> float:
            own.zero_grad()
            loss = run(x)
            loss.backward()
            return float(loss.detach())

        results.append([own.step(closure) for _ in range(3)])
    assert results[0] == results[1]
    assert all(map(torch.equal, eager.parameters(), model.parameters()))


def test_two_modules_do_not_update_one_parameter_twice() -> None:
    model, optimizer, fitted = fitted_pair(lambda p: SGD(p, lr=0.1), iterations=1)
    x = tower_batch()
    other = fit(model, (x,), budget=ROOMY, optimizer=optimizer, search=Search(moves=2))
    first, second = fitted(x), other(x)
    torch.autograd.backward(first)
    with pytest.raises(BadUse, match="another module"):
        torch.autograd.backward(second)


def test_another_model_may_be_fitted_and_trained_between_backward_and_the_step() -> None:
    model, optimizer, fitted = fitted_pair(lambda p: SGD(p, lr=0.1), iterations=1)
    x = tower_batch()
    torch.autograd.backward(fitted(x))
    other = fit(Tower(), (x,), budget=ROOMY, search=Search(moves=2))
    torch.autograd.backward(other(x))
    optimizer.step()
    assert model.get_parameter("layers.0.weight").grad is None


def test_an_optimizer_whose_scheduler_is_there_already_is_taken() -> None:
    model = Tower()
    optimizer = AdamW(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    refuse_unless_one_by_one(optimizer)


def test_calls_of_grad_and_of_the_model_itself_consume_nothing() -> None:
    model, optimizer, fitted = fitted_pair(lambda p: SGD(p, lr=0.1))
    x, first = tower_batch(), model.get_parameter("layers.0.weight")
    (found,) = torch.autograd.grad(fitted(x), [first])
    torch.autograd.backward(model(x))
    assert first.grad is not None
    assert torch.equal(first.grad, found)
    optimizer.step()
    optimizer.zero_grad()
    loop(fitted, optimizer, x, 1)
    torch.autograd.backward(fitted(x))
    optimizer.step()
    assert first.grad is None


def refused_optimizers(model: nn.Module) -> dict[str, Optimizer]:
    hooked = AdamW(model.parameters())
    hooked.register_step_pre_hook(lambda *_: None)
    replaced: Any = AdamW(model.parameters())
    replaced.step = lambda: None
    return {
        "LBFGS": torch.optim.LBFGS(model.parameters()),
        "Coupled": Coupled(model.parameters()),
        "Noisy": Noisy(model.parameters()),
        "runs before each step": hooked,
        "none of the parameters": AdamW(Tower().parameters()),
        "step was replaced": replaced,
    }


@pytest.mark.parametrize("name", list(refused_optimizers(Tower())))
def test_optimizers_that_cannot_go_one_by_one_are_refused(name: str) -> None:
    model = Tower()
    with pytest.raises(BadUse, match=name):
        fit(
            model,
            (tower_batch(),),
            budget=ROOMY,
            optimizer=refused_optimizers(model)[name],
            search=Search(moves=1),
        )


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_optimizers_that_go_one_by_one_are_taken(kind: str) -> None:
    model = Tower()
    optimizer = OPTIMIZERS[kind](groups_of(model))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    refuse_unless_one_by_one(optimizer)
    assert all(map(torch.equal, before, model.parameters()))


def test_a_saved_plan_for_one_backward_is_refused_for_several() -> None:
    """Its peak does not have the gradients of earlier backwards."""
    plan = plans_of(fitted_pair()[2])[0]
    assert fitted_pair(plan=plan)
    with pytest.raises(IllegalPlan, match="'gradients of earlier backwards' is in the step alone"):
        fitted_pair(plan=plan, accumulate=2)


def early(plan: Plan) -> Draft:
    """The plan with its first update moved before the op that reads the parameters last."""
    ops = {op.id: op for op in plan.graph.ops}
    steps = list(plan.steps)
    place = next(n for n, s in enumerate(steps) if isinstance(s, Compute) and ops[s.op].type == UPDATE)
    update = steps[place]
    assert isinstance(update, Compute)
    read = set(ops[update.op].reads()).intersection(
        name for name in plan.graph.tensors if plan.graph.tensors[name].gradient_of is None
    )
    reader = next(
        n
        for n in reversed(range(place))
        if isinstance(step := steps[n], Compute) and not read.isdisjoint(ops[step.op].reads())
    )
    steps.insert(reader, steps.pop(place))
    return replace(plan.draft(), steps=tuple(steps))


def test_an_update_before_the_last_read_of_its_parameter_is_found() -> None:
    _, _, fitted = fitted_pair()
    plan = plans_of(fitted)[0]
    with pytest.raises(IllegalPlan, match="does not hold its value then"):
        verify(early(plan))


class Interrupt(Exception):
    """Raised in the middle of an iteration."""


def copied(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())


def test_a_backward_that_fails_in_between_says_so_until_state_is_loaded() -> None:
    model, optimizer, fitted = fitted_pair(lambda p: SGD(p, lr=0.1), iterations=1)
    saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    failing: Any = model.get_parameter("layers.1.weight")

    def fail(_: Tensor) -> None:
        raise Interrupt

    handle = failing.register_post_accumulate_grad_hook(fail)
    x = tower_batch()
    with pytest.raises(Interrupt):
        torch.autograd.backward(fitted(x))
    handle.remove()
    for again in (lambda: fitted(x), optimizer.step):
        with pytest.raises(BadUse, match="neither those of before nor those of after"):
            again()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    optimizer.zero_grad()
    loop(fitted, optimizer, x, 2)
    eager = Tower(dropout=0.0)
    eager_optimizer = SGD(eager.parameters(), lr=0.1)
    loop(eager, eager_optimizer, x, 3)
    assert same((eager, eager_optimizer), (model, optimizer))


def small_tower() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A step for the command line."""
    return Tower(layers=2), (tower_batch(),)


@pytest.mark.slow
def test_check_compares_whole_iterations_and_finds_a_wrong_update(monkeypatch: pytest.MonkeyPatch) -> None:
    target = "tests.run.test_iteration:small_tower"
    record = check(target, "1GiB", optimizer="adamw", steps=4)
    assert record.holds
    assert {"exp_avg of parameter 0", "layers.0.weight", "norm.running_mean"} <= {
        difference.tensor for difference in record.differences
    }
    right = OneByOne.update

    def twice(self: OneByOne, parameter: Tensor, group: Any) -> None:
        right(self, parameter, group)
        right(self, parameter, group)

    monkeypatch.setattr("stowplan.techniques.iteration.run.planner.refuse_unless_one_by_one", lambda _: None)
    monkeypatch.setattr(OneByOne, "update", twice)
    assert not check(target, "1GiB", optimizer="adamw", steps=2).holds


@pytest.mark.usefixtures("spills")
@pytest.mark.slow
def test_the_frontier_and_the_largest_size_have_state_in_a_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wide_loops.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def step(batch=1):\n"
        "    layers = [nn.Linear(64, 64, bias=False) for _ in range(4)]\n"
        "    return nn.Sequential(*layers), (torch.ones(batch, 64),), torch.sum\n"
    )
    monkeypatch.chdir(tmp_path)
    how: Any = {"optimizer": "adamw"}
    inside = planner_for("wide_loops:step", allow=("recompute",), **how).tradeoffs()
    both = planner_for("wide_loops:step", allow=("recompute", "offload"), **how).tradeoffs()
    peaks = [offer.peak_bytes for offer in both]
    assert peaks[-len(inside) :] == [offer.peak_bytes for offer in inside]
    state = 3 * 2 * 64 * 64 * 4  # of three layers, for that of the smallest gradient stays
    assert peaks[0] < inside[0].peak_bytes - state // 4  # loaded for one update at a time
    assert both[0].seconds > inside[0].seconds
    budget = (peaks[0] + inside[0].peak_bytes) // 2
    found = largest_of(
        "wide_loops:step", budget, most=1, allow=("recompute", "offload"), search=Search(moves=1), **how
    )
    assert [row.fit is not None for row in found] == [False, False, True]


def test_a_second_backward_is_in_the_projected_time() -> None:
    model = Tower(dropout=0.0)
    iteration = IterationPlanner(Iteration(OPTIMIZERS["adamw"](model.parameters()), clip_norm=1.0))
    once, twice = iteration.steps(subject_of(Target(model, (tower_batch(),))))
    options = PlanOptions(("recompute",), search=Search(moves=1))
    plans = [step_planner(step, options).plan(ROOMY) for step in (once, twice)]
    step = sum(plans[0].pricing.seconds[op.id] for op in plans[0].graph.ops if op.type != UPDATE)
    assert plans[0].time_ratio == pytest.approx(1)
    assert plans[1].projected_seconds - plans[1].plain_seconds == pytest.approx(step)


def drop(model: nn.Module) -> None:
    """As DINO does for its last layer in the first epoch."""
    for name, parameter in model.named_parameters():
        if name == "layers.1.weight":
            parameter.grad = None


def halve(model: nn.Module) -> None:
    parameter = model.get_parameter("layers.1.weight")
    if parameter.grad is not None:
        parameter.grad.mul_(0.5)


def clamp(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("layers.1.weight").clamp_(-0.05, 0.05)


def clamp_data(model: nn.Module) -> None:
    model.get_parameter("layers.1.weight").data.clamp_(-0.05, 0.05)


def replace_data(model: nn.Module) -> None:
    parameter = model.get_parameter("layers.1.weight")
    parameter.data = parameter.data / 2


def edit_and_step(model: nn.Module, optimizer: Optimizer, edit: Callable[[nn.Module], None]) -> None:
    edit(model)
    optimizer.step()


@pytest.mark.parametrize("edit", [drop, halve, clamp, clamp_data, replace_data])
@pytest.mark.parametrize("kind", [lambda p: SGD(p, lr=0.1), AdamW], ids=["sgd", "adamw"])
def test_what_a_loop_edits_before_the_step_is_refused(
    kind: Callable[..., Optimizer], edit: Callable[[nn.Module], None]
) -> None:
    """In the first iteration before anything was updated, and later with the state to load."""
    for iterations in (0, 2):
        model, optimizer, fitted = fitted_pair(kind, iterations=iterations)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        torch.autograd.backward(fitted(tower_batch()))
        with pytest.raises(BadUse, match="between backward and") as refusal:
            edit_and_step(model, optimizer, edit)
        assert ("Nothing has been updated yet" in str(refusal.value)) is (iterations == 0)
        if iterations == 0 and edit in (drop, halve):
            assert all(map(torch.equal, before, model.parameters()))


def test_what_a_loop_reads_between_is_the_parameter_as_ever() -> None:
    model, optimizer, fitted = fitted_pair(lambda p: SGD(p, lr=0.1), iterations=1)
    weight = model.get_parameter("layers.1.weight")
    torch.autograd.backward(fitted(tower_batch()))
    kind, shown, copied = type(weight).__name__, repr(weight), copy.deepcopy(weight)
    norm = weight.data.norm()
    optimizer.step()
    assert (kind, shown, norm) == ("Parameter", repr(weight), weight.norm())
    assert type(weight) is type(copied) is nn.Parameter
    assert torch.equal(copied, weight)


class Clipping(Optimizer):
    """SGD with one norm over all gradients, as in LAMB."""

    def __init__(self, parameters: Any, most: float) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.most = most

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in trained]).norm()
        for parameter in trained:
            parameter.sub_(parameter.grad * (self.most / (norm + 1e-6)).clamp(max=1.0), alpha=0.1)


class Skipping(SGD):
    """Leaves out a step with a gradient that is not finite."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if all(torch.isfinite(p.grad).all() for p in trained):
            super().step(closure)


@pytest.mark.parametrize(
    "kind",
    [*(partial(Clipping, most=most) for most in (0.1, 20.0, 1e3, 1e8)), partial(Skipping, lr=0.1)],
    ids=lambda kind: str(kind.keywords),
)
def test_optimizers_that_look_at_all_gradients_are_refused(kind: Callable[..., Optimizer]) -> None:
    with pytest.raises(BadUse, match="otherwise one by one than together"):
        fitted_pair(kind)
