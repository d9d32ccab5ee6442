"""How well a step is known before it runs: projected beside measured peaks and times.

    python -m benchmarks.projection [--size real] [--optimizers] [NET ...]

Peaks are in bytes of an eager step, from the third column on as errors: of the graph alone, with the table of
workspaces (nothing ran), with the probe. Times are the median of several steps and the sum over probed ops.
"""

import argparse
import time
from collections.abc import Iterator
from statistics import median
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from benchmarks.results import Study, spread_of
from stowplan.analyse.facts import estimated_workspaces
from stowplan.capture import Captured, capture
from stowplan.run.cost.probe import CLOCK, Probed, probe
from stowplan.run.measure.measure import measure
from stowplan.run.optimizers import OPTIMIZERS, optimizer_share, training_peak_bytes
from stowplan.units import format_bytes, format_seconds
from tests.support.nets import NETS, Example

_STEPS = 5


def main() -> None:
    """Print a line per network, or per network and optimizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("nets", nargs="*", default=list(NETS), metavar="NET")
    parser.add_argument("--size", choices=("tiny", "real"), default="tiny")
    parser.add_argument("--optimizers", action="store_true", help="the whole step, optimizer included")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.nets:
        for line in (optimizer_lines if options.optimizers else step_lines)(name, options.size):
            print(f"{name:14} {line}", flush=True)


def step_lines(name: str, size: Literal["tiny", "real"]) -> Iterator[str]:
    """Peaks and times of forward and backward."""
    example = NETS[name].build(size)
    captured, probed = _known(example)
    times = [_timed_step(example) for _ in range(_STEPS)]
    seconds = median(times)
    peak = _measured(example, None)
    knowing = {
        "graph alone": None,
        "table": estimated_workspaces(captured.graph),
        "probe": probed.workspace_bytes,
    }
    off = {way: captured.eager.peak_bytes(known) / peak - 1 for way, known in knowing.items()}
    errors = " ".join(f"{error:+9.4%}" for error in off.values())
    total = max(interval.end_seconds for interval in probed.profile.clocks[CLOCK].values())
    study, case = Study("projection"), f"{name}, {size}"
    study.tell(case, "eager", "peak", peak, "B")
    study.tell(case, "eager", "time", seconds, "s", spread_of(times))
    for way, error in off.items():
        study.tell(case, way, "peak error", error, "of measured")
    study.tell(case, "probe", "time error", total / seconds - 1, "of measured")
    yield (
        f"{len(captured.graph.ops):5} ops {format_bytes(peak):>9} {errors}"
        f"  {format_seconds(seconds):>8} {format_seconds(total):>8} {total / seconds - 1:+7.1%}"
    )


def optimizer_lines(name: str, size: Literal["tiny", "real"]) -> Iterator[str]:
    """Peaks of training with two optimizers in each implementation."""
    example = NETS[name].build(size)
    captured, probed = _known(example)
    for kind, settings in (("sgd", {"momentum": 0.9}), ("adamw", {})):
        for implementation in ({"foreach": False}, {"foreach": True}, {"fused": True}):
            optimizer = OPTIMIZERS[kind](example.model.parameters(), lr=1e-6, **settings, **implementation)
            share = optimizer_share(optimizer)
            projected = training_peak_bytes(captured, share, probed.workspace_bytes)
            peak = _measured(example, optimizer)
            way = f"{share.name}, {share.implementation}"
            Study("optimizers").tell(
                f"{name}, {size}", way, "peak error", projected / peak - 1, "of measured"
            )
            yield (
                f"{share.name:6} {share.implementation:14} state {format_bytes(share.state_bytes):>9}"
                f" temporaries {format_bytes(share.step_temporary_bytes):>9}"
                f" peak {format_bytes(peak):>9} {projected / peak - 1:+9.4%}"
            )


def _known(example: Example) -> tuple[Captured, Probed]:
    captured = capture(*example)
    return captured, probe(captured, cache=None)


def _step(example: Example, optimizer: Optimizer | None = None) -> Tensor:
    loss: Tensor = example.model(*example.args)
    torch.autograd.backward(loss)
    if optimizer:
        optimizer.step()
    return loss


def _timed_step(example: Example) -> float:
    """Processor time, for the machine may be shared. Backward runs on a thread of its own."""
    example.model.zero_grad()
    started = time.process_time()
    _step(example)
    return time.process_time() - started


def _measured(example: Example, optimizer: Optimizer | None) -> int:
    """The peak of a second step: the first makes the optimizer's state, and kernels build what they keep."""
    _step(example, optimizer)
    example.model.zero_grad()
    state = [leaf for entry in optimizer.state.values() for leaf in entry.values()] if optimizer else []
    tensors = (*example.model.parameters(), *example.model.buffers(), *example.args, *state)
    found = measure(lambda: _step(example, optimizer), before=(t for t in tensors if isinstance(t, Tensor)))
    example.model.zero_grad()
    return found.measured_peak_bytes


if __name__ == "__main__":
    main()
