"""A step of 100,000 ops is read, validated and analysed in seconds, and the time grows like the graph."""

import json
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from math import log
from pathlib import Path

import pytest

from stowplan.formats import stow
from stowplan.ir import Document
from tests.support.steps import training_step
from tests.support.timing import timed

SIZES = (1_000, 10_000, 100_000)
SECONDS_ALLOWED, PARSES_ALLOWED = 10.0, 10.0  # the second on slow machines: measured 5 to 6
BYTES_ALLOWED = 2 * 2**30
NOISE = 3.0  # how much slower a run may be because the machine is busy

# Reading validates. Processor time, as the machine is shared; the process's own high-water mark, as ru_maxrss
# would begin at this one's.
MEASURED = """
import json, re, sys, time
from pathlib import Path
from stowplan.analyse import facts_of
from stowplan.formats import stow
text = Path(sys.argv[1]).read_text(encoding="utf-8")
begin = time.process_time()
document = stow.read(text)
facts = facts_of(document.graph)
seconds = time.process_time() - begin
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
begin = time.process_time()
json.loads(text)
parsing = time.process_time() - begin
figures = {"ops": len(facts.curve_bytes), "seconds": seconds, "json_seconds": parsing, "peak_bytes": peak}
print(json.dumps(figures))
"""


@dataclass(frozen=True, slots=True)
class Measured:
    """One run in a process of its own."""

    ops: int
    seconds: float
    json_seconds: float  # Python's own parser on the same file, which is as slow as the machine
    peak_bytes: int


def measure(folder: Path, ops: int) -> Measured:
    """The faster of two runs over a file of so many ops: the other may have met a busy moment."""
    path = folder / f"{ops}.stow.json"
    path.write_text(stow.write(Document("stow", training_step(ops))), encoding="utf-8")
    command = [sys.executable, "-c", MEASURED, str(path)]
    runs = (subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(2))
    return min((Measured(**json.loads(run.stdout)) for run in runs), key=lambda run: run.seconds)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc for the high-water mark")
@timed
def test_time_and_memory_grow_like_the_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [measure(tmp_path, ops) for ops in SIZES]
    with capsys.disabled():
        for run in runs:
            print(f"\n{run.ops:>7,} ops: {run.seconds:6.2f} s, {run.peak_bytes / 2**20:6.0f} MiB", end="")
    assert [run.ops for run in runs] == pytest.approx(SIZES, rel=0.01)
    assert runs[-1].seconds <= max(SECONDS_ALLOWED, PARSES_ALLOWED * runs[-1].json_seconds)
    assert runs[-1].peak_bytes <= BYTES_ALLOWED
    for fewer, more in pairwise(runs):
        assert more.seconds <= NOISE * fewer.seconds * growth(fewer.ops, more.ops)


def growth(fewer: int, more: int) -> float:
    """How many times longer n log n takes."""
    return (more * log(more)) / (fewer * log(fewer))
