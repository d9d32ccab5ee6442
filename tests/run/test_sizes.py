"""Calls of many shapes: each within the budget, to the bit, and without a search after the first."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stowplan import Search, Shapes
from stowplan.capture import capture
from stowplan.errors import BadUse, BudgetTooSmall
from stowplan.ir import Graph
from stowplan.plan.carry import PlannedSize, carried_point, carried_pricing, outline_of
from stowplan.plan.draft import Exactness
from stowplan.plan.frontier import frontier_of
from stowplan.plan.prices import price_by_roofline
from stowplan.plan.pricing import Basis, Machine, Pricing
from stowplan.plan.problem import slices_last
from stowplan.plan.select import problem_in_order
from stowplan.plan.steps import RecomputeOp
from stowplan.run.fit import fit, plans_of
from stowplan.run.measure.measure import measure
from stowplan.run.planning.plan_cache import PlanCache
from stowplan.run.planning.planner import DraftedStep
from tests.support.nets import NETS

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

MOVES = 100  # any plan will do
ALLOW = ("recompute",)


class Tokens(nn.Module):
    """A small net over texts, with draws and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16))
                for _ in range(4)
            )
        )
        self.norm = nn.BatchNorm1d(16)
        self.long = 1_000  # texts from this length on take another road

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        if tokens.shape[1] >= self.long:
            x = torch.tanh(x)
        normed: Tensor = self.norm(x.flatten(0, 1))
        return normed.square().mean()


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    """A batch of texts."""
    drawn = torch.Generator().manual_seed(seed + 100 * batch + length)
    return torch.randint(0, 50, (batch, length), generator=drawn)


@pytest.fixture(scope="module")
def budget() -> int:
    """0.7 of the peak of the largest step in eager."""
    model = Tokens()
    return int(0.7 * capture(model, (tokens(8, 48),)).eager.peak_bytes())


def stepped(
    model: nn.Module, batch: Tensor, *, measuring: bool = False
) -> tuple[Tensor, list[Tensor], list[Tensor], int]:
    """Loss, gradients, buffers and, if asked for, the measured peak of a step."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(int(batch.numel()))

    def step() -> Tensor:
        loss: Tensor = model(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    peak = 0
    if measuring:
        measured = measure(step, before=[*model.parameters(), *model.buffers(), batch])
        loss, peak = measured.result, measured.measured_peak_bytes
    else:
        loss = step()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return loss, gradients, [b.clone() for b in model.buffers()], peak


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with each search, also with one whose result the cache has."""
    made: list[int] = []
    search = PlanCache.step_for

    def counted(*args: Any) -> DraftedStep:
        made.append(1)
        return search(*args)

    monkeypatch.setattr(PlanCache, "step_for", counted)
    return made


@pytest.mark.slow
def test_a_loop_of_many_shapes_stays_within_the_budget_and_equals_eager(
    searches: list[int], budget: int
) -> None:
    torch.manual_seed(0)
    model = Tokens()
    searches.clear()
    eager, fitted = (
        copy.deepcopy(model),
        fit(model, (tokens(8, 48),), budget=budget, allow=ALLOW, search=Search(moves=MOVES)),
    )
    for length in (48, 33, 1):
        for batch in (8, 5):
            for repeat in range(2):
                ours = stepped(fitted, tokens(batch, length, repeat), measuring=True)
                theirs = stepped(eager, tokens(batch, length, repeat))
                assert ours[0].equal(theirs[0])
                assert all(map(torch.equal, (*ours[1], *ours[2]), (*theirs[1], *theirs[2])))
                assert ours[3] <= budget, (batch, length)
    assert len(searches) <= 3  # the first, and perhaps one where a dim of 1 makes another program


def test_a_smaller_call_of_a_step_that_fits_runs_as_it_is(searches: list[int]) -> None:
    model = Tokens()
    fitted = fit(model, (tokens(8, 48),), budget="1GiB")
    searches.clear()
    for _ in range(2):
        fitted(tokens(3, 20)).backward()
    assert not searches
    assert len(plans_of(fitted)) == 1
    fitted(tokens(9, 48)).backward()  # larger
    assert len(plans_of(fitted)) == 2


def test_a_smaller_call_that_is_another_program_is_planned_as_if_nothing_had_run() -> None:
    torch.manual_seed(0)
    model = Tokens()
    model.long = 30
    eager, fitted = copy.deepcopy(model), fit(model, (tokens(8, 48),), budget="1GiB")
    ours, theirs = stepped(fitted, tokens(8, 20)), stepped(eager, tokens(8, 20))
    assert ours[0].equal(theirs[0])  # the same draws
    assert all(map(torch.equal, ours[1], theirs[1]))
    assert all(map(torch.equal, ours[2], theirs[2]))  # statistics were updated once
    assert len(plans_of(fitted)) == 2


HELD: list[Tensor] = []


class Branching(Tokens):
    """A net that does something else with short texts, named by `short`."""

    def __init__(self, short: str = "") -> None:
        super().__init__()
        self.short = short

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        short = self.short if length < 40 else ""
        x = self.embedding(tokens)
        for layer in list(self.layers)[: 2 if short == "fewer layers" else 4]:
            x = x + layer(x)
        if short == "odd" and length % 2:
            x = torch.tanh(x)
        if short == "larger":
            x = x.repeat(1, 4, 1)
        if self.short == "held":
            wide = x.repeat(1, 1, 8)
            if short:
                HELD.append(wide)
        if self.short == "parts":
            x = torch.cat([part * 2 for part in x.split(16, 1)], 1)
        if self.short == "python":
            double: Callable[[Tensor], Tensor] = Doubled.apply
            x = double(x)
        normed: Tensor = self.norm(x.flatten(0, 1))
        return normed.square().mean()


class Doubled(torch.autograd.Function):
    """Twice a tensor; backward makes a tensor whose size does not follow from forward."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        filled = [gradient.new_zeros(8, 48, 64) for _ in range(8)]
        return 2 * gradient + sum(zeros.sum() for zeros in filled)


@pytest.mark.parametrize(
    ("short", "calls"),  # lengths, and the plans there are after each
    [
        ("odd", {34: 1, 33: 2}),
        ("fewer layers", {33: 2}),
        ("larger", {20: 2}),
        ("parts", {33: 1, 20: 2}),  # as many parts, or fewer
        ("python", {38: 2}),  # backward takes what it took at the larger size
    ],
)
def test_a_smaller_call_runs_as_it_is_only_if_it_is_the_same_program_and_fits(
    short: str, calls: Mapping[int, int]
) -> None:
    torch.manual_seed(0)
    model = Branching(short)
    budget = int(0.85 * capture(model, (tokens(8, 48),)).eager.peak_bytes())
    eager = copy.deepcopy(model)
    fitted = fit(model, (tokens(8, 48),), budget=budget, allow=ALLOW, search=Search(moves=MOVES))
    assert plans_of(fitted)[0].plain_peak_bytes > budget
    for length, plans in calls.items():
        for repeat in range(2):
            ours = stepped(fitted, tokens(8, length, repeat), measuring=True)
            theirs = stepped(eager, tokens(8, length, repeat))
            assert ours[0].equal(theirs[0])
            assert all(map(torch.equal, (*ours[1], *ours[2]), (*theirs[1], *theirs[2])))
            assert ours[3] <= budget
        assert len(plans_of(fitted)) == plans


def test_what_forward_leaves_alive_counts_in_a_smaller_call() -> None:
    model = Branching("held")
    budget = int(0.85 * capture(model, (tokens(8, 48),)).eager.peak_bytes())
    fitted = fit(model, (tokens(8, 48),), budget=budget, allow=ALLOW, search=Search(moves=MOVES))
    fitted(tokens(8, 30)).backward()  # has room for it
    assert len(plans_of(fitted)) == 1
    for _ in range(2):  # with 38 it is tried as it is, which leaves nothing, and planned
        HELD.clear()
        assert stepped(fitted, tokens(8, 38), measuring=True)[3] <= budget
        assert len(HELD) == 1
    assert len(plans_of(fitted)) == 2
    HELD.clear()


def test_a_policy_is_not_carried_to_a_program_that_differs_in_one_op(
    searches: list[int], budget: int
) -> None:
    model = Tokens()
    fitted = fit(model, (tokens(8, 48),), budget=budget, allow=ALLOW, search=Search(moves=MOVES))
    searches.clear()
    fitted(tokens(8, 46)).backward()
    assert not searches
    fitted.long = 44
    fitted(tokens(8, 44)).backward()
    assert len(searches) == 1


def test_a_carried_plan_claims_only_what_was_compared(budget: int) -> None:
    model = Tokens()
    fitted = fit(model, (tokens(8, 48),), budget=budget, allow=ALLOW, search=Search(moves=MOVES))
    for length in (47, 46, 45, 44, 43, 42):
        fitted(tokens(8, length)).backward()
    *compared, _, _, _ = plans = plans_of(fitted)
    assert all(plan.exactness is Exactness.BITWISE for plan in compared)
    unchecked = [plan for plan in plans if plan.exactness is Exactness.UNCHECKED]
    assert unchecked  # one may be searched anew, and is compared then
    assert all(plan.against_eager and "carried over" in plan.against_eager.note for plan in unchecked)


def test_a_refused_shape_is_refused_again_at_once(searches: list[int], budget: int) -> None:
    model = Tokens()
    fitted = fit(model, (tokens(8, 48),), budget=budget, allow=ALLOW, search=Search(moves=MOVES))
    with pytest.raises(BudgetTooSmall) as first:
        fitted(tokens(64, 64))
    searches.clear()
    with pytest.raises(BudgetTooSmall) as second:
        fitted(tokens(64, 64))
    assert not searches
    assert str(second.value) == str(first.value)
    assert second.value.__notes__ == first.value.__notes__
    fitted.eval()  # another program, which may fit
    with pytest.raises(BudgetTooSmall):
        fitted(tokens(64, 64))
    assert searches


def test_plans_make_room_for_others(budget: int) -> None:
    model = Tokens()
    fitted = fit(
        model,
        (tokens(8, 48),),
        budget=budget,
        allow=ALLOW,
        search=Search(moves=MOVES),
        shapes=Shapes(keep_plans=2),
    )
    for length in (47, 48, 46):  # 47 is unused for longest when 46 comes
        fitted(tokens(8, length)).backward()
    kept = [plan.graph.tensors["tokens"].shape for plan in plans_of(fitted)]
    assert kept == [(8, 48), (8, 46)]
    with pytest.raises(BadUse, match="keep_plans is 0"):
        fit(model, (tokens(8, 48),), budget=budget, shapes=Shapes(keep_plans=0))


def graph_of(name: str, **settings: int) -> Graph:
    """The step of a network."""
    net = NETS[name]
    example = net.make(**{**net.tiny, **settings})
    return slices_last(capture(example.model, example.args).graph)


def priced(graph: Graph) -> Pricing:
    """Prices that are the same on every machine."""
    return replace(price_by_roofline(graph, Machine(launch_seconds=0.0)), basis=Basis.MEASURED)


def measured_size(graph: Graph, workspace_bytes: Mapping[str, int]) -> PlannedSize:
    """A size with prices, whose plan keeps everything."""
    pricing = replace(priced(graph), workspace_bytes=workspace_bytes)
    return PlannedSize.of(graph, pricing, (), (), 1 << 40)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "planned", "others"),
    [
        ("gpt", {"batch": 8, "sequence": 24}, ({"batch": 8, "sequence": 20}, {"batch": 6, "sequence": 24})),
        ("vgg16", {"batch": 8}, ({"batch": 6},)),
        ("unet", {"batch": 4}, ({"batch": 3},)),
    ],
)
def test_carried_plans_are_nearly_as_fast_as_searched_ones(
    name: str, planned: dict[str, int], others: tuple[dict[str, int], ...]
) -> None:
    graph = graph_of(name, **planned)
    problem = problem_in_order(graph, priced(graph))
    points = frontier_of(problem, MOVES).points
    budget = (points[0].peak_bytes + 2 * points[-1].peak_bytes) // 3
    size = PlannedSize.of(graph, priced(graph), points, (), budget)
    for settings in others:
        other = graph_of(name, **settings)
        assert outline_of(other) == size.outline
        pricing = priced(other)
        again = problem_in_order(other, pricing)
        carried = carried_point(again, size.policies, budget)
        searched = [p for p in frontier_of(again, MOVES).points if p.peak_bytes <= budget]
        assert carried is not None
        plain = sum(again.seconds)
        assert carried.peak_bytes <= budget
        assert plain + carried.extra_seconds <= 1.03 * (plain + searched[-1].extra_seconds)


def test_prices_are_exact_at_measured_sizes_and_never_extrapolate_workspace() -> None:
    small, large = graph_of("gpt", sequence=8), graph_of("gpt", sequence=24)
    workspace = {op.id: 100 for op in large.ops}
    sizes = [measured_size(small, {}), measured_size(large, workspace)]
    for size in sizes:
        found = carried_pricing(size.graph, sizes)
        assert found is not None
        assert found.seconds == pytest.approx(dict(size.pricing.seconds))
    between = carried_pricing(graph_of("gpt", sequence=16), sizes)
    assert between is not None
    assert set(between.workspace_bytes.values()) == {100}
    assert carried_pricing(graph_of("gpt", sequence=25), sizes) is None


def test_a_size_counts_what_its_own_plan_was_left_with() -> None:
    """A plan that keeps everything has no gap; one that recomputes all that it can is above its bound."""
    graph = graph_of("gpt", batch=2, sequence=8)
    pricing = priced(graph)
    kept = PlannedSize.of(graph, pricing, (), (), 1 << 40)
    assert kept.gap == 0.0
    again = [RecomputeOp(op.id, ()) for op in graph.ops[:3]]
    spent = sum(pricing.seconds[step.op] for step in again)
    wasteful = PlannedSize.of(graph, pricing, (), again, 1 << 40)
    assert wasteful.gap == pytest.approx(spent / sum(pricing.seconds.values()))
