"""Layouts that change between stages: faster than any that is alike in all; their text reads back."""

import pytest

from stowplan.capture import Captured, capture
from stowplan.errors import BadUse, BudgetTooSmall
from stowplan.plan.pricing import Machine
from stowplan.techniques.shards.plan.mesh import parse_mesh
from stowplan.techniques.shards.plan.plan import shard_plan
from stowplan.techniques.shards.plan.projection import Network
from stowplan.techniques.shards.plan.relayout import LayoutState, Relayout, choose_layouts
from stowplan.techniques.shards.plan.seeds import seeds_for
from stowplan.techniques.shards.plan.text import load_plan, write_sheet
from tests.support.nets import unet

MESH = parse_mesh("space=2")
ENDS = ["nll_loss2d_forward.0"]
SLOW = Network(latency_seconds=4e-4, bytes_per_second=1e9)


def step(batch: int) -> Captured:
    return capture(*unet.NET.build("tiny", device="meta", resolution=412, batch=batch))


def chosen(captured: Captured, allowed_bytes: int | None = None) -> Relayout:
    graph = captured.graph
    seeds = seeds_for(graph, MESH)
    return choose_layouts(graph, MESH, seeds, ENDS, Machine(), SLOW, allowed_bytes)


@pytest.mark.slow
def test_stages_are_gathered_where_messages_cost_more_than_they_save() -> None:
    captured = step(1)
    found = chosen(captured)
    fixed = [projection.step_seconds for projection in found.alike.values()]
    assert set(found.states.values()) == {LayoutState.FOLLOW, LayoutState.GATHER}
    assert found.projection.step_seconds < min(fixed)
    assert load_plan(write_sheet(found.plan), captured.graph, ENDS) == found.plan
    with pytest.raises(BudgetTooSmall) as refused:
        chosen(captured, allowed_bytes=1000)
    assert refused.value.minimum_bytes <= found.projection.peak_bytes


def test_layouts_of_very_many_workers_or_of_nothing_are_not_chosen() -> None:
    graph = step(1).graph
    mesh = parse_mesh("space=16x16")
    with pytest.raises(BadUse, match="up to 64 workers"):
        choose_layouts(graph, mesh, seeds_for(graph, mesh), ENDS, Machine(), SLOW)
    with pytest.raises(BadUse, match="no op makes 'conv'"):
        shard_plan(graph, MESH, seeds_for(graph, MESH), ENDS, {"conv": (2,)})
