"""Batches of many shapes: what they cost over eager steps, and how good carried plans are.

    python -m benchmarks.lengths [--steps 500] [--lengths 50] [--batches 4] [--share 0.8]
    python -m benchmarks.lengths --quality [NET ...] [--sizes 5]

The loop trains a small GPT on random lengths and batch sizes. The largest shape is declared, and the budget
is a share of its peak in eager. Each step runs in eager and fitted, by the thread's processor time. All that
`fit` spends on shapes counts, except the first plan. Losses are compared to the bit.

The quality of carried plans is the ratio of their seconds to those of plans that are searched for the same
size. Both have the same prices, which come from a roofline, so that a busy machine changes nothing.
"""

import argparse
import copy
from random import Random
from statistics import median
from time import thread_time

import torch
from torch import Tensor, nn

import stowplan
from benchmarks.results import Study
from stowplan.capture import capture
from stowplan.ir import Graph
from stowplan.plan.carry import PlannedSize, carried_point, outline_of
from stowplan.plan.frontier import frontier_of
from stowplan.plan.prices import price_by_roofline
from stowplan.plan.pricing import Machine
from stowplan.plan.problem import Problem, slices_last
from stowplan.plan.select import problem_in_order
from tests.support.nets import NETS

_STUDY = Study("lengths")
_GPT = {"vocabulary": 2000, "context": 512, "dim": 256, "layers": 4, "heads": 8, "dropout": 0.0}
_LONGEST, _SHORTEST = 512, 16


def main() -> None:
    """Run the loop, or compare carried plans with searched ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--lengths", type=int, default=50)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.8)
    parser.add_argument("--quality", nargs="*", metavar="NET")
    parser.add_argument("--sizes", type=int, default=5)
    parser.add_argument("--moves", type=int, default=4000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.quality is None:
        _loop(options.steps, options.lengths, options.batches, options.share)
        return
    ratios = [
        ratio for name in options.quality or NETS for ratio in _ratios(name, options.sizes, options.moves)
    ]
    _STUDY.tell("networks", "carried", "worst", max(ratios), "of the searched plan's time")
    print(
        f"{len(ratios)} carried plans: median {median(ratios):.4f}, worst {max(ratios):.4f} of the searched"
    )


def _loop(steps: int, lengths: int, batches: int, share: float) -> None:
    drawn = Random(0)
    sizes = sorted({_SHORTEST + (_LONGEST - _SHORTEST) * n // (lengths - 1) for n in range(lengths)})
    largest = _tokens(batches, _LONGEST)
    model = NETS["gpt"].make(batch=batches, sequence=_LONGEST, **_GPT).model
    budget = int(share * capture(model, largest).eager.peak_bytes())
    eager = copy.deepcopy(model)
    ranges = {name: {0: (1, batches), 1: (_SHORTEST, _LONGEST)} for name in ("args.0", "args.1")}
    fitted = stowplan.fit(model, largest, budget=budget, allow=("recompute",), shapes=ranges)
    print(f"budget {budget:,}: {stowplan.plans_of(fitted)[0]}", flush=True)
    spent, plain, extra, shapes = 0.0, 0.0, 0.0, set[tuple[int, int]]()
    for number in range(1, steps + 1):
        shape = drawn.randint(1, batches), drawn.choice(sizes)
        batch = _tokens(*shape)
        ours, ours_seconds = _step(fitted, batch)
        theirs, their_seconds = _step(eager, batch)
        assert ours.equal(theirs), shape
        spent, plain = spent + ours_seconds, plain + their_seconds
        extra += (ours_seconds - their_seconds) * (shape not in shapes)
        shapes.add(shape)
        if number % 20 == 0:
            plans = len(stowplan.plans_of(fitted))
            overhead = spent / plain - 1
            print(
                f"{number:4} steps, {len(shapes)} shapes, {plans} plans: {overhead:.1%} over eager"
                f" ({plain / number:.2f} s a step), first calls of shapes {extra / plain:.1%}",
                flush=True,
            )
    _STUDY.tell("gpt", "fitted", "overhead", spent / plain - 1, "of eager's time")


def _tokens(batch: int, length: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(1000 * batch + length)
    first, second = (torch.randint(0, 2000, (batch, length), generator=drawn) for _ in range(2))
    return first, second


def _step(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, float]:
    model.zero_grad(set_to_none=True)
    begun = thread_time()
    loss: Tensor = model(*batch)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), thread_time() - begun


def _ratios(name: str, count: int, moves: int) -> list[float]:
    """For batches of 8 down, the carried plan's seconds over those of the searched one."""
    source = _problem(name, 8)
    points = frontier_of(source, moves).points
    budget = (points[0].peak_bytes + 2 * points[-1].peak_bytes) // 3
    pricing = price_by_roofline(source.graph, Machine())
    size, found = PlannedSize.of(source.graph, pricing, points, (), budget), list[float]()
    for batch in range(7, 7 - count, -1):
        problem = _problem(name, batch)
        searched = [p for p in frontier_of(problem, moves).points if p.peak_bytes <= budget]
        carried = carried_point(problem, size.policies, budget)
        if outline_of(problem.graph) != size.outline or carried is None or not searched:
            print(f"{name:14} batch {batch}: not carried", flush=True)
            continue
        plain = sum(problem.seconds)
        ratio = (plain + carried.extra_seconds) / (plain + searched[-1].extra_seconds)
        found.append(ratio)
        again = 1 + carried.extra_seconds / plain
        print(f"{name:14} batch {batch}: {ratio:.4f} of the searched plan, {again:.3f} x eager", flush=True)
    return found


def _problem(name: str, batch: int) -> Problem:
    net = NETS[name]
    example = net.make(**{**net.tiny, "batch": batch})
    graph: Graph = slices_last(capture(example.model, example.args).graph)
    return problem_in_order(graph, price_by_roofline(graph, Machine()))


if __name__ == "__main__":
    main()
