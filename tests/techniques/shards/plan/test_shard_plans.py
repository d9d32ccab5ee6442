"""Shares partition every tensor, needs are met from them exactly, and region text gives the plan back."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import pytest

from stowplan.capture import Captured, Ref, capture
from stowplan.errors import BadInput, BadUse, IllegalPlan
from stowplan.geometry import Rect, are_disjoint, covers
from stowplan.techniques.shards.plan.cells import Cells, regrouped
from stowplan.techniques.shards.plan.mesh import Axis, MeshAxes, parse_mesh
from stowplan.techniques.shards.plan.plan import ShardPlan, outline_plan, shard_plan
from stowplan.techniques.shards.plan.scale import mesh_traffic
from stowplan.techniques.shards.plan.seeds import seeds_for
from stowplan.techniques.shards.plan.text import load_plan, sheet_of, write_sheet
from stowplan.techniques.shards.plan.traffic import traffic_of
from tests.support.nets import gpt, resnet, unet, unet3d, vit
from tests.support.nets.net import Net

Seeds = Mapping[str, Sequence[int | None]]

CASES: list[tuple[Net, str, Seeds, dict[str, Any]]] = [
    (unet.NET, "space=2x2", {"args.0": (2, 3), "args.1": (1, 2)}, {"resolution": 204}),
    (unet.NET, "space=1x4", {"args.0": (2, 3), "args.1": (1, 2)}, {"resolution": 204}),
    (unet3d.NET, "space=3x1", {"args.0": (2, 3), "args.1": (1, 2)}, {}),
    (resnet.NET, "data=2,space=1:2", {"args.0": (0, 3), "args.1": (0, None)}, {}),
    (gpt.NET, "data=2,sequence=3", {"args.0": (0, 1), "args.1": (0, 1)}, {"batch": 4}),
    (vit.NET, "data=2,space=2", {"args.0": (0, 2), "args.1": (0, None)}, {"batch": 4}),
]


def ends_of(captured: Captured) -> list[str]:
    """What a step returns and leaves behind."""
    outputs = [leaf.tensor for leaf in captured.program.outputs if isinstance(leaf, Ref)]
    return [*outputs, *captured.program.updates.values()]


def plan_of(net: Net, mesh: str, seeds: Seeds, settings: dict[str, Any]) -> tuple[Captured, ShardPlan]:
    """A tiny net on a mesh; nothing is allocated."""
    captured = capture(*net.build("tiny", device="meta", **settings))
    return captured, shard_plan(captured.graph, parse_mesh(mesh), seeds, ends_of(captured))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].name}-{case[1]}")
@pytest.mark.slow
def test_what_a_worker_holds_is_its_own_and_what_it_is_sent(
    case: tuple[Net, str, Seeds, dict[str, Any]],
) -> None:
    _, plan = plan_of(*case)
    for worker, shard in plan.shards.items():
        sent = list(plan.received(worker))
        for name in plan.exchanged:
            if name not in shard.held:
                continue
            share = plan.layouts[name].share(plan.mesh, worker)
            parts = [share.intersect(shard.held[name]), *(t.rect for t in sent if t.tensor == name)]
            assert are_disjoint(parts)
            assert covers(parts, shard.held[name])
        for transfer in sent:
            owner = plan.layouts[transfer.tensor].share(plan.mesh, transfer.source)
            assert owner.contains(transfer.rect)
            assert transfer.source != worker


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].name}-{case[1]}")
@pytest.mark.slow
def test_owned_rects_are_disjoint_and_cover_and_every_level_has_what_it_needs(
    case: tuple[Net, str, Seeds, dict[str, Any]],
) -> None:
    _, plan = plan_of(*case)
    sheet = sheet_of(plan)
    for name, layout in plan.layouts.items():
        owned = [r for regions in sheet.workers if (r := regions.tensors[name].write) is not None]
        assert are_disjoint(owned)
        assert covers(owned, Rect.of_shape(layout.cells.sizes))
    for shard in plan.shards.values():
        for level in shard.levels:
            for use, need in zip(level.sharding.op.inputs, level.needs, strict=True):
                if need is not None:
                    sizes = plan.layouts[use.tensor].cells.sizes
                    assert shard.held[use.tensor].contains(need.clip(sizes))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].name}-{case[1]}")
@pytest.mark.slow
def test_traffic_from_workers_on_the_axes_is_that_of_all(
    case: tuple[Net, str, Seeds, dict[str, Any]],
) -> None:
    captured, plan = plan_of(*case)
    outline = outline_plan(captured.graph, plan.mesh, case[2], ends_of(captured))
    found, expected = mesh_traffic(outline), traffic_of(plan)
    assert found.sent_bytes.tolist() == [worker.sent_bytes for worker in expected]
    assert found.messages.tolist() == [worker.messages for worker in expected]


@pytest.mark.parametrize("mesh", ["data=16", "data=12", "data=24", "sequence=16", "data=2,sequence=9"])
@pytest.mark.slow
def test_four_places_of_each_kind_tell_the_traffic_of_a_long_axis(mesh: str) -> None:
    seeds = seeds_for(capture(*gpt.NET.build("tiny", device="meta", batch=16)).graph, parse_mesh(mesh))
    captured, plan = plan_of(gpt.NET, mesh, seeds, {"batch": 16})
    outline = outline_plan(captured.graph, plan.mesh, seeds, ends_of(captured))
    assert len(outline.shards) < plan.mesh.size
    found, expected = mesh_traffic(outline), traffic_of(plan)
    assert found.sent_bytes.tolist() == [worker.sent_bytes for worker in expected]
    assert found.messages.tolist() == [worker.messages for worker in expected]


@pytest.mark.slow
def test_region_text_of_four_workers_reads_back_into_the_same_plan() -> None:
    captured, plan = plan_of(*CASES[0])
    text = write_sheet(plan)
    assert load_plan(text, captured.graph, ends_of(captured)) == plan
    assert text.count("read_rect=") == 4 * len(plan.layouts)


@pytest.mark.slow
def test_region_text_that_does_not_follow_from_the_graph_is_refused() -> None:
    captured, plan = plan_of(*CASES[0])
    text = write_sheet(plan)
    high = list(plan.shards[0].held["args.0"].hi)
    halo = f"read_rect=Rect(array([0, 0, 0, 0], dtype=int32), array({high}, dtype=int32))"
    less = halo.replace(str(high), str([*high[:3], high[3] - 1]))
    assert halo in text
    with pytest.raises(IllegalPlan, match=r"worker 0 .*'args\.0'"):
        load_plan(text.replace(halo, less, 1), captured.graph, ends_of(captured))
    with pytest.raises(BadInput, match="4 low and 3 high"):
        load_plan(text.replace(halo, halo.replace(str(high), str(high[:3])), 1), captured.graph, [])
    with pytest.raises(BadInput, match="3 workers"):
        load_plan(text[: text.index("worker 3")], captured.graph, ends_of(captured))


@pytest.mark.parametrize("text", ["data", "data=", "data=two", "da ta=2", "data=0", "space=2:0"])
def test_a_mesh_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(BadUse):
        parse_mesh(text)


def test_spans_of_an_axis_partition_any_dim() -> None:
    for axis, size in product((Axis("a", 4), Axis("b", 3, (3, 1, 2))), range(9)):
        spans = [Rect((lo,), (hi,)) for lo, hi in (axis.span(size, n) for n in range(axis.size))]
        assert are_disjoint(spans)
        assert covers(spans, Rect((0,), (size,)))


def test_workers_are_numbered_by_their_places() -> None:
    mesh = MeshAxes((Axis("data", 2), Axis("space", 3)))
    assert [mesh.worker(place) for place in mesh.places()] == list(range(6))
    assert all(mesh.worker(mesh.place(worker)) == worker for worker in range(6))
    assert mesh.along(4, [0]) == (1, 4)
    assert mesh.along(4, [1]) == (3, 4, 5)


def test_merged_dims_keep_their_cells_as_long_as_one_is_cut() -> None:
    tokens = Cells.of_shape((4, 16, 32))
    merged = regrouped(tokens, (64, 32), cut=(1,))
    assert merged.groups == ((4, 16), (32,))
    assert regrouped(merged, (4, 16, 2, 16), cut=(1,)).groups == ((4,), (16,), (2,), (16,))
    assert regrouped(tokens, (64, 32), cut=()).groups == ((64,), (32,))


def test_a_box_of_cells_holds_the_flat_indices_it_is_made_for() -> None:
    cells = Cells(((3, 4, 2), (5,)))
    for low, high in ((0, 24), (3, 9), (8, 16), (9, 10), (15, 17)):
        box = cells.box(0, (low, high))
        rect = Rect(tuple(a for a, _ in box), tuple(b for _, b in box))
        flat = [(i * 4 + j) * 2 + k for i, j, k in rect.points()]
        assert set(range(low, high)) <= set(flat)
