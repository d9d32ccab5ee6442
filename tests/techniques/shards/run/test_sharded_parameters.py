"""Sharded parameters on real processes: exact, within the budget, and every planted fault is seen.

Workers that share samples evenly have one plan. On other meshes each worker has a plan of its own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from stowplan import fit
from stowplan.capture import capture
from stowplan.errors import BadUse
from stowplan.techniques.iteration.run.iteration import RunningIteration
from stowplan.techniques.shards.plan import early_gathers
from stowplan.techniques.shards.plan.parameter_shards import DividedParameters
from stowplan.techniques.shards.run.gather import Gather
from stowplan.techniques.shards.run.workers import Workers
from tests.support.asking import asked
from tests.support.workers.compared import example_of
from tests.support.workers.processes import on_workers
from tests.support.workers.sharded import Trained, Training

pytestmark = [pytest.mark.torch, pytest.mark.distributed]


@dataclass(frozen=True, slots=True)
class Findings:
    """All that a worker finds out, so that processes are started once."""

    roomy: Trained
    tight: Trained
    same_bits: tuple[bool, bool]  # in the tight budget, and if gathers begin where they are read
    slow: list[tuple[float, float]]  # how far parameters are that arrive when waited for, or are read before
    uneven: Trained  # two samples on one worker, one on the other
    accumulated: Trained  # four backwards before each step
    faults: dict[str, float]
    refusals: dict[str, str]
    saved: list[Any]  # whole parameters, as numbers
    resumed: bool


_ends = Gather.end
_first_seen: dict[int, tuple[Gather, list[Tensor]]] = {}


def ended_in_the_first_iteration(self: Gather, buffer: Tensor) -> list[Tensor]:
    fresh = _ends(self, buffer)
    if self.workers.step:  # else it is planned
        _, stale = _first_seen.setdefault(id(self), (self, [whole.clone() for whole in fresh]))
        for whole, old in zip(fresh, stale, strict=True):
            whole.copy_(old)
    return fresh


_slow: dict[int, Callable[[], Callable[[], None]]] = {}


def on_a_slow_network(
    self: Workers, flight: Tensor, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]
) -> None:
    """Messages arrive when they are waited for, and no sooner."""
    for _, room in receives:
        room.fill_(torch.nan)
    _slow[flight.data_ptr()] = partial(self.swap, sends, receives)


def is_slow(_: Workers, flight: Tensor) -> bool:
    return flight.data_ptr() in _slow


def waited_for(_: Workers, flight: Tensor) -> None:
    _slow.pop(flight.data_ptr())()()


def read_early(_: Workers, __: Tensor) -> None:
    """Nothing is waited for, and nothing is there."""


def not_summed(self: Gather, gradients: list[Tensor]) -> list[Tensor]:
    pairs = zip(gradients, self.rows, strict=True)
    return [rows.shard(gradient, self.workers.rank) for gradient, rows in pairs]


def of_this_worker_alone(own: Tensor) -> Tensor:
    return own


FAULTS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "a stale gather": (Gather, "end", ended_in_the_first_iteration),
    "a shard that is not summed": (Gather, "backward", not_summed),
    "a norm of one worker alone": (RunningIteration, "norm_over_workers", of_this_worker_alone),
}


def look(folder: Path) -> Findings:
    roomy = Training("1GiB")
    right = roomy.run(3)
    roomy.checkpoints(folder).save(3)
    saved = roomy.values()
    faults = dict(_faults(roomy))
    slow = [_far_on_a_slow_network(roomy)]
    roomy.checkpoints(folder).resume()
    resumed = _same(roomy.values(), saved)
    tight = Training(int(0.66 * right.projected_bytes), moves=400)
    scarce, bits = tight.run(3), [_same(tight.values(), saved)]
    with patch.object(early_gathers, "MOST_AHEAD", 0):
        late = Training("1GiB")
    assert late.run(3).early == 0
    bits.append(_same(late.values(), saved))
    shared_out = Training("1GiB", batch=3)
    uneven = shared_out.run(2)
    slow.append(_far_on_a_slow_network(shared_out))
    accumulated = Training("1GiB", accumulate=4).run(2)
    refusals, values = dict(_refusals(roomy)), [each.tolist() for each in saved]
    return Findings(
        right, scarce, (bits[0], bits[1]), slow, uneven, accumulated, faults, refusals, values, resumed
    )


def _same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(map(torch.equal, found, expected))


def _far_on_a_slow_network(training: Training) -> tuple[float, float]:
    """How far it leads if messages are waited for, and if they are not."""
    far: list[float] = []
    for end in (waited_for, read_early):
        with pytest.MonkeyPatch.context() as faults:
            faults.setattr(Workers, "begin_flight", on_a_slow_network)
            faults.setattr(Workers, "is_under_way", is_slow)
            faults.setattr(Workers, "end_flight", end)
            far.append(training.run(1).far)
        _slow.clear()
    return far[0], far[1]


def _faults(training: Training) -> Iterator[tuple[str, float]]:
    """How far each of the faults leads."""
    for name, (owner, method, fault) in FAULTS.items():
        _first_seen.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(training.iteration if owner is RunningIteration else owner, method, fault)
            yield name, training.run(2).far


def look_along_the_sequence() -> tuple[Trained, dict[str, float]]:
    """A Llama in a budget that gathers again, and the faults in it."""
    llama = Training("500KiB", net="llama", mesh="data=2,sequence=2")
    return llama.run(3), dict(_faults(llama))


def _refusals(sharded: Training) -> Iterator[tuple[str, str]]:
    """What is refused, and why."""
    model, args = example_of("gpt", batch=4)
    shapes = [parameter.shape for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters())
    settings: dict[str, dict[str, Any]] = {
        "an optimizer without a mesh": {"optimizer": optimizer, "accumulate": 4},
        "a number of workers": {"mesh": 2, "parameters": "shard"},
        "no such choice": {"mesh": "data=2", "parameters": "halve"},
    }
    for name, given in settings.items():
        with pytest.raises(BadUse) as refusal:
            fit(model, args, budget="1GiB", **asked(given))
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


def test_workers_with_unequal_shares_have_plans_of_their_own(two: list[Findings]) -> None:
    for found in two:
        assert found.uneven.is_right, found.uneven
        assert found.uneven.early > 10


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


def test_gathers_begin_early_where_the_budget_has_room_for_their_buffers(two: list[Findings]) -> None:
    for found in two:
        assert found.roomy.early > 10
        assert found.roomy.measured_bytes == found.roomy.projected_bytes
        assert 0 <= found.tight.projected_bytes - found.tight.measured_bytes <= 64
        assert found.same_bits == (True, True)


def test_a_gather_is_read_after_its_wait(two: list[Findings]) -> None:
    """Otherwise parameters are seen to be wrong where messages are slow."""
    for found in two:
        for waited, unwaited in found.slow:
            assert waited <= 1e-12
            assert not unwaited <= 1e-6


def test_planted_faults_are_seen(two: list[Findings]) -> None:
    for found in two:
        assert all(far > 1e-6 for far in found.faults.values()), found.faults


def test_a_checkpoint_of_shards_is_resumed_and_loads_as_whole(two: list[Findings], folder: Path) -> None:
    assert all(found.resumed for found in two)
    model, _ = example_of("gpt", batch=4)
    state = {"model": {name: torch.zeros_like(p) for name, p in model.named_parameters()}}
    with pytest.warns(UserWarning, match="load in a single process"):
        load(state, storage_reader=FileSystemReader(folder / "step-3"), no_dist=True)
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
        fit(nn.Linear(2, 2), (torch.ones(2, 2),), budget="1MiB", **asked({"parameters": "shard"}))
