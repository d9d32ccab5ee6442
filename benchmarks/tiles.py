"""Steps in tiles at shares of their activation memory: peaks, times against eager, gradients.

    python -m benchmarks.tiles [CASE ...] [--shares 0.2 0.1] [--rounds 3] [--threads 1] [--float64] [--json F]

A share is a share of eager's activation memory: its peak without parameters, their gradients, buffers and
inputs. A case with an allowance of its own is planned within that. If eager fits, it takes turns with the
step in tiles, and ratios are medians and quartiles over rounds, by the clock and by processor time, which
other work on the machine disturbs less. If eager does not fit, its forward half alone must give the same
loss. With `--rounds 0` steps are planned only.
"""

import argparse
import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import torch
from torch import Tensor, nn

from benchmarks.results import Study, ratio_of
from stowplan import Search
from stowplan.capture import capture
from stowplan.errors import BudgetTooSmall
from stowplan.plan.judge.verify import verify
from stowplan.plan.options import PlanOptions
from stowplan.plan.select import Selector
from stowplan.run.cost.machine import free_bytes
from stowplan.run.measure.measure import measure
from stowplan.run.planning.planner import PlannedStep, StepCandidate, Subject, step_planner
from tests.support.nets import NETS, Example

_ROOM = 0.8  # of the free memory: eager is run only within this
_GPT = {"batch": 1, "sequence": 8192, "vocabulary": 131_072, "dim": 64, "heads": 2, "layers": 2}
_FIGURES = {
    "plain_measured_bytes": ("eager", "peak", "B"),
    "measured_bytes": ("tiles", "peak", "B"),
    "ratio": ("tiles", "time", "of eager"),
}  # by the finding: the way, the figure and the unit that the page of all studies shows it by
Findings = dict[str, object]


@dataclass(frozen=True, slots=True)
class Case:
    """A network with settings, at shares of its activations or within an allowance."""

    net: str
    settings: Mapping[str, object]
    shares: tuple[float, ...] = (0.1,)
    allowed_bytes: int | None = None


CASES: Mapping[str, Case] = {
    "unet": Case("unet", {"batch": 1, "resolution": 572, "width": 64}, (0.2, 0.1)),
    "gpt": Case("gpt", _GPT, (0.15,)),
    "vgg16": Case("vgg16", {"batch": 1, "resolution": 1024, "has_classifier": False}),
    "resnet50": Case("resnet50", {"batch": 1, "resolution": 1024}),
    "unet3d": Case("unet3d", {"resolution": 96, "width": 16}),
    "vgg16-2048": Case("vgg16", {"batch": 1, "resolution": 2048, "has_classifier": False}),
    "resnet50-2048": Case("resnet50", {"batch": 1, "resolution": 2048}),
    "unet3d-large": Case("unet3d", {"resolution": 272, "width": 16}, allowed_bytes=8 * 2**30),
}


def main() -> None:
    """A line for people per case and share; with `--json`, a line for machines as well."""
    options = _options()
    torch.set_num_threads(options.threads)
    for name in options.cases:
        case = CASES[name]
        example = NETS[case.net].build("real", device="cpu", dtype=torch.float32, seed=0, **case.settings)
        started = perf_counter()
        subject = Subject(capture(*example), *example, {})
        planner = step_planner(
            subject, options=PlanOptions(search=Search(prefer=options.prefer, moves=options.moves))
        )
        tried_seconds = round(perf_counter() - started, 1)
        for allowed in allowances(case, example, planner, options.shares):
            about: Findings = {"case": name, "threads": options.threads, "tried_seconds": tried_seconds}
            _tell(about | _found(example, planner, allowed, options.rounds, options.float64), options.json)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    small = [name for name in CASES if "-" not in name]
    parser.add_argument("cases", nargs="*", default=small, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--shares", type=float, nargs="+", help="of eager's activation memory")
    parser.add_argument("--rounds", type=int, default=3, help="0 to plan only")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--float64", action="store_true", help="compare both with eager in float64 as well")
    parser.add_argument("--prefer", default="time")
    parser.add_argument("--moves", type=int, help="of the search for plans")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to add lines of JSON")
    options = parser.parse_args()
    if unknown := set(options.cases).difference(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; there is {', '.join(CASES)}")
    return options


def allowances(
    case: Case, example: Example, planner: Selector[StepCandidate], shares: list[float] | None
) -> list[int]:
    if case.allowed_bytes is not None:
        return [case.allowed_bytes]
    standing = _standing_bytes(example)
    activations = planner.baseline.peak_bytes - standing
    return [int(standing + share * activations) for share in shares or case.shares]


def _standing_bytes(example: Example) -> int:
    parameters = sum(parameter.nbytes for parameter in example.model.parameters())
    return 2 * parameters + sum(tensor.nbytes for tensor in (*example.model.buffers(), *example.args))


def _found(
    example: Example, planner: Selector[StepCandidate], allowed: int, rounds: int, float64: bool
) -> Findings:
    """Plan within the allowance, run and measure."""
    plain, standing = planner.baseline.peak_bytes, _standing_bytes(example)
    found: Findings = {
        "share": round((allowed - standing) / (plain - standing), 3),
        "plain_projected_bytes": plain,
        "allowed_bytes": allowed,
    }
    started = perf_counter()
    try:
        draft, way = planner.answer(allowed)
        plan = verify(draft)
    except BudgetTooSmall as fault:
        share = round((fault.minimum_bytes - standing) / (plain - standing), 3)
        return found | {"smallest_bytes": fault.minimum_bytes, "smallest_share": share}
    found |= {
        "projected_bytes": plan.projected_peak_bytes,
        "projected_ratio": round(plan.time_ratio, 3),
        "planned_seconds": round(perf_counter() - started, 1),
        "grids": [told.parts for told in plan.tile_maps],
    }
    if not rounds:
        return found
    planned = PlannedStep(plan, way.captured)
    has_room = plain < _ROOM * free_bytes(torch.device("cpu"))
    return found | (_compared(example, planned, rounds, float64) if has_room else _alone(example, planned))


def _compared(example: Example, planned: PlannedStep, rounds: int, float64: bool) -> Findings:
    """Both peaks, both times in turns, and how far the gradients are apart."""
    model, twin = example.model, copy.deepcopy(example.model)
    tiled = planned.bound_to(twin)
    times = [(_seconds(example, model, model), _seconds(example, tiled, twin)) for _ in range(rounds)]
    by_clock, by_processor = (
        [(eager[clock], in_tiles[clock]) for eager, in_tiles in times] for clock in range(2)
    )
    ratio, spread = ratio_of([in_tiles for _, in_tiles in by_clock], [eager for eager, _ in by_clock])
    eager, in_tiles = (median(column) for column in zip(*by_clock, strict=True))
    return {
        "plain_measured_bytes": _peak_bytes(example, model, model),
        "measured_bytes": _peak_bytes(example, tiled, twin),
        "plain_seconds": round(eager, 3),
        "seconds": round(in_tiles, 3),
        "ratio": round(ratio, 3),
        "ratio_spread": [round(end, 3) for end in spread],
        "processor_ratio": round(median(in_tiles / eager for eager, in_tiles in by_processor), 3),
        "gradients_apart": _apart(twin, model),
        **(_against_float64(example, model, twin) if float64 else {}),
    }


def _alone(example: Example, planned: PlannedStep) -> Findings:
    """A step that does not fit in eager: one measured step, and the loss of eager's forward."""
    model, tiled = example.model, planned.bound_to(example.model)
    model.zero_grad(set_to_none=True)
    standing = [*model.parameters(), *model.buffers(), *example.args]
    started = perf_counter()
    measured = measure(lambda: _once(example, tiled, model), before=standing)
    seconds = perf_counter() - started
    gradients = [parameter.grad for parameter in model.parameters()]
    with torch.no_grad():
        expected = model(*example.args)
    return {
        "measured_bytes": measured.measured_peak_bytes,
        "seconds": round(seconds, 1),
        "gradients_finite": all(g is not None and bool(g.isfinite().all()) for g in gradients),
        "loss": measured.result,
        "loss_apart": abs(measured.result / float(expected) - 1),
    }


def _once(example: Example, run: Callable[..., object], model: nn.Module) -> float:
    """One step, which makes gradients and tells its loss."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    loss = run(*example.args)
    assert isinstance(loss, Tensor)
    torch.autograd.backward(loss)
    return float(loss.detach())


def _seconds(example: Example, run: Callable[..., object], model: nn.Module) -> tuple[float, float]:
    """Of one step, by the clock and of the processor."""
    started, worked = perf_counter(), process_time()
    _once(example, run, model)
    return perf_counter() - started, process_time() - worked


def _peak_bytes(example: Example, run: Callable[..., object], model: nn.Module) -> int:
    """What was there at once, parameters and all."""
    model.zero_grad(set_to_none=True)
    standing = [*model.parameters(), *model.buffers(), *example.args]
    return measure(lambda: _once(example, run, model), before=standing).measured_peak_bytes


def _against_float64(example: Example, eager: nn.Module, tiled: nn.Module) -> Findings:
    """How far both are from eager in float64: what rounding makes of this network in any case."""
    exact = copy.deepcopy(eager).double()
    args = (arg.double() if arg.is_floating_point() else arg for arg in example.args)
    _once(Example(exact, tuple(args)), exact, exact)
    return {"eager_to_float64": _apart(eager, exact), "tiles_to_float64": _apart(tiled, exact)}


def _apart(one: nn.Module, other: nn.Module) -> float:
    """The largest distance of a parameter's gradients, relative to the other's.

    Some should be nothing, as of a bias before a norm: they count as if they were a thousandth of all.
    """
    pairs = [(_gradient(a), _gradient(b)) for a, b in zip(one.parameters(), other.parameters(), strict=True)]
    least = torch.stack([expected.norm() for _, expected in pairs]).norm() / 1000
    return max(
        float((found - expected).norm() / expected.norm().clamp_min(least)) for found, expected in pairs
    )


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.double()


def _tell(found: Findings, file: Path | None) -> None:
    print(" ".join(f"{key}={_readable(key, value)}" for key, value in found.items()), flush=True)
    if file is not None:
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(found) + "\n")
    study, case = Study("tiles"), f"{found['case']}, {found['share']} of its activations"
    for figure, (way, name, unit) in _FIGURES.items():
        if isinstance(value := found.get(figure), int | float):
            ends = found.get(f"{figure}_spread")
            quartiles = (ends[0], ends[1]) if isinstance(ends, list) else None
            study.tell(case, way, name, value, unit, quartiles)


def _readable(key: str, value: object) -> object:
    if isinstance(value, int) and key.endswith("_bytes"):
        return f"{value / 2**20:.1f}MiB"
    return f"{len(value)} sweeps" if key == "grids" and isinstance(value, list) else value


if __name__ == "__main__":
    main()
