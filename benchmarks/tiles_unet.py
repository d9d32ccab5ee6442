"""Real steps below what recomputation reaches: eager and tiles side by side, at shares of the activations.

    python -m benchmarks.tiles_unet unet --shares 0.2 0.1
    python -m benchmarks.tiles_unet gpt --shares 0.1

Activations are what the plain step takes at its peak besides parameters, their gradients and its inputs.
Peaks are measured, times are medians of rounds in which eager and tiles take turns. Ops and sweeps are tried
while planning, and remembered: with `--rounds 0` that is all that is done.
"""

import argparse
import copy
import json
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.nets import NETS
from stowplan.capture import capture
from stowplan.plan.tiles.master import preference
from stowplan.run.measure import measure
from stowplan.run.tiles.plan import PlannedStep, step_planner
from stowplan.run.tiles.ways import Subject

SETTINGS: dict[str, dict[str, Any]] = {
    "unet": {"batch": 1, "resolution": 572, "width": 64},
    "gpt": {"batch": 1, "sequence": 8192, "vocabulary": 131_072, "dim": 64, "heads": 2, "layers": 2},
}
Step = Callable[[], None]


def main() -> None:
    """Plan, measure, and print a line of JSON for each share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("net", choices=tuple(SETTINGS))
    parser.add_argument("--shares", type=float, nargs="+", default=[0.2, 0.1])
    parser.add_argument("--prefer", default="time")
    parser.add_argument("--rounds", type=int, default=3, help="0 to plan only")
    arguments = parser.parse_args()
    model, args = NETS[arguments.net].build("real", **SETTINGS[arguments.net])
    subject = Subject(capture(model, args), model, args, {})
    planner = step_planner(subject, prefer=preference(arguments.prefer))
    standing = 2 * sum(p.nbytes for p in model.parameters()) + sum(a.nbytes for a in args)
    for share in arguments.shares:
        allowed = int(standing + share * (planner.step.peak_bytes - standing))
        started = perf_counter()
        plan, way = planner.answer(allowed)
        told = {
            "net": arguments.net,
            "share": share,
            "allowed_bytes": allowed,
            "plain_projected_bytes": planner.step.peak_bytes,
            "projected_bytes": plan.projected_peak_bytes,
            "projected_ratio": round(plan.time_ratio, 3),
            "planned_seconds": round(perf_counter() - started, 1),
            "grids": [told.parts for told in plan.tile_maps],
        }
        if arguments.rounds:
            told |= compared(model, args, PlannedStep(plan, way.captured), arguments.rounds)
        print(json.dumps(told), flush=True)


def compared(
    model: nn.Module, args: tuple[Tensor, ...], planned: PlannedStep, rounds: int
) -> dict[str, object]:
    """Both peaks, both times, and how far the gradients are apart."""
    twin = copy.deepcopy(model)
    eager, tiled = stepping(model, model, args), stepping(planned.bound_to(twin), twin, args)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for step, seconds in zip((eager, tiled), times, strict=True):
            started = perf_counter()
            step()
            seconds.append(perf_counter() - started)
    apart = max(map(distance, model.parameters(), twin.parameters()))
    return {
        "plain_measured_bytes": peak_bytes(eager, model, args),
        "measured_bytes": peak_bytes(tiled, twin, args),
        "plain_seconds": round(median(times[0]), 3),
        "seconds": round(median(times[1]), 3),
        "ratio": round(median(times[1]) / median(times[0]), 3),
        "gradients_apart": apart,
    }


def stepping(run: Callable[..., object], model: nn.Module, args: tuple[Tensor, ...]) -> Step:
    """Forward and backward from fresh gradients."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        loss = run(*args)
        assert isinstance(loss, Tensor)
        torch.autograd.backward(loss)

    return step


def distance(one: Tensor, other: Tensor) -> float:
    """Of two parameters' gradients, relative to the first."""
    assert one.grad is not None
    assert other.grad is not None
    return float((one.grad - other.grad).norm() / one.grad.norm().clamp_min(1e-30))


def peak_bytes(step: Step, model: nn.Module, args: tuple[Tensor, ...]) -> int:
    """What was there at once, parameters and all."""
    model.zero_grad(set_to_none=True)
    standing = [*model.parameters(), *model.buffers(), *args]
    return measure(step, before=standing).measured_peak_bytes


if __name__ == "__main__":
    main()
