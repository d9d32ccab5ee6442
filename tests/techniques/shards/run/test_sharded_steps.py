"""Steps over meshes of real processes against one process: losses, gradients, buffers, bytes, draws."""

import copy
from contextlib import ExitStack
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from stowplan import Search, fit, shards_of
from stowplan.techniques.shards.plan.propagation import Chosen
from stowplan.techniques.shards.run.exchange import Exchange
from stowplan.techniques.shards.run.norm import Norm
from tests.support.nets import NETS
from tests.support.workers.budgets import Part, Taken, within_budgets
from tests.support.workers.compared import (
    EXACT,
    Cell,
    Outcome,
    compare,
    compare_all,
    distance,
    example_of,
    gradients_of,
)
from tests.support.workers.processes import on_workers

pytestmark = [pytest.mark.torch, pytest.mark.distributed]

CELLS = {
    2: [Cell("unet", "space=1x2"), Cell("gpt", "data=1,sequence=2"), Cell("diffusion", "space=1x2")],
    3: [Cell("unet", "space=3x1"), Cell("resnet50", "space=3x1")],
    4: [
        Cell("unet", "space=1:3:1:2"),
        Cell("resnet50", "data=2,space=2"),
        Cell("unet3d", "space=2x2"),
        Cell("gpt", "data=2,sequence=2"),
        Cell("vit", "space=2x2"),
    ],
}
"""Every net and every mesh of the whole matrix, which is `python -m benchmarks.shards exact`."""


RELAID: Chosen = {
    "convolution_4": (None,),
    "convolution_6": (None,),
    "convolution_8": (2,),
    "convolution_12": (0,),
    "convolution_14": (3,),
}
"""How some convolutions of a U-Net are cut, otherwise than what they read."""


@dataclass(frozen=True, slots=True)
class Findings:
    """All that a worker finds out, so that processes are started once."""

    outcomes: list[Outcome]
    faults: dict[str, float]
    fitted: float
    budgets: list[Taken]


def look(cells: list[Cell], further: bool) -> Findings:
    outcomes = compare_all(cells)
    if not further:
        return Findings(outcomes, {}, 0.0, [])
    outcomes.append(compare(Cell("unet", "space=2"), RELAID, resolution=204, batch=3))
    outcomes.append(compare(Cell("resnet50", "space=2"), fixed_statistics=True))
    fitted = fitted_distance(Cell("resnet50", "space=2"))
    volumes = Part(*NETS["unet3d"].build("tiny"), "space=2")
    return Findings(outcomes, compare_with_faults(), fitted, within_budgets(volumes, below=()))


@pytest.fixture(scope="module")
def two() -> list[Findings]:
    return on_workers(2, look, CELLS[2], True)


def check_all(found: list[Findings]) -> None:
    for outcome in (outcome for findings in found for outcome in findings.outcomes):
        assert outcome.is_right, outcome


def test_a_step_over_two_workers_is_the_step_of_one_process(two: list[Findings]) -> None:
    check_all(two)


@pytest.mark.parametrize("count", [3, 4])
def test_a_step_over_a_mesh_is_the_step_of_one_process(count: int) -> None:
    check_all(on_workers(count, look, CELLS[count], False))


def without_gradients_sent_back(self: Exchange, gradient: Tensor, flight: Tensor | None = None) -> Tensor:
    if flight is not None:
        self.workers.end_flight(flight)
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
    "no gradients sent back": (
        Exchange,
        ("backward", "end_backward"),
        without_gradients_sent_back,
        "unet",
    ),
    "statistics of the share alone": (Norm, ("statistics",), of_the_share_alone, "resnet50"),
    "a halo that is off by one": (Exchange, ("forward",), with_a_halo_that_is_off_by_one, "unet"),
}


def compare_with_faults() -> dict[str, float]:
    found = {}
    for fault, (owner, methods, wrong, name) in FAULTS.items():
        with ExitStack() as planted:
            for method in methods:
                planted.enter_context(patch.object(owner, method, wrong))
            found[fault] = compare(Cell(name, "space=2")).gradients
    return found


def test_planted_faults_are_caught(two: list[Findings]) -> None:
    for findings in two:
        for fault, found in findings.faults.items():
            assert found > 1e3 * EXACT, fault


def fitted_distance(cell: Cell) -> float:
    """How far the gradients of a planned step are from those of one process."""
    model, args = example_of(cell.net)
    plain = copy.deepcopy(model)
    torch.manual_seed(7)
    plain(*args).backward()
    fitted = fit(model, args, mesh=cell.mesh, budget="1GiB", search=Search(moves=50))
    torch.manual_seed(7)
    shares, _ = shards_of(fitted).share(*args)
    loss = fitted(*shares)
    assert isinstance(loss, Tensor)
    loss.backward()  # type: ignore[no-untyped-call]
    return distance(gradients_of(model), gradients_of(plain))


def test_a_planned_step_is_the_step_of_one_process(two: list[Findings]) -> None:
    assert max(findings.fitted for findings in two) < EXACT


def test_every_worker_keeps_to_a_budget_that_its_plain_part_does_not(two: list[Findings]) -> None:
    for taken in (taken for findings in two for taken in findings.budgets):
        assert taken.is_kept, taken
