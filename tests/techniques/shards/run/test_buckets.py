"""Gradients are summed over the workers in buckets, while backward goes on: same order, bytes and numbers."""

import copy
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stowplan import Search
from stowplan.plan.steps import RecomputeOp
from stowplan.run.fit import fit, plans_of
from stowplan.techniques.shards.plan.buckets import LEAST_BYTES, buckets_of
from stowplan.techniques.shards.plan.traffic import traffic_of
from stowplan.techniques.shards.run.fit import shards_of
from stowplan.techniques.shards.run.workers import Workers
from tests.support.nets import NETS
from tests.support.workers.compared import EXACT, Cell, Outcome, compare, distance, gradients_of
from tests.support.workers.processes import on_workers

pytestmark = [pytest.mark.torch, pytest.mark.distributed]

CELL, WIDTH = Cell("unet", "space=2"), 8  # several buckets


@dataclass(frozen=True, slots=True)
class Planned:
    """A step with something to make again: its distance from the plain one, and bytes against projected."""

    again: int
    far: float
    sent_bytes: tuple[int, int]
    summed_bytes: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Findings:
    outcome: Outcome
    messages: list[tuple[str, int]]
    planned: Planned
    left_out: Outcome
    policies: set[int]  # by which the kernel gives a core to the threads that serve sockets


def look() -> Findings:
    messages: list[tuple[str, int]] = []
    undo = [_listen(method, messages) for method in ("swap", "add_up", "begin_sum")]
    outcome = compare(CELL, width=WIDTH)
    for each in undo:
        each()
    planned = plan_tightly()
    Workers.begin_sum = leaving_a_bucket_out  # type: ignore[method-assign]
    return Findings(outcome, messages, planned, compare(CELL, width=WIDTH), policies())


def policies() -> set[int]:
    tasks = Path("/proc/self/task").iterdir() if sys.platform == "linux" else ()
    serving = [int(t.name) for t in tasks if (t / "comm").read_text().strip() == "gloo_tcp_loop"]
    return {os.sched_getscheduler(task) for task in serving}


def _listen(method: str, messages: list[tuple[str, int]]) -> Callable[[], None]:
    """Note what a worker says by this method, and how large it is; what is returned ends it."""
    speak = getattr(Workers, method)

    def noted(self: Workers, what: Any, *args: Any) -> Any:
        tensors = [what] if isinstance(what, Tensor) else [tensor for _, tensor in what]
        messages.append((method, sum(tensor.nbytes for tensor in tensors)))
        return speak(self, what, *args)

    setattr(Workers, method, noted)
    return lambda: setattr(Workers, method, speak)


def plan_tightly() -> Planned:
    """A step that takes 3.0 MB on each worker, in less."""
    model, args = NETS["gpt"].build("tiny", dtype=torch.float64, batch=32)
    plain = copy.deepcopy(model)
    torch.manual_seed(7)
    plain(*args).backward()
    fitted = fit(model, args, mesh="data=2", budget="2.2MB", search=Search(moves=20))
    sharded, (plan,) = shards_of(fitted), plans_of(fitted)
    shares, _ = sharded.share(*args)
    torch.manual_seed(7)
    loss = fitted(*shares)
    assert isinstance(loss, Tensor)
    loss.backward()  # type: ignore[no-untyped-call]
    workers = sharded.workers
    traffic = traffic_of(sharded.plan)[workers.rank]
    return Planned(
        sum(isinstance(step, RecomputeOp) for step in plan.steps),
        distance(gradients_of(model), gradients_of(plain)),
        (workers.sent_bytes, traffic.sent_bytes),
        (workers.summed_bytes, traffic.summed_bytes),
    )


begin_sum = Workers.begin_sum


def leaving_a_bucket_out(self: Workers, tensor: Tensor, axes: tuple[int, ...]) -> None:
    """The third bucket is said to be summed, as a copy of it is."""
    taken = tensor.clone() if len(self._sums) == 2 else tensor
    begin_sum(self, taken, axes)
    self._sums[tensor.data_ptr()] = self._sums.pop(taken.data_ptr())


@pytest.fixture(scope="module")
def found() -> list[Findings]:
    return on_workers(2, look)


def test_sums_in_buckets_are_exact_and_as_many_bytes_as_projected(found: list[Findings]) -> None:
    for findings in found:
        outcome = findings.outcome
        assert max(outcome.loss, outcome.gradients) < EXACT
        assert outcome.sent_bytes[0] == outcome.sent_bytes[1]
        assert outcome.summed_bytes[0] == outcome.summed_bytes[1]


def test_sums_are_begun_while_backward_goes_on_in_one_order_for_all_workers(found: list[Findings]) -> None:
    methods = [method for method, _ in found[0].messages]
    first, last = (methods.index("begin_sum"), max(n for n, m in enumerate(methods) if m == "begin_sum"))
    assert methods.count("begin_sum") >= 3
    assert methods[first:last].count("swap") >= 5
    assert [method for method, _ in found[1].messages] == methods
    sums = [[size for method, size in each.messages if method != "swap"] for each in found]
    assert sums[0] == sums[1]


@pytest.mark.skipif(sys.platform != "linux", reason="told by Linux alone")
def test_threads_that_serve_sockets_take_no_core_from_those_that_compute(found: list[Findings]) -> None:
    assert all(findings.policies == {os.SCHED_BATCH} for findings in found)


def test_a_bucket_that_is_left_out_of_the_sum_is_caught(found: list[Findings]) -> None:
    for findings in found:
        assert findings.left_out.loss < EXACT
        assert findings.left_out.gradients > 1e3 * EXACT


def test_recomputation_changes_no_message(found: list[Findings]) -> None:
    for findings in found:
        planned = findings.planned
        assert planned.again
        assert planned.far < EXACT
        assert planned.sent_bytes[0] == planned.sent_bytes[1]
        assert planned.summed_bytes[0] == planned.summed_bytes[1]


def test_buckets_have_every_parameter_once_up_to_their_limit() -> None:
    from stowplan.capture import capture

    model, args = NETS["gpt"].build("tiny")
    graph = capture(model, args).graph
    sizes = {name: tensor.nbytes or 0 for name, tensor in graph.tensors.items()}
    buckets = buckets_of(graph)
    names = [name for bucket in buckets for name in bucket]
    assert len(set(names)) == len(names) == len(list(model.parameters()))
    assert all(len(bucket) == 1 or sum(map(sizes.__getitem__, bucket)) <= LEAST_BYTES for bucket in buckets)
