"""Offload on a mesh: below the smallest budget without it, with the same gradients, messages and memory."""

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from stowplan import Mesh, Search, fit, plans_of, shards_of
from stowplan.errors import BadUse, BudgetTooSmall, IllegalPlan, TierFull
from stowplan.ops.effects import UNDER_WAY
from stowplan.plan.judge.simulate import simulate
from stowplan.plan.judge.verify import verify
from stowplan.plan.plan import Plan
from stowplan.plan.pricing import Tier
from stowplan.plan.steps import Compute, RecomputeOp, Step, Store
from stowplan.request import Parameters
from stowplan.run.measure.measure import measure
from stowplan.run.step.straight import baseline_steps
from stowplan.techniques.offload.plan import idle_intervals
from stowplan.techniques.offload.plan.idle_intervals import idle_intervals_of
from stowplan.techniques.offload.run import disk
from stowplan.techniques.offload.run.calls import SystemCalls
from stowplan.techniques.offload.run.disk import Bytes, DiskTier
from stowplan.techniques.offload.run.spill import whole_blocks
from tests.support.nets import Example
from tests.support.spilling import everything_moved
from tests.support.workers.compared import EXACT, differentiate, distance, example_of, gradients_of
from tests.support.workers.processes import on_workers
from tests.support.workers.sharded import Trained, Training, early_in, iterate
from tests.techniques.shards.run.test_tiles_in_shards import example

pytestmark = [pytest.mark.torch, pytest.mark.distributed]

WIDTH, ROWS, LAYERS = 64, 32768, 2  # a worker has 8 MiB of a hidden tensor
BELOW = 0.95
OFFLOAD: dict[str, Any] = {"allow": ["recompute", "offload"], "search": Search(moves=1, gap=1.0)}


class Layers(nn.Module):
    """Norms over all samples, which take part in messages: their results cannot be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        layers = ((nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()) for _ in range(LAYERS))
        self.layers = nn.Sequential(*(nn.Sequential(*each) for each in layers))
        self.score = nn.Linear(WIDTH, 4)

    def forward(self, given: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.score(self.layers(given)), labels)


def layers(rows: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(3)
    return Layers().double(), (torch.randn(rows, WIDTH, dtype=torch.float64), torch.randint(4, (rows,)))


@dataclass(frozen=True, slots=True)
class Offloaded:
    """A step below the smallest budget without offload, and how far a fault leads."""

    allowed_bytes: int
    measured_bytes: int
    projected_bytes: int
    sent_bytes: tuple[int, int]  # measured and projected
    written_bytes: tuple[int, int]
    read_bytes: tuple[int, int]
    far: float
    far_if_dropped: float
    store_under_way: str


def look_below(rows: int, parameters: Parameters) -> Offloaded:
    model, args = layers(rows)
    plain = copy.deepcopy(model)
    plain(*args).backward()
    with pytest.raises(BudgetTooSmall) as refused:
        fit(
            model,
            args,
            budget=1,
            mesh=Mesh("data=2", parameters=parameters),
            **{**OFFLOAD, "allow": ["recompute"]},
        )
    budget = int(BELOW * refused.value.minimum_bytes)
    fitted = fit(model, args, budget=budget, mesh=Mesh("data=2", parameters=parameters), **OFFLOAD)
    (plan,), sharded = plans_of(fitted), shards_of(fitted)
    shares, _ = sharded.share(*args)
    expected = _own(model, sharded.parameters, gradients_of(plain))
    before = [*shares, *model.parameters(), *model.buffers()]
    with pytest.MonkeyPatch.context() as patch:
        moved = _counted(patch)
        taken = measure(partial(differentiate, fitted, shares), before=before)
    far, sent = distance(gradients_of(model), expected), sharded.workers.sent_bytes
    with pytest.MonkeyPatch.context() as fault:
        fault.setattr(disk, "read_back", dropped)
        model.zero_grad()
        differentiate(fitted, shares)
    transfers = simulate(plan.graph, plan.steps, plan.pricing).transfers
    projected = Counter[bool]()
    for transfer in transfers:
        projected[transfer.is_store] += whole_blocks(transfer.nbytes)
    return Offloaded(
        budget,
        taken.measured_peak_bytes,
        plan.projected_peak_bytes + sharded.remembered_bytes,
        (sent, sharded.sent_bytes(fitted.__dict__["_fitting"].planned)),
        (moved["write"], projected[True]),
        (moved["read"], projected[False]),
        far,
        distance(gradients_of(model), expected),
        _store_under_way(plan),
    )


def _own(model: nn.Module, shards: Any, gradients: list[Tensor]) -> list[Tensor]:
    """The gradients that this worker should have."""
    if shards is None:
        return gradients
    rows = [shards.rows_of(parameter) for parameter in model.parameters()]
    return [of.shard(gradient, dist.get_rank()) for of, gradient in zip(rows, gradients, strict=True)]


def _counted(patch: pytest.MonkeyPatch) -> Counter[str]:
    """The bytes that the system moves to disk and back from now on."""
    moved = Counter[str]()

    def counting(name: str) -> None:
        call = getattr(SystemCalls, name)

        def counted(self: SystemCalls, file: int, data: memoryview, offset: int) -> int:
            done: int = call(self, file, data, offset)
            moved[name] += done
            return done

        patch.setattr(SystemCalls, name, counted)

    counting("write")
    counting("read")
    return moved


def dropped(*args: Any) -> None:
    """A transfer that brings nothing back."""
    given: list[Bytes] = args[3]
    given.pop()[:] = 0


def _store_under_way(plan: Plan) -> str:
    """What is said of the plan if it stores a buffer that messages arrive in."""
    ops = {op.id: op for op in plan.graph.ops}
    runs = ((n, step) for n, step in enumerate(plan.steps) if isinstance(step, Compute | RecomputeOp))
    at, begun = next((n, ops[step.op]) for n, step in runs if ops[step.op].type in UNDER_WAY)
    stored = Store((begun.outputs[0].tensor,))
    with pytest.raises(IllegalPlan) as refused:
        verify(replace(plan.draft(), steps=(*plan.steps[: at + 1], stored, *plan.steps[at + 1 :])))
    return str(refused.value)


@dataclass(frozen=True, slots=True)
class AllMoved:
    """How far a step in which all idle storages wait on disk is from one whose gathers begin early."""

    far: float
    stores: int
    early: int  # gathers of the other step; in this one they begin where they are read
    under_way: int  # buffers that would have an idle interval if messages did not arrive in them


def _with_steps(plan: Plan, steps: tuple[Step, ...]) -> Plan:
    pricing = replace(plan.pricing, tier=Tier("host", 2**40, 1e9, 1e9))
    curve = simulate(plan.graph, steps, pricing).curve_bytes
    how: Any = {"pricing": pricing, "steps": steps, "projected_curve_bytes": curve}
    return verify(replace(plan.draft(), **how, allowed_bytes=max(curve)))


def look_at_all_moved(mesh: str, parameters: Parameters, net: Example) -> AllMoved:
    model, args = net
    fitted = fit(
        model, args, budget="1GiB", allow=(), search=Search(moves=1), mesh=Mesh(mesh, parameters=parameters)
    )
    shares, _ = shards_of(fitted).share(*args)
    fitting, (plan,), found = fitted.__dict__["_fitting"], plans_of(fitted), list[list[Tensor]]()
    captured = fitting.planned.captured
    moved = everything_moved(captured, gradients=False)
    for steps in (plan.steps, moved):
        fitting.planned, fitting.bound = replace(fitting.planned, plan=_with_steps(plan, steps)), None
        model.zero_grad()
        torch.manual_seed(5)
        differentiate(fitted, shares)
        found.append([gradient.clone() for gradient in gradients_of(model)])
    baseline = baseline_steps(captured.graph)
    guarded = len(idle_intervals_of(captured.graph, baseline))
    with pytest.MonkeyPatch.context() as fault:
        fault.setattr(idle_intervals, "UNDER_WAY", frozenset())
        more = len(idle_intervals_of(captured.graph, baseline)) - guarded
    stores = sum(isinstance(step, Store) for step in moved)
    return AllMoved(distance(*found), stores, early_in(plan), more)


def refusals() -> list[str]:
    """What workers are told of gradients, and of a full disk of one of them: for a step and for state."""
    model, args = layers(64)
    with pytest.raises(BadUse) as gradients:
        fit(
            model,
            args,
            budget="1GiB",
            mesh="data=2",
            **{**OFFLOAD, "allow": ["recompute", "offload-gradients"]},
        )
    model, args = layers(ROWS)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(DiskTier, "reserve", full)
        with pytest.raises((BadUse, TierFull)) as room:
            fit(model, args, budget="56MiB", mesh=Mesh("data=2", parameters="shard"), **OFFLOAD)
        with small_chunks(), pytest.raises((BadUse, TierFull)) as state:
            Training(smallest_without(parameters="shard"), **STATE_AWAY)
    return [str(gradients.value), str(room.value), str(state.value)]


def full(*_: object) -> None:
    raise TierFull("the disk of worker 1 is full")


STATE_AWAY: dict[str, Any] = {"allow": ["recompute", "offload"], "moves": 1}


@dataclass(frozen=True, slots=True)
class StateAway:
    """Iterations of AdamW below the smallest budget with state in memory, and how far a fault leads."""

    trained: Trained
    in_memory_bytes: tuple[int, int]  # of state, between iterations: with these plans, and without
    far_if_dropped: float


def smallest_without(**options: Any) -> int:
    """A budget below the smallest with which the optimizer's state stays in memory."""
    with pytest.raises(BudgetTooSmall) as refused:
        Training(1, moves=1, **options)
    return int(BELOW * refused.value.minimum_bytes)


@contextmanager
def small_chunks() -> Iterator[None]:
    """State goes to disk in pieces that do not dwarf a tiny network."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        tier = DiskTier(Path(folder), chunk_bytes=4096)
        patch.setattr("stowplan.techniques.iteration.run.planner.tier_for", lambda _: tier)
        yield


def look_at_state(**options: Any) -> StateAway:
    budget = smallest_without(**options)
    roomy = Training("1GiB", moves=1, **options)
    roomy.run(1)
    with small_chunks(), pytest.MonkeyPatch.context() as fault:
        training = Training(budget, **options, **STATE_AWAY)
        trained = training.run(3)
        fault.setattr(disk, "read_back", dropped)
        dropping = Training(budget, **options, **STATE_AWAY).run(3)
    in_memory = [sum(t.nbytes for t in each.state_in_memory()) for each in (training, roomy)]
    return StateAway(trained, (in_memory[0], in_memory[1]), dropping.far)


def resumes_with_state_away(folder: Path) -> bool:
    """Whether a training that is saved and resumed ends with the bits of one that was left alone."""
    budget = smallest_without(parameters="shard")
    with small_chunks():
        alone, saved, resumed = (Training(budget, parameters="shard", **STATE_AWAY) for _ in range(3))
        shares, _ = shards_of(alone.fitted).share(*alone.args)
        for training in (alone, saved):
            torch.manual_seed(3)
            for done in (1, 2):
                iterate(training.fitted, shares, training.optimizer, None)
                if training is saved and done == 1:
                    saved.checkpoints(folder).save(done)
        assert resumed.checkpoints(folder).resume() == 1
        iterate(resumed.fitted, shares, resumed.optimizer, None)
        ends = [training.values() for training in (alone, saved, resumed)]
    return all(torch.equal(*pair) for end in ends[1:] for pair in zip(ends[0], end, strict=True))


Findings: TypeAlias = tuple[list[Offloaded], list[AllMoved], list[StateAway], bool, list[str]]


def look(folder: Path) -> Findings:
    below = [look_below(ROWS, "shard"), look_below(ROWS + 1, "shard"), look_below(ROWS, "replicate")]
    moved = [
        look_at_all_moved("data=2", "shard", example_of("gpt", batch=3)),
        look_at_all_moved("space=2", "shard", Example(*example(batch=2, width=4, size=16))),
        look_at_all_moved("data=2", "replicate", Example(*example(batch=2, width=4, size=16))),
    ]
    away = [
        look_at_state(parameters="shard"),
        look_at_state(parameters="shard", batch=3, clip_norm=None),
        look_at_state(parameters="replicate", accumulate=2),
    ]
    return below, moved, away, resumes_with_state_away(folder), refusals()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Findings]:
    return on_workers(2, look, tmp_path_factory.mktemp("checkpoints"))


def test_offload_meets_a_budget_below_the_smallest_without_it(two: list[Findings]) -> None:
    """With one plan for both workers, with a plan for each, and with whole parameters."""
    for below, *_ in two:
        for found in below:
            assert found.measured_bytes <= found.projected_bytes <= found.allowed_bytes
            assert found.far < EXACT


def test_bytes_sent_and_bytes_moved_are_as_projected(two: list[Findings]) -> None:
    for below, *_ in two:
        for found in below:
            assert found.sent_bytes[0] == found.sent_bytes[1]
            assert 0 < found.written_bytes[0] == found.written_bytes[1]
            assert 0 < found.read_bytes[0] == found.read_bytes[1]


def test_a_dropped_transfer_is_seen(two: list[Findings]) -> None:
    for below, *_ in two:
        for found in below:
            assert found.far_if_dropped > 1e-6


def test_all_that_can_be_moved_is_the_same_to_the_bit(two: list[Findings]) -> None:
    """Buffers that messages arrive in stay: gathered parameters, gradients of halos, sums of gradients."""
    for _, moved, *_ in two:
        for found in moved:
            assert found.far == 0.0
            assert found.stores > 10
            assert found.under_way > 0


def test_early_and_late_gathers_of_workers_with_own_plans_give_the_same_bits(two: list[Findings]) -> None:
    for _, (unequal, *_), *_ in two:
        assert unequal.early > 10
        assert unequal.far == 0.0


def test_a_plan_that_stores_a_buffer_under_way_is_illegal(two: list[Findings]) -> None:
    for below, *_ in two:
        assert all("messages are still under way" in found.store_under_way for found in below)


def test_state_waits_on_disk_below_the_smallest_budget_with_state_in_memory(two: list[Findings]) -> None:
    """With one plan for both workers, a plan for each without clipping, and whole parameters in two parts."""
    for _, _, away, *_ in two:
        for found in away:
            assert found.trained.is_right
            assert found.in_memory_bytes[0] < 0.5 * found.in_memory_bytes[1]
            assert found.far_if_dropped > 1e-6


def test_a_checkpoint_has_the_state_that_waits_on_disk(two: list[Findings]) -> None:
    assert all(is_same for *_, is_same, _ in two)


def test_what_cannot_be_offloaded_is_refused_before_the_first_step(two: list[Findings]) -> None:
    for *_, (gradients, _, _) in two:
        assert "offload-gradients is not available with a mesh" in gradients
    for number in (1, 2):
        assert "worker 1 could not plan its part" in two[0][-1][number]
        assert "is full" in two[1][-1][number]
