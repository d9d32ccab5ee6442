"""Sharded parameters on real processes: exact, within the budget, and every planted fault is seen.

Workers that share samples evenly have one plan. On other meshes each worker has a plan of its own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from stowplan import fit
from stowplan.capture import capture
from stowplan.errors import BadUse
from stowplan.plan.shards.parameter_shards import DividedParameters
from stowplan.run.iteration.iteration import Iteration
from stowplan.run.shards.gather import Gather
from tests.support.workers.compared import example_of
from tests.support.workers.processes import on_workers
from tests.support.workers.sharded import Trained, Training

pytestmark = [pytest.mark.torch, pytest.mark.distributed]


@dataclass(frozen=True, slots=True)
class Findings:
    """All that a worker finds out, so that processes are started once."""

    roomy: Trained
    tight: Trained
    uneven: Trained  # two samples on one worker, one on the other
    accumulated: Trained  # four backwards before each step
    faults: dict[str, float]
    refusals: dict[str, str]
    saved: list[Any]  # whole parameters, as numbers
    resumed: bool


_gathers = Gather.forward
_first_seen: dict[int, tuple[Gather, list[Tensor]]] = {}


def gathered_in_the_first_iteration(self: Gather, shards: list[Tensor]) -> list[Tensor]:
    fresh = _gathers(self, shards)
    if not self.workers.step:
        return fresh  # while it is planned
    _, stale = _first_seen.setdefault(id(self), (self, [whole.clone() for whole in fresh]))
    return [whole.clone() for whole in stale]


def not_summed(self: Gather, gradients: list[Tensor]) -> list[Tensor]:
    pairs = zip(gradients, self.rows, strict=True)
    return [rows.shard(gradient, self.workers.rank) for gradient, rows in pairs]


def of_this_worker_alone(own: Tensor) -> Tensor:
    return own


FAULTS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "a stale gather": (Gather, "forward", gathered_in_the_first_iteration),
    "a shard that is not summed": (Gather, "backward", not_summed),
    "a norm of one worker alone": (Iteration, "norm_over_workers", of_this_worker_alone),
}


def look(folder: Path) -> Findings:
    roomy = Training("1GiB")
    right = roomy.run(5)
    roomy.checkpoints(folder).save(5)
    saved = roomy.values()
    faults = dict(_faults(roomy))
    roomy.checkpoints(folder).resume()
    resumed = all(map(torch.equal, roomy.values(), saved))
    tight = Training(int(0.75 * right.projected_bytes)).run(2)
    uneven = Training("1GiB", batch=3).run(2)
    accumulated = Training("1GiB", accumulate=4).run(2)
    refusals, values = dict(_refusals(roomy)), [each.tolist() for each in saved]
    return Findings(right, tight, uneven, accumulated, faults, refusals, values, resumed)


def _faults(training: Training) -> Iterator[tuple[str, float]]:
    """How far each of the faults leads."""
    for name, (owner, method, fault) in FAULTS.items():
        _first_seen.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(training.iteration if owner is Iteration else owner, method, fault)
            yield name, training.run(2).far


def look_along_the_sequence() -> tuple[Trained, dict[str, float]]:
    """A Llama in a budget that gathers again, and the faults in it."""
    llama = Training("500KiB", net="llama", mesh="data=2,sequence=2")
    return llama.run(5), dict(_faults(llama))


def _refusals(sharded: Training) -> Iterator[tuple[str, str]]:
    """What is refused, and why."""
    model, args = example_of("gpt", batch=4)
    shapes = [parameter.shape for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters())
    settings: dict[str, dict[str, Any]] = {
        "an optimizer without a mesh": {"parameters": "replicate", "optimizer": optimizer, "accumulate": 4},
        "a number of workers": {"mesh": 2},
        "no such choice": {"mesh": "data=2", "parameters": "halve"},
    }
    for name, given in settings.items():
        with pytest.raises(BadUse) as refusal:
            fit(model, args, budget="1GiB", **{"parameters": "shard", **given})
        assert [parameter.shape for parameter in model.parameters()] == shapes
        yield name, str(refusal.value)
    with pytest.raises(BadUse) as refusal:
        sharded.model(*sharded.args)
    yield "the model itself", str(refusal.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def two(folder: Path) -> list[Findings]:
    return on_workers(2, look, folder)


def test_training_on_shards_is_training_in_one_process(two: list[Findings]) -> None:
    for found in two:
        assert found.roomy.is_right, found.roomy
        assert found.roomy.recomputed == 0


def test_bytes_sent_are_those_that_simulate_projects(two: list[Findings]) -> None:
    divided = DividedParameters(capture(*example_of("gpt", batch=4)).graph, 2)
    assert [found.roomy.sent_bytes[0] for found in two] == divided.traffic(again=False).sent_bytes.tolist()
    assert [found.tight.sent_bytes[0] for found in two] <= divided.traffic().sent_bytes.tolist()


def test_workers_with_unequal_shares_have_plans_of_their_own(two: list[Findings]) -> None:
    for found in two:
        assert found.uneven.is_right, found.uneven


def test_gradients_of_several_backwards_add_up_in_the_shards(two: list[Findings]) -> None:
    """Each backward sums its own, so that no worker holds whole gradients between them."""
    for found in two:
        assert found.accumulated.is_right, found.accumulated
        assert found.accumulated.sent_bytes[0] == 4 * found.roomy.sent_bytes[0]


def test_parameters_are_sharded_over_all_workers_of_other_axes_too() -> None:
    for found, faults in on_workers(4, look_along_the_sequence):
        assert found.is_right, found
        assert found.recomputed > 0
        assert all(far > 1e-6 for far in faults.values()), faults


def test_a_smaller_budget_gathers_again_and_holds_on_every_worker(two: list[Findings]) -> None:
    for found in two:
        assert found.tight.is_right, found.tight
        assert found.tight.recomputed > 0
        assert found.tight.measured_bytes < found.roomy.measured_bytes
        assert found.tight.sent_bytes[0] > found.roomy.sent_bytes[0]


def test_planted_faults_are_seen(two: list[Findings]) -> None:
    for found in two:
        assert all(far > 1e-6 for far in found.faults.values()), found.faults


def test_a_checkpoint_of_shards_is_resumed_and_loads_as_whole(two: list[Findings], folder: Path) -> None:
    assert all(found.resumed for found in two)
    model, _ = example_of("gpt", batch=4)
    state = {"model": {name: torch.zeros_like(p) for name, p in model.named_parameters()}}
    with pytest.warns(UserWarning, match="load in a single process"):
        load(state, storage_reader=FileSystemReader(folder / "step-5"), no_dist=True)
    assert [each.tolist() for each in state["model"].values()] == two[0].saved


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("an optimizer without a mesh", 'mesh="data=2"'),
        ("a number of workers", "not for a chosen division"),
        ("no such choice", "replicate, shard, choose"),
        ("the model itself", "are shards since fit"),
    ],
)
def test_what_is_not_offered_is_refused(two: list[Findings], what: str, why: str) -> None:
    assert why in two[0].refusals[what]


def test_parameters_are_divided_only_on_a_mesh() -> None:
    with pytest.raises(BadUse, match="give mesh= too"):
        fit(nn.Linear(2, 2), (torch.ones(2, 2),), budget="1MiB", parameters="shard")
