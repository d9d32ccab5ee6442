"""Steps in tiles at a fraction of their activation memory: projected and measured peaks, time against eager.

    python -m benchmarks.tiles [--share 0.1] [--threads 1] [CASE ...]

A case is a network at a size; the budget is what stands anyway (parameters, their gradients, inputs) and a
share of what eager takes besides. A case with an allowance of its own is one that eager has no room for: it
is planned within the allowance from projected figures alone, and run.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.nets import NETS, Example
from stowplan.capture import capture
from stowplan.errors import BudgetTooSmall
from stowplan.plan.tiles.master import MasterPlanner, Prefer
from stowplan.run.measure import measure
from stowplan.run.tiles.plan import PlannedStep, step_planner
from stowplan.run.tiles.ways import StepWay, Subject
from stowplan.units import format_bytes, format_seconds

_STEPS = 2


@dataclass(frozen=True, slots=True)
class Case:
    """A network with settings, and what it is allowed where eager cannot say."""

    net: str
    settings: Mapping[str, object]
    allowed_bytes: int | None = None


CASES: Mapping[str, Case] = {
    "vgg16": Case("vgg16", {"batch": 1, "resolution": 1024, "has_classifier": False}),
    "vgg16-2048": Case("vgg16", {"batch": 1, "resolution": 2048, "has_classifier": False}),
    "resnet50": Case("resnet50", {"batch": 1, "resolution": 1024}),
    "resnet50-2048": Case("resnet50", {"batch": 1, "resolution": 2048}),
    "unet3d": Case("unet3d", {"resolution": 96, "width": 16}),
    "unet3d-large": Case("unet3d", {"resolution": 288, "width": 16}, allowed_bytes=8 * 2**30),
}


def main() -> None:
    """Print a line per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    small = [name for name in CASES if "-" not in name]
    parser.add_argument("cases", nargs="*", default=small, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--share", type=float, default=0.1, help="of eager's activation memory")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.cases:
        print(f"{name:14} {line_of(CASES[name], options.share)}", flush=True)


def line_of(case: Case, share: float) -> str:
    """Plan, run and measure one case."""
    example = NETS[case.net].build("real", device="cpu", dtype=torch.float32, seed=0, **case.settings)
    planner = step_planner(Subject(capture(*example), *example, {}), prefer=Prefer.TIME, moves=4000)
    standing = _standing_bytes(example)
    allowed = case.allowed_bytes or int(standing + share * (planner.step.peak_bytes - standing))
    told = f"eager {format_bytes(planner.step.peak_bytes):>9} allowed {format_bytes(allowed):>9}"
    try:
        return f"{told} {_run(example, planner, allowed, compares=case.allowed_bytes is None)}"
    except BudgetTooSmall as fault:
        return f"{told} smallest {format_bytes(fault.minimum_bytes):>9}"


def _run(example: Example, planner: MasterPlanner[StepWay], allowed: int, *, compares: bool) -> str:
    plan, way = planner.answer(allowed)
    step = PlannedStep(plan, way.captured).bound_to(example.model)
    seconds = _seconds(example, step)
    peak = _peak_bytes(example, step)
    eager = f" {seconds / _seconds(example, example.model):5.2f} of eager" if compares else ""
    return (
        f"projected {format_bytes(plan.projected_peak_bytes):>9} measured {format_bytes(peak):>9}"
        f" {len(plan.tile_maps):3} sweeps {format_seconds(seconds):>8}{eager}"
        f" (projected {plan.time_ratio:4.2f})"
    )


def _standing_bytes(example: Example) -> int:
    parameters = sum(parameter.nbytes for parameter in example.model.parameters())
    rest = (*example.model.buffers(), *example.args)
    return 2 * parameters + sum(tensor.nbytes for tensor in rest)


def _once(example: Example, run: Callable[..., object]) -> None:
    example.model.zero_grad(set_to_none=True)
    loss = run(*example.args)
    assert isinstance(loss, Tensor)
    torch.autograd.backward(loss)


def _seconds(example: Example, run: Callable[..., object]) -> float:
    """The fastest of a few steps."""
    found = []
    for _ in range(_STEPS):
        started = time.perf_counter()
        _once(example, run)
        found.append(time.perf_counter() - started)
    return min(found)


def _peak_bytes(example: Example, run: Callable[..., object]) -> int:
    example.model.zero_grad(set_to_none=True)
    standing = (*example.model.parameters(), *example.model.buffers(), *example.args)
    return measure(lambda: _once(example, run), before=standing).measured_peak_bytes


if __name__ == "__main__":
    main()
