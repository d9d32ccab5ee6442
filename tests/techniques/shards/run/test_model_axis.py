"""A `model` axis on real processes: exact, within the budget, and every planted fault is seen."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from stowplan.techniques.shards.plan.mesh import parse_mesh
from stowplan.techniques.shards.plan.parameter_shards import DividedParameters
from stowplan.techniques.shards.run.actions import LayOut, LocalValues
from stowplan.techniques.shards.run.gather import Gather
from stowplan.techniques.shards.run.step import ShardedStep, plan_sharded, step_to_shard
from stowplan.techniques.shards.run.workers import Workers
from tests.support.nets.fused import fused
from tests.support.workers.compared import (
    EXACT,
    Cell,
    Outcome,
    compare,
    differentiate,
    distance,
    example_of,
    gradients_of,
)
from tests.support.workers.processes import on_workers
from tests.support.workers.sharded import Trained, Training

pytestmark = [pytest.mark.torch, pytest.mark.distributed]

MESH = "data=2,model=2"


@dataclass(frozen=True, slots=True)
class Findings:
    """All that a worker finds out, so that processes are started once."""

    steps: list[Outcome]
    fused: float  # how far gradients of projections in one weight are off
    faults: dict[str, float]
    roomy: Trained
    tight: Trained


_add_up, _forward, _lay_out = Workers.add_up, Gather.forward, LayOut.run


def not_summed_along_the_model_axis(self: Workers, tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
    return tensor.clone() if axes == (1,) else _add_up(self, tensor, axes)


def of_another_part(self: LayOut, values: LocalValues) -> None:
    _lay_out(self, values)
    values.parts[self.parameter] = values.parts[self.parameter].roll(1, dims=0)


def gathered_from_the_wrong_rows(self: Gather, shards: list[Tensor]) -> list[Tensor]:
    made = _forward(self, shards)
    if not self.parts:
        return made  # whole ones, outside of a step
    pairs = zip(made, self.parts, strict=True)
    return [part if cut is None else part.roll(1, dims=-1) for part, cut in pairs]


def look() -> Findings:
    steps = [compare(Cell("gpt", MESH), batch=4), compare(Cell("llama", "sequence=2,model=2"), batch=4)]
    apart = _distance_of_fused("sequence=2,model=2")
    faults = dict(_faults_of_a_step())
    gpt = Training("1GiB", mesh=MESH)
    roomy = gpt.run(5)
    faults.update(_fault_of_shards(gpt))
    tight = Training("440KiB", net="llama", mesh=MESH).run(5)
    return Findings(steps, apart, faults, roomy, tight)


def _distance_of_fused(mesh: str) -> float:
    model, args = fused()
    plain = copy.deepcopy(model)
    torch.manual_seed(7)
    plain(*args).backward()
    step = ShardedStep(model, args, mesh=parse_mesh(mesh))
    torch.manual_seed(7)
    differentiate(step, step.share(*args)[0])
    return distance(gradients_of(model), gradients_of(plain))


def _faults_of_a_step() -> Iterator[tuple[str, float]]:
    for owner, method, fault in (
        (Workers, "add_up", not_summed_along_the_model_axis),
        (LayOut, "run", of_another_part),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, method, fault)
            yield fault.__name__, compare(Cell("gpt", MESH), batch=4).gradients


def _fault_of_shards(training: Training) -> Iterator[tuple[str, float]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gather, "forward", gathered_from_the_wrong_rows)
        yield gathered_from_the_wrong_rows.__name__, training.run(2).far


@pytest.fixture(scope="module")
def four() -> list[Findings]:
    return on_workers(4, look)


def test_a_step_over_a_model_axis_is_the_step_of_one_process(four: list[Findings]) -> None:
    for outcome in (outcome for found in four for outcome in found.steps):
        assert outcome.is_right, outcome


def test_projections_in_one_weight_are_those_of_one_process(four: list[Findings]) -> None:
    assert max(found.fused for found in four) <= EXACT


def test_training_on_parts_of_shards_is_training_in_one_process(four: list[Findings]) -> None:
    for found in four:
        assert found.roomy.is_right, found.roomy
        assert found.tight.is_right, found.tight
        assert found.tight.recomputed > 0


def test_planted_faults_are_caught(four: list[Findings]) -> None:
    for found in four:
        assert len(found.faults) == 3
        assert all(far > 1e3 * EXACT for far in found.faults.values()), found.faults


def test_bytes_sent_are_those_that_simulate_projects(four: list[Findings]) -> None:
    captured = step_to_shard(*example_of("gpt", batch=4))
    divided = DividedParameters(captured.graph, 4, plan_sharded(captured, parse_mesh(MESH)))
    sent = divided.traffic(again=False).sent_bytes.tolist()
    assert [found.roomy.sent_bytes[0] for found in four] == sent


def test_a_part_of_a_weight_is_all_that_is_gathered(four: list[Findings]) -> None:
    captured = step_to_shard(*example_of("gpt", batch=4))
    whole = DividedParameters(captured.graph, 4).traffic(again=False).sent_bytes
    assert max(found.roomy.sent_bytes[0] for found in four) < 0.75 * torch.tensor(whole).max()
