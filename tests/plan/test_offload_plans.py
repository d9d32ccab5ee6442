"""Moving tensors away: the clock by hand, two accounts that must agree, and what may not be done."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from stowplan import Search
from stowplan.errors import BadUse, IllegalPlan
from stowplan.ir import DType, Graph, Kind, Op, Phase, Role, Tensor, Use
from stowplan.plan.draft import Draft
from stowplan.plan.explain.explain import explain
from stowplan.plan.files import plan_file
from stowplan.plan.frontier import Point
from stowplan.plan.judge.simulate import bytes_beside, simulate
from stowplan.plan.judge.verify import verify
from stowplan.plan.options import PlanOptions
from stowplan.plan.plan import Plan
from stowplan.plan.planner import Planner
from stowplan.plan.pricing import Basis, Pricing, Tier
from stowplan.plan.problem import Problem
from stowplan.plan.steps import Compute, Free, Load, Offload, Step, Store
from stowplan.run.step.straight import baseline_steps
from stowplan.techniques.offload.plan import plugin
from stowplan.techniques.offload.plan.idle_intervals import idle_intervals_of
from stowplan.techniques.offload.plan.insert_transfers import insert_transfers
from stowplan.techniques.offload.plan.transfer_schedule import Caps, TransferSchedule
from stowplan.watch import Patience, ended_by

MB = 10**6
TIER = Tier("disk", 10**9, store_bytes_per_second=MB, load_bytes_per_second=MB)


def chain(length: int, nbytes: int = MB) -> Graph:
    """Ops in a row, whose backward half reads what each made, in reverse."""
    tensors = {"x": Tensor("x", Kind.INPUT, nbytes=nbytes)}
    tensors |= {f"a{i}": Tensor(f"a{i}", Kind.ACTIVATION, nbytes=nbytes) for i in range(length)}
    tensors |= {f"g{i}": Tensor(f"g{i}", Kind.GRADIENT, nbytes=nbytes) for i in range(length)}
    ops = [
        Op(f"f{i}", "custom", Phase.FORWARD, (Use(f"a{i - 1}" if i else "x"),), (Use(f"a{i}"),))
        for i in range(length)
    ]
    for i in reversed(range(length)):
        reads = (Use(f"a{i}"), *([Use(f"g{i + 1}")] if i + 1 < length else []))
        ops.append(Op(f"b{i}", "custom", Phase.BACKWARD, reads, (Use(f"g{i}"),)))
    return Graph(tensors, tuple(ops), frozenset({"x", "g0"}))


def priced(graph: Graph, seconds: float, tier: Tier = TIER) -> Pricing:
    return Pricing({op.id: seconds for op in graph.ops}, Basis.MEASURED, {}, tier)


def moved(steps: tuple[Step, ...], name: str, *, gone: str, back: str) -> list[Step]:
    """Store a tensor behind its first reader, free it behind one op and load it before another."""
    found: list[Step] = []
    stored = False
    for step in steps:
        if isinstance(step, Compute) and step.op == back:
            found.append(Load((name,)))
        found.append(step)
        if isinstance(step, Compute) and step.op == "f1":
            found.append(Store((name,)))
            stored = True
        if isinstance(step, Compute) and step.op == gone and stored:
            found.append(Free((name,)))
    return found


@pytest.mark.parametrize(
    ("seconds", "gone", "back", "stalls"),
    [
        (1.0, "f2", "b1", 0.0),  # a second each way, and an op of a second beside each
        (0.5, "f2", "b1", 1.0),  # half of each is waited for
        (1.0, "f1", "b0", 2.0),  # out and back while everybody waits
        (1.0, "f3", "b0", 1.0),
    ],
)
def test_the_clock_counts_what_is_waited_for(seconds: float, gone: str, back: str, stalls: float) -> None:
    graph = chain(5)
    steps = moved(baseline_steps(graph), "a0", gone=gone, back=back)
    run = simulate(graph, steps, priced(graph, seconds))
    assert run.stall_seconds == pytest.approx(stalls)
    assert run.seconds == pytest.approx(10 * seconds + stalls)
    assert [transfer.is_store for transfer in run.transfers] == [True, False]


def test_transfers_of_one_way_come_one_after_the_other() -> None:
    graph = chain(4)
    intervals = idle_intervals_of(graph, baseline_steps(graph))
    chosen = [interval for interval in intervals if interval.tensors[0] in ("a0", "a1")]
    transfers = _transfers(graph, 0.1, TIER)
    caps = {transfers.intervals.index(interval): Caps(interval.after, interval.before) for interval in chosen}
    steps = insert_transfers(baseline_steps(graph), transfers.outcome(caps).moves)
    first, second = (t for t in simulate(graph, steps, priced(graph, 0.1)).transfers if t.is_store)
    assert second.start_seconds >= first.end_seconds


@pytest.mark.parametrize("real_first", [True, False])
def test_real_views_of_complex_tensors_stay(real_first: bool) -> None:
    """PyTorch may keep a conjugation as a flag, which a copy of the bytes does not have."""
    dtypes = (DType.FLOAT32, DType.COMPLEX64) if real_first else (DType.COMPLEX64, DType.FLOAT32)
    owner, view = (Tensor(n, Kind.ACTIVATION, dtype=d, nbytes=64) for n, d in zip("ov", dtypes, strict=True))
    tensors = {t.id: t for t in (owner, replace(view, alias_of="o"), *map(_numbers, "xabc"))}
    ops = [_made("o", "x"), _made("v", "o"), _made("a", "x"), _made("b", "a"), _made("c", "b", "v")]
    graph = Graph(tensors, tuple(ops), frozenset("c"))
    found = {name for each in idle_intervals_of(graph, baseline_steps(graph)) for name in each.tensors}
    assert not found & {"o", "v"}


@pytest.mark.parametrize(("device", "leaves"), [("cuda:0", False), ("cpu", True)])
def test_what_an_accelerators_step_has_on_the_host_stays_there(device: str, leaves: bool) -> None:
    """Attention keeps the state of its generator on the host. On a CPU, the tier is the disk."""
    tensors = {name: replace(_numbers(name), device=device) for name in "xabc"}
    tensors["o"] = replace(_numbers("o"), device="cpu")
    ops = [_made("o", "x"), _made("a", "x"), _made("b", "a"), _made("c", "b", "o")]
    graph = Graph(tensors, tuple(replace(op, device=device) for op in ops), frozenset("c"))
    found = {name for each in idle_intervals_of(graph, baseline_steps(graph)) for name in each.tensors}
    assert ("o" in found) == leaves


def _numbers(name: str) -> Tensor:
    return Tensor(name, Kind.INPUT if name == "x" else Kind.ACTIVATION, nbytes=64)


def _made(name: str, *read: str) -> Op:
    return Op(name, "custom", Phase.FORWARD, tuple(map(Use, read)), (Use(name),))


def _transfers(graph: Graph, seconds: float, tier: Tier) -> TransferSchedule:
    steps = baseline_steps(graph)
    plain = simulate(graph, steps, priced(graph, seconds))
    intervals = idle_intervals_of(graph, steps, gradients=True)
    return TransferSchedule(
        steps, intervals, plain, priced(graph, seconds).seconds, tier, bytes_beside(graph, tier)
    )


def test_the_search_and_the_judge_agree() -> None:
    chance = Random(0)
    for _ in range(300):
        graph = chain(chance.randint(3, 9))
        seconds, tier = (
            chance.choice((0.05, 0.3, 1.0, 3.0)),
            replace(TIER, latency_seconds=0.01, staging_bytes=7),
        )
        transfers = _transfers(graph, seconds, tier)
        caps = {
            i: Caps(middle, transfers.run_from(middle + 1))
            for i, interval in enumerate(transfers.intervals)
            if chance.random() < 0.6 and interval.before - interval.after > 1
            for middle in [chance.randrange(interval.after, interval.before - 1)]
        }
        outcome = transfers.outcome(caps)
        steps = insert_transfers(baseline_steps(graph), outcome.moves)
        judged = simulate(graph, steps, priced(graph, seconds, tier))
        assert judged.peak_bytes == outcome.peak_bytes
        assert judged.seconds == pytest.approx(outcome.seconds)


def test_a_budget_is_met_by_moving_and_more_of_it_never_costs_time() -> None:
    graph = chain(12)
    planner = Planner.of(graph, priced(graph, 1.0), options=PlanOptions(allow=("offload",)))
    times = []
    for allowed in range(planner.minimum_bytes, planner.plain_peak_bytes + MB, MB // 2):
        plan = planner.plan(allowed)
        times.append(plan.projected_seconds)
        assert plan_file.read(plan_file.write(plan)) == plan
    assert times == sorted(times, reverse=True)
    assert times[-1] == plan.plain_seconds
    assert planner.minimum_bytes <= planner.plain_peak_bytes // 2


@pytest.mark.slow
def test_moving_and_recomputing_is_never_worse_than_either() -> None:
    graph = chain(12)
    pricing = priced(graph, 0.7)
    both = Planner.of(
        graph, pricing, options=PlanOptions(allow=("recompute", "offload"), search=Search(moves=2000))
    )
    for allow in ("recompute", "offload"):
        alone = Planner.of(graph, pricing, options=PlanOptions(allow=(allow,), search=Search(moves=2000)))
        for allowed in range(alone.minimum_bytes, alone.plain_peak_bytes, MB):
            assert both.plan(allowed).projected_seconds <= alone.plan(allowed).projected_seconds + 1e-9


def test_a_search_that_is_over_descends_once_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, over, begun = chain(12), Patience(), list[Point]()
    pricing, options = priced(graph, 0.7), PlanOptions(allow=("recompute", "offload"))
    alone = Planner.of(graph, pricing, PlanOptions(allow=("recompute",)))
    descended = plugin._descended

    def counted(problem: Problem, start: Point, *rest: Any) -> Iterator[Point]:
        begun.append(start)
        return descended(problem, start, *rest)

    monkeypatch.setattr(plugin, "_descended", counted)
    whole = plugin.with_offload(alone.problem, alone.frontier, pricing, options)
    assert (len(begun) > 1, whole.ended) == (True, "")
    begun.clear()
    over.end("Ctrl-C")
    with ended_by(over):
        ended = plugin.with_offload(alone.problem, alone.frontier, pricing, options)
    assert (len(begun), ended.ended) == (1, "Ctrl-C")
    for point in alone.frontier.points:
        found = ended.at(point.peak_bytes)
        assert found is not None
        assert found.extra_seconds <= point.extra_seconds


@pytest.mark.slow
def test_nothing_is_moved_where_all_fits_or_recomputing_is_cheaper() -> None:
    graph = chain(8)
    slow = replace(TIER, store_bytes_per_second=1.0, load_bytes_per_second=1.0)
    planner = Planner.of(
        graph,
        priced(graph, 1.0, slow),
        options=PlanOptions(allow=("recompute", "offload"), search=Search(moves=2000)),
    )
    plans = [planner.plan(planner.plain_peak_bytes), planner.plan(planner.plain_peak_bytes - MB)]
    assert not any(isinstance(step, Store) for plan in plans for step in plan.steps)


def _plan_that_moves() -> Plan:
    graph = chain(12)
    planner = Planner.of(graph, priced(graph, 1.0), options=PlanOptions(allow=("offload",)))
    return planner.plan(planner.minimum_bytes)


def test_explain_tells_the_way_out_and_back() -> None:
    plan = _plan_that_moves()
    name = next(name for name, decision in plan.decisions.items() if isinstance(decision, Offload))
    told = explain(plan, name)
    assert [transfer.is_store for transfer in told.transfers] == [True, False]
    assert len(told.spans) == 2
    assert "over the budget" in told.otherwise


def test_what_is_not_legal_is_refused() -> None:
    plan = _plan_that_moves().draft()
    first, stored = next((n, step.tensors[0]) for n, step in enumerate(plan.steps) if isinstance(step, Store))
    without_store = (*plan.steps[:first], *plan.steps[first + 1 :])
    with pytest.raises(IllegalPlan, match="the tier does not have"):
        verify(replace(plan, steps=without_store))
    with pytest.raises(IllegalPlan, match="has room for"):
        verify(replace(plan, pricing=replace(plan.pricing, tier=replace(TIER, capacity_bytes=1))))
    with pytest.raises(IllegalPlan, match="names no tier"):
        verify(replace(plan, pricing=replace(plan.pricing, tier=None)))
    with pytest.raises(IllegalPlan, match="the caller has"):
        verify(replace(plan, graph=replace(plan.graph, held=plan.graph.held | {stored})))


def test_a_sum_that_was_stored_before_its_last_part_is_not_loaded() -> None:
    graph = chain(3)
    added = Op("b9", "custom", Phase.BACKWARD, (Use("a0"),), (Use("g1", Role.ACCUMULATE),))
    ops = list(graph.ops)
    ops.insert(5, added)
    graph = replace(graph, ops=tuple(ops))
    steps = list(baseline_steps(graph))
    made, summed = (_place(steps, op) for op in ("b1", "b9"))
    steps[summed + 1 : summed + 1] = [Free(("g1",)), Load(("g1",))]
    steps.insert(made + 1, Store(("g1",)))
    pricing = priced(graph, 1.0)
    curve = simulate(graph, steps, pricing).curve_bytes
    draft = Draft(graph, pricing, max(curve), {}, tuple(steps), curve, 1.0, 1, 1.0, 1, 1.0, 0)
    with pytest.raises(IllegalPlan, match="the tier does not have"):
        verify(draft)


def _place(steps: list[Step], op: str) -> int:
    return next(number for number, step in enumerate(steps) if isinstance(step, Compute) and step.op == op)


def test_offload_needs_a_tier() -> None:
    graph = chain(3)
    pricing = replace(priced(graph, 1.0), tier=None)
    with pytest.raises(BadUse, match="no tier"):
        Planner.of(graph, pricing, options=PlanOptions(allow=("offload",)))
