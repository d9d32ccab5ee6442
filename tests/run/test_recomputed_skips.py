"""Joined stages, and skips recomputed for late readers: the same gradients in less memory."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from stowplan import Search
from stowplan.capture import Captured, capture
from stowplan.ir import Phase
from stowplan.ops.effects import macs_of
from stowplan.ops.table import site_of
from stowplan.plan.judge.verify import verify
from stowplan.plan.options import PlanOptions
from stowplan.plan.select import Baseline, Refusals
from stowplan.run.planning.planner import Subject, price_captured
from stowplan.run.planning.saved import saved_step
from stowplan.run.step.straight import StraightStep
from stowplan.techniques.tiles.plan.borders import in_tiling_order
from stowplan.techniques.tiles.plan.candidates import Tiling, stages_of
from stowplan.techniques.tiles.plan.collapse import extra_macs_of
from stowplan.techniques.tiles.plan.joins import BackwardFootprint, divided_tilings
from stowplan.techniques.tiles.plan.skips import Skip, cheap_skips
from stowplan.techniques.tiles.run import insertions
from stowplan.techniques.tiles.run.candidates import TiledCandidate
from stowplan.techniques.tiles.run.insertions import capture_with_sweeps
from stowplan.techniques.tiles.run.remade import with_skips_recomputed
from stowplan.techniques.tiles.run.sweep import Sweep
from stowplan.techniques.tiles.run.sweep_probes import SweepProbes
from tests.support.in_tiles import gradients_of, relative_error
from tests.support.nets import NETS

pytestmark = [pytest.mark.slow, pytest.mark.torch]
Args = tuple[Tensor, ...]


def unet() -> tuple[nn.Module, Args]:
    return NETS["unet"].build("tiny", dtype=torch.float64, resolution=332)


def vgg(resolution: int = 1024, width: int = 4) -> tuple[nn.Module, Args]:
    return NETS["vgg16"].build(
        "tiny", dtype=torch.float64, resolution=resolution, batch=1, width=width, has_classifier=False
    )


def early(captured: Captured) -> Captured:
    return replace(captured, graph=in_tiling_order(captured.graph))


def error_of(captured: Captured, model: nn.Module, args: Args, tiling: Tiling) -> float:
    """Of loss and gradients of the step with this tiling, against eager."""
    sweeps = [Sweep(tiled.segment, captured.program.calls, tiled.parts) for tiled in tiling]
    return error_of_step(capture_with_sweeps(early(captured), model, args, sweeps=sweeps), model, args)


def error_of_step(captured: Captured, model: nn.Module, args: Args) -> float:
    step = StraightStep(captured, model)
    loss, gradients = gradients_of(model, model, args)
    found, made = gradients_of(step, model, args)
    return relative_error([found, *made], [loss, *gradients])


def test_joined_stages_compute_what_eager_does() -> None:
    model, args = vgg()
    captured = capture(model, args)
    tilings = list(divided_tilings(early(captured).graph, Refusals()))
    assert tilings
    assert error_of(captured, model, args, tilings[-1]) < 1e-12


def test_what_joined_stages_hand_to_each_other_is_never_whole() -> None:
    graph = in_tiling_order(capture(*vgg()).graph)
    borders = {stage[-1] for stage in stages_of(graph)}
    *_, least = divided_tilings(graph, Refusals())
    inside = {op.id for tiled in least for op in tiled.segment.ops[:-1]}
    assert inside & borders


def test_more_memory_is_offered_for_clearly_less_work_alone() -> None:
    graph = in_tiling_order(capture(*vgg()).graph)
    tilings = list(divided_tilings(graph, Refusals()))
    extra = [sum(extra_macs_of(tiled.segment, tiled.costs) for tiled in tiling) for tiling in tilings]
    step = sum(macs_of(site_of(graph, op)) for op in graph.ops)
    assert len(extra) > 2
    assert all(more - less > 0.01 * step for less, more in pairwise(extra))


def test_borders_between_valleys_do_not_keep_stages_apart() -> None:
    """Three blocks that widen first and end in a loss are in one sweep, though each narrows in two steps."""
    net = nn.Sequential(*(layer for _ in range(3) for layer in narrowing()))
    graph = in_tiling_order(capture(Summed(net), (torch.zeros(1, 1, 64, 64),)).graph)
    sweeps = [
        {op.id for op in each.segment.ops} for tiling in divided_tilings(graph, Refusals()) for each in tiling
    ]
    most = {fall: max(len(reached(sweep, stages_of(graph, fall))) for sweep in sweeps) for fall in (0, 0.3)}
    assert most[0] == 3 < most[0.3]


def narrowing() -> tuple[nn.Module, ...]:
    return nn.Conv2d(1, 32, 1), nn.ReLU(), nn.Conv2d(32, 4, 1), nn.Tanh(), nn.Conv2d(4, 1, 1)


def reached(ops: set[str], stages: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return [stage for stage in stages if not ops.isdisjoint(stage)]


def test_parts_of_joined_stages_are_small_where_they_can_be() -> None:
    """Memory of large blocks is asked for anew every time: tiles of them would be slow."""
    graph = in_tiling_order(capture(*vgg(resolution=2048, width=32)).graph)
    parts = [tiled.costs.part_bytes for tiling in divided_tilings(graph, Refusals()) for tiled in tiling]
    assert 2**22 < max(parts) <= 2**25


def test_every_pool_ends_a_stage() -> None:
    """Also the one behind which as much is handed on as before: the last pools of VGG."""
    graph = in_tiling_order(capture(*vgg()).graph)
    borders = [stage[-1] for stage in stages_of(graph)]
    pools = [op.id for op in graph.ops if op.type == "aten.max_pool2d_with_indices.default"]
    assert borders[:4] == pools[:4]


def test_two_stages_as_one_need_less_than_the_second_alone() -> None:
    graph = in_tiling_order(capture(*vgg()).graph)
    need, (first, second, *_) = BackwardFootprint(graph), stages_of(graph)
    assert need.beside((*first, *second)) < need.beside(second)


def test_needs_count_what_there_is() -> None:
    """Of two convolutions: the image, all weights, gradients from there on, what comes in and out."""
    net = nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.Conv2d(2, 4, 1, bias=False))
    graph = capture(Summed(net), (torch.zeros(1, 1, 8, 8),)).graph
    first, second = [op.id for op in graph.ops if op.phase is Phase.FORWARD][:2]
    need, weights, image = BackwardFootprint(graph), [2 * 4, 8 * 4], 64 * 4
    assert need.standing_bytes == 2 * sum(weights) + image
    assert need.beside([first]) == 2 * sum(weights) + image + 2 * image
    assert need.beside([second]) == sum(weights) + weights[1] + image + 2 * 2 * image + 4 * image
    assert need.beside([first, second]) == 2 * sum(weights) + image + 4 * image


class Summed(nn.Module):
    """A network and the sum of what it makes."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, image: Tensor) -> Tensor:
        made: Tensor = self.net(image)
        return made.sum()


def test_the_largest_skip_of_a_unet_is_cheap_to_recompute() -> None:
    captured = early(capture(*unet()))
    first = cheap_skips(captured.graph)[0]
    late = [op for op in captured.graph.ops if op.id == first.reader]
    assert late[0].type == "aten.cat.default"
    assert [op.type for op in first.makers][:2] == ["aten.convolution.default", "aten.relu.default"]


def test_a_step_with_recomputed_skips_computes_what_eager_does() -> None:
    model, args = unet()
    captured = next(with_skips_recomputed(capture(model, args), model, args, {}))
    tilings = list(divided_tilings(in_tiling_order(captured.graph), Refusals()))
    assert error_of_step(captured, model, args) < 1e-12
    assert error_of(captured, model, args, tilings[-1]) < 1e-12


def test_a_plan_with_a_recomputed_skip_comes_back() -> None:
    model, args = NETS["unet"].build("tiny", resolution=236)
    subject = Subject(capture(model, args), model, args, {})
    remade = next(with_skips_recomputed(subject.captured, model, args, {}))
    pricing, graph = price_captured(remade), in_tiling_order(remade.graph)
    probes = SweepProbes(graph, remade.program.calls, pricing)
    tiling = list(divided_tilings(graph, Refusals()))[-1]
    search = PlanOptions({"recompute", "tile"}, search=Search(moves=20))
    way = TiledCandidate(replace(subject, captured=remade), tiling, {}, probes, Baseline(1.0, 2**30), search)
    plan = verify(way.draft(2**30))
    assert plan.tile_maps
    assert saved_step(plan, subject, 2**30).captured.graph == way.captured.graph


def test_a_skip_whose_second_making_is_not_differentiated_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    recomputed = insertions._recomputed

    def detached(captured: Captured, skip: Skip, values: dict[str, Tensor]) -> Tensor:
        return recomputed(captured, skip, values).detach()

    monkeypatch.setattr(insertions, "_recomputed", detached)
    model, args = unet()
    captured = next(with_skips_recomputed(capture(model, args), model, args, {}))
    assert error_of_step(captured, model, args) > 1e-6


@pytest.mark.parametrize("name", ["resnet50", "unet3d"])
def test_an_op_that_gathers_statistics_is_not_recomputed(name: str) -> None:
    graph = in_tiling_order(capture(*NETS[name].build("tiny")).graph)
    assert cheap_skips(graph) == ()
