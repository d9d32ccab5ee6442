"""Offloading to this machine's disk: its measured cost against the projection and against other techniques.

    python -m benchmarks.offload time     [NET ...]   peaks and seconds, projected and measured; stalls
    python -m benchmarks.offload joint    [NET ...]   time ratios of each technique alone, and of all together
    python -m benchmarks.offload endure               1,000 flipped bytes and 2,000 steps

One thread computes. Peaks are the allocator's own; seconds are medians of steps that alternate with the
baseline. Budgets lie between the smallest budget without tiles and the baseline's peak.
"""

import argparse
import os
import random
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmarks.results import Study, ratio_of
from stowplan import Search
from stowplan.capture import capture
from stowplan.errors import BudgetTooSmall, TierDamaged
from stowplan.plan.judge.simulate import simulate
from stowplan.plan.options import PlanOptions
from stowplan.plan.plan import Plan
from stowplan.plan.planner import Planner
from stowplan.run.measure.measure import measure
from stowplan.run.planning.planner import Subject, price_captured, step_planner
from stowplan.run.step.straight import StraightStep, baseline_steps
from stowplan.techniques.offload.run.disk import DiskTier
from stowplan.units import format_bytes
from tests.support.nets import NETS, Example
from tests.support.spilling import Spilling, same, spilling

SIZES: dict[str, dict[str, Any]] = {  # steps of about a second
    "unet": {"resolution": 316, "width": 32},
    "resnet50": {"batch": 4, "resolution": 96},
    "gpt": {"layers": 4, "vocabulary": 8000},
    "vit": {"batch": 4, "layers": 6},
}
SMALL_SIZES: dict[str, dict[str, Any]] = {  # steps small enough to plan many tiled candidates
    "unet": {"resolution": 220, "width": 8, "batch": 2},
    "resnet50": {"batch": 32, "resolution": 64},
    "gpt": {"batch": 64, "sequence": 64},
    "vit": {"batch": 64, "resolution": 64},
}
SHARES = (0.9, 0.7, 0.5, 0.3, 0.1)
_SHARES_HELP = "budgets, by how far they are from the smallest to the baseline's peak"
ALONE = ("recompute", "tile", "offload")
_ROUNDS = 5
_MOVES = 1500
_FLIPS, _STEPS = 1000, 2000


def main() -> None:
    """Print a line per network and budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("time", "joint", "endure"))
    parser.add_argument("nets", nargs="*", default=list(SIZES), metavar="NET")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help=_SHARES_HELP)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "endure":
        endure()
        return
    tier = DiskTier()
    known = tier.described()
    out, back = (rate / 1e6 for rate in (known.store_bytes_per_second, known.load_bytes_per_second))
    print(
        f"disk: {out:.0f} MB/s out, {back:.0f} MB/s back, {known.latency_seconds * 1e6:.0f} us at least",
        flush=True,
    )
    for name in options.nets:
        lines = partial(time_lines, tier=tier) if options.what == "time" else joint_lines
        for line in lines(name, options.shares):
            print(f"{name:9} {line}", flush=True)


def time_lines(name: str, shares: Sequence[float], tier: DiskTier) -> Iterator[str]:
    """Plans that only offload, run in turns with the baseline."""
    example = NETS[name].build("real", **SIZES[name])
    captured = capture(*example)
    pricing = replace(price_captured(captured), tier=tier.described())
    planner = Planner.of(captured.graph, pricing, options=PlanOptions(allow=("offload",)))
    plain = StraightStep(captured, example.model, steps=baseline_steps(captured.graph))
    for share in shares:
        plan = planner.plan(_between(planner.minimum_bytes, planner.plain_peak_bytes, share))
        moved = StraightStep(captured, example.model, steps=plan.steps, tier=tier)
        yield _time_line(name, example, plan, plain, moved)


def _time_line(name: str, example: Example, plan: Plan, plain: StraightStep, moved: StraightStep) -> str:
    rounds = _interleaved([partial(_step, example, plain), partial(_step, example, moved)])
    plain_seconds, seconds = map(median, rounds)
    peak = _peak(example, moved)
    pricing = plan.pricing
    run = simulate(plan.graph, plan.steps, pricing)
    stored = sum(transfer.nbytes for transfer in run.transfers if transfer.is_store)
    projected = plan.projected_seconds * plain_seconds / plan.plain_seconds
    _tell(name, plan, peak, rounds)
    return (
        f"budget {format_bytes(plan.allowed_bytes):>8} peak {format_bytes(peak):>8}"
        f" ({peak / plan.projected_peak_bytes - 1:+.2%} of projected) moved {format_bytes(stored):>8}"
        f" seconds {seconds:.3f}, projected {plan.projected_seconds:.3f}"
        f" ({seconds / plan.projected_seconds - 1:+.1%},"
        f" beside the baseline {seconds / projected - 1:+.1%}), baseline {plain_seconds:.3f}"
        f" stalls {run.stall_seconds / run.seconds:.1%}"
    )


def _tell(name: str, plan: Plan, peak: int, rounds: list[tuple[float, ...]]) -> None:
    study, case = Study("offload"), f"{name} in {format_bytes(plan.allowed_bytes)}"
    plain, moved = rounds
    ratio, quartiles = ratio_of(moved, plain)
    study.tell(case, "baseline", "peak", plan.plain_peak_bytes, "B")
    study.tell(case, "offload", "peak", peak, "B")
    study.tell(case, "offload", "peak error", plan.projected_peak_bytes / peak - 1, "of measured")
    study.tell(case, "offload", "time", ratio, "of baseline", quartiles)
    study.tell(case, "projected", "time", plan.time_ratio, "of baseline")


def joint_lines(name: str, shares: Sequence[float]) -> Iterator[str]:
    """Projected time ratios; `none` where a technique cannot meet the budget."""
    model, args = NETS[name].build("tiny", **SMALL_SIZES[name])
    subject = Subject(capture(model, args), model, args, {})
    planners = {
        words: step_planner(
            subject, options=PlanOptions(allow=words, search=Search(prefer="time", moves=_MOVES))
        )
        for words in (*((word,) for word in ALONE), ALONE)
    }
    offers = planners[ALONE].plain.tradeoffs()
    low, high = (bound(offer.peak_bytes for offer in offers) for bound in (min, max))
    for share in shares:
        allowed = _between(low, high, share)
        ratios = [_ratio(planner.plan, allowed) for planner in planners.values()]
        told = " ".join(
            f"{'+'.join(words)} {ratio:.4f}" if ratio < float("inf") else f"{'+'.join(words)} none"
            for words, ratio in zip(planners, ratios, strict=True)
        )
        for words, ratio in zip(planners, ratios, strict=True):
            if ratio < float("inf"):
                case = f"{name} in {format_bytes(allowed)}"
                Study("joint").tell(case, " and ".join(words), "projected time", ratio, "of baseline")
        verdict = "no worse" if ratios[-1] <= min(ratios[:-1]) + 1e-9 else "WORSE"
        yield f"budget {format_bytes(allowed):>8} {told}: {verdict}"


def _ratio(plan_for: Callable[[int], Plan], allowed_bytes: int) -> float:
    try:
        return plan_for(allowed_bytes).time_ratio
    except BudgetTooSmall:
        return float("inf")


def _between(low: int, high: int, share: float) -> int:
    return int(low + (high - low) * share)


def _step(example: Example, run: StraightStep) -> None:
    example.model.zero_grad(set_to_none=True)
    loss = run(*example.args)
    assert isinstance(loss, Tensor)
    torch.autograd.backward(loss)


def _interleaved(steps: list[Callable[[], None]]) -> list[tuple[float, ...]]:
    """The seconds of each, in rounds after one to warm up."""
    rounds = [[_seconds(step) for step in steps] for _ in range(_ROUNDS + 1)][1:]
    return list(zip(*rounds, strict=True))


def _seconds(step: Callable[[], None]) -> float:
    started = perf_counter()
    step()
    return perf_counter() - started


def _peak(example: Example, run: StraightStep) -> int:
    example.model.zero_grad(set_to_none=True)
    before = [*example.model.parameters(), *example.model.buffers(), *example.args]
    return measure(lambda: _step(example, run), before=before).measured_peak_bytes


def endure() -> None:
    """What a step that moves everything does with a damaging disk, and whether anything grows."""
    with tempfile.TemporaryDirectory() as folder, spilling(Path(folder)) as fine:
        before = fine.state()
        fine.train()
        expected, chance = fine.gradients(), random.Random(0)
        outcomes = [_flipped(fine, chance, before, expected) for _ in range(_FLIPS)]
        print(f"{_FLIPS} flipped bytes: {outcomes.count(True)} found, {outcomes.count(False)} in unused room")
        start = _held(fine)
        for _ in range(_STEPS):
            fine.train()
        print(f"descriptors, threads, spill bytes: {start} before {_STEPS} steps, {_held(fine)} after")


def _flipped(
    fine: Spilling, chance: random.Random, before: dict[str, Tensor], expected: dict[str, Tensor]
) -> bool:
    fine.model.load_state_dict(before)
    try:
        fine.train(
            between=partial(fine.flip, chance.randrange(fine.tier.spill.nbytes), chance.randrange(1, 256))
        )
    except TierDamaged:
        assert not fine.gradients(), "a failed step has left gradients"
        assert same(before, fine.state()), "a failed step has changed buffers"
        return True
    assert same(expected, fine.gradients()), "wrong gradients"
    return False


def _held(fine: Spilling) -> tuple[int, int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count(), fine.tier.spill.nbytes


if __name__ == "__main__":
    main()
