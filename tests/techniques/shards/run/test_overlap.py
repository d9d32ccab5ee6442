"""Gradients of halos travel while those of weights are computed: same bits and bytes, nothing read early."""

import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from stowplan import Search, fit, plans_of
from stowplan.techniques.shards.plan.mesh import parse_mesh
from stowplan.techniques.shards.run.local import LocalStep
from stowplan.techniques.shards.run.step import ShardedStep
from stowplan.techniques.shards.run.workers import Workers
from tests.support.workers.compared import distance, example_of, gradients_of
from tests.support.workers.processes import on_workers

pytestmark = [pytest.mark.torch, pytest.mark.distributed]

BEGIN, END = (f"stowplan.{name}_exchange_back.default" for name in ("begin", "end"))


@dataclass(frozen=True, slots=True)
class Findings:
    """What one of two workers finds."""

    same_bits: bool
    same_bytes: bool
    read_early: float
    between: list[int]  # by exchange of the planned step, gradients of weights while it is under way
    fits: bool
    kept_in_flight: bool
    refused: str


def trained(*, overlaps: bool = True, faulty: bool = False) -> tuple[list[Tensor], int]:
    """The gradients of a step on two workers, and the bytes sent."""
    torch.manual_seed(3)
    model, args = example_of("unet")
    late: list[tuple[Tensor, object]] = []

    def later(workers: Workers, flight: Tensor) -> None:
        late.append(workers._flights.pop(flight.data_ptr()))

    with nullcontext() if overlaps else patch.object(LocalStep, "_ahead", lambda *_: None):
        step = ShardedStep(model, args, mesh=parse_mesh("space=2"))
    torch.manual_seed(7)
    shares, _ = step.share(*args)
    with ExitStack() as faults:
        if faulty:  # one worker is late, and the other reads before it waits
            faults.enter_context(patch.object(Workers, "begin_flight", beginning_late))
            faults.enter_context(patch.object(Workers, "end_flight", later))
        loss = step(*shares)
        assert isinstance(loss, Tensor)
        loss.backward()  # type: ignore[no-untyped-call]
    for _, wait in late:
        assert callable(wait)
        wait()
    return gradients_of(model), step.workers.sent_bytes


_begin = Workers.begin_flight


def beginning_late(workers: Workers, flight: Tensor, *messages: list[tuple[int, Tensor]]) -> None:
    if workers.rank:
        time.sleep(0.2)
    _begin(workers, flight, *messages)


def planned() -> tuple[list[int], bool]:
    """How many gradients of weights the ops of a planned step compute while each exchange is under way."""
    model, args = example_of("unet")
    fitted = fit(model, args, budget="1GiB", mesh="space=2", search=Search(moves=20))
    (plan,) = plans_of(fitted)
    types = [op.type for op in plan.graph.ops]
    starts = [number for number, kind in enumerate(types) if kind == BEGIN]
    ends = [types.index(END, start) for start in starts]
    pairs = zip(starts, ends, strict=True)
    counted = [types[start:end].count("aten.convolution_backward.default") for start, end in pairs]
    flights = [plan.graph.tensors[plan.graph.ops[start].outputs[0].tensor].nbytes for start in starts]
    return counted, all(flights)


def in_flight() -> tuple[bool, str]:
    """A buffer that nobody holds stays until its messages have arrived, and ends once."""
    workers = Workers("space=2")
    flight, peer = torch.zeros(2000), 1 - dist.get_rank()
    place = flight.data_ptr()
    workers.begin_flight(flight, [(peer, flight[:1000])], [(peer, flight[1000:])])
    del flight
    others = [torch.zeros(2000) for _ in range(50)]
    kept = place not in {other.data_ptr() for other in others}
    flight = workers._flights[place][0]
    workers.end_flight(flight)
    try:
        workers.end_flight(flight)
    except RuntimeError as refusal:
        return kept, str(refusal)
    return kept, ""


def look() -> Findings:
    found, sent = trained()
    plain, sent_plainly = trained(overlaps=False)
    faulty, _ = trained(faulty=True)
    return Findings(
        all(map(torch.equal, found, plain)),
        sent == sent_plainly,
        distance(faulty, plain),
        *planned(),
        *in_flight(),
    )


@pytest.mark.slow
def test_weights_get_their_gradients_while_halos_travel() -> None:
    for found in on_workers(2, look):
        assert found.same_bits
        assert found.same_bytes
        assert not found.read_early <= 1e-6, "a buffer that is read before its wait goes unnoticed"
        assert len(found.between) > 5
        assert min(found.between) >= 1
        assert found.fits, "a buffer under way is not counted"
        assert found.kept_in_flight
        assert "no messages were begun" in found.refused
