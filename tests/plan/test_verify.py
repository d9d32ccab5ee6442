"""A plan that does not compute its graph is refused, and says at which step."""

from dataclasses import replace
from functools import cache

import pytest

from stowplan import Search
from stowplan.errors import IllegalPlan
from stowplan.ir import Graph, Kind, Op, Phase, Role, Tensor, Use
from stowplan.ops.effects import UPDATE
from stowplan.plan.draft import Draft
from stowplan.plan.judge.simulate import peaks_by_device, simulate
from stowplan.plan.judge.verify import verify
from stowplan.plan.options import PlanOptions
from stowplan.plan.planner import Planner
from stowplan.plan.pricing import Basis, Pricing, Tier
from stowplan.plan.steps import Compute, Free, Load, RecomputeOp, Step, Store
from tests.support.steps import random_step, uneven_prices


@pytest.fixture(scope="module")
def plan() -> Draft:
    """A draft in which some ops are recomputed."""
    graph = random_step(5, layers=8)
    planner = Planner.of(graph, uneven_prices(graph, 5), options=PlanOptions(search=Search(moves=300)))
    found = planner.draft((planner.minimum_bytes + planner.plain_peak_bytes) // 2)
    assert any(isinstance(step, RecomputeOp) for step in found.steps)
    verify(found)
    return found


def _with_steps(plan: Draft, steps: tuple[Step, ...]) -> Draft:
    pricing = plan.pricing
    played = simulate(plan.graph, steps, pricing)
    return replace(plan, steps=steps, projected_curve_bytes=played.curve_bytes)


def test_leaving_out_a_second_run_is_seen(plan: Draft) -> None:
    number = next(i for i, step in enumerate(plan.steps) if isinstance(step, RecomputeOp))
    with pytest.raises(IllegalPlan, match="does not hold its value"):
        verify(replace(plan, steps=plan.steps[:number] + plan.steps[number + 1 :]))


def test_leaving_out_an_op_is_seen(plan: Draft) -> None:
    last = max(i for i, step in enumerate(plan.steps) if isinstance(step, Compute))
    with pytest.raises(IllegalPlan, match="never runs"):
        verify(replace(plan, steps=plan.steps[:last]))


def test_losing_a_result_is_seen(plan: Draft) -> None:
    with pytest.raises(IllegalPlan, match="'gw' is gone at the end"):
        verify(replace(plan, steps=(*plan.steps, Free(("gw",)))))


def test_running_an_op_twice_is_seen(plan: Draft) -> None:
    doubled = (plan.steps[0], *plan.steps)
    with pytest.raises(IllegalPlan, match="a second time"):
        verify(replace(plan, steps=doubled))


def test_freeing_too_early_is_seen(plan: Draft) -> None:
    first = next(step for step in plan.steps if isinstance(step, Compute))
    made = next(op for op in plan.graph.ops if op.id == first.op).outputs[0].tensor
    with pytest.raises(IllegalPlan):
        verify(replace(plan, steps=(plan.steps[0], Free((made,)), *plan.steps[1:])))


def test_a_curve_that_is_not_the_steps_own_is_seen(plan: Draft) -> None:
    lower = (plan.projected_curve_bytes[0] - 1, *plan.projected_curve_bytes[1:])
    with pytest.raises(IllegalPlan, match="curve"):
        verify(replace(plan, projected_curve_bytes=lower))


def test_more_than_the_budget_is_seen(plan: Draft) -> None:
    with pytest.raises(IllegalPlan, match="allowed"):
        verify(replace(plan, allowed_bytes=plan.projected_peak_bytes - 1))
    exactly = replace(plan, allowed_bytes=plan.projected_peak_bytes)
    assert verify(exactly).draft() == exactly


def test_writing_over_what_is_read_later_is_seen() -> None:
    """An in-place ReLU whose input a later op still reads."""
    tensors = {
        "x": Tensor("x", Kind.INPUT, nbytes=8),
        "a": Tensor("a", Kind.ACTIVATION, nbytes=8),
        "b": Tensor("b", Kind.ACTIVATION, nbytes=8),
        "c": Tensor("c", Kind.ACTIVATION, nbytes=8),
    }
    ops = (
        Op("f1", "Wide", Phase.FORWARD, (Use("x"),), (Use("a"),)),
        Op("f2", "Relu", Phase.FORWARD, (Use("a"),), (Use("b"),)),
        Op("f3", "Wide", Phase.FORWARD, (Use("a"), Use("b")), (Use("c"),)),
    )
    graph = Graph(tensors, ops, frozenset({"c", "x"}))
    pricing = Pricing({op.id: 1.0 for op in ops}, Basis.MEASURED)
    plan = Planner.of(graph, pricing).draft(1000)
    spoiled = (Compute("f1"), Compute("f2", (("b", "a"),)), Compute("f3"))
    with pytest.raises(IllegalPlan, match="reads 'a'"):
        verify(_with_steps(plan, spoiled))


def _with_a_counter() -> Graph:
    """A buffer that the step counts up, and an op whose result depends on what was in it."""
    tensors = {
        "count": Tensor("count", Kind.BUFFER, nbytes=8),
        "seen": Tensor("seen", Kind.ACTIVATION, nbytes=8),
        "count.updated": Tensor("count.updated", Kind.BUFFER, nbytes=8, alias_of="count"),
        "g": Tensor("g", Kind.GRADIENT, nbytes=8),
        "gx": Tensor("gx", Kind.GRADIENT, nbytes=8),
    }
    ops = (
        Op("plus_one", "Wide", Phase.FORWARD, (Use("count"),), (Use("seen"),)),
        Op("update", "update", Phase.UPDATE, (Use("seen"),), (Use("count.updated"),)),
        Op("back", "Back", Phase.BACKWARD, (Use("g"), Use("seen")), (Use("gx"),)),
    )
    return Graph(tensors, ops, frozenset({"gx"}))


def test_an_op_that_read_a_buffer_before_its_update_is_never_recomputed() -> None:
    graph = _with_a_counter()
    pricing = Pricing({op.id: 1.0 for op in graph.ops}, Basis.MEASURED)
    plan = Planner.of(graph, pricing).draft(1000)
    twice = (*plan.steps[:2], RecomputeOp("plus_one", ("seen",)), *plan.steps[2:])
    with pytest.raises(IllegalPlan, match="must run once or would not make the same"):
        verify(replace(plan, steps=twice))


def test_what_comes_from_outside_is_never_written_over() -> None:
    """A gradient that the caller hands in dies at the op that reads it, but belongs to the caller."""
    tensors = {name: Tensor(name, Kind.GRADIENT, nbytes=8) for name in ("given", "made")}
    ops = (Op("back", "Relu", Phase.BACKWARD, (Use("given"),), (Use("made"),)),)
    graph = Graph(tensors, ops, frozenset({"made"}))
    plan = Planner.of(graph, Pricing({"back": 1.0}, Basis.MEASURED)).draft(1000)
    assert plan.steps[0] == Compute("back")
    with pytest.raises(IllegalPlan, match="may not write"):
        verify(_with_steps(plan, (Compute("back", (("made", "given"),)),)))


def _step() -> Graph:
    """A step with a view, a second output, an accumulated gradient, and statistics written into a buffer."""
    kinds = {
        Kind.INPUT: ("x",),
        Kind.BUFFER: ("average", "average.updated"),
        Kind.ACTIVATION: ("a", "seen", "view", "b", "total", "loss"),
        Kind.MASK: ("mask",),
        Kind.GRADIENT: ("gb", "gw", "ga"),
    }
    owners = {"view": "a", "average.updated": "average"}
    tensors = {
        name: Tensor(name, kind, nbytes=8, alias_of=owners.get(name))
        for kind, names in kinds.items()
        for name in names
    }
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    ops = (
        Op("make", "Wide", forward, (Use("x"),), (Use("a"), Use("seen"), Use("total"))),
        Op("book", "update", Phase.UPDATE, (Use("seen"),), (Use("average.updated"),)),
        Op("look", "View", forward, (Use("a"),), (Use("view"),)),
        Op("drop", "Relu", forward, (Use("view"),), (Use("b"), Use("mask"))),
        Op("add", "Wide", forward, (Use("b"),), (Use("total", Role.ACCUMULATE),)),
        Op("end", "Wide", forward, (Use("b"), Use("total")), (Use("loss"),)),
        Op("back end", "Back", backward, (Use("loss"), Use("b", Role.SAVED)), (Use("gb"), Use("gw"))),
        Op(
            "back drop",
            "Back",
            backward,
            (Use("gb"), Use("mask", Role.SAVED), Use("a", Role.SAVED)),
            (Use("ga"), Use("gw", Role.ACCUMULATE)),
        ),
    )
    return Graph(tensors, ops, frozenset({"x", "loss", "gw"}))


FORWARD: tuple[Step, ...] = tuple(map(Compute, ("make", "book", "look", "drop", "add", "end")))
BACKWARD: tuple[Step, ...] = (Compute("back end"), Compute("back drop"))


@cache
def _plain() -> Draft:
    graph = _step()
    return Planner.of(
        graph,
        Pricing({op.id: 1.0 for op in graph.ops}, Basis.MEASURED),
        options=PlanOptions(search=Search(moves=1)),
    ).draft(10_000)


def _planned(*steps: Step, capacity_bytes: int = 64) -> Draft:
    """A plan for `_step()` with these steps, whose curve is left as it was."""
    pricing = replace(_plain().pricing, tier=Tier("host", capacity_bytes, 8.0, 8.0))
    return replace(_plain(), pricing=pricing, steps=steps)


AWAY: tuple[Step, ...] = (Store(("a", "view")), Free(("a", "view")), Load(("a", "view")))


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param((*FORWARD, *BACKWARD), id="each op once"),
        pytest.param((*FORWARD, *AWAY, *BACKWARD), id="away and back"),
        pytest.param(
            (*FORWARD[:3], *AWAY[:2], Load(("a", "view")), *FORWARD[3:], *AWAY[1:], *BACKWARD),
            id="loaded again after a sum elsewhere",
        ),
        pytest.param(
            (*FORWARD, Free(("b", "mask")), RecomputeOp("drop", ("b", "mask")), *BACKWARD), id="made again"
        ),
        pytest.param(
            (*FORWARD, Free(("mask",)), RecomputeOp("drop", ("mask",)), *BACKWARD), id="one output made again"
        ),
        pytest.param((*FORWARD, *BACKWARD, Store(("gw",))), id="a gradient leaves before the caller has it"),
        pytest.param(
            (
                *FORWARD[:3],
                Compute("drop", (("b", "view"),)),
                *FORWARD[4:],
                RecomputeOp("make", ("a",)),
                *BACKWARD,
            ),
            id="written over and made again",
        ),
    ],
)
def test_what_computes_the_graph_is_let_through(steps: tuple[Step, ...]) -> None:
    plan = _planned()
    legal = _with_steps(plan, steps)
    assert verify(legal).draft() == legal


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ((Compute("nothing"),), "step 0 runs 'nothing', which is not an op"),
        ((RecomputeOp("nothing", ()),), "step 0 runs 'nothing', which is not an op"),
        ((RecomputeOp("make", ("a",)), *FORWARD), "step 0 repeats 'make', which has not run yet"),
        ((*FORWARD, RecomputeOp("add", ("total",))), "repeats 'add', which must run once"),
        ((*FORWARD, *BACKWARD, RecomputeOp("back end", ("gb",))), "repeats 'back end', which must run once"),
        ((*FORWARD, RecomputeOp("make", ("a", "seen"))), "the new contents of a buffer a second time"),
        ((*FORWARD, RecomputeOp("make", ("b",))), "wants outputs of 'make' that it does not have"),
        ((Store(("a",)),), "stores 'a', which does not hold a value"),
        ((Store(("x",)),), "stores 'x', which does not hold a value made before"),
        ((*FORWARD, Free(("a",)), Store(("a",))), "stores 'a', which does not hold a value"),
        ((*FORWARD, Store(("loss",))), "stores 'loss', which the caller has"),
        ((*FORWARD, Load(("a", "view"))), "loads a, view, of which the tier does not have the value"),
        ((*FORWARD, *AWAY[:2], Load(("a",))), "loads a, of which the tier does not have the value"),
        (
            (*FORWARD, BACKWARD[0], Store(("gw",)), BACKWARD[1], Free(("gw",)), Load(("gw",))),
            "loads gw, of which the tier does not have the value",
        ),
        (
            (*FORWARD[:-2], Store(("total",)), Free(("total",)), *FORWARD[-2:]),
            "'add' reads 'total', which does not hold its value",
        ),
        (
            (*FORWARD, RecomputeOp("drop", ("mask",), (("b", "view"),))),
            "'drop' may not write 'b' over 'view'",
        ),
        ((*FORWARD, RecomputeOp("drop", ("b",), (("b", "x"),))), "'drop' may not write 'b' over 'x'"),
        (
            (*FORWARD[:3], Compute("drop", (("b", "view"),)), *FORWARD[4:], *BACKWARD),
            "'back drop' reads 'a', which does not hold its value",
        ),
    ],
)
def test_what_does_not_compute_the_graph_says_at_which_step(steps: tuple[Step, ...], reason: str) -> None:
    with pytest.raises(IllegalPlan, match=reason):
        verify(_planned(*steps))


def test_loading_nothing_is_no_step() -> None:
    plan = _planned(*FORWARD, Load(()))
    with pytest.raises(IllegalPlan, match="loads nothing"):
        simulate(plan.graph, plan.steps, plan.pricing)


def test_a_parameter_is_not_read_after_its_update() -> None:
    """Its gradient may be: an update reads that and leaves it as it is."""
    kinds = {"x": Kind.INPUT, "w": Kind.PARAMETER, "a": Kind.ACTIVATION, "gw": Kind.GRADIENT}
    tensors = {name: Tensor(name, kind, nbytes=8) for name, kind in kinds.items()}
    tensors |= {name: Tensor(name, Kind.GRADIENT, nbytes=8) for name in ("gx", "norm")}
    backward = Phase.BACKWARD
    ops = (
        Op("make", "Wide", Phase.FORWARD, (Use("x"), Use("w")), (Use("a"),)),
        Op("back", "Back", backward, (Use("a"),), (Use("gw"),)),
        Op("back to x", "Back", backward, (Use("a"), Use("w")), (Use("gx"),)),
        Op("update", UPDATE, backward, (Use("w"), Use("gw")), ()),
        Op("look", "Back", backward, (Use("gw"),), (Use("norm"),)),
    )
    graph = Graph(tensors, ops, frozenset({"x", "gx", "norm"}))
    pricing = Pricing({op.id: 1.0 for op in ops}, Basis.MEASURED)
    plan = Planner.of(graph, pricing, options=PlanOptions(search=Search(moves=1))).draft(10_000)
    verify(plan)
    make, back, to_x, update, look = (Compute(op.id) for op in ops)
    with pytest.raises(IllegalPlan, match="'back to x' reads 'w', which does not hold its value"):
        verify(_with_steps(plan, (make, back, update, to_x, look)))


def test_a_tier_holds_all_that_is_stored_or_the_plan_is_refused() -> None:
    steps = (*FORWARD, *AWAY, Store(("b",)), Free(("b",)), Load(("b",)), *BACKWARD)
    exactly = _with_steps(_planned(capacity_bytes=16), steps)
    assert verify(exactly).draft() == exactly
    with pytest.raises(IllegalPlan, match="store 16 B, host has room for 15 B"):
        verify(_with_steps(_planned(capacity_bytes=15), steps))


def test_what_messages_arrive_in_is_stored_only_after_they_are_waited_for() -> None:
    names = {"x": Kind.INPUT, "sums": Kind.ACTIVATION, "total": Kind.ACTIVATION, "loss": Kind.ACTIVATION}
    tensors = {name: Tensor(name, kind, nbytes=8) for name, kind in names.items()}
    ops = (
        Op("begin", "stowplan.begin_sums.default", Phase.FORWARD, (Use("x"),), (Use("sums"),)),
        Op("wait", "Wide", Phase.FORWARD, (Use("sums"),), (Use("total"),)),
        Op("end", "Wide", Phase.FORWARD, (Use("sums"), Use("total")), (Use("loss"),)),
    )
    graph = Graph(tensors, ops, frozenset({"x", "loss"}))
    pricing = Pricing(dict.fromkeys(("begin", "wait", "end"), 1.0), Basis.MEASURED)
    plan = Planner.of(graph, pricing, options=PlanOptions(search=Search(moves=1))).draft(10_000)
    plan = replace(plan, pricing=replace(pricing, tier=Tier("host", 64, 8.0, 8.0)))
    away = (Store(("sums",)), Free(("sums",)), Load(("sums",)))
    begin, wait, end = (Compute(op.id) for op in ops)
    verify(_with_steps(plan, (begin, wait, *away, end)))
    with pytest.raises(IllegalPlan, match="stores 'sums', of which messages are still under way"):
        verify(_with_steps(plan, (begin, *away, wait, end)))


def test_each_device_has_the_peak_of_its_own_tensors_and_ops() -> None:
    where = {"x": "one", "a": "one", "b": "other", "loss": "other"}
    tensors = {
        name: Tensor(name, Kind.INPUT if name == "x" else Kind.ACTIVATION, nbytes=8, device=device)
        for name, device in where.items()
    }
    ops = (
        Op("make", "Wide", Phase.FORWARD, (Use("x"),), (Use("a"),), device="one"),
        Op("move", "Wide", Phase.FORWARD, (Use("a"),), (Use("b"),), device="other"),
        Op("end", "Wide", Phase.FORWARD, (Use("b"),), (Use("loss"),), device="other"),
    )
    graph = Graph(tensors, ops, frozenset({"x", "loss"}))
    pricing = Pricing(dict.fromkeys(("make", "move", "end"), 1.0), Basis.MEASURED, {"end": 100})
    steps = (Compute("make"), Compute("move"), Free(("a",)), Compute("end"), Free(("b",)))
    assert peaks_by_device(graph, steps, pricing) == {"one": 16, "other": 116}
