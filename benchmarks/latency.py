"""Waiting for a plan: processor seconds from a call of `fit` or a command to its answer, case by case.

    python -m benchmarks.latency [--case NAME ...]

Each case runs in a process of its own with one thread and empty caches, unless it says otherwise. The time
to import PyTorch and to build the model does not count. `former` is the figure before planning was made
faster, `goal` the figure that was asked for.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import partial
from io import StringIO
from statistics import median
from time import process_time
from typing import Any

import torch
from torch import nn

import stowplan
from benchmarks.results import ROOT, Study
from stowplan import Execution, Search
from stowplan.demo import gpt
from tests.support.nets import NETS, Example

_GPT2_PEAK = 1_601_733_640  # bytes, of GPT-2 small in eager
_GPT6_PEAK = 121_140_296  # of the GPT of `stowplan.demo`
_FORMER_TIMES = {
    f"time at {gibibytes} GiB": time
    for gibibytes, time in {2.6: 1.2071, 3.05: 1.0997, 3.5: 1.0527, 4.0: 1.0337, 5.6: 1.0004}.items()
}
_COSTLIEST = 30  # ops of a network whose prices are compared
_BUSY = 2  # processes beside the probe
_BUSY_CODE = "import torch; torch.set_num_threads(1); a = torch.rand(700, 700)\nwhile True: (a @ a).sum()"
Figures = dict[str, float]


def fits() -> Figures:
    """GPT-2 small, 2 x 256 tokens: everything fits."""
    return {"seconds": _seconds_to_fit("hf_gpt2", "16GiB")}


def budgets() -> Figures:
    """The same at 0.8 of its peak, then another budget."""
    example = _built("hf_gpt2")
    first = _seconds(lambda: stowplan.fit(*example, budget=_GPT2_PEAK * 8 // 10))
    second = _seconds(lambda: stowplan.fit(*example, budget=_GPT2_PEAK * 78 // 100))
    return {"first seconds": first, "second seconds": second}


def document() -> Figures:
    """`stowplan plan` on the U-Net document at each of five budgets, with the import of the solver."""
    from stowplan.api import plan_for

    figures: Figures = {}
    for gibibytes in (2.6, 3.05, 3.5, 4.0, 5.6):
        begun = process_time()
        plan = plan_for(ROOT / "examples/data/unet_step.txt", int(gibibytes * 2**30), saved="retain")
        figures[f"seconds at {gibibytes} GiB"] = process_time() - begun
        figures[f"time at {gibibytes} GiB"] = plan.time_ratio
    return figures


def six_layers() -> Figures:
    """A GPT of six layers at half of its memory: `fit` with a first plan, and the plan that is waited for."""
    return _soon_and_later(*gpt(), _GPT6_PEAK // 2)


def soon() -> Figures:
    """GPT-2 small at 0.8 of its peak, in the same two ways."""
    example = _built("hf_gpt2")
    return _soon_and_later(example.model, example.args, _GPT2_PEAK * 8 // 10)


def _soon_and_later(model: nn.Module, args: tuple[object, ...], budget: int) -> Figures:
    fit = partial(stowplan.fit, model, args, budget=budget)
    begun = process_time()
    first = stowplan.plans_of(fit(search=Search(wait=False)))[0]
    took = process_time() - begun
    best = stowplan.plans_of(fit())[0]
    return {"seconds": took, "time of the first plan": first.time_ratio, "time of the best": best.time_ratio}


def hopeless() -> Figures:
    """`stowplan plan` with a budget of 6 bytes on GPT-2 small."""
    from stowplan.cli.main import main as command

    global _prepared
    _prepared = _built("hf_gpt2")
    said = StringIO()
    with redirect_stderr(said):
        took = _seconds(lambda: command(["plan", "benchmarks.latency:prepared", "--budget", "6"]))
    assert "did you mean 6GiB?" in said.getvalue(), said.getvalue()
    return {"seconds": took}


_prepared: Example | None = None


def prepared() -> tuple[nn.Module, tuple[object, ...]]:
    """The step of `hopeless`, for the command."""
    running = sys.modules["__main__"]
    example: Example | None = getattr(running, "_prepared", None) or _prepared
    assert example is not None, "only for `hopeless`"
    return example.model, example.args


def length() -> Figures:
    """GPT-2 with 4 layers at 0.8 of its peak, warm: the first step of a new sequence length."""
    example = _built("hf_gpt2", layers=4)
    fitted = stowplan.fit(*example, budget="700MiB")
    shorter = tuple(tokens[:, :240] for tokens in example.args if isinstance(tokens, torch.Tensor))
    return {"seconds": _first_step(fitted, shorter)}


def last_batch() -> Figures:
    """A ResNet-50 of width 48, 32 images of 128 x 128 in 450 MiB: the first step of a last batch of 8."""
    example = _resnet()
    fitted = stowplan.fit(*example, budget="450MiB", allow=("recompute",))
    smaller = tuple(each[:8] for each in example.args if isinstance(each, torch.Tensor))
    return {"seconds": _first_step(fitted, smaller)}


def unet() -> Figures:
    """U-Net 572 at a fifth of its activations, in tiles."""
    return _in_tiles("unet", 0.2)


def resnet50_2048() -> Figures:
    """ResNet-50, 2048 x 2048, at a tenth of its activations, in tiles."""
    return _in_tiles("resnet50-2048", 0.1)


def deep() -> Figures:
    """A Llama of 100 layers, 18,443 ops, priced by a roofline: search at 0.7 of its peak."""
    from stowplan.capture import capture
    from stowplan.plan.options import PlanOptions
    from stowplan.plan.prices import price_by_roofline
    from stowplan.plan.pricing import Machine
    from stowplan.plan.select import planner_of

    example = NETS["llama"].build("real", device="meta", batch=8, layers=100)
    graph = capture(example.model, example.args).graph
    pricing = price_by_roofline(graph, Machine())

    def search() -> None:
        planner = planner_of(graph, pricing, PlanOptions(("recompute",)))
        planner.plan(planner.baseline.peak_bytes * 7 // 10)

    return {"seconds": _seconds(search)}


def kernels() -> Figures:
    """GPT-2 small with compiled kernels: what they take beyond a plan with eager's, children included."""
    example = _built("hf_gpt2")
    fit = partial(stowplan.fit, *example, budget=_GPT2_PEAK * 8 // 10)
    eager, compiled = (
        _seconds(partial(fit, execution=Execution(kernels=each)), _whole_time)
        for each in ("eager", "compiled")
    )
    return {"seconds": compiled - eager}


def memory() -> Figures:
    """Peak RSS of a process that fits a ResNet-50 of width 48, batch 32, in 450 MiB and trains 3 steps."""
    example = _resnet()
    fitted = stowplan.fit(*example, budget="450MiB", allow=("recompute",))
    planned = _peak_rss()
    optimizer = torch.optim.AdamW(fitted.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        fitted(*example.args).backward()
        optimizer.step()
    return {"MiB": _peak_rss(), "MiB before the first step": planned}


def _peak_rss() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def prices() -> Figures:
    """Prices of the 30 costliest ops of ResNet-50 and GPT, quiet and beside two busy processes."""
    figures: Figures = {}
    for net in ("resnet50", "gpt"):
        quiet, again = _costliest(net), _costliest(net)  # which tells how quiet the host is
        with _busy_neighbours():
            busy = _costliest(net)
        for when, prices_then in (("", busy), (", quiet twice", again)):
            apart = sorted(abs(prices_then[op] / quiet[op] - 1) for op in quiet)
            figures |= {
                f"{net} median apart{when}": apart[len(apart) // 2],
                f"{net} most apart{when}": apart[-1],
            }
    return figures


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured, and by figure its former value and its goal; `warm` runs it again with its caches.

    A case of several `runs` has their medians.
    """

    run: Callable[[], Figures]
    former: Mapping[str, float | str]
    goal: Mapping[str, float | str]
    warm: bool = False
    runs: int = 1


CASES: Mapping[str, Case] = {
    "fits": Case(fits, {"seconds": 17.8}, {"seconds": 4}),
    "budgets": Case(
        budgets,
        {"first seconds": 18, "second seconds": 9},
        {"first seconds": 8, "second seconds": 2},
    ),
    "document": Case(
        document,
        {f"seconds at {gibibytes} GiB": 11.5 for gibibytes in (2.6, 3.05, 3.5, 4.0)} | _FORMER_TIMES,
        {f"seconds at {gibibytes} GiB": 1.0 for gibibytes in (2.6, 3.05, 3.5, 4.0, 5.6)}
        | {"time at 2.6 GiB": 1.1782},
    ),
    "six_layers": Case(six_layers, {"seconds": "39, busy"}, {"seconds": 1.5}),
    "soon": Case(soon, {"seconds": 7}, {"seconds": 2.5}),
    "hopeless": Case(hopeless, {"seconds": 91}, {"seconds": 3}),
    # Many shapes of one program.
    "length": Case(length, {"seconds": "19 to 25"}, {"seconds": 0.15}),
    "last_batch": Case(last_batch, {"seconds": 19.7}, {"seconds": 0.3}),
    # Large steps.
    "unet": Case(unet, {"seconds": "54 to 117"}, {"seconds": 15}),
    "resnet50_2048": Case(resnet50_2048, {"seconds": 168}, {"seconds": 60}),
    "deep": Case(deep, {"seconds": 11.6}, {"seconds": 8}),
    "kernels": Case(kernels, {}, {"seconds": 90, "seconds, warm": 5}, warm=True),
    # The user's process and its neighbours.
    "memory": Case(
        memory, {"MiB": "390 more than warm"}, {"MiB": "at most 50 more than warm"}, warm=True, runs=5
    ),
    "prices": Case(prices, {}, dict.fromkeys(("resnet50 most apart", "gpt most apart"), 0.05)),
}


def _built(net: str, **settings: object) -> Example:
    return NETS[net].build("real", device="cpu", dtype=torch.float32, seed=0, **settings)


def _resnet() -> Example:
    return _built("resnet50", batch=32, resolution=128, width=48, classes=10)


def _seconds(work: Callable[[], object], clock: Callable[[], float] = process_time) -> float:
    begun = clock()
    work()
    return clock() - begun


def _whole_time() -> float:
    """Processor seconds of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return process_time() + children.ru_utime + children.ru_stime


def _seconds_to_fit(net: str, budget: str) -> float:
    example = _built(net)
    return _seconds(lambda: stowplan.fit(*example, budget=budget))


def _first_step(fitted: nn.Module, args: tuple[object, ...]) -> float:
    """What the first step of a kind takes beyond the median of the next five."""
    first, *others = (_seconds(lambda: fitted(*args).backward()) for _ in range(6))
    return first - median(others)


def _in_tiles(name: str, share: float) -> Figures:
    from benchmarks.tiles import CASES as TILED
    from benchmarks.tiles import allowances
    from stowplan.capture import capture
    from stowplan.run.planning.planner import Subject, step_planner

    example = _built(TILED[name].net, **TILED[name].settings)

    def plan() -> None:
        planner = step_planner(Subject(capture(*example), *example, {}))
        for allowed in allowances(TILED[name], example, planner, [share]):
            planner.answer(allowed)

    return {"seconds": _seconds(plan)}


def _costliest(net: str) -> Mapping[str, float]:
    """Seconds of the ops that take longest, by op, probed without a cache."""
    from stowplan.capture import capture
    from stowplan.plan.prices import price_by_roofline
    from stowplan.plan.pricing import Machine
    from stowplan.run.cost.machine import device_of
    from stowplan.run.cost.probe import call_signature, costs_of_calls

    captured = capture(*_built(net))
    expected = price_by_roofline(captured.graph, Machine()).seconds
    ops = sorted(captured.graph.ops, key=lambda op: -expected[op.id])
    signatures = {
        (signature := call_signature(captured.graph, captured.program.calls[op.id])).text: signature
        for op in ops
    }
    chosen = list(signatures.values())[:_COSTLIEST]
    costs = costs_of_calls(chosen, device_of(captured.graph), cache=None)
    return {text: cost.seconds for text, cost in costs.items() if cost is not None}


@contextmanager
def _busy_neighbours() -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", _BUSY_CODE]) for _ in range(_BUSY)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _measured(name: str) -> Figures:
    """The figures of a case, from processes of its own."""
    runs = [_measured_once(name) for _ in range(CASES[name].runs)]
    return {figure: median(run[figure] for run in runs) for figure in runs[0]}


def _measured_once(name: str) -> Figures:
    with tempfile.TemporaryDirectory() as cache:
        figures = _child(name, cache)
        if CASES[name].warm:
            figures |= {f"{figure}, warm": value for figure, value in _child(name, cache).items()}
    return figures


def _child(name: str, cache: str) -> Figures:
    environment = {**os.environ, "XDG_CACHE_HOME": cache, "OMP_NUM_THREADS": "1"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = f"{cache}/inductor"
    command = [sys.executable, "-m", "benchmarks.latency", "--run", name]
    run = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: Figures = json.loads(run.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print the table, a row as soon as it is measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", nargs="+", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument("--run", choices=tuple(CASES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(CASES[options.run].run()))
        return
    study = Study("latency")
    print("| case | figure | former | goal | measured |")
    print("|---|---|---|---|---|")
    for name in options.case:
        case, words = CASES[name], _words_of(CASES[name].run)
        for figure, value in _measured(name).items():
            former, goal = (_spelled(known.get(figure, "")) for known in (case.former, case.goal))
            print(f"| {words} | {figure} | {former} | {goal} | {value:.3g} |", flush=True)
            study.tell(words, "stowplan", figure, value, "MiB" if "MiB" in figure else _unit(figure))
            for way, known in (("former", case.former.get(figure)), ("goal", case.goal.get(figure))):
                if isinstance(known, int | float):
                    study.tell(words, way, figure, known, "MiB" if "MiB" in figure else _unit(figure))


def _words_of(run: Callable[[], Any]) -> str:
    return (run.__doc__ or "").removesuffix(".")


def _unit(figure: str) -> str:
    return "s" if "seconds" in figure else "of the price"


def _spelled(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


if __name__ == "__main__":
    main()
