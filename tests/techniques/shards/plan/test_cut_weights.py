"""A `model` axis: which weights it cuts, where products are summed, and what it costs on any mesh."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from stowplan.capture import Captured, capture
from stowplan.errors import BadUse, TooManyWorkers
from stowplan.geometry import are_disjoint
from stowplan.plan.pricing import Machine
from stowplan.techniques.shards.plan.choice import choose_mesh, meshes_of
from stowplan.techniques.shards.plan.mesh import parse_mesh
from stowplan.techniques.shards.plan.parameter_shards import DividedParameters, ParameterPart
from stowplan.techniques.shards.plan.plan import ShardPlan, outline_plan, shard_plan
from stowplan.techniques.shards.plan.projection import Network, project
from stowplan.techniques.shards.plan.scale import mesh_traffic
from stowplan.techniques.shards.plan.seeds import seeds_for
from stowplan.techniques.shards.plan.text import load_plan, write_sheet
from stowplan.techniques.shards.plan.traffic import traffic_of
from stowplan.techniques.shards.plan.vocabulary import weight_layouts
from stowplan.techniques.shards.run.step import ends_of
from tests.support.nets import NETS
from tests.support.nets.fused import fused
from tests.support.nets.heads import HEADS, heads

THREE_AXES = "data=2,sequence=2,model=2"


@pytest.fixture(scope="module")
def gpt() -> Captured:
    return capture(*NETS["gpt"].build("tiny", device="meta", batch=4))


@pytest.fixture(scope="module")
def llama() -> Captured:
    return capture(*NETS["llama"].build("tiny", device="meta", batch=4))


def on(captured: Captured, mesh: str) -> ShardPlan:
    graph, found = captured.graph, parse_mesh(mesh)
    return shard_plan(graph, found, seeds_for(graph, found), ends_of(captured))


def cut_of(captured: Captured, size: int) -> dict[str, tuple[tuple[tuple[int, ...], ...], int | None]]:
    """By weight of the first block, its dims as cells, and the cell that is cut."""
    found = weight_layouts(captured.graph, parse_mesh(f"model={size}"))
    prefix = "network.blocks.0."
    return {
        name.removeprefix(prefix): (layout.cells.groups, layout.axes[0])
        for name, layout in found.items()
        if name.startswith(prefix)
    }


def test_heads_and_hidden_units_of_a_gpt_are_cut(gpt: Captured) -> None:
    assert cut_of(gpt, 2) == {
        "attention.qkv.weight": (((3, 4, 8), (32,)), 1),
        "attention.qkv.bias": (((3, 4, 8),), 1),
        "attention.out.weight": (((32,), (4, 8)), 1),
        "feed_forward.0.weight": (((128,), (32,)), 0),
        "feed_forward.0.bias": (((128,),), 0),
        "feed_forward.2.weight": (((32,), (128,)), 1),
    }


def test_shared_heads_and_gates_of_a_llama_are_cut(llama: Captured) -> None:
    assert cut_of(llama, 2) == {
        "attention.query.weight": (((4, 8), (32,)), 0),
        "attention.key.weight": (((2, 8), (32,)), 0),
        "attention.value.weight": (((2, 8), (32,)), 0),
        "attention.out.weight": (((32,), (4, 8)), 1),
        "feed_forward.gate.weight": (((88,), (32,)), 0),
        "feed_forward.up.weight": (((88,), (32,)), 0),
        "feed_forward.down.weight": (((32,), (88,)), 1),
    }


def test_fewer_heads_than_workers_are_left_whole(gpt: Captured, llama: Captured) -> None:
    assert {name.split(".")[0] for name in cut_of(gpt, 5)} == {"feed_forward"}
    assert {name for name in cut_of(llama, 4) if "attention" in name} == {
        "attention.query.weight",
        "attention.out.weight",
    }


def test_products_are_summed_and_nothing_is_sent_or_gathered(gpt: Captured) -> None:
    plan = on(gpt, "data=2,model=2")
    summed = [sharding.op.id for sharding in plan.shardings if sharding.summed_axes == (1,)]
    assert summed == ["embedding", "addmm_1", "addmm_3", "addmm_5", "addmm_7", "_log_softmax"]
    assert not plan.exchanged
    assert not plan.gathered


def test_each_worker_reads_its_part_of_a_weight(gpt: Captured) -> None:
    plan = on(gpt, "data=2,model=2")
    for name in plan.cut_weights:
        parts = [plan.shards[worker].held[name] for worker in (0, 1)]
        assert are_disjoint(parts)
        assert all(plan.shards[w + 2].held[name] == part for w, part in enumerate(parts))
        assert sum(part.volume for part in parts) * 4 == (gpt.graph.tensors[name].nbytes or 0)


def test_the_traffic_of_three_axes_is_that_of_all_workers_one_by_one(llama: Captured) -> None:
    graph, mesh = llama.graph, parse_mesh(THREE_AXES)
    each = traffic_of(on(llama, THREE_AXES))
    scaled = mesh_traffic(outline_plan(graph, mesh, seeds_for(graph, mesh), ends_of(llama)))
    assert scaled.sent_bytes.tolist() == [worker.sent_bytes for worker in each]
    assert scaled.messages.tolist() == [worker.messages for worker in each]


def test_region_text_of_a_model_axis_reads_back(gpt: Captured) -> None:
    plan = on(gpt, "data=2,model=2")
    assert load_plan(write_sheet(plan), gpt.graph, ends_of(gpt)) == plan


def test_a_model_axis_takes_compute_and_memory_and_sends_parts_of_shards(llama: Captured) -> None:
    graph = llama.graph

    def projected(mesh: str, *, shards: bool) -> tuple[float, int, int]:
        found, given = parse_mesh(mesh), (Machine(), Network())
        seeds, ends = seeds_for(graph, found), ends_of(llama)
        made = project(graph, found, seeds, ends, *given, shards_parameters=shards)
        return made.compute_seconds, made.peak_bytes, made.sent_bytes

    for shards in (False, True):
        less, more = (projected(mesh, shards=shards) for mesh in ("data=2,model=2", "data=2"))
        assert less[0] < more[0]
        assert less[1] < more[1]
    whole = DividedParameters(graph, 4).traffic().sent_bytes.max()
    assert projected("data=2,model=2", shards=True)[2] < whole


def test_a_part_has_the_rows_and_columns_of_its_cells(gpt: Captured) -> None:
    plan = on(gpt, "data=2,model=2")
    name = "network.blocks.0.attention.qkv.weight"
    part = ParameterPart.of_rect(plan.layouts[name].cells, plan.shards[1].held[name])
    assert part.runs == (((16, 32), (48, 64), (80, 96)), ((0, 32),))
    whole = torch.arange(96 * 32).view(96, 32)
    found = torch.zeros(part.shape, dtype=whole.dtype)
    for worker in range(4):
        rows = 24 * worker, 24 * worker + 24
        blocks = part.blocks(rows)
        assert sum(whole[slice(*rows)][at].numel() for at, _ in blocks) == part.elements(rows)
        for at, to in blocks:
            found[to] = whole[slice(*rows)][at]
    assert torch.equal(found, whole.view(3, 4, 8, 32)[:, 2:].reshape(48, 32))


def test_projections_in_one_weight_are_cut_piece_by_piece() -> None:
    plan = on(capture(*fused()), "data=2,model=2")
    assert {name: plan.layouts[name].cells.groups for name in plan.cut_weights if "weight" in name} == {
        "all.weight": ((3, 4, 4), (16,)),
        "out.weight": ((16,), (4, 4)),
        "query.weight": ((4, 4), (16,)),
        "pair.weight": ((2, 2, 4), (16,)),
        "inner_out.weight": ((16,), (2, 2, 4)),
        "gate_and_up.weight": ((2, 24), (16,)),
        "down.weight": ((16,), (24,)),
    }
    assert sum(sharding.summed_axes == (1,) for sharding in plan.shardings) == 3
    assert not plan.exchanged
    assert not plan.gathered


class ThreeLayers(nn.Module):
    """The hidden dim between the last two is left whole: the second layer already sums over its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y.square().mean()


def test_a_weight_is_cut_once() -> None:
    step = capture(ThreeLayers(), (torch.ones(4, 4),))
    found = weight_layouts(step.graph, parse_mesh("model=2"))
    assert {name: layout.axes for name, layout in found.items()} == {
        "layers.0.weight": (0,),
        "layers.0.bias": (0,),
        "layers.2.weight": (1,),
    }


def test_a_net_without_a_hidden_dim_between_products_is_refused() -> None:
    unet = capture(*NETS["unet"].build("tiny", device="meta"))
    with pytest.raises(TooManyWorkers, match="no two linear layers"):
        weight_layouts(unet.graph, parse_mesh("data=2,model=2"))


def test_an_axis_that_cuts_inputs_by_dims_cuts_no_weights(gpt: Captured) -> None:
    seeds = {"args.0": (0, 1), "args.1": (0, 1)}
    plan = shard_plan(gpt.graph, parse_mesh("data=2,model=2"), seeds, ends_of(gpt))
    assert not plan.cut_weights
    assert plan.layouts["embedding"].axes == (0, 1)


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_is_cut_unless_the_caller_gets_its_logits(kind: str) -> None:
    for returned in (False, True):
        found = capture(*heads(kind, tied=True, returned=returned))
        mesh, ends = parse_mesh("data=2,model=2"), frozenset(ends_of(found))
        if returned:
            with pytest.raises(TooManyWorkers, match="no loss has as many classes"):
                weight_layouts(found.graph, mesh, ends)
        else:
            cut = weight_layouts(found.graph, mesh, ends)
            assert {name: layout.axes for name, layout in cut.items()} == {
                "words.weight": (None, 0),
                "head.bias": (None, 0),
            }


def test_a_vocabulary_divides_logits_among_workers(gpt: Captured) -> None:
    plan = on(gpt, "data=2,model=2")
    (loss,) = (s for s in plan.shardings if s.op.type == "aten.nll_loss_forward.default")
    scores = loss.op.inputs[0].tensor
    parts = [shard.held[scores].volume for shard in plan.shards.values()]
    assert max(parts) <= 51 / 101 * 0.5 * 4 * 16 * 101
    assert loss.summed_axes == (0, 1)


def test_a_number_of_workers_may_become_a_model_axis() -> None:
    step = capture(*NETS["llama"].build("tiny", device="meta", batch=1, sequence=2))
    given = step.graph, 4, ends_of(step), Machine(), Network()
    meshes = [str(mesh) for mesh in meshes_of(step.graph, 4)]
    assert meshes == ["data=1,sequence=1,model=4", "data=1,sequence=2,model=2"]
    assert str(choose_mesh(*given).mesh) in meshes
    unet = capture(*NETS["unet"].build("tiny", device="meta"))
    assert not any(axis.name == "model" for mesh in meshes_of(unet.graph, 4) for axis in mesh.axes)


def test_shared_heads_limit_the_axis_and_are_named(llama: Captured) -> None:
    graph, mesh = llama.graph, parse_mesh("sequence=2,model=4")
    with pytest.raises(TooManyWorkers, match="give 'model' at most 2 workers"):
        project(graph, mesh, seeds_for(graph, mesh), ends_of(llama), Machine(), Network())


def test_two_model_axes_are_refused(gpt: Captured) -> None:
    with pytest.raises(BadUse, match="has 2 axes 'model'"):
        weight_layouts(gpt.graph, parse_mesh("model=2x2"))


@pytest.mark.parametrize("mesh", [THREE_AXES, "data=2,space=2x2"])
def test_what_repeated_layers_share_is_what_each_op_would_get_alone(llama: Captured, mesh: str) -> None:
    """An attribute that no rule reads makes every op look different, so that nothing is shared."""
    blocks = [module for _ in range(3) for module in (nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())]
    image = torch.empty(2, 4, 32, 32, device="meta")
    captured = (
        llama if mesh == THREE_AXES else capture(nn.Sequential(*blocks).to("meta"), (image,), loss=sum_of)
    )
    graph, found = captured.graph, parse_mesh(mesh)
    ops = tuple(replace(op, attributes={**op.attributes, "own": op.id}) for op in graph.ops)
    plans, figures = [], []
    for step in (graph, replace(graph, ops=ops)):
        seeds, ends = seeds_for(step, found), ends_of(captured)
        plans.append(shard_plan(step, found, seeds, ends))
        each = project(step, found, seeds, ends, Machine(), Network(), shards_parameters=True)
        figures.append(replace(each, planning_seconds=0.0, planner_bytes=0))
    shared, alone = plans
    assert len({sharding.alike for sharding in shared.shardings}) < len(shared.shardings)
    assert len({sharding.alike for sharding in alone.shardings}) == len(alone.shardings)
    assert (shared.layouts, shared.exchanged) == (alone.layouts, alone.exchanged)
    for worker, shard in shared.shards.items():
        other = alone.shards[worker]
        assert (shard.made, shard.held) == (other.made, other.held)
        levels = [[(level.name, level.made, level.needs) for level in each.levels] for each in (shard, other)]
        assert levels[0] == levels[1]
    assert figures[0] == figures[1]


def sum_of(image: Tensor) -> Tensor:
    return image.sum()
