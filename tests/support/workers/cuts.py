"""A worker whose wire is cut: it lives, the others live, and no packet tells either of the other."""

import random
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.support.workers.losses import NOTICE_SECONDS
from tests.support.workers.processes import Worker, started
from tests.support.workers.training import Outcome, train, uninterrupted
from tests.support.workers.wires import wires


@dataclass(frozen=True, slots=True)
class Cut:
    """`seconds` is when the last of all workers knew; `wrong` what should not be so."""

    count: int
    victim: int
    seconds: float
    wrong: tuple[str, ...]


def cut_off(
    count: int, victim: int, chance: random.Random, timeout: float, steps: int, *, is_sharded: bool = False
) -> Cut:
    """Cut a worker's wire at a random moment of a training."""
    folder = Path(tempfile.mkdtemp())
    with wires(count) as laid:
        run = partial(train, is_sharded=is_sharded)
        workers = started(count, run, folder, steps, None, timeout=timeout, wires=laid)
        try:
            _wait_for(folder / "step-2" / ".metadata", workers)
            time.sleep(chance.random() * 0.1)
            laid.cut(victim)
            cut = time.monotonic()
            told = [worker.answer() for worker in workers]
        finally:
            for worker in workers:
                worker.end()
    seconds = max(outcome.noticed for outcome in told) - cut
    expected = uninterrupted(count, steps, is_sharded=is_sharded)
    wrong = {each for rank, found in enumerate(told) for each in _wrong(found, rank, victim, expected[rank])}
    late = {"late"} if seconds > timeout + NOTICE_SECONDS else set()
    return Cut(count, victim, seconds, tuple(sorted(wrong | late)))


def _wrong(outcome: Outcome, rank: int, victim: int, expected: dict[int, str]) -> list[str]:
    if outcome.step is None:
        return ["not noticed"]
    named = outcome.suspects == (victim,) or rank == victim
    wrong = [] if named else [f"{rank} named {outcome.suspects} for {victim}"]
    whole = all(expected[done] == found for done, found in outcome.digests.items())
    return wrong if whole else [*wrong, "other bits"]


def _wait_for(path: Path, workers: list[Worker]) -> None:
    while not path.exists():
        assert all(worker.process.is_alive() for worker in workers), workers[0].answer()
        time.sleep(0.01)
