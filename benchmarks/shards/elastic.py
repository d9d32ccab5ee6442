"""A training with sharded parameters over random changes of the number of workers, against one process.

Half of the attempts end because a worker is killed in the middle of a step. The next attempt continues from
the newest checkpoint, on another mesh.
"""

import argparse
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.results import Study
from tests.support.workers.elastic import losses_alone, losses_in, random_attempts

_MOST = 1e-12


def main(argv: Sequence[str]) -> None:
    """A line for each attempt, and the largest distance."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shards elastic")
    parser.add_argument("--changes", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(argv)
    attempts = list(random_attempts(random.Random(asked.seed), asked.changes))
    expected = losses_alone(max(each.until for each in attempts))
    done, worst = 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        for attempt in attempts:
            found = losses_in(attempt, Path(folder))
            assert [*found] == [*range(done + 1, attempt.until + 1 - attempt.is_lost)], (attempt, found)
            done += len(found)
            far = max((abs(loss / expected[step] - 1) for step, loss in found.items()), default=0.0)
            worst = max(worst, far)
            end = "a worker is killed in the next one" if attempt.is_lost else "all stop"
            print(f"{attempt.mesh}: {len(found)} steps, {far:.1e} from one process; {end}", flush=True)
    print(f"{asked.changes} changes, {done} steps: losses differ by at most {worst:.1e} relative")
    Study("shards").tell("changes of the number of workers", "losses", "distance", worst, "relative")
    assert worst <= _MOST
