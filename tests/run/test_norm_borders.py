"""Networks with norms, in sweeps that begin at the norms: eager's gradients, and half of what eager keeps."""

import copy
from collections import Counter
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

from stowplan import Search
from stowplan.capture import Captured, capture
from stowplan.errors import NotTileable
from stowplan.ir import Phase
from stowplan.plan.options import PlanOptions
from stowplan.plan.prices import price_by_macs
from stowplan.plan.steps import RecomputeOp
from stowplan.run.planning.planner import planner_for_captured
from stowplan.run.step.straight import StraightStep
from stowplan.techniques.tiles.plan.borders import stretches_between_narrow_norms, stretches_between_norms
from stowplan.techniques.tiles.plan.collapse import SWEEP, collapse, extra_macs_of
from stowplan.techniques.tiles.plan.costs import costs_of_sweep
from stowplan.techniques.tiles.plan.rounds import rounds_of
from stowplan.techniques.tiles.plan.segment import segment_of
from stowplan.techniques.tiles.run.insertions import capture_with_sweeps
from stowplan.techniques.tiles.run.sweep import Sweep
from tests.support.in_tiles import gradients_of, in_order, relative_error, sweeps_of
from tests.support.nets import NETS

pytestmark = pytest.mark.torch
SIZES: dict[str, dict[str, object]] = {
    "resnet50": {"resolution": 64, "batch": 4, "layers": (1, 2, 1)},
    "unet3d": {"resolution": 16},
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.slow
def test_a_step_in_sweeps_between_its_norms(name: str) -> None:
    model, args = NETS[name].build("tiny", device="cpu", dtype=torch.float64, seed=0, **SIZES[name])
    captured = in_order(capture(model, args))
    sweeps = sweeps_of(captured, stretches_between_norms(captured.graph))
    assert len(sweeps) > 4
    assert error_of(captured, model, args, sweeps) < 1e-12


def error_of(captured: Captured, model: nn.Module, args: tuple[Tensor, ...], sweeps: list[Sweep]) -> float:
    """Of loss, gradients and buffers of the step with these sweeps, against eager."""
    twin = copy.deepcopy(model)
    step = StraightStep(capture_with_sweeps(captured, twin, args, sweeps=sweeps), twin)
    loss, gradients = gradients_of(model, model, args)
    found, with_sweeps = gradients_of(step, twin, args)
    buffers, updated = ([buffer.double() for buffer in net.buffers()] for net in (model, twin))
    return relative_error([found, *with_sweeps, *updated], [loss, *gradients, *buffers])


@pytest.mark.slow
def test_a_step_in_sweeps_between_its_narrow_norms() -> None:
    """What a bottleneck widens to is never whole; what is handed on is as narrow as it gets."""
    model, args = NETS["resnet50"].build(
        "tiny", device="cpu", dtype=torch.float64, seed=0, **SIZES["resnet50"]
    )
    captured = in_order(capture(model, args))
    sweeps = sweeps_of(captured, stretches_between_narrow_norms(captured.graph))
    deep = [sweep for sweep in sweeps if len(sweep.rounds) > 2]
    assert len(deep) >= 3
    assert all(_widest(sweep) >= 2 * _normed_bytes(sweep) for sweep in deep)
    assert error_of(captured, model, args, sweeps) < 1e-12


def _widest(sweep: Sweep) -> int:
    return max(sweep.segment.graph.tensors[name].nbytes or 0 for name in sweep.segment.inside)


def _normed_bytes(sweep: Sweep) -> int:
    """Of what the first norm of a sweep is taken of."""
    return sweep.segment.graph.tensors[sweep.rounds[0].statistics[0].inputs[0].tensor].nbytes or 0


@pytest.mark.slow
def test_ops_not_needed_in_backward_are_not_counted() -> None:
    """Norm, activation and convolution: the convolution runs once forward, as without tiles."""
    captured = in_order(capture(*NETS["resnet50"].build("tiny")))
    segment = segment_of(captured.graph, stretches_between_norms(captured.graph)[2])
    assert segment.ops[-1].type == "aten.convolution.default"
    costs = costs_of_sweep(segment, rounds_of(segment, (1, 1, 2, 2)))
    assert costs.idle == {segment.ops[-1].id: 1.0}
    assert extra_macs_of(segment, costs) == 0


@pytest.mark.slow
def test_a_graph_with_norms_collapsed_updates_every_buffer_once() -> None:
    captured = in_order(capture(*NETS["resnet50"].build("tiny")))
    graph, pricing = captured.graph, price_by_macs(captured.graph)
    buffers = Counter(name for op in graph.ops if op.phase is Phase.UPDATE for name in op.writes())
    for stretch in stretches_between_norms(graph)[1:8]:
        segment = segment_of(graph, stretch)
        with suppress(NotTileable):  # the ends of blocks, whose sums of gradients the step writes out
            collapsed = collapse(segment, costs_of_sweep(segment, rounds_of(segment, (1, 1, 2, 1))), pricing)
            graph, pricing = collapsed.graph, collapsed.pricing
    assert Counter(name for op in graph.ops if op.phase is Phase.UPDATE for name in op.writes()) == buffers
    assert sum(op.type == SWEEP for op in graph.ops) >= 2


class Branches(nn.Module):
    """Two branches whose norms follow their convolutions at once, as they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))
        self.other = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.one(x) + self.other(x)).mean()


def test_norms_of_branches_come_side_by_side() -> None:
    captured = in_order(capture(Branches(), (torch.randn(2, 2, 4, 4),)))
    types = [op.type.split(".")[1] for op in captured.graph.ops if op.phase is Phase.FORWARD]
    first = types.index("_native_batch_norm_legit_functional")
    assert types[first + 1] == "_native_batch_norm_legit_functional"
    assert types[:first].count("convolution") == 2
    assert len(stretches_between_norms(captured.graph)) == 2


@pytest.mark.slow
def test_a_recomputed_sweep_does_not_gather_a_second_time() -> None:
    """Its statistics, a few numbers, are kept: a second run is one pass, however many norms it has."""
    model, args = NETS["resnet50"].build(
        "tiny", device="cpu", dtype=torch.float32, seed=0, **SIZES["resnet50"]
    )
    captured = in_order(capture(model, args))
    sweeps = sweeps_of(captured, stretches_between_narrow_norms(captured.graph))
    with_sweeps = capture_with_sweeps(captured, model, args, sweeps=sweeps)
    planner = planner_for_captured(with_sweeps, options=PlanOptions(search=Search(moves=500)))
    again = Counter(
        next(op.type for op in with_sweeps.graph.ops if op.id == step.op)
        for step in planner.plan(int(1.2 * planner.minimum_bytes)).steps
        if isinstance(step, RecomputeOp)
    )
    assert again["stowplan.sweep.default"] > 0
    assert again["stowplan.gather.default"] == 0
