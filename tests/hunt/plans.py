"""Search and judges against values: schedules of small random steps, right ones and damaged ones.

A case draws a step, a schedule of the search for it (its ledger and its list of steps), sometimes with
transfers to a tier, and some damage to the list. A machine that follows values knows which lists compute the
step, and counts bytes by adding them up. The judges must accept what is right, with the bytes that search and
machine count, and refuse everything else. `python -m tests.hunt.plans --cases 100000` runs many cases.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TypeAlias

from stowplan.errors import IllegalPlan
from stowplan.ir import Graph
from stowplan.plan.judge.simulate import peaks_by_device, simulate
from stowplan.plan.judge.verify import check_steps
from stowplan.plan.ledger import Ledger, State, steps_of
from stowplan.plan.pricing import Pricing, Tier
from stowplan.plan.problem import Problem, problem_of, slices_last
from stowplan.plan.steps import Compute, Free, Load, RecomputeOp, Step, Store
from stowplan.techniques.offload.plan.idle_intervals import idle_intervals_of
from stowplan.techniques.offload.plan.insert_transfers import Move, insert_transfers
from tests.support.small_steps import small_step
from tests.support.values import Reference, Wrong, curve_of, reference_of

TIER = Tier("host", 1 << 40, 8.0, 8.0, staging_bytes=100)
DAMAGES = 4  # to each schedule
Steps: TypeAlias = list[Step]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A list of steps as the search writes it, and the peak that the search says it has."""

    graph: Graph
    pricing: Pricing
    steps: tuple[Step, ...]
    peak_bytes: int | None  # None: nobody says


def problem_and_states(seed: int) -> tuple[Problem, Pricing, Random]:
    """A step as the search sees it."""
    graph, pricing = small_step(seed)
    graph = slices_last(graph)
    seconds = [pricing.seconds[op.id] for op in graph.ops]
    return problem_of(graph, seconds, pricing.workspace_bytes), pricing, Random(seed)


def schedule_of(seed: int) -> Schedule:
    """What the search makes of random states, changed one by one, some of them taken back."""
    problem, pricing, random = problem_and_states(seed)
    ledger = Ledger(problem)
    change(ledger, random)
    steps, peak = steps_of(problem, ledger.states), int(ledger.curve_bytes().max(initial=0))
    if random.random() < 0.15:
        pricing = replace(pricing, tier=TIER)
        return Schedule(problem.graph, pricing, with_transfers(problem.graph, steps, random), None)
    return Schedule(problem.graph, pricing, steps, peak)


def change(ledger: Ledger, random: Random) -> None:
    """Set the states of gaps, as a search does."""
    gaps = len(ledger.states)
    if random.random() < 0.3:
        ledger.load([random.choice(list(State)) for _ in range(gaps)])
    for _ in range(random.randint(0, 2 * gaps) if gaps else 0):
        ledger.set_state(random.randrange(gaps), random.choice(list(State)))
        if random.random() < 0.3:
            ledger.roll_back()
        else:
            ledger.commit()


def with_transfers(graph: Graph, steps: tuple[Step, ...], random: Random) -> tuple[Step, ...]:
    """Some idle storages spend their time in the tier."""
    moves = []
    for interval in idle_intervals_of(graph, steps, gradients=random.random() < 0.5):
        if random.random() < 0.5:
            out = random.randint(interval.after, interval.before - 1)
            back = random.randint(out + 1, interval.before)
            moves.append(Move(interval, out, back))
    return insert_transfers(steps, moves)


def damaged(graph: Graph, steps: Sequence[Step], random: Random) -> Steps:
    """The steps with one or two changes, any of which may do no harm."""
    changed = list(steps)
    for _ in range(random.choice((1, 1, 1, 2))):
        if changed:
            random.choice(_DAMAGES)(graph, changed, random)
    return changed


def _leave_out(_graph: Graph, steps: Steps, random: Random) -> None:
    del steps[random.randrange(len(steps))]


def _leave_out_a_second_run(_graph: Graph, steps: Steps, random: Random) -> None:
    again = [number for number, step in enumerate(steps) if isinstance(step, RecomputeOp)]
    if again:
        del steps[random.choice(again)]


def _move(_graph: Graph, steps: Steps, random: Random) -> None:
    step = steps.pop(random.randrange(len(steps)))
    steps.insert(random.randint(0, len(steps)), step)


def _swap(_graph: Graph, steps: Steps, random: Random) -> None:
    if len(steps) > 1:
        one = random.randrange(len(steps) - 1)
        steps[one], steps[one + 1] = steps[one + 1], steps[one]


def _repeat(graph: Graph, steps: Steps, random: Random) -> None:
    op = random.choice(graph.ops)
    made = list(op.writes())
    outputs = tuple(random.sample(made, random.randint(1, len(made)))) if made else ()
    steps.insert(random.randint(0, len(steps)), RecomputeOp(op.id, outputs))


def _free_early(_graph: Graph, steps: Steps, random: Random) -> None:
    frees = [number for number, step in enumerate(steps) if isinstance(step, Free)]
    if frees:
        step = steps.pop(number := random.choice(frees))
        steps.insert(random.randint(max(0, number - 4), number), step)


def _free(graph: Graph, steps: Steps, random: Random) -> None:
    steps.insert(random.randint(0, len(steps)), Free((random.choice(list(graph.tensors)),)))


def _free_less(_graph: Graph, steps: Steps, random: Random) -> None:
    frees = [(n, step) for n, step in enumerate(steps) if isinstance(step, Free) and step.tensors]
    if frees:
        number, step = random.choice(frees)
        kept = random.choice(step.tensors)
        steps[number] = Free(tuple(name for name in step.tensors if name != kept))


def _write_over(graph: Graph, steps: Steps, random: Random) -> None:
    runs = [(n, step) for n, step in enumerate(steps) if isinstance(step, Compute | RecomputeOp)]
    number, step = random.choice(runs) if runs else (0, None)
    if step is None:
        return
    op = next(op for op in graph.ops if op.id == step.op)
    written = dict(step.overwrites)
    pairs = [(output, victim) for output in op.writes() if output not in written for victim in op.reads()]
    if step.overwrites and random.random() < 0.3:
        steps[number] = replace(step, overwrites=step.overwrites[1:])
    elif pairs:
        steps[number] = replace(step, overwrites=(*step.overwrites, random.choice(pairs)))


def _want_less(_graph: Graph, steps: Steps, random: Random) -> None:
    again = [(n, step) for n, step in enumerate(steps) if isinstance(step, RecomputeOp)]
    if again:
        number, step = random.choice(again)
        steps[number] = replace(step, outputs=step.outputs[:-1])


def _move_away(graph: Graph, steps: Steps, random: Random) -> None:
    out = random.randint(0, len(steps))
    back = random.randint(out, len(steps))
    frees = [step for step in steps if isinstance(step, Free) and step.tensors]
    names = random.choice(frees).tensors[:1] if frees else (random.choice(list(graph.tensors)),)
    steps.insert(back, Load(names))
    steps[out:out] = [Store(names), Free(names)]


_DAMAGES: tuple[Callable[[Graph, Steps, Random], None], ...] = (
    *(_leave_out, _leave_out_a_second_run, _move, _move, _swap, _swap, _repeat, _repeat),
    *(_free_early, _free, _free_less, _write_over, _write_over, _want_less, _move_away),
)


def compare(graph: Graph, steps: tuple[Step, ...], pricing: Pricing, reference: Reference) -> str:
    """What both say of a list of steps; AssertionError where they do not say the same."""
    try:
        levels = curve_of(graph, reference, steps, pricing)
    except Wrong as wrong:
        try:
            check_steps(graph, steps, pricing)
        except IllegalPlan:
            return "refused"
        raise AssertionError(f"accepted, but wrong: {wrong}") from None
    try:
        simulation = check_steps(graph, steps, pricing)
    except IllegalPlan as fault:
        raise AssertionError(f"refused, but right: {fault}") from fault
    counted = tuple(level[""] for level in levels)
    assert simulation.curve_bytes == counted, ("the curves differ", simulation.curve_bytes, counted)
    peaks = peaks_by_device(graph, steps, pricing)
    for device, peak in peaks.items():
        assert peak == max((level[device] for level in levels), default=0), (
            "the peak differs",
            device,
        )
    return "accepted"


def case(seed: int) -> Counter[str]:
    """One step, its schedule, and damaged ones; AssertionError says what is wrong."""
    schedule = schedule_of(seed)
    graph, pricing, reference = schedule.graph, schedule.pricing, reference_of(schedule.graph)
    said = compare(graph, schedule.steps, pricing, reference)
    assert said == "accepted", "the search made a wrong schedule"
    if schedule.peak_bytes is not None:
        peak = simulate(graph, schedule.steps, pricing).peak_bytes
        assert peak == schedule.peak_bytes, ("search and judges count other peaks", schedule.peak_bytes, peak)
    found = Counter({"schedules": 1})
    random = Random(seed)
    pricing = replace(pricing, tier=TIER)
    for _ in range(DAMAGES):
        steps = tuple(damaged(graph, schedule.steps, random))
        if steps != schedule.steps:
            found[f"damaged and {compare(graph, steps, pricing, reference)}"] += 1
    return found


def main() -> int:
    """Run cases until one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--from", dest="first", type=int, default=0)
    arguments = parser.parse_args()
    found, began, failed = Counter[str](), time.perf_counter(), 0
    for seed in range(arguments.first, arguments.first + arguments.cases):
        try:
            found += case(seed)
        except AssertionError as fault:
            failed += 1
            print(f"case {seed}: {fault}", flush=True)
    seconds = time.perf_counter() - began
    told = ", ".join(f"{count:,} {what}" for what, count in sorted(found.items()))
    print(f"{arguments.cases:,} cases from {arguments.first} in {seconds:.0f} s: {told}; {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
