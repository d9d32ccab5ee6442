"""A training that goes on from its checkpoints each time that a worker is killed or stopped.

The survivors must notice in time, name the lost worker and the step, and have the very bits of a step that
the uninterrupted training had; whoever resumes must have them, too.
"""

import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from stowplan.techniques.shards.run.roll_call import ANSWER_SECONDS
from tests.support.workers.phases import Fault, Hit, Phase, hit_in
from tests.support.workers.processes import started
from tests.support.workers.training import Outcome, train, uninterrupted

TIMEOUT_SECONDS = 4.0
"""How long a worker waits for another before it gives the step up."""

NOTICE_SECONDS = 2 * ANSWER_SECONDS + 2
"""Until a worker whose connection failed has named who is lost: it speaks, it listens, and it has company."""

LIMIT_SECONDS = {signal.SIGKILL: NOTICE_SECONDS, signal.SIGSTOP: TIMEOUT_SECONDS + NOTICE_SECONDS}
STEPS = 24
"""Of a training; then another is begun."""


@dataclass(frozen=True, slots=True)
class Round:
    """A worker was lost. `seconds` is when the last of the others knew, `wrong` what should not be so."""

    count: int
    fault: Fault
    hit: Phase
    seconds: float
    wrong: tuple[str, ...]
    digests_held: int


def lose(count: int, folder: Path, fault: Fault, plant: str = "", *, is_sharded: bool = False) -> Round:
    """Go on with the training in this folder until the fault; what the others say of it."""
    run = partial(train, is_sharded=is_sharded)
    workers = started(count, run, folder, STEPS, fault, plant, timeout=TIMEOUT_SECONDS)
    try:
        told = {rank: worker.answer() for rank, worker in enumerate(workers) if rank != fault.victim}
    finally:
        workers[fault.victim].process.kill()
        for worker in workers:
            worker.end()
    hit = hit_in(folder / f"journal-{fault.victim}")
    assert hit is not None, f"{fault} did not come"
    expected = uninterrupted(count, STEPS, plant, is_sharded=is_sharded)
    wrong = {each for rank, found in told.items() for each in _wrong(found, hit, fault, expected[rank])}
    seconds = max(outcome.noticed for outcome in told.values()) - hit.when
    held = sum(len(outcome.digests) for outcome in told.values())
    return Round(count, fault, hit.phase, seconds, tuple(sorted(wrong)), held)


def _wrong(outcome: Outcome, hit: Hit, fault: Fault, expected: dict[int, str]) -> Iterator[str]:
    if outcome.step is None:
        yield "not noticed"
        return
    if outcome.noticed - hit.when > LIMIT_SECONDS[fault.how]:
        yield "late"
    if outcome.suspects != (fault.victim,):
        yield f"named {outcome.suspects} for {fault.victim}"
    if outcome.step not in (outcome.done, outcome.done + 1):
        yield f"step {outcome.step} after {outcome.done}"
    if outcome.digests[outcome.done] != expected[outcome.done]:
        yield "half a step"
    if any(found != expected[done] for done, found in outcome.digests.items() if done != outcome.done):
        yield "resumed with other bits"


class Trainings:
    """Trainings that are interrupted again and again, by the number of their workers."""

    def __init__(self, plant: str = "", *, is_sharded: bool = False) -> None:
        self._folders: dict[int, Path] = {}
        self._plant, self._is_sharded = plant, is_sharded

    def lose(self, count: int, fault: Fault) -> Round:
        """The next interruption; a training that is nearly done makes place for a new one."""
        folder = self._folders.setdefault(count, Path(tempfile.mkdtemp()))
        found = lose(count, folder, fault, self._plant, is_sharded=self._is_sharded)
        if any(folder.glob(f"step-{STEPS - 8}")):
            del self._folders[count]
        return found
