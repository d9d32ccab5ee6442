"""`fit` on the stand-in: bits as in eager there, peaks as projected, transfers in order, draws repeated."""

import copy
import gc
import os
from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import stowplan
from stowplan import Execution
from stowplan.ir.heap import HeapBlock, HeapSegment
from stowplan.plan.allocator.held_blocks import Held, HeldBlocks
from stowplan.plan.allocator.projection import HeapProjection, project
from stowplan.plan.allocator.settings import AllocatorSettings
from stowplan.plan.draft import Exactness
from stowplan.plan.plan import Plan
from stowplan.plan.steps import RecomputeOp, Store
from stowplan.run.fit import automatic_budget
from stowplan.run.measure.measure import device_bytes, measure
from stowplan.techniques.held_blocks.run.code import LAYOUTS, Holding
from stowplan.techniques.offload.run.host import HostAway, HostTier
from stowplan.techniques.offload.run.plugin import tier_of
from tests.support import device as stand_in

_MIB = 2**20
_ITERATIONS = 2_000 if os.environ.get("STAND_IN") == "long" else 100  # each with other delays


def _network(*, drop: float = 0.0, blocks: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    dropout: list[nn.Module] = [nn.Dropout(drop)] if drop else []
    return nn.Sequential(
        *(layer for _ in range(blocks) for layer in (nn.Linear(32, 32), nn.Tanh(), *dropout))
    )


class _Trained:
    """A network and the same network fitted, on one device."""

    def __init__(
        self,
        model: nn.Module,
        place: torch.device,
        budget: int,
        allow: Iterable[str],
        rows: int = 128,
        *,
        arena: bool = False,
    ) -> None:
        self.place, self.input = place, torch.randn(rows, 32, device=place)
        self.eager = model.to(place)
        fresh = copy.deepcopy(self.eager)
        self.budget = budget
        self.fitted = stowplan.fit(
            fresh,
            (self.input,),
            budget=self.budget,
            loss=torch.sum,
            allow=allow,
            execution=Execution(arena=arena),
        )
        self.gradients(self.fitted)

    @property
    def plan(self) -> Plan:
        return stowplan.plans_of(self.fitted)[0]

    def peak(self, model: nn.Module) -> int:
        model.zero_grad()
        there = [*model.parameters(), self.input]
        return measure(lambda: self._step(model), device=self.place, before=there).measured_peak_bytes

    def gradients(self, model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        self._step(model)
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    def is_the_same(self) -> bool:
        pairs = zip(self.gradients(self.eager), self.gradients(self.fitted), strict=True)
        return all(torch.equal(one, other) for one, other in pairs)

    def _step(self, model: nn.Module) -> None:
        torch.manual_seed(5)
        torch.rand(1, device=self.place)  # its generator then differs from the other device's
        torch.autograd.backward(model(self.input).sum())


def _has(plan: Plan, kind: type) -> bool:
    return any(isinstance(step, kind) for step in plan.steps)


def test_recomputing_gives_the_bits_of_eager_within_the_budget(device: torch.device) -> None:
    trained = _Trained(_network(), device, 96_000, ["recompute"])
    assert _has(trained.plan, RecomputeOp)
    assert trained.plan.exactness is Exactness.BITWISE
    assert trained.is_the_same()
    assert trained.peak(trained.fitted) == trained.plan.projected_peak_bytes <= trained.budget


def test_a_step_in_an_arena_gives_the_bits_of_eager_and_takes_what_was_projected(
    device: torch.device,
) -> None:
    trained = _Trained(_network(), device, 131_000, ["recompute"], arena=True)
    assert trained.plan.arena is not None
    assert trained.plan.arena.nbytes > trained.plan.requested_peak_bytes // 2
    stand_in.delay(1_000)
    assert trained.is_the_same()
    assert trained.peak(trained.fitted) == trained.plan.projected_peak_bytes <= trained.budget


def _reserving(model: nn.Module, call: Tensor, way: str) -> tuple[int, HeapProjection]:
    """Bytes reserved, measured and projected, from an empty device on: input, parameters, three steps.

    With held blocks, their segment comes before: it is known from a plan that was made before.
    """
    place, measured, held = torch.device("standin", 1), 0, tuple[int, ...]()
    for _ in range(2 if way == "held_blocks" else 1):
        gc.collect()
        torch.accelerator.empty_cache()
        assert device_bytes(place).current == 0
        for nbytes in held:
            torch.empty(nbytes, dtype=torch.uint8, device=place)
        x, moved = call.to(place), copy.deepcopy(model).to(place)
        how: Any = {"execution": Execution(**cast(Any, {way: True}))} if way else {}
        fitted = stowplan.fit(moved, (x,), budget="28MiB", loss=torch.sum, allow=["recompute"], **how)
        torch.accelerator.synchronize(place)
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(place)
        for _ in range(3):
            moved.zero_grad()
            torch.autograd.backward(fitted(x))
        torch.accelerator.synchronize(place)
        measured = torch.accelerator.memory_stats(place)["reserved_bytes.all.peak"]
        for one, other in zip(model.parameters(), moved.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert torch.equal(one.grad, other.grad.cpu())
        planned = fitted.__dict__["_fitting"].planned[0].step
        layout = getattr(planned.placement, "layout", None)
        how = {"repair": False, "held_blocks": way == "held_blocks", "arena": layout}
        heap = project(planned.plan, AllocatorSettings(), **how)
        held = heap.held_segments
        del x, moved, fitted, planned, one, other, how
    gc.collect()
    torch.accelerator.empty_cache()
    return measured, heap


@pytest.mark.parametrize("way", ["", "arena", "held_blocks"])
def test_a_step_reserves_what_the_model_of_the_allocator_says(way: str) -> None:
    call, middle = torch.randn(1500, 96), (510, 510, 510) if way == "held_blocks" else (340, 96, 700)
    layers = [nn.Linear(*pair) for pair in pairwise((96, 260, 110, *middle, 96, 1300, 310))]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))
    torch.autograd.backward(model(call).sum())
    measured, heap = _reserving(model, call, way)
    assert measured == heap.figures.reserved_peak_bytes
    if way == "held_blocks":
        assert heap.held_blocks is not None
        assert heap.held_blocks.enlarged
        assert measured < 1.08 * heap.floor_bytes < 0.8 * heap.unrepaired_bytes


def _layout(device: torch.device) -> list[HeapSegment]:
    """As `torch.cuda.memory_snapshot` tells it of a CUDA device."""
    found = []
    for segment in stand_in.layout(device.index):
        sizes = [size for size, _, _ in segment.blocks]
        places = accumulate(sizes, initial=segment.address)
        blocks = (
            HeapBlock(at, size, requested, state)
            for at, (size, state, requested) in zip(places, segment.blocks, strict=False)
        )
        found.append(
            HeapSegment(segment.address, segment.nbytes, segment.is_small, tuple(blocks), segment.stream)
        )
    return found


def test_blocks_are_held_around_what_others_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as an optimizer's state, which is allocated after the first backward: nothing else is reserved."""
    place = torch.device("standin", 1)
    layers = [nn.Linear(*pair) for pair in pairwise((96, 260, 110, 510, 510, 510, 96, 1300, 310))]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh()))).to(place)
    x = torch.randn(1500, 96, device=place)
    how: Any = {"loss": torch.sum, "allow": ["recompute"], "execution": Execution(held_blocks=True)}
    fitted = stowplan.fit(model, (x,), budget="28MiB", **how)
    monkeypatch.setitem(LAYOUTS, "standin", _layout)
    gc.collect()
    torch.accelerator.empty_cache()
    planned = fitted.__dict__["_fitting"].planned[0].step
    before = device_bytes(place, "reserved").current
    nbytes = planned.placement.blocks.step_bytes + 20 * _MIB
    torch.empty(nbytes, dtype=torch.uint8, device=place)
    kept = list[Tensor]()
    for _ in range(4):
        model.zero_grad()
        torch.autograd.backward(fitted(x))
        kept = kept or [torch.zeros(3 * _MIB, dtype=torch.uint8, device=place) for _ in range(6)]
        torch.accelerator.synchronize(place)
        small = sum(segment.nbytes for segment in _layout(place) if segment.is_small)
        assert device_bytes(place, "reserved").current <= before + nbytes + 2 * _MIB + small
    del model, fitted, planned, x, kept, layers
    gc.collect()
    torch.accelerator.empty_cache()


def test_without_room_no_block_is_held_and_this_is_said_once(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    plan = _Trained(_network(), device, 96_000, ["recompute"]).plan
    stand_in.set_capacity(device_bytes(device, "reserved").current + 40 * _MIB, 0)
    held = {0: Held((_MIB, 2 * _MIB, 100), frozenset({1})), 1: Held((100 * _MIB,))}
    holding = Holding(HeldBlocks(_MIB, _MIB, held, frozenset(held), frozenset()), plan, device)
    holding.begins()
    assert [block is None for block in holding.hold(0)] == [False, True, False]
    assert holding.hold(1) == holding.hold(0) == []
    assert caplog.text.count("could not be held") == 1


def test_draws_are_repeated_on_their_own_device() -> None:
    trained = _Trained(_network(drop=0.5, blocks=3), torch.device("standin", 1), 91_000, ["recompute"])
    again = {step.op for step in trained.plan.steps if isinstance(step, RecomputeOp)}
    assert any(op.id in again and "dropout" in op.type for op in trained.plan.graph.ops)
    assert torch.accelerator.current_device_index() == 0
    assert trained.is_the_same()
    assert trained.peak(trained.fitted) == trained.plan.projected_peak_bytes <= trained.budget


def _offloading(device: torch.device) -> _Trained:
    trained = _Trained(_network(), device, 84_000, ["offload"])
    assert _has(trained.plan, Store)
    return trained


def test_offloading_gives_the_bits_of_eager_whatever_is_late(device: torch.device) -> None:
    trained = _offloading(device)
    assert trained.peak(trained.fitted) == trained.plan.projected_peak_bytes <= trained.budget
    for seed in range(_ITERATIONS):
        stand_in.delay(100, seed=seed)
        assert trained.is_the_same(), f"seed {seed}"


def _not(*_: object) -> None:
    """A wait that is missing."""


def _copy_at_once(_: HostAway, stream: torch.Stream, target: Tensor, source: Tensor) -> torch.Event:
    with stream:
        target.copy_(source, non_blocking=True)
    return stream.record_event()


@pytest.mark.parametrize(("name", "fault"), [("wait", _not), ("_copy", _copy_at_once)])
def test_a_transfer_without_its_wait_is_seen(
    name: str, fault: Callable[..., object], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = _offloading(device)
    expected = [gradient.clone() for gradient in trained.gradients(trained.eager)]
    assert all(map(torch.equal, trained.gradients(trained.fitted), expected))
    monkeypatch.setattr(HostAway, name, fault)
    tier, ops = tier_of(device), torch.accelerator.current_stream(device)
    assert isinstance(tier, HostTier)
    late, others = (tier.back, [ops]) if name == "wait" else (ops, [tier.out, tier.back])
    with stand_in.held(late):
        gradients = trained.gradients(trained.fitted)
        for stream in others:
            stream.synchronize()
    torch.accelerator.synchronize()
    assert not all(map(torch.equal, gradients, expected)), "no bits are wrong"
    assert stand_in.take_faults(), "and no wait is missing"


def test_a_step_that_eager_has_no_room_for_runs_under_the_budget() -> None:
    place = torch.device("standin", 1)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Tanh(), nn.Sigmoid())))
    data = torch.zeros(3 * _MIB, device=place, requires_grad=True)
    torch.accelerator.empty_cache()
    stand_in.set_capacity(device_bytes(place, "reserved").current + 76 * _MIB, 1)
    with pytest.raises(torch.OutOfMemoryError):
        torch.autograd.backward(model(data).sum())
    torch.accelerator.empty_cache()
    fitted = stowplan.fit(model, (data,), budget="auto", loss=torch.sum, allow=["recompute"])
    torch.autograd.backward(fitted(data))
    assert data.grad is not None


def test_memory_that_the_allocator_keeps_is_part_of_an_automatic_budget(device: torch.device) -> None:
    model = nn.Linear(4, 4).to(device)
    args = (torch.ones(2, 4, device=device),)
    torch.accelerator.empty_cache()
    before = automatic_budget(model, args)
    torch.zeros(30 * _MIB, device=device)
    assert torch.accelerator.memory_reserved() > 100 * _MIB
    assert automatic_budget(model, args) == pytest.approx(before, abs=1)


def test_pinned_memory_of_a_tier_is_used_again(device: torch.device) -> None:
    tier = HostTier(device)
    for number in range(3):
        data = torch.full((256,), float(number), device=device)
        away = tier.store(data)
        away.wait()
        del data
        (back,) = away.load()
        away.wait()
        assert back.tolist() == [number] * 256
        del away
        assert [len(free) for free in tier._pinned.values()] == [1]


def test_a_transfer_that_nobody_waited_for_spoils_nothing(device: torch.device) -> None:
    tier, data = HostTier(device), torch.ones(256, device=device)
    away = tier.store(data)
    away.wait()
    with stand_in.held(tier.back):
        (back,) = away.load()
        address = back.data_ptr()
        del away, back  # as when an op fails between a load and its use
        fresh = torch.zeros(256, device=device)
        assert fresh.data_ptr() == address
    torch.accelerator.synchronize()
    assert fresh.tolist() == [0] * 256
