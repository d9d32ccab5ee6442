"""Sweeps whose backward rematerialises inputs from kept tensors: the gradients are eager's."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from stowplan import Search
from stowplan.capture import capture
from stowplan.ir import validate
from stowplan.plan.judge.verify import verify
from stowplan.plan.options import PlanOptions
from stowplan.plan.select import Baseline, Refusals
from stowplan.run.measure.measure import measure
from stowplan.run.planning.planner import PlannedStep, Subject, price_captured
from stowplan.run.planning.saved import saved_step
from stowplan.run.step.straight import StraightStep
from stowplan.techniques.tiles.plan.borders import in_tiling_order
from stowplan.techniques.tiles.plan.rematerialised_tilings import rematerialised_tilings
from stowplan.techniques.tiles.run.candidates import TiledCandidate
from stowplan.techniques.tiles.run.sweep_probes import SweepProbes
from tests.support.in_tiles import gradients_of, relative_error
from tests.support.nets import NETS

pytestmark = [pytest.mark.slow, pytest.mark.torch]
BACKWARD = "stowplan.sweep_backward.default"
SEARCH = PlanOptions({"recompute", "tile"}, search=Search(moves=300))


NETWORKS: dict[str, dict[str, object]] = {
    "resnet50": {"resolution": 64, "batch": 1, "layers": (3, 2)},  # bottlenecks, batch norm
    "unet3d": {"resolution": 16},  # skips, norms of every sample
}


def built(name: str) -> Subject:
    model, args = NETS[name].build("tiny", device="cpu", dtype=torch.float64, seed=0, **NETWORKS[name])
    return Subject(capture(model, args), model, args, {})


def rematerialising_candidates(subject: Subject) -> list[TiledCandidate]:
    early = replace(subject.captured, graph=in_tiling_order(subject.captured.graph))
    probes = SweepProbes(early.graph, early.program.calls, price_captured(early))
    ordered, step = replace(subject, captured=early), Baseline(1.0, 2**30)
    return [
        TiledCandidate(ordered, tiling, remats, probes, step, SEARCH)
        for tiling, remats in rematerialised_tilings(early.graph, Refusals())
        if remats
    ]


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_the_same(name: str) -> None:
    subject = built(name)
    loss, gradients = gradients_of(subject.model, subject.model, subject.args)
    candidates = rematerialising_candidates(subject)
    assert len(candidates) > 1
    for candidate in candidates:
        graph = validate(candidate.captured.graph)
        assert any(
            op.id.startswith("again_for_") or ", of " in str(op.attributes.get("name")) for op in graph.ops
        )
        made, in_tiles = gradients_of(
            StraightStep(candidate.captured, subject.model), subject.model, subject.args
        )
        assert relative_error([made, *in_tiles], [loss, *gradients]) < 1e-12


def test_a_plan_with_streams_keeps_its_budget_and_comes_back() -> None:
    """The smallest budget with rematerialised inputs: as projected, and the same step from the plan alone."""
    subject = built("resnet50")
    model, args = subject.model, subject.args
    candidate = min(rematerialising_candidates(subject), key=lambda candidate: candidate.floor_bytes)
    allowed = min(offer.peak_bytes for offer in candidate.tradeoffs())
    plan = verify(candidate.draft(allowed))
    assert any(told.made_of for told in plan.tile_maps)
    assert saved_step(plan, subject, allowed).captured.graph == candidate.captured.graph
    step = PlannedStep(plan, candidate.captured).bound_to(model)

    def once() -> None:
        loss = step(*args)
        assert isinstance(loss, Tensor)
        torch.autograd.backward(loss)

    model.zero_grad(set_to_none=True)
    standing = [*model.parameters(), *model.buffers(), *(arg for arg in args if isinstance(arg, Tensor))]
    assert measure(once, before=standing).measured_peak_bytes <= allowed
