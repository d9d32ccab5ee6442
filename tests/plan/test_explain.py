"""The explanation of a tensor agrees with the plan and the simulator."""

from dataclasses import replace

import pytest

from stowplan import Search
from stowplan.errors import BadUse
from stowplan.plan.explain.explain import explain
from stowplan.plan.judge.simulate import alive_at
from stowplan.plan.judge.verify import verify
from stowplan.plan.options import PlanOptions
from stowplan.plan.plan import Plan
from stowplan.plan.planner import Planner
from stowplan.plan.steps import Keep, Recompute, RecomputeOp
from tests.support.steps import random_step, uneven_prices


@pytest.fixture(scope="module", params=[5, 6, 11])
def plan(request: pytest.FixtureRequest) -> Plan:
    """A plan in which some tensors are recomputed."""
    graph = random_step(request.param, layers=8)
    planner = Planner.of(
        graph, uneven_prices(graph, request.param), options=PlanOptions(search=Search(moves=500))
    )
    return planner.plan((planner.minimum_bytes + planner.plain_peak_bytes) // 2)


@pytest.mark.slow
def test_a_tensor_is_in_memory_where_it_is_said_to_be(plan: Plan) -> None:
    owners = [set(alive_at(plan.graph, plan.steps, number)) for number in range(len(plan.steps))]
    sharing = {name for step in plan.steps for pair in getattr(step, "overwrites", ()) for name in pair}
    views: dict[str, set[str]] = {}
    for name in plan.graph.tensors:
        views.setdefault(plan.graph.storage_of(name), set()).add(name)
    for name, tensor in plan.graph.tensors.items():
        if tensor.alias_of is None and sharing.isdisjoint(views[name]):
            inside = {at for start, end in explain(plan, name).spans for at in range(start, end)}
            last = len(plan.steps) - 1
            assert inside == {at for at, there in enumerate(owners) if views[name] & there and at != last}


@pytest.mark.slow
def test_second_runs_and_their_price_are_counted(plan: Plan) -> None:
    told = {name: explain(plan, name) for name in plan.graph.tensors}
    again = [step for step in plan.steps if isinstance(step, RecomputeOp)]
    assert again
    for name, each in told.items():
        assert each.again_runs == sum(name in step.outputs for step in again)
        if each.again_runs and plan.graph.tensors[name].alias_of is None:
            assert len(each.spans) == 1 + each.again_runs
            assert each.again_share * plan.plain_seconds == pytest.approx(each.again_seconds)
            assert each.otherwise.startswith("kept, the step would")
    assert {type(each.decision) for each in told.values() if each.again_runs} <= {Recompute, type(None)}


def test_what_is_kept_says_what_making_it_again_would_bring(plan: Plan) -> None:
    kept = [explain(plan, name) for name, made in plan.decisions.items() if isinstance(made, Keep)]
    alone = [told for told in kept if len(told.spans) == 1]
    assert alone
    for told in alone:
        assert told.alive_at_peak == ("lower the memory at the peak by" in told.otherwise)
        assert told.alive_at_peak != ("not lower the peak" in told.otherwise)


def test_what_comes_from_outside_was_not_open_to_decide(plan: Plan) -> None:
    told = explain(plan, "w")
    assert (told.maker, told.decision) == ("", None)
    assert told.spans == ((0, len(plan.steps) - 1),)
    assert told.otherwise == "nothing else was open to decide"


def test_a_tensor_is_found_by_its_name_and_others_are_offered(plan: Plan) -> None:
    tensors = dict(plan.graph.tensors)
    tensors["v0"] = replace(tensors["v0"], name="encoder.out")
    named = verify(replace(plan.draft(), graph=replace(plan.graph, tensors=tensors)))
    assert explain(named, "encoder.out").tensor == "v0"
    with pytest.raises(BadUse, match="no tensor 'g_v'; it has g_v"):
        explain(plan, "g_v")
    with pytest.raises(BadUse, match=f"it has {next(iter(plan.decisions))}"):
        explain(plan, "nowhere")
