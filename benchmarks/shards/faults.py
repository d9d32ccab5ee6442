"""Workers killed and stopped at random moments, of trainings that go on from their checkpoints every time.

The survivors must notice in time, name the lost worker and the step, and have the very bits of a step that
the uninterrupted training had; whoever resumes must have them, too.
"""

import argparse
import random
import signal
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import Study
from benchmarks.shards.cuts import cut_off
from benchmarks.shards.phases import Fault, Hit, Phase, hit_in, phases_in_turn
from benchmarks.shards.plants import PLANTS
from benchmarks.shards.processes import started
from benchmarks.shards.training import Outcome, train, uninterrupted

TIMEOUT_SECONDS = 4.0
"""How long a worker waits for another before it gives the step up."""

LIMIT_SECONDS = {signal.SIGKILL: 5.0, signal.SIGSTOP: TIMEOUT_SECONDS + 1}
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


def lose(count: int, folder: Path, fault: Fault, plant: str = "") -> Round:
    """Go on with the training in this folder until the fault; what the others say of it."""
    workers = started(count, train, folder, STEPS, fault, plant, timeout=TIMEOUT_SECONDS)
    try:
        told = [worker.answer() for rank, worker in enumerate(workers) if rank != fault.victim]
    finally:
        workers[fault.victim].process.kill()
        for worker in workers:
            worker.end()
    hit = hit_in(folder / f"journal-{fault.victim}")
    assert hit is not None, f"{fault} did not come"
    wrong = tuple(sorted({each for outcome in told for each in _wrong(outcome, hit, fault, count, plant)}))
    seconds = max(outcome.noticed for outcome in told) - hit.when
    held = sum(len(outcome.digests) for outcome in told)
    return Round(count, fault, hit.phase, seconds, wrong, held)


def _wrong(outcome: Outcome, hit: Hit, fault: Fault, count: int, plant: str) -> Iterator[str]:
    expected = uninterrupted(count, STEPS, plant)
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

    def __init__(self, plant: str = "") -> None:
        self._folders: dict[int, Path] = {}
        self._plant = plant

    def lose(self, count: int, fault: Fault) -> Round:
        """The next interruption; a training that is nearly done makes place for a new one."""
        folder = self._folders.setdefault(count, Path(tempfile.mkdtemp()))
        found = lose(count, folder, fault, self._plant)
        if any(folder.glob(f"step-{STEPS - 8}")):
            del self._folders[count]
        return found


def random_faults(chance: random.Random, how: signal.Signals, times: int) -> Iterator[tuple[int, Fault]]:
    """Of two and four workers in turn, any of them, in all phases in turn, at any moment."""
    for number in range(times):
        count, phase = 2 + 2 * (number % 2), phases_in_turn(number // 2)
        yield count, Fault(chance.randrange(count), how, phase, chance.randrange(2, 5), chance.random())


def table_of(rounds: Iterable[Round]) -> Iterator[str]:
    """A line per signal, number of workers and phase that was hit."""
    by_place = defaultdict(list)
    for each in rounds:
        by_place[each.fault.how.name, each.count, each.hit.value].append(each)
    yield f"{'signal':8} workers {'phase hit':14} times  noticed after  states held  wrong"
    for (how, count, phase), found in sorted(by_place.items()):
        worst, wrong = max(each.seconds for each in found), sum(bool(each.wrong) for each in found)
        study = Study("shards")
        study.tell(f"{how} of one of {count} in {phase}", "the others", "noticed after", worst, "s")
        held = sum(each.digests_held for each in found)
        yield f"{how:8} {count:7} {phase:14} {len(found):5} {worst:11.2f} s {held:12} {wrong:6}"


def caught(plant: str, chance: random.Random, tries: int = 12) -> str:
    """What is found wrong with a planted fault, "" if nothing."""
    trainings = Trainings(plant)
    for _, fault in random_faults(chance, signal.SIGKILL, 2 * tries):
        try:
            found = trainings.lose(4, fault).wrong
        except AssertionError as fault_of_worker:
            found = (str(fault_of_worker).strip().splitlines()[-1],)
        if found:
            return "; ".join(found)
    return ""


def main(argv: Sequence[str]) -> None:
    """The table, and what did not go as it must."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shards faults")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--stops", type=int, default=4)
    parser.add_argument("--cuts", type=int, default=0, help="links cut; needs the right to make networks")
    parser.add_argument("--plants", action="store_true", help="also faults of the code, which must be found")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(argv)
    chance, trainings = random.Random(asked.seed), Trainings()
    rounds = []
    for how, times in ((signal.SIGKILL, asked.kills), (signal.SIGSTOP, asked.stops)):
        for count, fault in random_faults(chance, how, times):
            rounds.append(trainings.lose(count, fault))
            if rounds[-1].wrong:
                print(rounds[-1], flush=True)
    print("\n".join(table_of(rounds)), flush=True)
    for number in range(asked.cuts):
        count = 2 + number % 2
        print(cut_off(count, chance.randrange(count), chance, TIMEOUT_SECONDS, STEPS), flush=True)
    for plant in PLANTS if asked.plants else ():
        print(f"planted: {plant}: {caught(plant, chance) or 'NOT FOUND'}", flush=True)
