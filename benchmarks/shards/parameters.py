"""Sharded parameters: an iteration of GPT-2 small with AdamW on 4 workers, beside FSDP2 and one process."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from time import perf_counter
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Optimizer

from benchmarks.results import Study
from stowplan import Mesh, Search, fit, plans_of, shards_of
from stowplan.errors import BudgetTooSmall
from stowplan.run.measure.measure import measure
from stowplan.techniques.shards.plan import early_gathers
from stowplan.techniques.shards.plan.mesh import parse_mesh
from tests.support.nets import NETS
from tests.support.nets.net import Example
from tests.support.workers.processes import on_workers
from tests.support.workers.sharded import Trained, Training

SIZES = {
    "gpt2": {"vocabulary": 50257, "context": 1024, "dim": 768, "layers": 12, "heads": 12},
    "gpt": {"vocabulary": 8192, "context": 64, "dim": 256, "layers": 6, "heads": 8},
}
EXACT = (
    ("gpt", "data=2"),
    ("gpt", "data=4"),
    ("gpt", "data=2,sequence=2"),
    ("gpt", "data=2,model=2"),
    ("gpt", "sequence=4"),
    ("llama", "data=4"),
    ("llama", "data=2,sequence=2"),
    ("llama", "data=2,model=2"),
    ("llama", "sequence=4"),
    ("resnet50", "data=2,space=2"),
    ("unet", "data=2,space=2"),
)
_MOVES = 300
_PATIENCE_SECONDS = 3600.0  # a large model on a busy machine


@dataclass(frozen=True, slots=True)
class Taken:
    """What a worker took for an iteration of one method."""

    method: str
    peak_bytes: int
    seconds: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Method:
    """An iteration, and what is there between two of them."""

    name: str
    run: Callable[[], None]
    model: nn.Module
    optimizer: Optimizer
    note: str = ""

    def tensors(self) -> Iterable[Tensor]:
        state = (value for each in self.optimizer.state.values() for value in each.values())
        there = (value for value in state if not value.is_meta)  # others wait on disk
        return map(_local, (*self.model.parameters(), *self.model.buffers(), *there))


def _local(tensor: Tensor) -> Tensor:
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found.detach()


def _example(name: str, batch: int, sequence: int) -> Example:
    torch.manual_seed(0)
    return NETS["gpt"].make(batch=batch, sequence=sequence, dropout=0.0, **SIZES[name])


def _loop(model: Callable[..., Tensor], args: Sequence[Tensor], optimizer: Optimizer) -> None:
    model(*args).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def _fsdp(example: Example, *, reshard: bool) -> Method:
    model, args = example
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    for block in next(each for each in model.modules() if isinstance(each, nn.ModuleList | nn.Sequential)):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    share = len(args[0]) // dist.get_world_size()
    own = [each[dist.get_rank() * share :][:share].clone() for each in args]
    optimizer = AdamW(model.parameters())
    name = f"FSDP2, reshard_after_forward={reshard}"
    return Method(name, lambda: _loop(model, own, optimizer), model, optimizer)


def _stowplan(example: Example, budget: int | str, allow: tuple[str, ...] = ("recompute",)) -> Method:
    model, args = example
    optimizer = AdamW(model.parameters())
    mesh = f"data={dist.get_world_size()}"
    how = {"mesh": Mesh(mesh, parameters="shard"), "search": Search(moves=_MOVES), "allow": allow}
    fitted = fit(model, args, budget=budget, optimizer=optimizer, **how)  # type: ignore[arg-type]
    shares, _ = shards_of(fitted).share(*args)
    (plan,) = plans_of(fitted)
    sent = shards_of(fitted).sent_bytes(fitted.__dict__["_fitting"].planned)
    note = f"budget {plan.allowed_bytes:,}, projected {plan.projected_peak_bytes:,}; {sent:,} bytes sent"
    return Method("stowplan", lambda: _loop(fitted, shares, optimizer), model, optimizer, note)


def _late(example: Example, budget: int) -> Method:
    """Gathers begin where they are waited for."""
    with patch.object(early_gathers, "MOST_AHEAD", 0):
        return replace(_stowplan(example, budget), name="stowplan, no gather early")


def _state_on_disk(example: Callable[[], Example]) -> Method:
    """In the smallest budget."""
    allow = ("recompute", "offload")
    try:
        found = _stowplan(example(), 1, allow)
    except BudgetTooSmall as refusal:
        found = _stowplan(example(), refusal.minimum_bytes, allow)
    return replace(found, name="stowplan, state on disk")


def compare(
    name: str, batch: int, sequence: int, share: float, rounds: int, others: Collection[str]
) -> list[Taken]:
    """One process on the first worker, then all methods in turn."""
    alone = Taken("one process, eager", 0, 0.0)
    if dist.get_rank() == 0:
        model, args = _example(name, batch, sequence)
        optimizer = AdamW(model.parameters())
        method = Method(alone.method, lambda: _loop(model, args, optimizer), model, optimizer)
        (alone,) = _taken([method], 1)
        del model, optimizer, method
    nbytes = torch.tensor([alone.peak_bytes])
    dist.broadcast(nbytes, 0)
    budget = int(share * int(nbytes))
    try:
        methods = [_stowplan(_example(name, batch, sequence), budget)]
    except BudgetTooSmall as refusal:
        budget = refusal.minimum_bytes
        methods = [_stowplan(_example(name, batch, sequence), budget)]
    if "late" in others:
        methods.append(_late(_example(name, batch, sequence), budget))
    if "disk" in others:
        methods.append(_state_on_disk(partial(_example, name, batch, sequence)))
    if "fsdp" in others:
        methods += (_fsdp(_example(name, batch, sequence), reshard=reshard) for reshard in (True, False))
    return [alone, *_taken(methods, rounds)]


def versus(name: str, batch: int, sequence: int, reshard: bool, rounds: int) -> list[Taken]:
    """FSDP2, and stowplan in the peak of FSDP2's smallest worker, in turn."""
    fsdp = _fsdp(_example(name, batch, sequence), reshard=reshard)
    fsdp.run()  # the optimizer makes its state
    peak = torch.tensor([measure(fsdp.run, before=list(fsdp.tensors())).measured_peak_bytes])
    dist.all_reduce(peak, dist.ReduceOp.MIN)
    return _taken([fsdp, _stowplan(_example(name, batch, sequence), int(peak))], rounds)


def _print_versus(given: Namespace) -> None:
    """For both ways of FSDP2: at its peak no slower, and at its time no larger?"""
    study, case = Study("shards"), f"{given.model} beside FSDP2 on {given.workers} workers"
    for reshard in (True, False):
        asked = given.model, given.batch, given.sequence, reshard, given.rounds
        found = on_workers(given.workers, versus, *asked, patience=_PATIENCE_SECONDS)
        peaks = [max(taken[number].peak_bytes for taken in found) for number in range(2)]
        seconds = [max(taken[number].seconds for taken in found) for number in range(2)]
        time, size = seconds[1] / seconds[0], peaks[1] / peaks[0]
        verdict = "yes" if time <= 1 and size <= 1 else "NO"
        print(
            f"{case}, {found[0][0].method}: {seconds[0]:.2f} s and {peaks[0]:,} bytes;"
            f" stowplan in this peak: {seconds[1]:.2f} s and {peaks[1]:,} bytes;"
            f" {time:.3f} of the time, {size:.3f} of the peak; no slower and no larger: {verdict}",
            flush=True,
        )
        study.tell(case, found[0][0].method, "stowplan's time", time, "of FSDP2")
        study.tell(case, found[0][0].method, "stowplan's peak", size, "of FSDP2")


def exact(net: str, mesh: str) -> tuple[Trained, Trained]:
    """Five iterations with dropout, AdamW and clipping, in a roomy budget and in one that gathers again."""
    roomy = Training("1GiB", net=net, mesh=mesh).run(5)
    try:
        tight = Training(int(0.8 * roomy.projected_bytes), net=net, mesh=mesh)
    except BudgetTooSmall as refusal:
        tight = Training(refusal.minimum_bytes, net=net, mesh=mesh)
    return roomy, tight.run(5)


def _taken(methods: Sequence[Method], rounds: int) -> list[Taken]:
    for method in methods:
        method.run()  # the optimizer makes its state
    peaks = [measure(each.run, before=list(each.tensors())).measured_peak_bytes for each in methods]
    if dist.get_rank() == 0:  # times take longer
        for method, peak in zip(methods, peaks, strict=True):
            print(f"{method.name}: {peak:,} bytes; {method.note}", flush=True)
    times: list[list[float]] = [[] for _ in methods]
    for _ in range(rounds):
        for method, own in zip(methods, times, strict=True):
            begun = perf_counter()
            method.run()
            own.append(perf_counter() - begun)
    found = zip(methods, peaks, times, strict=True)
    return [Taken(each.name, peak, median(own), each.note) for each, peak, own in found]


def main(argv: Sequence[str]) -> None:
    """A line for each method and worker."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(SIZES), default="gpt2")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--share", type=float, default=0.35, help="budget of a worker, of one process's peak")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--exact", action="store_true", help="instead, tiny models in float64")
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 too, in the same rounds")
    text = "stowplan with gathers that begin where they are read too, in the same rounds"
    parser.add_argument("--late", action="store_true", help=text)
    text = "stowplan with the optimizer's state on disk too, in its smallest budget"
    parser.add_argument("--disk", action="store_true", help=text)
    text = "instead, stowplan in FSDP2's own peaks; --workers 2 --sequence 64 is small"
    parser.add_argument("--versus", action="store_true", help=text)
    given = parser.parse_args(argv)
    if given.versus:
        _print_versus(given)
        return
    if given.exact:
        for net, mesh in EXACT:
            for rank, (roomy, tight) in enumerate(on_workers(parse_mesh(mesh).size, exact, net, mesh)):
                print(f"{net} on {mesh}, worker {rank}: {roomy}\n  {tight}", flush=True)
                assert roomy.is_right, roomy
                assert tight.is_right, tight
        return
    others = [name for name in ("late", "disk", "fsdp") if getattr(given, name)]
    asked = given.model, given.batch, given.sequence, given.share, given.rounds, others
    found = on_workers(given.workers, compare, *asked, patience=_PATIENCE_SECONDS)
    alone = found[0][0].peak_bytes
    study, case = Study("shards"), f"{given.model} with sharded parameters on {given.workers} workers"
    for rank, taken in enumerate(found):
        for each in taken if rank == 0 else taken[1:]:
            share = each.peak_bytes / alone
            text = f"worker {rank}, {each.method}: {each.peak_bytes:,} bytes, {share:.3f} of one process"
            print(f"{text}; {each.seconds:.2f} s; {each.note}")
            study.tell(case, f"{each.method}, worker {rank}", "peak", each.peak_bytes, "B")
            study.tell(case, f"{each.method}, worker {rank}", "share", share, "of one process")
            study.tell(case, f"{each.method}, worker {rank}", "iteration", each.seconds, "s")
