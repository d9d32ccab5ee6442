"""A plan that does not compute its graph is refused, and says at which step."""

from dataclasses import replace

import pytest
from small_steps import training_step, uneven_prices

from stowplan.errors import IllegalPlan
from stowplan.ir import Graph, Kind, Op, Phase, Tensor, Use
from stowplan.plan.decision import Again, Compute, Free, Step
from stowplan.plan.make import Planner
from stowplan.plan.plan import Plan
from stowplan.plan.pricing import Basis, Pricing
from stowplan.plan.simulate import simulate
from stowplan.plan.verify import verify


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A plan in which some ops run again."""
    graph = training_step(5, layers=8)
    planner = Planner.of(graph, uneven_prices(graph, 5), moves=2000)
    found = planner.plan((planner.minimum_bytes + planner.plain_peak_bytes) // 2)
    assert any(isinstance(step, Again) for step in found.steps)
    return verify(found)


def _with_steps(plan: Plan, steps: tuple[Step, ...]) -> Plan:
    curve = simulate(plan.graph, steps, plan.pricing.seconds, plan.pricing.workspace_bytes).curve_bytes
    return replace(plan, steps=steps, projected_curve_bytes=curve)


def test_leaving_out_a_second_run_is_seen(plan: Plan) -> None:
    number = next(i for i, step in enumerate(plan.steps) if isinstance(step, Again))
    with pytest.raises(IllegalPlan, match="does not hold its value"):
        verify(replace(plan, steps=plan.steps[:number] + plan.steps[number + 1 :]))


def test_leaving_out_an_op_is_seen(plan: Plan) -> None:
    last = max(i for i, step in enumerate(plan.steps) if isinstance(step, Compute))
    with pytest.raises(IllegalPlan, match=r"never runs|is gone"):
        verify(replace(plan, steps=plan.steps[:last]))


def test_running_an_op_twice_is_seen(plan: Plan) -> None:
    doubled = (plan.steps[0], *plan.steps)
    with pytest.raises(IllegalPlan, match="a second time"):
        verify(replace(plan, steps=doubled))


def test_freeing_too_early_is_seen(plan: Plan) -> None:
    first = next(step for step in plan.steps if isinstance(step, Compute))
    made = next(op for op in plan.graph.ops if op.id == first.op).outputs[0].tensor
    with pytest.raises(IllegalPlan):
        verify(replace(plan, steps=(plan.steps[0], Free((made,)), *plan.steps[1:])))


def test_a_curve_that_is_not_the_steps_own_is_seen(plan: Plan) -> None:
    lower = (plan.projected_curve_bytes[0] - 1, *plan.projected_curve_bytes[1:])
    with pytest.raises(IllegalPlan, match="curve"):
        verify(replace(plan, projected_curve_bytes=lower))


def test_more_than_the_budget_is_seen(plan: Plan) -> None:
    with pytest.raises(IllegalPlan, match="allowed"):
        verify(replace(plan, allowed_bytes=plan.projected_peak_bytes - 1))


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
    plan = Planner.of(graph, pricing).plan(1000)
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


def test_an_op_that_read_a_buffer_before_its_update_never_runs_again() -> None:
    graph = _with_a_counter()
    pricing = Pricing({op.id: 1.0 for op in graph.ops}, Basis.MEASURED)
    plan = Planner.of(graph, pricing).plan(1000)
    twice = (*plan.steps[:2], Again("plus_one", ("seen",)), *plan.steps[2:])
    with pytest.raises(IllegalPlan, match="must run once or would not make the same"):
        verify(replace(plan, steps=twice))


def test_what_comes_from_outside_is_never_written_over() -> None:
    """A gradient that the caller hands in dies at the op that reads it, but belongs to the caller."""
    tensors = {name: Tensor(name, Kind.GRADIENT, nbytes=8) for name in ("given", "made")}
    ops = (Op("back", "Relu", Phase.BACKWARD, (Use("given"),), (Use("made"),)),)
    graph = Graph(tensors, ops, frozenset({"made"}))
    plan = Planner.of(graph, Pricing({"back": 1.0}, Basis.MEASURED)).plan(1000)
    assert plan.steps[0] == Compute("back")
    with pytest.raises(IllegalPlan, match="may not write"):
        verify(_with_steps(plan, (Compute("back", (("made", "given"),)),)))
