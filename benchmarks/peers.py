"""stowplan against what a user would pick instead, in one process, interleaved: peak and time of each.

    python -m benchmarks.peers unet resnet50 gpt vit
    python -m benchmarks.peers gpt --kernels compiled

For every peer's point (peak, seconds) stowplan makes a plan of at most that peak. It also makes plans for
half and a quarter of eager's activation memory: eager's peak without parameters, gradients, buffers and
inputs. Peaks are the allocator's own totals. Each round runs every method once; times are medians over rounds
of the ratio to eager. One thread. With compiled kernels, `torch.compile` without a budget is a peer as well,
and both kinds of plans answer.
"""

import argparse
import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, process_time
from types import FunctionType

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.results import Study, ratio_of
from stowplan.capture import capture
from stowplan.errors import BudgetTooSmall
from stowplan.plan.options import Kernels, PlanOptions
from stowplan.run.measure.measure import measure
from stowplan.run.planning.planner import step_planner
from stowplan.run.planning.subject import PlannedStep, Subject
from stowplan.run.step.straight import StraightStep
from tests.support.nets import NETS, Example

BLOCKS = ("DoubleConvolution", "Bottleneck", "Block")  # what a practitioner would checkpoint
RATIOS = (0.7, 0.5, 0.3, 0.1)
Loss = Callable[[], Tensor]


@dataclass(slots=True)
class Method:
    """A way to compute the same loss, and what was measured of it. `answers`: what it was planned for."""

    name: str
    loss: Loss
    answers: list[str] = field(default_factory=list)
    peak_bytes: int = 0
    ratio: float = 0.0
    quartiles: tuple[float, float] = (0.0, 0.0)
    projected_ratio: float | None = None
    bound: float | None = None


def compare(net: str, rounds: int, *, peers: "_Peers", batch: int | None) -> list[Method]:
    """Every peer, and stowplan at every peer's peak."""
    example = NETS[net].build("real", batch=batch) if batch else NETS[net].build("real")
    methods = list(_methods(example, peers))
    for method in methods:
        _measure_peak(method, example)
    wishes = {method.name: method.peak_bytes for method in methods} | _goals(example, methods[0].peak_bytes)
    for kernels in peers.kernels:
        for answer in _answers(example, wishes, kernels):
            _measure_peak(answer, example)
            methods.append(answer)
    _measure_times(methods, example.model, rounds, peers.clock)
    return methods


@dataclass(frozen=True, slots=True)
class _Peers:
    """The backends and ratios of `torch.compile` to compare with, and the kernels of the plans."""

    backends: tuple[str, ...] = ("aot_eager_decomp_partition", "inductor")
    ratios: tuple[float, ...] = RATIOS
    kernels: tuple[str, ...] = ("eager",)
    clock: Callable[[], float] = perf_counter


def _methods(example: Example, peers: _Peers) -> Iterator[Method]:
    model, args = example
    yield Method("eager", lambda: model(*args))
    blocked = _checkpointed(model)
    yield Method("checkpoint per block", lambda: blocked(*args))
    for backend in peers.backends:
        for ratio in peers.ratios:
            name = "inductor, no budget" if ratio == 1 else f"budget {ratio}, {backend}"
            yield Method(name, _compiled(model, args, backend, ratio))


def _checkpointed(model: nn.Module) -> nn.Module:
    """The same parameters, with each block's forward recomputed in backward."""
    blocked = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    for block in (module for module in blocked.modules() if type(module).__name__ in BLOCKS):
        block.forward = _recomputed(block.forward)
    return blocked


def _recomputed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*args: Tensor) -> Tensor:
        result: Tensor = checkpoint(forward, *args, use_reentrant=False)
        return result

    return run


def _compiled(model: nn.Module, args: tuple[Tensor, ...], backend: str, ratio: float) -> Loss:
    """Compiled at once, while the knob is set; code of its own keeps the graph from being another ratio's."""

    def call() -> Tensor:
        loss: Tensor = model(*args)
        return loss

    own = call.__code__.replace(co_name=f"call_{backend}_{ratio}")
    compiled = torch.compile(FunctionType(own, globals(), None, None, call.__closure__), backend=backend)
    functorch_config.activation_memory_budget = ratio
    compiled().backward()
    model.zero_grad(set_to_none=True)
    return compiled


def _goals(example: Example, eager_bytes: int) -> dict[str, int]:
    """Budgets of half and a quarter of the activation memory that eager takes."""
    model, args = example
    parameters = [*model.parameters()]
    always = sum(t.nbytes for t in (*parameters, *parameters, *model.buffers(), *args))
    activation_bytes = eager_bytes - always
    shares = {"half of the activations": 2, "a quarter of the activations": 4}
    return {name: always + activation_bytes // part for name, part in shares.items()}


def _answers(example: Example, wishes: dict[str, int], kernels: str) -> list[Method]:
    """A method for each plan that the wishes lead to; several may lead to one."""
    model, args = example
    captured = capture(model, args)
    options = PlanOptions(allow=("recompute",), kernels=kernels)
    planner = step_planner(Subject(captured, model, args, {}), options)
    answers: dict[int, Method] = {}
    for wish, allowed_bytes in wishes.items():
        try:
            plan, candidate = planner.answer(allowed_bytes)
        except BudgetTooSmall as refusal:
            print(f"  no plan for {wish}: {refusal}")
            continue
        if plan.projected_peak_bytes not in answers:
            step = PlannedStep(plan, candidate.captured).bound_to(model)
            told = (
                "stowplan" if kernels == Kernels.EAGER else f"stowplan, {len(plan.kernels)} kernels compiled,"
            )
            name = f"{told} at {plan.projected_peak_bytes / 2**20:.2f} MiB"
            answers[plan.projected_peak_bytes] = Method(
                name, _calling(step, args), projected_ratio=plan.time_ratio, bound=plan.bound
            )
        answers[plan.projected_peak_bytes].answers.append(wish)
    return list(answers.values())


def _calling(step: StraightStep, args: tuple[Tensor, ...]) -> Loss:
    def loss() -> Tensor:
        result = step(*args)
        assert isinstance(result, Tensor)
        return result

    return loss


def _measure_peak(method: Method, example: Example) -> None:
    model, args = example
    _run(method, model)
    standing = [*model.parameters(), *model.buffers(), *args]
    method.peak_bytes = measure(lambda: _run(method, model), before=standing).measured_peak_bytes
    print(f"  {method.name}: {method.peak_bytes / 2**20:.1f} MiB", flush=True)


def _measure_times(methods: list[Method], model: nn.Module, rounds: int, clock: Callable[[], float]) -> None:
    times: list[list[float]] = [[] for _ in methods]
    for _ in range(rounds):
        for method, seconds in zip(methods, times, strict=True):
            started = clock()
            _run(method, model)
            seconds.append(clock() - started)
    for method, seconds in zip(methods, times, strict=True):
        method.ratio, method.quartiles = ratio_of(seconds, times[0])


def _run(method: Method, model: nn.Module) -> None:
    method.loss().backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)


def table(net: str, methods: list[Method]) -> str:
    """Markdown: one row per method, times as ratios to eager."""
    rows = [
        f"### {net}",
        "",
        "| method | peak MiB | time | quartiles | projected | bound |",
        "|---" * 6 + "|",
    ]
    for method in methods:
        low, high = method.quartiles
        told = (f"{ratio:.3f}" if ratio else "" for ratio in (method.projected_ratio, method.bound))
        name = method.name + (f" (for {', '.join(method.answers)})" if method.answers else "")
        figures = f"{method.peak_bytes / 2**20:.1f} | {method.ratio:.3f} | {low:.3f} to {high:.3f}"
        rows.append(f"| {name} | {figures} | {' | '.join(told)} |")
    return "\n".join(rows)


def main() -> None:
    """Compare on each network named and write table and JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nets", nargs="+", choices=sorted(NETS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, help="instead of each network's own")
    parser.add_argument("--no-inductor", action="store_true", help="leave out the slowest peer to compile")
    parser.add_argument(
        "--kernels", choices=("eager", "compiled"), default="eager", help="those of the plans"
    )
    parser.add_argument(
        "--processor-time", action="store_true", help="for a machine that others use: no waiting counts"
    )
    parser.add_argument("--ratios", type=float, nargs="+", help="memory budgets of torch.compile; 1 is none")
    parser.add_argument(
        "--out", type=Path, default=Path("build/peers"), help="where `stowplan report` finds them"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for net in arguments.nets:
        print(net)
        methods = compare(net, arguments.rounds, peers=_peers(arguments), batch=arguments.batch)
        print(table(net, methods), flush=True)
        _tell(f"{net}, batch {arguments.batch}" if arguments.batch else net, methods)
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / f"{net}.json").write_text(_json(methods))


def _peers(arguments: argparse.Namespace) -> _Peers:
    clock = process_time if arguments.processor_time else perf_counter
    if arguments.kernels == "compiled":
        ratios = tuple(arguments.ratios or (1.0, *RATIOS))
        return _Peers(("inductor",), ratios, ("eager", "compiled"), clock)
    backends = ("aot_eager_decomp_partition", *(() if arguments.no_inductor else ("inductor",)))
    return _Peers(backends, tuple(arguments.ratios or RATIOS), clock=clock)


def _tell(case: str, methods: list[Method]) -> None:
    study = Study("peers")
    for method in methods:
        study.tell(case, method.name, "peak", method.peak_bytes, "B")
        study.tell(case, method.name, "time", method.ratio, "of eager", method.quartiles)


def _json(methods: list[Method]) -> str:
    """`peers` and `stowplan`, each a list of name, peak and time; `stowplan report` reads the former."""
    points: dict[str, list[object]] = {"peers": [], "stowplan": []}
    for method in methods:
        point = {"name": method.name, "peak_bytes": method.peak_bytes, "time_ratio": method.ratio}
        points["stowplan" if method.answers else "peers"].append(point)
    return json.dumps(points, indent=2)


if __name__ == "__main__":
    main()
