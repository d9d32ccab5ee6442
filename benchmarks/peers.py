"""stowplan against what a user would pick instead, in one process, interleaved: peak and time of each.

    python -m benchmarks.peers unet resnet50 gpt vit --out build/peers

For every peer's point (peak, seconds) stowplan is asked for a plan of at most that peak. Peaks are the
allocator's own, in all; times are medians over rounds in which every method runs once. One thread.
"""

import argparse
import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from types import FunctionType

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.nets import NETS, Example
from stowplan.capture import capture
from stowplan.errors import BudgetTooSmall
from stowplan.plan.verify import verify
from stowplan.run.fit import planner_for_captured, replay_bytes
from stowplan.run.measure import measure
from stowplan.run.straight import StraightStep

BLOCKS = ("DoubleConvolution", "Bottleneck", "Block")  # what a practitioner would checkpoint
RATIOS = (0.7, 0.5, 0.3, 0.1)
Loss = Callable[[], Tensor]


@dataclass(slots=True)
class Method:
    """A way to compute the same loss, and what was measured of it. `for_peer` names the peer it answers."""

    name: str
    loss: Loss
    for_peer: str = ""
    peak_bytes: int = 0
    seconds: float = 0.0
    quartiles: tuple[float, float] = (0.0, 0.0)
    projected_ratio: float | None = None


def compare(net: str, rounds: int, *, inductor: bool, batch: int | None) -> list[Method]:
    """Every peer, and stowplan at every peer's peak."""
    example = NETS[net].build("real", batch=batch) if batch else NETS[net].build("real")
    methods = [method for method in _peers(example, inductor) if _measure_peak(method, example)]
    methods += [method for method in _answers(example, methods) if _measure_peak(method, example)]
    _measure_times(methods, example.model, rounds)
    return methods


def _peers(example: Example, inductor: bool) -> Iterator[Method]:
    model, args = example
    yield Method("eager", lambda: model(*args))
    blocked = _checkpointed(model)
    yield Method("checkpoint per block", lambda: blocked(*args))
    for backend in ("aot_eager_decomp_partition", *(["inductor"] if inductor else [])):
        for ratio in RATIOS:
            yield Method(f"budget {ratio}, {backend}", _compiled(model, args, backend, ratio))


def _checkpointed(model: nn.Module) -> nn.Module:
    """The same parameters, with each block's forward run again in backward."""
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


def _answers(example: Example, peers: list[Method]) -> Iterator[Method]:
    model, args = example
    captured = capture(model, args)
    planner = planner_for_captured(captured)
    for peer in peers:
        try:
            plan = verify(planner.plan(peer.peak_bytes - replay_bytes(captured)))
        except BudgetTooSmall as refusal:
            print(f"  no plan for the peak of {peer.name}: {refusal}")
            continue
        step = StraightStep(captured, model, steps=plan.steps)
        name = f"stowplan at {peer.peak_bytes / 2**20:.0f} MiB"
        yield Method(name, _calling(step, args), for_peer=peer.name, projected_ratio=plan.time_ratio)


def _calling(step: StraightStep, args: tuple[Tensor, ...]) -> Loss:
    def loss() -> Tensor:
        result = step(*args)
        assert isinstance(result, Tensor)
        return result

    return loss


def _measure_peak(method: Method, example: Example) -> bool:
    model, args = example
    _run(method, model)
    standing = [*model.parameters(), *model.buffers(), *args]
    method.peak_bytes = measure(lambda: _run(method, model), before=standing).measured_peak_bytes
    print(f"  {method.name}: {method.peak_bytes / 2**20:.1f} MiB", flush=True)
    return True


def _measure_times(methods: list[Method], model: nn.Module, rounds: int) -> None:
    times: dict[str, list[float]] = {method.name: [] for method in methods}
    for _ in range(rounds):
        for method in methods:
            started = perf_counter()
            _run(method, model)
            times[method.name].append(perf_counter() - started)
    for method in methods:
        ordered = sorted(times[method.name])
        method.seconds = median(ordered)
        method.quartiles = (ordered[len(ordered) // 4], ordered[3 * len(ordered) // 4])


def _run(method: Method, model: nn.Module) -> None:
    method.loss().backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)


def table(net: str, methods: list[Method]) -> str:
    """Markdown: one row per method, times as ratios to eager."""
    eager = methods[0].seconds
    rows = [f"### {net}", "", "| method | peak MiB | time | quartiles | projected |", "|---|---|---|---|---|"]
    for method in methods:
        low, high = (quartile / eager for quartile in method.quartiles)
        projected = "" if method.projected_ratio is None else f"{method.projected_ratio:.3f}"
        name = method.name + (f" (as {method.for_peer})" if method.for_peer else "")
        figures = f"{method.peak_bytes / 2**20:.1f} | {method.seconds / eager:.3f} | {low:.3f} to {high:.3f}"
        rows.append(f"| {name} | {figures} | {projected} |")
    return "\n".join(rows)


def main() -> None:
    """Compare on each network named and write table and JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nets", nargs="+", choices=sorted(NETS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, help="instead of each network's own")
    parser.add_argument("--no-inductor", action="store_true", help="leave out the slowest peer to compile")
    parser.add_argument("--out", type=Path, help="write the figures of each network into this folder as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for net in arguments.nets:
        print(net)
        inductor = not arguments.no_inductor
        methods = compare(net, arguments.rounds, inductor=inductor, batch=arguments.batch)
        print(table(net, methods), flush=True)
        if arguments.out:
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / f"{net}.json").write_text(_json(methods))


def _json(methods: list[Method]) -> str:
    """`peers` and `stowplan`, each a list of name, peak and time; `stowplan report` reads the former."""
    eager = methods[0].seconds
    points: dict[str, list[object]] = {"peers": [], "stowplan": []}
    for method in methods:
        point = {"name": method.name, "peak_bytes": method.peak_bytes, "time_ratio": method.seconds / eager}
        points["stowplan" if method.for_peer else "peers"].append(point)
    return json.dumps(points, indent=2)


if __name__ == "__main__":
    main()
