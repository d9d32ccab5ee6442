"""What a whole iteration takes: forward, backward and the optimizer's step, everything in memory counted.

    python -m benchmarks.iteration [--model gpt2] [--rounds 7] [--methods "eager" "stowplan" ...]
    python -m benchmarks.iteration --exact [--minutes 60]
    python -m benchmarks.iteration --faults [--times 100] [--seed 0]

A GPT of 88 MiB of parameters with AdamW on a small batch: eager, the optimizer in backward by hooks, and
stowplan in the smallest budget it finds. All methods live in one process; each round runs every method once.
`--model gpt2` takes GPT-2 small (124 million parameters) on 2 x 256 tokens.

`--exact` compares losses, parameters, buffers and optimizer state with eager's after 20 iterations, bit for
bit: each network with each optimizer, with and without clipping, with 1 and 4 micro-batches, in a roomy and
in the smallest budget. The combinations come in a random order that is always the same, so a run that ends
early is a sample of all. Each result is a line of `build/bench/exact.jsonl`, and a second run goes on from
there.

`--faults` ends iterations of small training loops at random places: `--times` by an interrupt and as
many by an op or a transfer to disk that fails. It counts what is left, and what the next call says.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from time import monotonic, perf_counter, thread_time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import stowplan
from benchmarks.results import Study, ratio_of
from stowplan import Iteration, Search
from stowplan.run.measure.measure import measure
from tests.support.iterations import OPTIMIZERS, Loop, differing
from tests.support.nets import NETS
from tests.support.nets.net import Example
from tests.support.torn import LOOPS, Outcome, TornLoop

_STUDY = Study("iteration")
_EXACT = Study("exact")
_ITERATIONS = 20
_OFFLOAD = ("recompute", "offload")
_ONE_BACKWARD = 240 * 2**20  # enough for all gradients, so that clipping needs no second backward
_ARGUMENTS = ("batch", "sequence", "vocabulary", "context", "dim", "layers", "heads")
_SIZES = {"gpt": (2, 64, 8192, 64, 512, 6, 8), "gpt2": (2, 256, 50257, 1024, 768, 12, 12)}


@dataclass(frozen=True, slots=True)
class Method:
    """One iteration, the model that it trains, and the optimizers that keep state for it."""

    run: Callable[[], None]
    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    plan: stowplan.Plan | None = None
    beside_bytes: int = 0  # of the tier's staging, which is there between iterations

    def tensors(self) -> Iterator[Tensor]:
        """What is there between iterations."""
        yield from self.model.parameters()
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                values = (value for value in state.values() if isinstance(value, Tensor))
                yield from (value for value in values if not value.is_meta)  # else it is on disk


def _example(name: str) -> Example:
    torch.manual_seed(0)
    return NETS["gpt"].make(**dict(zip(_ARGUMENTS, _SIZES[name], strict=True)), dropout=0.0)


def _loop(model: nn.Module, args: tuple[Tensor, ...], optimizer: Optimizer, clip: float | None) -> None:
    loss: Tensor = model(*args)
    loss.backward()  # type: ignore[no-untyped-call]
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()


def _eager(example: Example, clip: float | None = None, **options: Any) -> Method:
    model, args = example
    optimizer = AdamW(model.parameters(), **options)
    return Method(lambda: _loop(model, args, optimizer, clip), model, (optimizer,))


def _hooks(example: Example) -> Method:
    model, args = example
    own: dict[Tensor, Optimizer] = {parameter: AdamW([parameter]) for parameter in model.parameters()}

    def update(parameter: Tensor) -> None:
        own[parameter].step()
        own[parameter].zero_grad()

    for parameter in own:
        parameter.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]

    def run() -> None:
        loss: Tensor = model(*args)
        loss.backward()  # type: ignore[no-untyped-call]

    return Method(run, model, tuple(own.values()))


def _stowplan(
    example: Example,
    loop: Mapping[str, Any],
    *,
    allow: Sequence[str] | None = None,
    budget: int = 1,
    **options: Any,
) -> Method:
    """In this budget, or in the smallest if that is larger."""
    model, args = example
    optimizer = AdamW(model.parameters(), **options)

    def fitted_in(budget: int) -> nn.Module:
        iteration = Iteration(optimizer, **loop)
        return stowplan.fit(
            model, args, budget=budget, allow=allow, optimizer=iteration, search=Search(moves=5)
        )

    try:
        fitted = fitted_in(budget)
    except stowplan.BudgetTooSmall as refusal:
        fitted = fitted_in(refusal.minimum_bytes)
    (plan,) = stowplan.plans_of(fitted)
    beside = plan.graph.tensors.get("staging of the tier")
    staging = beside.nbytes or 0 if beside else 0
    return Method(lambda: _loop(fitted, args, optimizer, None), model, (optimizer,), plan, staging)


_METHODS: Mapping[str, Callable[[Example], Method]] = {
    "eager": _eager,
    "eager, fused": lambda example: _eager(example, fused=True),
    "eager, clipped": lambda example: _eager(example, clip=1.0),
    "hooks": _hooks,
    "stowplan": lambda example: _stowplan(example, {}),
    "stowplan, fused": lambda example: _stowplan(example, {}, fused=True),
    "stowplan, clipped, gradients kept": lambda example: _stowplan(
        example, {"clip_norm": 1.0, "keep_gradients": True}
    ),
    "stowplan, clipped": lambda example: _stowplan(example, {"clip_norm": 1.0}),
    "stowplan, state on disk": lambda example: _stowplan(example, {}, allow=_OFFLOAD),
    "stowplan, clipped, state on disk": lambda example: _stowplan(
        example, {"clip_norm": 1.0}, allow=_OFFLOAD, budget=_ONE_BACKWARD
    ),
}


_LIKE = {  # the method that has trained to the same parameters in the end
    "hooks": "eager",
    "stowplan": "eager",
    "stowplan, fused": "eager, fused",
    "stowplan, clipped, gradients kept": "eager, clipped",
    "stowplan, clipped": "eager, clipped",
    "stowplan, state on disk": "eager",
    "stowplan, clipped, state on disk": "eager, clipped",
}


def main() -> None:
    """Print a line for each method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=list(_SIZES), default="gpt")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--methods", nargs="*", default=list(_METHODS), choices=list(_METHODS))
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--minutes", type=float, default=600)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.exact:
        _compare(monotonic() + 60 * options.minutes)
        return
    if options.faults:
        _end_in_between(options.times, options.seed)
        return
    methods = {name: _METHODS[name](_example(options.model)) for name in options.methods}
    peaks = {name: _peak(method) for name, method in methods.items()}
    times: dict[str, list[Times]] = {name: [] for name in methods}
    for _ in range(options.rounds):
        for name, method in methods.items():
            times[name].append(_timed(method.run))
    for name, method in methods.items():
        _tell(options.model, name, method, peaks[name], times[name], times[options.methods[0]])
        plain = methods.get(_LIKE.get(name, ""))
        if plain is not None:
            same = all(map(torch.equal, plain.model.parameters(), method.model.parameters()))
            _STUDY.tell(f"{options.model}, AdamW", name, "parameters as in eager", float(same), "true")
            print(
                f"{'':34} parameters {'equal to' if same else 'OTHER THAN'} those of {_LIKE[name]}",
                flush=True,
            )


def _compare(until: float) -> None:
    """Compare combinations with eager until then; skip those that were compared before."""
    loops = [Loop(*each) for each in product(NETS, OPTIMIZERS, (False, True), (1, 4))]
    Random(0).shuffle(loops)
    known = {result.case for result in _EXACT.told()}
    for loop in loops:
        case = f"{loop.net}, {loop.optimizer}, clips={loop.clips}, accumulate={loop.accumulate}"
        if case in known:
            continue
        if monotonic() > until:
            break
        expected = loop.in_eager(_ITERATIONS)
        plans = {"roomy": None, "smallest": loop.smallest_plan()}
        apart = {
            budget: differing(expected, loop.planned(_ITERATIONS, plan=plan))
            for budget, plan in plans.items()
        }
        for budget, names in apart.items():  # together, for a case is compared whole or not at all
            _EXACT.tell(case, budget, "tensors unlike eager's", len(names), f"of {len(expected)}")
            print(f"{case}  {budget}  {', '.join(names[:3]) + ' differ' if names else 'equal'}", flush=True)
    found = _EXACT.told()
    wrong = sum(result.value > 0 for result in found)
    print(f"{len(found)} of {2 * len(loops)} compared after {_ITERATIONS} iterations, {wrong} differ")


def _end_in_between(times: int, seed: int) -> None:
    """Interrupts, then faults, spread over all loops."""
    random, found = Random(seed), {kind: Counter[Outcome]() for kind in ("interrupt", "fault")}
    with TemporaryDirectory() as folder:
        loops = {name: TornLoop.of(Path(folder), **options) for name, options in LOOPS.items()}
        for kind, number in product(found, range(times)):
            name = list(loops)[number % len(loops)]
            faults = ("op", "transfer") if loops[name].tier else ("op",)
            outcome = loops[name].ended_at(random, kind if kind == "interrupt" else random.choice(faults))
            found[kind][outcome] += 1
            if outcome is Outcome.WRONG:
                print(f"{kind} {number}, {name}: {outcome}")
        for loop in loops.values():
            loop.close()
    for kind, outcomes in found.items():
        _STUDY.tell("ended in between", kind, "times", times, "runs")
        _STUDY.tell("ended in between", kind, str(Outcome.WRONG), outcomes[Outcome.WRONG], "runs")
        print(f"{times} by {kind}: " + "; ".join(f"{outcomes[each]} {each}" for each in Outcome))


def _peak(method: Method) -> int:
    for _ in range(2):
        method.run()
    measured = measure(method.run, before=method.tensors()).measured_peak_bytes
    return measured + method.beside_bytes


class Times(NamedTuple):
    """Seconds of one iteration: of the processor, and on the clock, where it also waits for the disk."""

    processor: float
    clock: float


def _timed(run: Callable[[], None]) -> Times:
    begun = Times(thread_time(), perf_counter())
    run()
    return Times(thread_time() - begun.processor, perf_counter() - begun.clock)


def _tell(model: str, name: str, method: Method, peak: int, times: list[Times], plain: list[Times]) -> None:
    seconds = [each.clock for each in times]
    ratio, spread = ratio_of(seconds, [each.clock for each in plain])
    processor, around = ratio_of([each.processor for each in times], [each.processor for each in plain])
    _STUDY.tell(f"{model}, AdamW", name, "peak", peak, "B")
    _STUDY.tell(f"{model}, AdamW", name, "time", ratio, "of eager", spread)
    _STUDY.tell(f"{model}, AdamW", name, "processor time", processor, "of eager", around)
    line = f"{name:34} {peak / 2**20:7.1f} MiB  {median(seconds):6.3f} s  {ratio:.3f} of eager"
    line += f" ({spread[0]:.3f} to {spread[1]:.3f}), {processor:.3f} of its processor time"
    if method.plan is not None:
        projected = method.plan.projected_peak_bytes
        line += f"  projected {projected / 2**20:.1f} MiB ({projected / peak - 1:+.3%})"
        line += f", {method.plan.projected_seconds:.3f} s, {method.plan.time_ratio:.3f} of eager"
    print(line, flush=True)


if __name__ == "__main__":
    main()
