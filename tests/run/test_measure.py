"""Measured memory: exact on steps whose allocations are known, and in agreement with the operating system."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stowplan.run.measure.measure import measure

pytestmark = pytest.mark.torch

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]


def block(mib: int) -> Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8)


@pytest.mark.slow
def test_the_peak_is_that_of_what_lives_at_once() -> None:
    def step() -> Tensor:
        first = block(3)
        block(5)
        del first
        return block(6)

    measurement = measure(step, before=())
    assert measurement.measured_rise_bytes == 8 * MIB
    assert measurement.measured_curve_bytes[-1] == 6 * MIB
    assert measurement.result.numel() == 6 * MIB


def test_what_was_there_counts_and_its_end_is_noticed() -> None:
    held = [block(4), block(1)]

    def step() -> None:
        held.pop(0)
        held.append(block(2))

    # An iterator that has come to its end holds nothing; a tuple would be held by this frame's own call
    # wherever torch.compile has been used before in this process.
    measurement = measure(step, before=iter(tuple(held)))
    assert measurement.before_bytes == 5 * MIB
    assert measurement.measured_peak_bytes == 5 * MIB
    assert measurement.measured_curve_bytes[-1] == 3 * MIB


@pytest.mark.slow
def test_tensors_that_python_knows_are_found() -> None:
    gc.collect()  # what tests before have left in cycles may end at any time
    held = block(7)
    view = held[: 2 * MIB]
    parameter = torch.nn.Parameter(torch.zeros(MIB // 4))
    torch.autograd.backward(parameter.sum())
    found = measure(lambda: None).before_bytes
    del held
    assert found - measure(lambda: None).before_bytes == 0  # the view keeps the whole storage
    del view
    parameter.grad = None
    assert found - measure(lambda: None).before_bytes == 8 * MIB


def test_frees_are_matched_by_address_not_by_remembered_size() -> None:
    """A block freed at an address that an older, larger one had must not count as the larger one."""
    sizes = [9, 2, 9, 1, 9]

    def step() -> None:
        for size in sizes:
            block(size)

    for _ in range(2):
        curve = measure(step, before=()).measured_curve_bytes
        assert (min(curve), max(curve), curve[-1]) == (0, 9 * MIB, 0)


RSS_SCRIPT = """
import gc, sys, torch
from tests.support.nets import NETS
from stowplan.run.measure.measure import measure

torch.set_num_threads(1)
model, args = NETS[sys.argv[1]].build("tiny", **eval(sys.argv[2]))

def step():
    loss = model(*args)
    loss.backward()
    return loss

def resident(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))

for _ in range(2):
    step()
    model.zero_grad(set_to_none=True)
gc.collect()
with open("/proc/self/clear_refs", "w") as marks:
    marks.write("5")
before = resident("VmRSS")
step()
rise = resident("VmHWM") - before
model.zero_grad(set_to_none=True)
print(rise, measure(step).measured_rise_bytes)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="asks the Linux kernel")
@pytest.mark.parametrize(
    ("net", "settings"),
    [("resnet50", {"batch": 16, "resolution": 256}), ("gpt", {"batch": 8, "sequence": 512, "dim": 128})],
)
@pytest.mark.slow
def test_the_operating_system_agrees(net: str, settings: dict[str, int]) -> None:
    """Blocks of 64 KiB and more go back to the system when freed, so that its high-water mark is ours."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RSS_SCRIPT, net, repr(settings)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    resident, measured = map(int, done.stdout.split())
    assert measured == pytest.approx(resident, rel=0.01)
