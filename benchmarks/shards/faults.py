"""Workers killed and stopped at random moments, of trainings that go on from their checkpoints every time.

The survivors must notice in time, name the lost worker and the step, and have the very bits of a step that
the uninterrupted training had; whoever resumes must have them, too.
"""

import argparse
import random
import signal
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from benchmarks.results import Study
from tests.support.workers.cuts import cut_off
from tests.support.workers.losses import STEPS, TIMEOUT_SECONDS, Round, Trainings
from tests.support.workers.phases import Fault, Phase, phases_in_turn
from tests.support.workers.training import PLANTS, SHARDED_PHASES


def random_faults(
    chance: random.Random, how: signal.Signals, times: int, phases: Sequence[Phase] = tuple(Phase)
) -> Iterator[tuple[int, Fault]]:
    """Of two and four workers in turn, any of them, in all phases in turn, at any moment."""
    for number in range(times):
        count, phase = 2 + 2 * (number % 2), phases_in_turn(number // 2, phases)
        yield count, Fault(chance.randrange(count), how, phase, chance.randrange(2, 5), chance.random())


def table_of(rounds: Iterable[Round], state: str = "") -> Iterator[str]:
    """A line per signal, number of workers and phase that was hit."""
    by_place = defaultdict(list)
    for each in rounds:
        by_place[each.fault.how.name, each.count, each.hit.value].append(each)
    yield f"{'signal':8} workers {'phase hit':14} times  noticed after  states held  wrong"
    for (how, count, phase), found in sorted(by_place.items()):
        worst, wrong = max(each.seconds for each in found), sum(bool(each.wrong) for each in found)
        study = Study("shards")
        study.tell(f"{how} of one of {count} in {phase}{state}", "the others", "noticed after", worst, "s")
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
    parser.add_argument("--sharded", action="store_true", help="parameters and optimizer state in shards")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(argv)
    chance, trainings = random.Random(asked.seed), Trainings(is_sharded=asked.sharded)
    rounds, phases = [], SHARDED_PHASES if asked.sharded else tuple(Phase)
    for how, times in ((signal.SIGKILL, asked.kills), (signal.SIGSTOP, asked.stops)):
        for count, fault in random_faults(chance, how, times, phases):
            rounds.append(trainings.lose(count, fault))
            if rounds[-1].wrong:
                print(rounds[-1], flush=True)
    print("\n".join(table_of(rounds, ", sharded" if asked.sharded else "")), flush=True)
    for number in range(asked.cuts):
        count = 2 + number % 2
        victim = chance.randrange(count)
        found = cut_off(count, victim, chance, TIMEOUT_SECONDS, STEPS, is_sharded=asked.sharded)
        print(found, flush=True)
    for plant in PLANTS if asked.plants else ():
        print(f"planted: {plant}: {caught(plant, chance) or 'NOT FOUND'}", flush=True)
