"""A probe says what each op takes, leaves no trace, and with it the peak of a step is known beforehand."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stowplan.analyse.facts import estimated_workspaces
from stowplan.capture import Call, Captured, Ref, capture
from stowplan.plan.prices import price_by_profile
from stowplan.plan.pricing import Basis
from stowplan.run.cost.machine import Cost, ProbeCache, measure_machine
from stowplan.run.cost.probe import (
    CLOCK,
    PROBES,
    Operand,
    Probed,
    Signature,
    call_signature,
    costs_of_calls,
    operands_of,
    probe,
)
from stowplan.run.measure.measure import measure
from tests.support.models import Normed, Rewriting, Tied, images
from tests.support.nets import NETS, Example
from tests.support.timing import timed

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]


def quickly(captured: Captured, cache: ProbeCache | None = None) -> Probed:
    return probe(captured, repeats=1, cache=cache)


def measured_peak(example: Example) -> int:
    """Bytes of an eager step, the second one: what kernels build on their first call stays with them."""

    def step() -> Tensor:
        loss: Tensor = example.model(*example.args)
        torch.autograd.backward(loss)
        return loss

    step()
    example.model.zero_grad()
    before = (*example.model.parameters(), *example.model.buffers(), *example.args)
    return measure(step, before=before).measured_peak_bytes


def seconds_of(probed: Probed) -> dict[str, float]:
    intervals = probed.profile.clocks[CLOCK].items()
    return {op: interval.end_seconds - interval.kernel_seconds for op, interval in intervals}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.slow
def test_projected_peaks_are_the_measured_ones(name: str) -> None:
    example = NETS[name].build("tiny")
    captured = capture(*example)
    probed = quickly(captured)
    assert not probed.estimated
    measured = measured_peak(example)
    projected = captured.eager.peak_bytes(probed.workspace_bytes)
    assert -0.005 <= projected / measured - 1 <= 0.01
    estimated = captured.eager.peak_bytes(estimated_workspaces(captured.graph))
    assert abs(estimated / measured - 1) <= 0.05


def test_the_workspace_of_a_convolutions_backward_is_seen() -> None:
    model = nn.Conv2d(32, 32, 3)
    captured = capture(model, (images(2, 32, 20, 20).requires_grad_(),), loss=torch.sum)
    workspace = quickly(captured).workspace_bytes
    (adjoint,) = (op for op in captured.graph.ops if op.type == "aten.convolution_backward.default")
    image = 2 * 32 * 20 * 20 * 4
    assert image < workspace[adjoint.id] < 4 * image


def test_every_op_has_a_price_and_views_are_free() -> None:
    captured = capture(nn.Linear(64, 64), (images(8, 64),), loss=torch.sum)
    probed = quickly(captured)
    pricing = price_by_profile(captured.graph, probed.profile, probed.workspace_bytes)
    assert pricing.basis is Basis.MEASURED
    for op in captured.graph.ops:
        is_view = all(captured.graph.tensors[name].alias_of for name in op.writes())
        assert (pricing.seconds[op.id] == 0) == is_view, op.id


@timed
def test_a_larger_product_takes_longer() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.narrow, self.wide = nn.Linear(256, 16, bias=False), nn.Linear(256, 2048, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.add(self.narrow(x).sum(), self.wide(x).sum())

    captured = capture(Two(), (images(256, 256),))
    seconds = seconds_of(quickly(captured))
    narrow, wide = [op.id for op in captured.graph.ops if op.type == "aten.mm.default"][:2]
    assert seconds[wide] > 4 * seconds[narrow]


def test_probing_leaves_generator_and_tensors_alone() -> None:
    model, x = Normed(), images(2, 3, 8, 8)
    captured = capture(model, (x,))
    state, held = torch.get_rng_state(), {name: t.clone() for name, t in model.state_dict().items()}
    quickly(captured)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, held[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("model", "args"),
    [
        (Tied(), (torch.tensor([1, 2]), torch.tensor([3, 4]))),
        (Rewriting(), (images(3, 4),)),
        (
            nn.Sequential(nn.Conv2d(3, 4, 3, dtype=torch.float64), nn.MaxPool2d(2)),
            (images(1, 3, 8, 8).double(),),
        ),
    ],
)
def test_indices_buffers_and_double_precision_can_be_tried(
    model: nn.Module, args: tuple[Tensor, ...]
) -> None:
    assert not quickly(capture(model, args)).estimated


def test_an_op_that_refuses_its_operands_is_estimated() -> None:
    class Wrapping(nn.Embedding):
        def forward(self, token: Tensor, count: Tensor) -> Tensor:  # type: ignore[override]  # on purpose
            return F.embedding(token % count, self.weight).sum()

    captured = capture(Wrapping(7, 5), (torch.tensor([8, 9]), torch.tensor([7, 7])))
    probed = quickly(captured)
    types = {op.id: op.type for op in captured.graph.ops}
    assert {types[op] for op in probed.estimated} == {"aten.remainder.Tensor"}
    assert all(seconds_of(probed)[op] > 0 for op in probed.estimated)
    assert not probed.profile.estimated


def test_without_time_each_op_runs_once_and_its_memory_is_measured(tmp_path: Path) -> None:
    """A table says less than these kernels take, and a plan would exceed its budget by that."""
    model = nn.Sequential(nn.Conv2d(64, 64, 3), nn.InstanceNorm2d(64), nn.Conv2d(64, 3, 7, stride=2))
    captured, cache = capture(model, (images(1, 64, 16, 16),), loss=torch.sum), ProbeCache(tmp_path)
    hasty = probe(captured, limit_seconds=0, cache=cache)
    assert not hasty.estimated
    whole = quickly(captured, cache)  # nothing of the first is in the cache
    assert hasty.workspace_bytes == whole.workspace_bytes
    assert hasty.profile != whole.profile


def test_progress_counts_distinct_ops(tmp_path: Path) -> None:
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    captured = capture(layers, (images(2, 8),), loss=torch.sum)
    told: list[tuple[int, int]] = []
    probe(captured, repeats=1, cache=ProbeCache(tmp_path), progress=lambda *step: told.append(step))
    (count,) = {of for _, of in told}
    assert [done for done, _ in told] == list(range(1, count + 1))
    assert count < len(captured.graph.ops) / 2


def test_what_was_tried_is_not_tried_again(tmp_path: Path) -> None:
    captured = capture(Normed(), (images(2, 3, 8, 8),))
    first = quickly(captured, ProbeCache(tmp_path))
    told: list[tuple[int, int]] = []
    again = probe(captured, cache=ProbeCache(tmp_path), progress=lambda *step: told.append(step))
    assert again == first
    assert not told


def test_signatures_tell_operands_apart_by_all_that_matters() -> None:
    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            w = self.weight
            return (w * w + w * x + w * x.t() + x * w + w * x.double()).sum()

    captured = capture(Products(), (images(4, 4),))
    graph, calls = captured.graph, captured.program.calls
    forward = [op for op in graph.ops if op.type == "aten.mul.Tensor"][:5]
    same, plain, strided, swapped, double = (call_signature(graph, calls[op.id]).text for op in forward)
    assert plain == swapped
    assert len({same, plain, strided, double}) == 4


@timed
def test_the_machine_is_measured_once(tmp_path: Path) -> None:
    machine = measure_machine(cache=ProbeCache(tmp_path))
    assert machine == measure_machine(cache=ProbeCache(tmp_path))
    assert 1e8 < machine.macs_per_second < 1e15
    assert 1e7 < machine.bytes_per_second < 1e13
    assert 1e-8 < machine.launch_seconds < 1e-2


def test_what_an_op_overwrites_is_no_operand_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands of ops that are probed one after the other share their memory."""
    cpu, seen = torch.device("cpu"), list[tuple[int, float]]()

    def looking(signature: Signature, _: torch.device) -> Cost:
        (operand,) = operands_of(signature)
        seen.append((operand.data_ptr(), float(operand.max())))
        return Cost(0.0, 0)

    operands = (Operand((8,), (1,), torch.float32, cpu),)
    reads = [Call(op, (Ref("%0"),), {}, (), single=True) for op in (torch.ops.aten.exp.default,) * 2]
    scales = Call(torch.ops.aten.mul_.Scalar, (Ref("%0"), 1e30), {}, (), single=True)
    monkeypatch.setitem(PROBES, "aten.exp.default", looking)
    calls = (reads[0], scales, reads[1])
    signatures = [Signature(call, operands, f"op {place}") for place, call in enumerate(calls)]
    assert None not in costs_of_calls(signatures, cpu, cache=None).values()
    (before, _), (after, largest) = seen
    assert before == after
    assert largest <= 1


@pytest.mark.parametrize("op", [torch.ops.aten.copy.default, torch.ops.aten.slice_scatter.default], ids=str)
def test_an_op_that_copies_a_whole_storage_copies_its_own(op: torch._ops.OpOverload) -> None:
    """Its operand may share memory with a larger one of an op that was probed before."""
    cpu = torch.device("cpu")

    def signature(call: Call, *sizes: int) -> Signature:
        operands = tuple(Operand((size,), (1,), torch.float32, cpu) for size in sizes)
        return Signature(call, operands, f"{call.target} of {sizes}")

    large = signature(Call(torch.ops.aten.exp.default, (Ref("%0"),), {}, (), single=True), 1 << 20)
    small = signature(Call(op, (Ref("%0"), Ref("%1")), {}, (), single=True), 16, 16)
    costs = costs_of_calls([large, small], cpu, cache=None)
    assert [cost and cost.rise_bytes for cost in costs.values()] == [4 << 20, 64]
