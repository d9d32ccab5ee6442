"""The model of the caching allocator against recorded traces and random streams, and its speed.

    python -m benchmarks.allocator [FOLDER] [--streams 10000]

FOLDER holds traces as tests/data/cuda_traces does. For each trace the table says how many of its requests the
model places elsewhere and how many segments differ when it follows the recorded addresses, whether the final
layout is the recorded one, and the reserved peak of that run and of one at addresses of its own.
"""

import argparse
from pathlib import Path
from random import Random
from time import process_time

from benchmarks.results import Study
from stowplan.plan.allocator.caching import CachingAllocator
from stowplan.plan.allocator.replay import free_run, replay
from tests.support.cuda_traces import FOLDER, read_trace
from tests.support.heap_streams import random_size, run_stream

_EVENTS = 1_000_000
_STUDY = Study("allocator")


def main() -> None:
    """Print the traces, then the laws, then the speed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--streams", type=int, default=10_000, help="random streams of 100 events each")
    options = parser.parse_args()
    wrong = sum(not _follows(path) for path in sorted(options.folder.glob("*.json.gz")))
    print(f"{wrong} traces differ")
    for seed in range(options.streams):
        run_stream(seed, 100, laws=False)
    print(f"{options.streams:,} random streams of 100 events keep every invariant")
    seconds = _seconds_of(_requests(Random(7), _EVENTS))
    print(f"{_EVENTS:,} events in {seconds:.2f} s of processor time")
    _STUDY.tell("random requests", "model", "1,000,000 events", seconds, "s")


def _follows(path: Path) -> bool:
    """Whether the model gives all that a trace recorded; prints a line."""
    trace = read_trace(path)
    followed, own = replay(trace.before, trace.events), free_run(trace.before, trace.events)
    same_layout = trace.layout_of(followed.segments) == trace.after
    peak, own_peak = followed.figures.reserved_peak_bytes, own.figures.reserved_peak_bytes
    print(
        f"{trace.name:32}{len(trace.events):7,} events,"
        f" {followed.misplaced} of {followed.requests:,} misplaced,"
        f" {followed.segment_faults:2} segments differ, layout {'same' if same_layout else 'DIFFERS'},"
        f" reserved {peak >> 20:6,} MiB, on its own {own_peak / peak - 1:+.3%}"
    )
    _STUDY.tell(trace.name, "model", "misplaced", followed.misplaced, "requests")
    _STUDY.tell(trace.name, "model", "reserved on its own", own_peak / peak, "of recorded")
    return same_layout and not (followed.misplaced or followed.segment_faults) and peak == own_peak


def _requests(random: Random, count: int) -> list[int]:
    """Sizes, and for frees -1 - the number of the request, with up to 1,000 blocks alive."""
    sizes = [random_size(random) for _ in range(300)]
    living: list[int] = []
    requests: list[int] = []
    for number in range(count):
        if living and (len(living) > 1000 or random.random() < 0.5):
            requests.append(-1 - living.pop(random.randrange(len(living))))
        else:
            living.append(number)
            requests.append(random.choice(sizes))
    return requests


def _seconds_of(requests: list[int]) -> float:
    allocator = CachingAllocator()
    addresses = [0] * len(requests)
    began = process_time()
    for number, request in enumerate(requests):
        if request > 0:
            addresses[number] = allocator.malloc(request)
        else:
            allocator.free(addresses[-1 - request])
    return process_time() - began


if __name__ == "__main__":
    main()
