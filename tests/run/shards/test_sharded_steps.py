"""Steps over meshes of real processes against one process: losses, gradients, buffers, bytes, draws."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from benchmarks.nets import NETS
from benchmarks.shards.processes import on_workers
from torch import Tensor, nn

from stowplan.plan.shards.mesh import parse_mesh
from stowplan.plan.shards.traffic import traffic_of
from stowplan.run.fit import fit, plans_of
from stowplan.run.shards.exchange import Exchange
from stowplan.run.shards.fit import shards_of
from stowplan.run.shards.norm import Norm
from stowplan.run.shards.step import ShardedStep

pytestmark = pytest.mark.torch

EXACT = 1e-12
MESHES: dict[int, list[tuple[str, str, dict[str, Any]]]] = {
    2: [
        ("unet", "space=1x2", {"resolution": 204}),
        ("gpt", "sequence=2", {}),
        ("diffusion", "space=1x2", {}),
    ],
    3: [
        ("unet", "space=3x1", {"resolution": 204}),
        ("resnet50", "data=1,space=3", {}),
    ],
    4: [
        ("unet", "space=2x2", {"resolution": 204}),
        ("unet", "space=1:3:1:2", {"resolution": 220}),
        ("resnet50", "data=2,space=2", {"batch": 3}),
        ("unet3d", "space=2x2", {}),
        ("gpt", "data=2,sequence=2", {"batch": 4}),
        ("vit", "data=2,space=2", {"batch": 4}),
    ],
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How far a sharded step is from the plain one, and what it sent against what was projected."""

    case: str
    loss: float
    gradients: float
    buffers: float
    same_draws: bool
    sent_bytes: tuple[int, int]
    summed_bytes: tuple[int, int]


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference, relative to the largest of the expected values of the tensor.

    A gradient that is zero but for rounding is measured by the largest of all.
    """
    scale = max((float(tensor.double().norm()) for tensor in expected), default=1.0)
    pairs = zip(found, expected, strict=True)
    far = [(float((f - e).double().norm()), float(e.double().norm())) for f, e in pairs]
    return max((diff / (own if own > 1e-9 * scale else scale) for diff, own in far), default=0.0)


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def compare(name: str, mesh: str, settings: dict[str, Any]) -> Outcome:
    """One step of a net on a mesh, beside the same step in this process alone."""
    model, args = NETS[name].build("tiny", dtype=torch.float64, **settings)
    plain = copy.deepcopy(model)
    torch.manual_seed(7)
    expected = plain(*args)
    expected.backward()
    drawn = torch.get_rng_state()
    step = ShardedStep(model, args, mesh=parse_mesh(mesh))
    torch.manual_seed(7)
    shares, _ = step.share(*args)
    loss = step(*shares)
    assert isinstance(loss, Tensor)
    loss.backward()  # type: ignore[no-untyped-call]
    traffic = traffic_of(step.plan)[step.workers.rank]
    return Outcome(
        f"{name} on {mesh}",
        abs(float((loss - expected).detach() / expected.detach())),
        distance(gradients_of(model), gradients_of(plain)),
        distance(list(model.buffers()), list(plain.buffers())),
        torch.equal(drawn, torch.get_rng_state()),
        (step.workers.sent_bytes, traffic.sent_bytes),
        (step.workers.summed_bytes, traffic.summed_bytes),
    )


@dataclass(frozen=True, slots=True)
class Findings:
    """All that a worker finds out, so that processes are started once."""

    outcomes: list[Outcome]
    faults: dict[str, float]
    fitted: tuple[float, int, int] | None


def look(cases: list[tuple[str, str, dict[str, Any]]], further: bool) -> Findings:
    outcomes = [compare(*case) for case in cases]
    if not further:
        return Findings(outcomes, {}, None)
    return Findings(outcomes, compare_with_faults(), fit_under_a_budget("resnet50", "space=2", {}))


@pytest.fixture(scope="module")
def two() -> list[Findings]:
    return on_workers(2, look, MESHES[2], True)


def check_all(found: list[Findings]) -> None:
    for outcome in (outcome for findings in found for outcome in findings.outcomes):
        assert max(outcome.loss, outcome.gradients, outcome.buffers) < EXACT, outcome
        assert outcome.same_draws, outcome
        assert outcome.sent_bytes[0] == outcome.sent_bytes[1], outcome
        assert outcome.summed_bytes[0] == outcome.summed_bytes[1], outcome


def test_a_step_over_two_workers_is_the_step_of_one_process(two: list[Findings]) -> None:
    check_all(two)


@pytest.mark.parametrize("count", [3, 4])
def test_a_step_over_a_mesh_is_the_step_of_one_process(count: int) -> None:
    check_all(on_workers(count, look, MESHES[count], False))


def without_sending_gradients_back(self: Exchange, gradient: Tensor) -> Tensor:
    found = gradient.new_zeros(self.share.shape)
    if self.kept is not None:
        found[self.kept[0]].copy_(gradient[self.kept[1]])
    return found


def of_the_share_alone(self: Norm, image: Tensor) -> tuple[Tensor, Tensor]:
    share = image[self.counted] if self.counted is not None else image
    dims = [dim for dim in range(image.dim()) if dim != 1]
    return share.mean(dims), share.var(dims, correction=0)


forward_as_it_is = Exchange.forward


def with_a_halo_that_is_off_by_one(self: Exchange, share: Tensor) -> Tensor:
    held = forward_as_it_is(self, share)
    for swap in self.receives:
        held[swap.index] = held[swap.index].roll(1, dims=-1)
    return held


FAULTS = {
    "no gradients sent back": (Exchange, "backward", without_sending_gradients_back, "unet"),
    "statistics of the share alone": (Norm, "statistics", of_the_share_alone, "resnet50"),
    "a halo that is off by one": (Exchange, "forward", with_a_halo_that_is_off_by_one, "unet"),
}


def compare_with_faults() -> dict[str, float]:
    found = {}
    for fault, (owner, method, wrong, name) in FAULTS.items():
        right = getattr(owner, method)
        setattr(owner, method, wrong)
        settings = {"resolution": 204} if name == "unet" else {}
        found[fault] = compare(name, "space=2", settings).gradients
        setattr(owner, method, right)
    return found


def test_planted_faults_are_caught(two: list[Findings]) -> None:
    for findings in two:
        for fault, found in findings.faults.items():
            assert found > 1e3 * EXACT, fault


def fit_under_a_budget(name: str, mesh: str, settings: dict[str, Any]) -> tuple[float, int, int]:
    """A planned step: its distance from the plain one, the bytes allowed and those projected."""
    model, args = NETS[name].build("tiny", dtype=torch.float64, **settings)
    plain = copy.deepcopy(model)
    plain(*args).backward()
    (roomy,) = plans_of(fit(model, args, mesh=mesh, budget="1GiB", moves=50))
    allowed = roomy.projected_peak_bytes
    fitted = fit(model, args, mesh=mesh, budget=allowed, moves=50)
    shares, _ = shards_of(fitted).share(*args)
    loss = fitted(*shares)
    assert isinstance(loss, Tensor)
    loss.backward()  # type: ignore[no-untyped-call]
    return (
        distance(gradients_of(model), gradients_of(plain)),
        allowed,
        plans_of(fitted)[0].projected_peak_bytes,
    )


def test_every_worker_plans_its_part_within_its_budget(two: list[Findings]) -> None:
    for findings in two:
        assert findings.fitted is not None
        far, allowed, projected = findings.fitted
        assert far < EXACT
        assert projected <= allowed
