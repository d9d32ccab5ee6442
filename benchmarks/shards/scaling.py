"""Weak scaling: as much work per worker on one worker and on two, beside what the machine itself allows.

    python -m benchmarks.shards scaling [small | large | paper]

Two processes that have nothing to do with each other slow each other down where they share a core's units,
its caches and the way to memory: what they reach together is the most that any two workers can. Work grows by
the batch, or by an image that is longer along the dim that is cut, whose multiply-accumulates are counted.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.results import Study, spread_of
from stowplan import Mesh, Search, fit, shards_of
from stowplan.analyse.facts import costs_of
from stowplan.techniques.shards.run.processes import MeshLike
from stowplan.techniques.shards.run.step import ShardedStep
from tests.support.nets import NETS
from tests.support.workers.compared import differentiate
from tests.support.workers.processes import on_workers

_ROOMY, _MOVES = "16GiB", 20  # nothing has to be recomputed
_BORDER = 184  # a U-Net's prediction is so much smaller than its image
_PATIENCE_SECONDS = 3600.0  # with workers that run all rounds


@dataclass(frozen=True, slots=True)
class Size:
    """One worker's image, the net's width, and how high an image is that is about twice the work."""

    resolution: int
    width: int
    doubled: int
    rounds: int


SIZES = {
    "small": Size(316, 16, 524, 21),
    "large": Size(444, 32, 780, 15),
    "paper": Size(572, 64, 1020, 5),  # the U-Net as it was published
}
GOAL = 0.90  # of what two processes reach that have nothing to do with each other


@dataclass(frozen=True, slots=True)
class Work:
    """What is run: images of `height` on a mesh, with whole parameters or shards of them."""

    mesh: str
    batch: int
    height: int
    is_sharded: bool = False


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds of one round on one worker: by the clock, of its processor, and of that in gloo's threads."""

    wall: float
    processor: float
    serving: float


@dataclass(frozen=True, slots=True)
class Rounds:
    """All rounds of one kind of work, and its multiply-accumulates."""

    macs: float
    took: tuple[Took, ...]


def works(size: Size) -> dict[str, Work]:
    """By name; `alone` is one worker while the other rests."""
    single = Work("", 1, size.resolution)
    grown = Work("space=2", 1, size.doubled)
    return {
        "alone": single,
        "apart": single,
        "data=2": Work("data=2", 2, size.resolution),
        "data=2, sharded parameters": Work("data=2", 2, size.resolution, is_sharded=True),
        "space=2": Work("space=2", 2, size.resolution),
        "space=2, a longer image": grown,
    }


def step_on(mesh: MeshLike, work: Work, size: Size) -> tuple[float, Callable[[], None]]:
    """A U-Net's step on a mesh, which can be repeated, and its multiply-accumulates."""
    model, _ = NETS["unet"].build("real", resolution=size.resolution, width=size.width, batch=1)
    across = size.resolution
    label = torch.randint(0, 2, (work.batch, work.height - _BORDER, across - _BORDER))
    args = torch.randn(work.batch, 1, work.height, across), label
    if work.is_sharded:
        return _with_shards(model, args, work)
    step = ShardedStep(model, args, mesh=mesh)
    shares, _ = step.share(*args)

    def run() -> None:
        model.zero_grad()
        differentiate(step, shares)

    return float(costs_of(step.captured.graph).macs.sum()), run


def _with_shards(
    model: nn.Module, args: tuple[Tensor, Tensor], work: Work
) -> tuple[float, Callable[[], None]]:
    fitted = fit(
        model, args, budget=_ROOMY, mesh=Mesh(work.mesh, parameters="shard"), search=Search(moves=_MOVES)
    )
    step = shards_of(fitted)
    shares, _ = step.share(*args)

    def run() -> None:
        model.zero_grad()
        loss: Tensor = fitted(*shares)
        loss.backward()  # type: ignore[no-untyped-call]

    return float(costs_of(step.captured.graph).macs.sum()), run


def nothing() -> None:
    """What a worker does while another has the machine for itself."""


def in_turns(size: Size) -> dict[str, Rounds]:
    """This worker's rounds by what it does, in turns, so that all meet the same moods of the machine."""
    apart = init_device_mesh("cpu", (2, 1), mesh_dim_names=("apart", "data"))["data"]
    ready = {name: step_on(work.mesh or apart, work, size) for name, work in works(size).items()}
    took: dict[str, list[Took]] = {name: [] for name in ready}
    for turn in range(size.rounds + 2):
        for name, (_, run) in ready.items():
            found = _timed(nothing if name == "alone" and dist.get_rank() else run)
            if turn > 1:
                took[name].append(found)
    return {name: Rounds(macs, tuple(took[name])) for name, (macs, _) in ready.items()}


def _timed(run: Callable[[], None]) -> Took:
    dist.barrier()
    wall, processor, own = time.perf_counter(), time.process_time(), time.thread_time()
    run()
    spent = time.process_time() - processor
    return Took(time.perf_counter() - wall, spent, spent - (time.thread_time() - own))


@dataclass(frozen=True, slots=True)
class Rate:
    """Of all workers together, round by round: seconds of the slowest, and work done in each of them."""

    seconds: tuple[float, ...]
    macs_per_second: tuple[float, ...]  # and worker

    def against(self, other: "Rate") -> list[float]:
        """What a worker gets done, in parts of what it does in the same round of the other."""
        return [one / two for one, two in zip(self.macs_per_second, other.macs_per_second, strict=True)]


def rate_of(found: Sequence[Rounds], workers: int) -> Rate:
    """The work per second of each worker, if `workers` share the work."""
    seconds = [max(each.wall for each in row) for row in zip(*(one.took for one in found), strict=True)]
    return Rate(tuple(seconds), tuple(found[0].macs / workers / second for second in seconds))


def limits(found: Mapping[str, Sequence[Rounds]], name: str) -> str:
    """Where a worker's seconds go that it would not need alone, for as much work."""

    def each(of: str, get: Callable[[Took], float]) -> float:
        rounds = found[of][:1] if of == "alone" else found[of]
        return median(get(took) for one in rounds for took in one.took)

    work = found[name][0].macs / (1 if name == "apart" else 2) / found["alone"][0].macs
    alone, apart = (each(of, lambda took: took.processor) * work * 1e3 for of in ("alone", "apart"))
    wall, processor, serving = (
        each(name, get) * 1e3 for get in (lambda t: t.wall, lambda t: t.processor, lambda t: t.serving)
    )
    return (
        f"of {wall:.0f} ms, {alone:.0f} are as alone, {apart - alone:+.0f} for the other's company,"
        f" {processor - serving - apart:+.0f} more to compute, {serving:.0f} serve messages,"
        f" {wall - processor:.0f} are waiting"
    )


def _held_against_goal(relative: float) -> str:
    """How much of two processes apart is reached, and whether that is enough."""
    verdict = "reached" if relative >= GOAL else "missed"
    return f"{relative:.3f} of two apart ({GOAL:.2f} {verdict})"


def study(label: str) -> None:
    """A line per mesh of two, for one size."""
    size = SIZES[label]
    workers = on_workers(2, in_turns, size, patience=_PATIENCE_SECONDS)
    found = {name: [each[name] for each in workers] for name in workers[0]}
    rates = {name: rate_of(each, 1 if name in ("alone", "apart") else 2) for name, each in found.items()}
    case = f"unet {size.resolution}, width {size.width}"
    print(f"{case}: one worker {median(rates['alone'].seconds):.3f} s", flush=True)
    tell = partial(Study("shards").tell, unit="")
    for name in list(found)[1:]:
        reached, relative = (rates[name].against(rates[of]) for of in ("alone", "apart"))
        low, high = spread_of(reached)
        print(f"  {name}: {median(reached):.3f} ({low:.3f} to {high:.3f})", end="")
        print("" if name == "apart" else f"; {_held_against_goal(median(relative))}", end="; ")
        print(limits(found, name), flush=True)
        tell(case, name, "efficiency", median(reached), spread=spread_of(reached))
        tell(case, name, "efficiency against two apart", median(relative), spread=spread_of(relative))


def main(words: Sequence[str]) -> None:
    """The sizes that are asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("sizes", nargs="*", default=list(SIZES), metavar="SIZE", help=", ".join(SIZES))
    for label in parser.parse_args(words).sizes:
        study(label)
