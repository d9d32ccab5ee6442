"""A few tiles tell what a sweep takes: its memory to the byte, in about the time of all of them."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stowplan import Search
from stowplan.capture import capture
from stowplan.plan.options import PlanOptions
from stowplan.plan.select import Baseline, Refusals
from stowplan.run.cost.machine import Cost
from stowplan.run.cost.probe import Signature, call_signature, cost_of_call, costs_of_calls, probed_cost
from stowplan.run.planning.planner import Subject, price_captured
from stowplan.techniques.tiles.plan.borders import in_tiling_order
from stowplan.techniques.tiles.plan.candidates import stage_tilings
from stowplan.techniques.tiles.run import sweep_probes
from stowplan.techniques.tiles.run.candidates import TiledCandidate
from stowplan.techniques.tiles.run.sampling import sample_of
from stowplan.techniques.tiles.run.sweep import Sweep
from stowplan.techniques.tiles.run.sweep_probes import SweepProbes, signatures_of
from tests.support.in_tiles import stretch
from tests.support.nets import NETS
from tests.support.timing import timed

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]
CPU = torch.device("cpu")
Cut = tuple[str | None, str | None, tuple[int, ...]]


def calls_of(net: str, settings: dict[str, Any], cut: Cut) -> tuple[Sweep, list[Signature]]:
    captured = capture(*NETS[net].build("tiny", **settings))
    first, last, parts = cut
    sweep = Sweep(stretch(captured, first, last), captured.program.calls, parts)
    return sweep, signatures_of(sweep)


@pytest.mark.parametrize(
    ("net", "settings", "cut"),
    [
        ("vgg16", {"resolution": 128}, ("convolution", "max_pool2d_with_indices_1", (1, 1, 4, 4))),
        ("unet", {"resolution": 220}, (None, None, (1, 1, 2, 2))),
        (
            "resnet50",
            {"resolution": 128},
            ("_native_batch_norm_legit_functional", "convolution_1", (1, 1, 4, 2)),
        ),
        ("gpt", {"batch": 1}, ("native_layer_norm_1", "add_2", (1, 8, 1))),
    ],
)
@timed
def test_the_largest_tiles_take_as_much_memory_as_all(net: str, settings: dict[str, Any], cut: Cut) -> None:
    sweep, signatures = calls_of(net, settings, cut)
    assert sum(len(each.tiles) for each in sweep.rounds) > 2 * len(sweep.rounds)
    assert all(len(sample_of(each).tiles) <= 4 for each in sweep.rounds)
    assert len(signatures) == (1 if sweep.segment.loss else 2) + bool(sweep.statistics)
    for signature in signatures:
        some, whole = cost_of_call(signature, CPU, repeats=1), probed_cost(signature, CPU, repeats=1)
        assert some is not None
        assert whole is not None
        assert some.rise_bytes == whole.rise_bytes
        assert some.seconds < 5 * whole.seconds  # one that counts what is done once for every tile is not


@timed
def test_memory_that_tiles_share_is_brought_in_once() -> None:
    """Each tile writes a few numbers in most pages of an output of 64 MiB."""
    model = nn.Sequential(nn.Conv2d(8, 64, 1), nn.Flatten())
    captured = capture(model, (torch.rand(1, 8, 512, 512, requires_grad=True),))
    sweep = Sweep(stretch(captured, None, "convolution"), captured.program.calls, (1, 1, 8, 8))
    forward, _ = signatures_of(sweep)
    some, whole = cost_of_call(forward, CPU, repeats=1), probed_cost(forward, CPU, repeats=1)
    assert some is not None
    assert whole is not None
    assert some.seconds < 1.7 * whole.seconds


class _Resized(nn.Module):
    """Its first and last rows lie on rows of the image, and the others between them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        resized = F.interpolate(x * self.weight, size=(8, 8), mode="bilinear", align_corners=True)
        return F.mse_loss(resized * self.weight, y)


class _Pooled(nn.Module):
    """Pools whose parts take more memory at one border than in the middle, and more at the top than left."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4, track_running_stats=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        pooled = F.max_pool2d(F.max_pool2d(x, 3, 1, 1), 3, 1, 1)
        return F.mse_loss(self.norm(pooled) + pooled.mean(), y)


class _Joined(nn.Module):
    """Most tiles read one of the two tensors that are joined, and some read both."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        joined = torch.cat((x * self.weight, x.sin() * self.weight), 2)
        return F.mse_loss(joined[:, :, 3:11], y)


@pytest.mark.parametrize(
    ("model", "sides", "first", "parts"),
    [
        (_Resized(), (4, 8), "upsample_bilinear2d", (2, 1, 8, 4)),
        (_Pooled(), (8, 8), "max_pool2d_with_indices", (2, 1, 4, 4)),
        (_Joined(), (8, 8), "cat", (2, 1, 4, 4)),
    ],
)
def test_tiles_at_borders_take_no_more_memory_than_those_sampled(
    model: nn.Module, sides: tuple[int, int], first: str, parts: tuple[int, ...]
) -> None:
    images = tuple(torch.rand(2, 4, side, side, dtype=torch.float64) for side in sides)
    captured = capture(model.double(), images)
    sweep = Sweep(stretch(captured, first, None), captured.program.calls, parts)
    for signature in signatures_of(sweep):
        some, whole = cost_of_call(signature, CPU, repeats=1), probed_cost(signature, CPU, repeats=1)
        assert some is not None
        assert whole is not None
        assert some.rise_bytes == whole.rise_bytes


@pytest.mark.slow
def test_sweeps_are_probed_on_the_tensors_of_the_captured_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its skips are laid out otherwise than in the step without tiles, and would be probed a second time."""
    asked = set[str]()

    def noted(signatures: Iterable[Signature], *args: Any, **settings: Any) -> Mapping[str, Cost | None]:
        signatures = list(signatures)
        asked.update(signature.text for signature in signatures)
        return costs_of_calls(signatures, *args, **settings)

    monkeypatch.setattr(sweep_probes, "costs_of_calls", noted)
    model, args = NETS["unet"].build("tiny", resolution=188)
    early = capture(model, args)
    early = replace(early, graph=in_tiling_order(early.graph))
    probes = SweepProbes(early.graph, early.program.calls, price_captured(early))
    subject, baseline = Subject(early, model, args, {}), Baseline(1.0, 2**30)
    tiling = max(stage_tilings(early.graph, Refusals()), key=len)
    candidate = TiledCandidate(subject, tiling, {}, probes, baseline, PlanOptions(search=Search(moves=20)))
    *_, probed = candidate.bounds(2**40)
    assert probed < inf
    graph, calls = candidate.captured.graph, candidate.captured.program.calls
    sweeps = {op.id for op in graph.ops if op.type.startswith("stowplan.")}
    assert asked == {call_signature(graph, calls[op]).text for op in sweeps}


class _Blocks(nn.Module):
    """Two equal blocks between others that differ from them in one thing each."""

    def __init__(self) -> None:
        super().__init__()
        dilations = (1, 1, 1, 2, 1)
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=d, dilation=d) for d in dilations)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs[:4]:
            x = conv(x) - x
        x = x - self.convs[4](x)
        return x.square().mean()


def test_sweeps_over_equal_blocks_have_one_price() -> None:
    captured = capture(_Blocks(), (torch.randn(1, 4, 16, 16),))

    def priced_as(block: str, parts: tuple[int, ...] = (1, 1, 2, 2)) -> tuple[str, ...]:
        segment = stretch(captured, f"convolution{block}", f"sub{block}")
        sweep = Sweep(segment, captured.program.calls, parts)
        assert sweep.segment.ops[0].id in sweep.name
        return tuple(signature.text for signature in signatures_of(sweep))

    assert priced_as("_1") == priced_as("_2")
    others = {priced_as(block) for block in ("", "_3", "_4")} | {priced_as("_2", (1, 1, 4, 2))}
    assert len(others | {priced_as("_1")}) == 5  # no gradient of the input, dilated, the other way, finer
