"""stowplan against what a user would pick instead, in one process, interleaved: peak and time of each.

    python -m benchmarks.peers unet resnet50 gpt vit
    python -m benchmarks.peers --kernels compiled --prepare
    python -m benchmarks.peers --kernels compiled

For every peer's point (peak, seconds) stowplan makes a plan of at most that peak. It also makes plans for
half and a quarter of eager's activation memory: eager's peak without parameters, gradients, buffers and
inputs. A larger budget whose plan is not faster gets no plan of its own. Peaks are the allocator's own
totals. Each round runs every method once, and eager again after every third: times are medians over rounds of
the ratio to eager at that moment, whose time is taken to change evenly in between. One thread.

With compiled kernels, `torch.compile` without a budget is a peer as well, and both kinds of plans answer.
Compilers take minutes, so `--prepare` runs all but the rounds and leaves what was compiled in the caches of
inductor (TORCHINDUCTOR_CACHE_DIR) and of stowplan (XDG_CACHE_HOME); others may use the machine meanwhile. A
run with rounds throws the prices of ops away and takes them anew: what decides its plans was measured there.
"""

import argparse
import copy
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from shutil import rmtree
from statistics import median
from time import perf_counter, process_time
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.page import write_section
from benchmarks.results import Study, spread_of
from stowplan import Execution
from stowplan.capture import capture
from stowplan.errors import BudgetTooSmall
from stowplan.ops.effects import FUSED
from stowplan.plan.judge.verify import verify
from stowplan.plan.options import KernelChoice, PlanOptions
from stowplan.plan.plan import Plan
from stowplan.run.cost.machine import user_folder
from stowplan.run.measure.measure import measure
from stowplan.run.planning.planner import CapturedCandidate, PlannedStep, StepCandidate, Subject, step_planner
from stowplan.run.step.straight import StraightStep
from stowplan.techniques.kernels.run.kernel import Kernel
from tests.support.nets import NETS, Example

COMPILED_CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "resnet50": ("resnet50", {}),
    "resnet50-b32": ("resnet50", {"batch": 32}),
    "vit": ("vit", {}),
    "gpt-6x512": (
        "gpt",
        {"batch": 8, "vocabulary": 8192, "context": 256, "dim": 512, "layers": 6, "heads": 8},
    ),
    "unet-316": ("unet", {"resolution": 316}),
    "unet-572": ("unet", {}),
    "hf_llama-6x512": (
        "hf_llama",
        {"batch": 4, "vocabulary": 8192, "dim": 512, "layers": 6, "heads": 8, "hidden": 1376},
    ),
}
"""Networks whose activations are most of their memory: those that are compared with compiled kernels."""
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {**{net: (net, {}) for net in NETS}, **COMPILED_CASES}
BLOCKS = ("DoubleConvolution", "Bottleneck", "Block", "LlamaDecoderLayer")  # what people checkpoint
RATIOS = (0.7, 0.5, 0.3, 0.1)
HALF, QUARTER = "half of the activations", "a quarter of the activations"
_PRODUCTS = ("convolution", "mm", "scaled_dot_product")  # in types of ops that no group takes in
_SAME = 1.003  # times as long: a larger budget that saves no more gets no plan of its own
_NEAR = 0.01  # of the projection: how far a measured peak may be from it
Loss = Callable[[], Tensor]


@dataclass(slots=True)
class Method:
    """A way to compute the same loss, and what was measured of it. `answers`: what it was planned for."""

    name: str
    loss: Loss
    is_warm: bool = False  # whether it has run
    answers: list[str] = field(default_factory=list)
    allowed_bytes: int | None = None  # the least of the budgets that it answers
    projected_bytes: int | None = None
    peak_bytes: int = 0
    ratio: float = 0.0
    quartiles: tuple[float, float] = (0.0, 0.0)
    projected_ratio: float | None = None
    bound: float | None = None

    @property
    def fault(self) -> str:
        """What a measured peak breaks: the budget or the projection."""
        if self.allowed_bytes is None or self.projected_bytes is None:
            return ""
        told = f"{self.name}: measured {self.peak_bytes:,} bytes"
        if self.peak_bytes > self.allowed_bytes:
            return f"{told}, allowed {self.allowed_bytes:,}"
        apart = abs(self.peak_bytes - self.projected_bytes)
        return f"{told}, projected {self.projected_bytes:,}" if apart > _NEAR * self.peak_bytes else ""


def compare(case: str, rounds: int, *, peers: "_Peers", batch: int | None) -> list[Method]:
    """Every peer, and stowplan at every peer's peak; without rounds only peaks are measured."""
    net, settings = CASES[case]
    example = NETS[net].build("real", **{**settings, **({"batch": batch} if batch else {})})
    began = perf_counter()
    methods = list(_methods(example, peers))
    for method in methods:
        _measure_peak(method, example)
    print(f"  peers are ready after {perf_counter() - began:.0f} s", flush=True)
    wishes = {method.name: method.peak_bytes for method in methods} | _goals(example, methods[0].peak_bytes)
    if rounds:
        rmtree(user_folder("probes"), ignore_errors=True)
    for kernels in peers.kernels:
        for answer in _answers(example, wishes, kernels):
            _measure_peak(answer, example)
            methods.append(answer)
        print(f"  plans with {kernels} kernels are ready after {perf_counter() - began:.0f} s", flush=True)
    if peers.errors:
        _tell_errors(methods, example)
    if rounds:
        done = _measure_times(methods, example.model, rounds, peers)
        print(f"  {done} rounds of {len(methods)} methods after {perf_counter() - began:.0f} s", flush=True)
    return methods


@dataclass(frozen=True, slots=True)
class _Peers:
    """The backends and ratios of `torch.compile` to compare with, and the kernels of the plans."""

    backends: tuple[str, ...] = ("aot_eager_decomp_partition", "inductor")
    ratios: tuple[float, ...] = RATIOS
    kernels: tuple[KernelChoice, ...] = ("eager",)
    clock: Callable[[], float] = perf_counter
    limit_seconds: float | None = None  # after which no round begins, once three are done
    errors: bool = False  # whether gradients are compared with float64


def _methods(example: Example, peers: _Peers) -> Iterator[Method]:
    model, args = example
    yield Method("eager", lambda: model(*args))
    blocked = _checkpointed(model)
    yield Method("checkpoint per block", lambda: blocked(*args))
    for backend in peers.backends:
        for ratio in peers.ratios:
            name = "inductor, no budget" if ratio == 1 else f"budget {ratio}, {backend}"
            yield Method(name, _compiled(model, args, backend, ratio), is_warm=True)


def _checkpointed(model: nn.Module) -> nn.Module:
    """The same parameters, with each block's forward recomputed in backward."""
    blocked = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    for block in (module for module in blocked.modules() if type(module).__name__ in BLOCKS):
        block.forward = _recomputed(block.forward)
    return blocked


def _recomputed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*args: Tensor, **kwargs: object) -> Tensor:
        result: Tensor = checkpoint(partial(forward, **kwargs), *args, use_reentrant=False)
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
    shares = {HALF: 2, QUARTER: 4}
    return {name: always + activation_bytes // part for name, part in shares.items()}


def _answers(example: Example, wishes: dict[str, int], kernels: KernelChoice) -> list[Method]:
    """A method for each plan that the wishes lead to; several may lead to one."""
    model, args = example
    captured = capture(model, args)
    options = PlanOptions(allow=("recompute",), execution=Execution(kernels=kernels))
    planner = step_planner(Subject(captured, model, args, {}), options)
    answers: list[Method] = []
    before: Plan | None = None
    for wish, allowed_bytes in sorted(wishes.items(), key=lambda pair: pair[1]):
        try:
            draft, candidate = planner.answer(allowed_bytes)
            plan = verify(draft)
        except BudgetTooSmall as refusal:
            print(f"  no plan for {wish}: {refusal}")
            continue
        if before is None or before.projected_seconds > _SAME * plan.projected_seconds:
            answers.append(_planned(plan, candidate, example, kernels))
            before = plan
        answers[-1].answers.append(wish)
    if kernels != "eager" and planner.compiled is not None:
        print("\n".join(_profile(planner.compiled, planner.baseline.seconds)), flush=True)
    return answers


def _profile(candidate: StepCandidate, eager_seconds: float) -> Iterator[str]:
    """What the step with compiled kernels is spent on, as prices say, and its slowest group."""
    assert isinstance(candidate, CapturedCandidate)
    seconds, ops = candidate.pricing.seconds, candidate.captured.graph.ops
    kinds = {"products": _PRODUCTS, "compiled groups": (FUSED,), "other ops": ("",)}
    left = {op.id: op for op in ops}
    for kind, types in kinds.items():
        taken = [op for op in left.values() if any(part in op.type for part in types)]
        for op in taken:
            del left[op.id]
        spent = sum(seconds[op.id] for op in taken)
        yield f"  {kind}: {len(taken)}, {spent:.3f} s, {spent / eager_seconds:.3f} of eager's ops"
    slowest = max((op for op in ops if op.type == FUSED), key=lambda op: seconds[op.id])
    kernel = candidate.captured.program.calls[slowest.id].arguments()["name"]
    assert isinstance(kernel, Kernel)
    inside = Counter(str(call.target).split(".")[1] for call in kernel.calls)
    told = ", ".join(f"{count} {name}" for name, count in inside.most_common())
    yield f"  slowest group: {seconds[slowest.id]:.3f} s, of {told}"


def _planned(plan: Plan, candidate: StepCandidate, example: Example, kernels: str) -> Method:
    step = PlannedStep(plan, candidate.captured).bound_to(example.model)
    told = "stowplan" if kernels == "eager" else f"stowplan, {len(plan.kernels)} kernels compiled,"
    return Method(
        f"{told} at {plan.projected_peak_bytes / 2**20:.2f} MiB",
        _calling(step, example.args),
        allowed_bytes=plan.allowed_bytes,
        projected_bytes=plan.projected_peak_bytes,
        projected_ratio=plan.time_ratio,
        bound=plan.bound,
    )


def _calling(step: StraightStep, args: tuple[Tensor, ...]) -> Loss:
    def loss() -> Tensor:
        result = step(*args)
        assert isinstance(result, Tensor)
        return result

    return loss


def _measure_peak(method: Method, example: Example) -> None:
    model, args = example
    if not method.is_warm:
        _run(method, model)
    standing = [*model.parameters(), *model.buffers(), *args]
    method.peak_bytes = measure(lambda: _run(method, model), before=standing).measured_peak_bytes
    print(f"  {method.name}: {method.peak_bytes / 2**20:.1f} MiB", flush=True)


def _tell_errors(methods: Sequence[Method], example: Example) -> None:
    """How far the gradients of eager and of the last plan are from those in float64, all as one vector."""
    model, args = example
    exact = copy.deepcopy(model).double()
    given = [arg.double() if arg.is_floating_point() else arg for arg in args]
    right = _gradients(Method("float64", lambda: exact(*given)), exact)
    for method in (methods[0], methods[-1]):
        apart = (_gradients(method, model).double() - right).norm() / right.norm()
        print(f"  gradients of {method.name}: {apart:.2e} from float64", flush=True)


def _gradients(method: Method, model: nn.Module) -> Tensor:
    method.loss().backward()  # type: ignore[no-untyped-call]
    found = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return found


def _measure_times(methods: list[Method], model: nn.Module, rounds: int, peers: _Peers) -> int:
    """Run the rounds, and say how many there were."""
    found: list[list[float]] = []
    began = perf_counter()
    for number in range(rounds):
        if peers.limit_seconds and number >= 3 and perf_counter() - began > peers.limit_seconds:
            break
        found.append(ratios_in_round(methods, lambda method: _seconds_of(method, model, peers.clock)))
    for method, ratios in zip(methods, zip(*found, strict=True), strict=True):
        method.ratio, method.quartiles = median(ratios), spread_of(ratios)
    return len(found)


T = TypeVar("T")
_EAGER_EVERY = 3  # methods: the speed of a shared host changes within a round


def ratios_in_round(methods: Sequence[T], seconds_of: Callable[[T], float]) -> list[float]:
    """The time of each method over that of eager, which is the first of them."""
    eager, *others = methods
    ratios, before = [1.0], seconds_of(eager)
    for start in range(0, len(others), _EAGER_EVERY):
        times = [seconds_of(method) for method in others[start : start + _EAGER_EVERY]]
        after = seconds_of(eager)
        step = (after - before) / (len(times) + 1)
        ratios += (seconds / (before + place * step) for place, seconds in enumerate(times, start=1))
        before = after
    return ratios


def _seconds_of(method: Method, model: nn.Module, clock: Callable[[], float]) -> float:
    started = clock()
    _run(method, model)
    return clock() - started


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


def main() -> int:
    """Compare on each network named and write table and JSON; 1 if a budget or a projection did not hold."""
    arguments = _arguments()
    torch.set_num_threads(1)
    peers, faults = _peers(arguments), list[str]()
    for net in arguments.nets or COMPILED_CASES:
        print(net, flush=True)
        rounds = 0 if arguments.prepare else arguments.rounds
        methods = compare(net, rounds, peers=peers, batch=arguments.batch)
        print(table(net, methods), flush=True)
        faults += (f"{net}, {method.fault}" for method in methods if method.fault)
        torch.compiler.reset()
        if arguments.prepare:
            continue
        study = Study("kernels" if arguments.kernels == "compiled" else "peers")
        _tell(study, f"{net}, batch {arguments.batch}" if arguments.batch else net, methods)
        if arguments.docs:
            write_section(study.name)
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / f"{net}.json").write_text(_json(methods))
    print("\n".join(["budgets or projections that did not hold:", *faults]) if faults else "budgets hold")
    return 1 if faults else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "nets",
        nargs="*",
        metavar="NET",
        help=f"{', '.join(CASES)}; those of compiled kernels if none is named",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--limit", type=float, metavar="SECONDS", help="begin no round after this, once three are done"
    )
    parser.add_argument(
        "--prepare", action="store_true", help="leave all that is compiled in the caches, and time nothing"
    )
    text = "tell how far gradients of eager and of the last plan are from float64"
    parser.add_argument("--errors", action="store_true", help=text)
    parser.add_argument("--docs", action="store_true", help="write each network into docs/benchmarks.md")
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
    if unknown := set(arguments.nets) - CASES.keys():
        parser.error(f"no network {', '.join(unknown)}; there is {', '.join(CASES)}")
    return arguments


def _peers(arguments: argparse.Namespace) -> _Peers:
    clock, limit = process_time if arguments.processor_time else perf_counter, arguments.limit
    if arguments.kernels == "compiled":
        ratios = tuple(arguments.ratios or (1.0, *RATIOS))
        return _Peers(("inductor",), ratios, ("eager", "compiled"), clock, limit, arguments.errors)
    backends = ("aot_eager_decomp_partition", *(() if arguments.no_inductor else ("inductor",)))
    ratios = tuple(arguments.ratios or RATIOS)
    return _Peers(backends, ratios, clock=clock, limit_seconds=limit, errors=arguments.errors)


def _tell(study: Study, case: str, methods: list[Method]) -> None:
    for method in methods:
        goals = [goal for goal in (HALF, QUARTER) if goal in method.answers]
        way = method.name + (f" ({', '.join(goals)})" if goals else "")
        study.tell(case, way, "peak", method.peak_bytes, "B")
        study.tell(case, way, "time", method.ratio, "of eager", method.quartiles)
        if method.projected_bytes is not None:
            apart = method.projected_bytes / method.peak_bytes - 1
            study.tell(case, way, "projected peak", apart, "of measured")


def _json(methods: list[Method]) -> str:
    """`peers` and `stowplan`, each a list of name, peak and time; `stowplan report` reads the former."""
    points: dict[str, list[object]] = {"peers": [], "stowplan": []}
    for method in methods:
        point = {"name": method.name, "peak_bytes": method.peak_bytes, "time_ratio": method.ratio}
        points["stowplan" if method.answers else "peers"].append(point)
    return json.dumps(points, indent=2)


if __name__ == "__main__":
    sys.exit(main())
