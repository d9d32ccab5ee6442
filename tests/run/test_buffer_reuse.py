"""The gradient of a segment's input is written over that of its output where that is all a tile reads."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from stowplan import Search
from stowplan.capture import Captured, capture
from stowplan.ir import Graph
from stowplan.plan.judge.verify import verify
from stowplan.plan.options import PlanOptions
from stowplan.plan.planner import Planner
from stowplan.run.measure.measure import measure
from stowplan.run.planning.planner import PlannedStep, draft_within, price_captured
from stowplan.run.step.straight import StraightStep
from stowplan.techniques.tiles.plan.borders import stretches_between_narrow_norms
from stowplan.techniques.tiles.run.insertions import capture_with_sweeps
from stowplan.techniques.tiles.run.sweep import Sweep
from tests.support.in_tiles import gradients_of, in_order, relative_error, step_in_tiles, stretch, sweeps_of
from tests.support.nets import NETS

pytestmark = [pytest.mark.slow, pytest.mark.torch]
IN_PLACE, BESIDE = "stowplan.sweep_backward_.default(", "stowplan.sweep_backward.default("


class Bottleneck(nn.Module):
    def __init__(self, channels: int, inside: int) -> None:
        super().__init__()
        self.reduce = nn.Sequential(nn.Conv2d(channels, inside, 1, bias=False), nn.BatchNorm2d(inside))
        self.spatial = nn.Sequential(nn.Conv2d(inside, inside, 3, padding=1), nn.BatchNorm2d(inside))
        self.expand = nn.Sequential(nn.Conv2d(inside, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        branch = self.expand(torch.relu(self.spatial(torch.relu(self.reduce(x)))))
        return torch.relu(branch + x)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 16, 1)
        self.blocks = nn.Sequential(Bottleneck(16, 2), Bottleneck(16, 2))
        self.head = nn.Conv2d(16, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.blocks(self.stem(x)))
        return found.square().mean()


def residual_with_sweeps() -> tuple[Residual, tuple[Tensor, ...], Captured]:
    torch.manual_seed(0)
    model, args = Residual().double(), (torch.randn(1, 2, 32, 32, dtype=torch.float64),)
    captured = in_order(capture(model, args))
    sweeps = sweeps_of(captured, stretches_between_narrow_norms(captured.graph))
    return model, args, capture_with_sweeps(captured, model, args, sweeps=sweeps)


def never_over(graph: Graph) -> Graph:
    """The same step, in which every gradient has a place of its own."""
    ops = (
        replace(op, attributes={**op.attributes, "over": ()}) if "over" in op.attributes else op
        for op in graph.ops
    )
    return replace(graph, ops=tuple(ops))


def measured_peak_bytes(step: StraightStep, model: nn.Module, args: tuple[Tensor, ...]) -> int:
    def once() -> None:
        loss = step(*args)
        assert isinstance(loss, Tensor)
        torch.autograd.backward(loss)

    model.zero_grad(set_to_none=True)
    return measure(once, before=[*model.parameters(), *model.buffers(), *args]).measured_peak_bytes


def error_of(step: StraightStep, model: nn.Module, args: tuple[Tensor, ...]) -> float:
    loss, gradients = gradients_of(model, model, args)
    found, in_tiles = gradients_of(step, model, args)
    return relative_error([found, *in_tiles], [loss, *gradients])


def test_a_residual_net_needs_one_block_for_both_gradients() -> None:
    model, args, captured = residual_with_sweeps()
    pricing = price_captured(captured)
    graphs = captured.graph, never_over(captured.graph)
    over, beside = (
        Planner.of(graph, pricing, options=PlanOptions(allow=["recompute"], search=Search(moves=100)))
        for graph in graphs
    )
    allowed, more = over.minimum_bytes, beside.minimum_bytes
    assert allowed < 0.95 * more
    step = PlannedStep(verify(draft_within(over, allowed)), captured).bound_to(model)
    assert IN_PLACE in step.source
    assert error_of(step, model, args) < 1e-12
    assert measured_peak_bytes(step, model, args) <= allowed
    other = PlannedStep(verify(draft_within(beside, more)), captured).bound_to(model)
    assert IN_PLACE not in other.source
    assert allowed < measured_peak_bytes(other, model, args) <= more


class Joined(nn.Module):
    """The sum of two activations, or of one and a third value, which is added outside the sweep."""

    def __init__(self, *, adds_third: bool) -> None:
        super().__init__()
        self.one, self.other, self.third = (nn.Conv2d(2, 3, 1) for _ in range(3))
        self.adds_third = adds_third

    def forward(self, x: Tensor) -> Tensor:
        third = self.third(x)
        one, other = self.one(x), self.other(x)
        total = torch.tanh(one) + third if self.adds_third else torch.tanh(one) + torch.sigmoid(other)
        return total.square().mean()


@pytest.mark.parametrize("adds_third", [False, True])
def test_a_gradient_that_others_read_stays(adds_third: bool) -> None:
    """The other output of the same sweep, or an op outside of it."""
    torch.manual_seed(0)
    model, args = Joined(adds_third=adds_third).double(), (torch.randn(1, 2, 8, 8, dtype=torch.float64),)
    step = step_in_tiles(model, args, ("tanh", "tanh" if adds_third else "sigmoid", (1, 1, 2, 2)))
    assert error_of(step, model, args) < 1e-12


@pytest.mark.parametrize(("kernel", "over"), [(1, [-1, -1, 0]), (3, [-1, -1, -1])])
def test_a_halo_forbids_it(kernel: int, over: list[int]) -> None:
    """A tile would find there what its neighbour has written."""

    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Conv2d(2, 2, 1)
            self.conv = nn.Conv2d(2, 2, kernel, padding=kernel // 2)

        def forward(self, x: Tensor) -> Tensor:
            first: Tensor = self.before(x)
            return (first + torch.tanh(self.conv(first))).square().mean()

    captured = capture(Skip(), (torch.randn(1, 2, 8, 8),))
    sweep = Sweep(stretch(captured, "convolution_1", "add"), captured.program.calls, (1, 1, 2, 2))
    assert sweep.over_gradients(range(3)) == over


def test_tokens_of_a_feed_forward() -> None:
    model, args = NETS["gpt"].build("tiny", dtype=torch.float64)
    step = step_in_tiles(model, args, ("native_layer_norm_1", "add_2", (2, 4, 1)))
    assert IN_PLACE in step.source
    assert BESIDE not in step.source
    assert error_of(step, model, args) < 1e-12
