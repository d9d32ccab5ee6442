"""Workers that die, hang or are cut off: the others say so in time, with whole steps, and can go on."""

import os
import random
import signal

import pytest

from stowplan.errors import BadUse
from stowplan.techniques.shards.plan.mesh import parse_mesh
from stowplan.techniques.shards.run.workers import Workers
from tests.support.timing import timed
from tests.support.workers.cuts import cut_off
from tests.support.workers.losses import STEPS, TIMEOUT_SECONDS, Trainings
from tests.support.workers.phases import Fault, Phase

pytestmark = [pytest.mark.torch, pytest.mark.distributed]


@pytest.mark.parametrize(
    ("is_sharded", "phases"),
    [(False, (Phase.FORWARD, Phase.SUMS, Phase.SAVE)), (True, (Phase.BACKWARD, Phase.SAVE))],
)
@timed
def test_a_training_whose_workers_die_goes_on_with_the_bits_of_one_that_was_left_alone(
    is_sharded: bool, phases: tuple[Phase, ...]
) -> None:
    trainings = Trainings(is_sharded=is_sharded)
    for number, phase in enumerate(phases):
        found = trainings.lose(2, Fault(number % 2, signal.SIGKILL, phase, 2, 0.4))
        assert not found.wrong, found


@timed
def test_a_worker_that_hangs_is_named_by_all_others_when_the_timeout_ends() -> None:
    """In a mesh of two axes, where sums run over groups of their own."""
    found = Trainings().lose(4, Fault(1, signal.SIGSTOP, Phase.BACKWARD, 2, 0.5))
    assert not found.wrong, found
    assert found.seconds > TIMEOUT_SECONDS - 1


@pytest.mark.parametrize(
    ("plant", "phase", "wrong"),
    [
        ("update before the sums", Phase.SUMS, "half a step"),
        ("buffers not given back", Phase.SUMS, "half a step"),
        ("draws not saved", Phase.SAVE, "resumed with other bits"),
    ],
)
def test_what_a_lost_worker_must_not_leave_behind_is_found(plant: str, phase: Phase, wrong: str) -> None:
    trainings = Trainings(plant)
    faults = [Fault(1, signal.SIGKILL, each, 3, 0.0) for each in (phase, Phase.FORWARD)]
    assert any(wrong in trainings.lose(2, fault).wrong for fault in faults)


@pytest.mark.skipif(not os.path.exists("/usr/sbin/ip") or os.geteuid() != 0, reason="no right to lay wires")
@timed
def test_a_worker_whose_wire_is_cut_is_lost_when_the_timeout_ends() -> None:
    found = cut_off(3, 2, random.Random(0), TIMEOUT_SECONDS, STEPS)
    assert not found.wrong, found
    assert found.seconds > TIMEOUT_SECONDS - 1


def test_a_mesh_without_its_processes_is_refused() -> None:
    with pytest.raises(BadUse, match="0 processes are connected"):
        Workers(parse_mesh("space=2"))
