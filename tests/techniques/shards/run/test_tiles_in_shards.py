"""Tiles inside shards: below the smallest budget without them, on all workers, with the same gradients."""

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from stowplan import Mesh, Search, fit, plans_of, shards_of
from stowplan.errors import BadUse, BudgetTooSmall, CaptureError, NotTileable
from stowplan.run.measure.measure import measure
from stowplan.run.planning.planner import DraftedStep
from stowplan.techniques.shards.run.gather import Gather
from stowplan.techniques.shards.run.shard_planner import subject_with_placeholders
from stowplan.techniques.shards.run.step import ShardedStep
from stowplan.techniques.tiles.plan.barriers import is_barrier
from stowplan.techniques.tiles.plan.borders import in_tiling_order
from stowplan.techniques.tiles.plan.candidates import stages_of
from stowplan.techniques.tiles.plan.segment import segment_of
from tests.support.workers.budgets import Part, Taken, within_budgets
from tests.support.workers.compared import EXACT, differentiate, distance, gradients_of
from tests.support.workers.processes import on_workers

pytestmark = [pytest.mark.torch, pytest.mark.distributed]

WIDTH, SIZE = 6, 64
BELOW = 0.75


class SmallUNet(nn.Module):
    """One level down and up, with dropout in the middle, and a loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU()
        )
        self.middle = nn.Sequential(nn.MaxPool2d(2), nn.Dropout(0.2))
        self.up = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.score = nn.Conv2d(2 * width, 2, 3, padding=1)

    def forward(self, image: Tensor, labels: Tensor) -> Tensor:
        skip = self.down(image)
        found = torch.cat([skip, self.up(self.middle(skip))], 1)
        return F.cross_entropy(self.score(found), labels, torch.tensor([1.0, 3.0], dtype=image.dtype))


def example(
    *, batch: int = 1, width: int = WIDTH, size: int = SIZE
) -> tuple[SmallUNet, tuple[Tensor, Tensor]]:
    torch.manual_seed(3)
    labels = torch.randint(2, (batch, size, size))
    labels[:, 10:20] = -100  # of no class
    return SmallUNet(width).double(), (torch.randn(batch, 1, size, size, dtype=torch.float64), labels)


@dataclass(frozen=True, slots=True)
class Findings:
    """How the steps went, how far the last is from one process, and what was said of faults."""

    taken: list[Taken]
    far: float
    barriers: tuple[int, int]  # collectives in forward; stages that have collectives and other work
    too_small: tuple[int, str]
    other_fault: str


def look() -> Findings:
    mesh = "space=2"
    model, args = example()
    taken = within_budgets(Part(model, args, mesh), below=(BELOW,))
    return Findings(
        taken, far_from_one_process(model, args), barriers_in(mesh), refusal_of_one(mesh), fault_of_one(mesh)
    )


def far_from_one_process(model: nn.Module, args: tuple[Tensor, ...]) -> float:
    plain = copy.deepcopy(model)
    plain.zero_grad()
    torch.manual_seed(5)
    plain(*args).backward()
    return distance(gradients_of(model), gradients_of(plain))


def look_in_two_dims() -> tuple[int, int, int, float]:
    """Budget, measured peak, segments in tiles, and how far gradients are from those of one process."""
    model, args = example()
    part = Part(model, args, "space=2x2")
    budget = int(BELOW * part.smallest(allow=["recompute"]))
    step, measured, _ = part.run(budget)
    return budget, measured, len(plans_of(step)[0].tile_maps), far_from_one_process(model, args)


@dataclass(frozen=True, slots=True)
class OfShards:
    """A step with sharded parameters below the smallest budget without tiles, and how far a fault leads."""

    allowed_bytes: int
    measured_bytes: int
    sent_bytes: tuple[int, int]  # measured and projected
    tiled: int
    gathers_before_a_sweep: int
    far: float
    far_if_not_summed: float


def look_at_sharded_parameters(batch: int) -> OfShards:
    model, args = example(batch=batch, width=16, size=32)
    plain = copy.deepcopy(model)
    torch.manual_seed(5)
    plain(*args).backward()
    how: dict[str, Any] = {"mesh": Mesh("data=2", parameters="shard"), "search": Search(moves=50)}
    with pytest.raises(BudgetTooSmall) as refused:
        fit(model, args, budget=1, allow=["recompute"], **how)
    budget = int(BELOW * refused.value.minimum_bytes)
    fitted = fit(model, args, budget=budget, **how)
    sharded, planned = shards_of(fitted), fitted.__dict__["_fitting"].planned
    shares, _ = sharded.share(*args)
    assert sharded.parameters is not None
    rows = [sharded.parameters.rows_of(parameter) for parameter in model.parameters()]
    pairs = zip(rows, gradients_of(plain), strict=True)
    expected = [of.shard(gradient, dist.get_rank()) for of, gradient in pairs if of is not None]
    torch.manual_seed(5)
    before = [*shares, *model.parameters()]
    measured = measure(partial(differentiate, fitted, shares), before=before).measured_peak_bytes
    far, sent = distance(gradients_of(model), expected), sharded.workers.sent_bytes
    with pytest.MonkeyPatch.context() as fault:
        fault.setattr(Gather, "backward", not_summed)
        model.zero_grad()
        torch.manual_seed(5)
        differentiate(fitted, shares)
    wrong = distance(gradients_of(model), expected)
    types = [op.type for op in planned.captured.graph.ops]
    first = next((place for place, kind in enumerate(types) if "sweep" in kind), 0)
    gathers = sum("gather" in kind for kind in types[:first])
    tiled = len(planned.plan.tile_maps)
    return OfShards(budget, measured, (sent, sharded.sent_bytes(planned)), tiled, gathers, far, wrong)


def not_summed(self: Gather, gradients: list[Tensor]) -> list[Tensor]:
    pairs = zip(gradients, self.rows, strict=True)
    return [rows.shard(gradient, self.workers.rank) for gradient, rows in pairs]


def look_at_shards() -> list[OfShards]:
    """With one plan for both workers, and with a plan for each: one sample and two."""
    return [look_at_sharded_parameters(batch) for batch in (2, 3)]


def barriers_in(mesh: str) -> tuple[int, int]:
    model, args = example()
    subject = subject_with_placeholders(ShardedStep(model, args, mesh=mesh), model)
    graph = in_tiling_order(subject.captured.graph)
    collectives = {op.id for op in graph.ops if is_barrier(graph, op)}
    tensors = graph.tensors
    looks = {op.id for op in graph.ops if all(tensors[name].alias_of for name in op.writes())}
    looks |= {op.id for op in graph.ops if not op.inputs}  # a draw
    walls = [stage for stage in stages_of(graph) if not collectives.isdisjoint(stage)]
    with pytest.raises(NotTileable, match="other workers take part"):
        segment_of(graph, walls[0])
    return len(collectives), sum(not collectives.union(looks).issuperset(stage) for stage in walls)


def refusal_of_one(mesh: str) -> tuple[int, str]:
    """What a worker is told when the last one alone has too little."""
    model, args = example()
    is_last = dist.get_rank() == dist.get_world_size() - 1
    with pytest.raises(BudgetTooSmall) as refused:
        fit(
            model,
            args,
            budget=10_000 if is_last else "1GiB",
            reserve=100,
            mesh=mesh,
            allow=(),
            search=Search(moves=1),
        )
    return refused.value.minimum_bytes, str(refused.value)


def failing(*_: object, **__: object) -> DraftedStep:
    raise CaptureError("the first worker fails in its own way")


def fault_of_one(mesh: str) -> str:
    """What a worker is told when the first one cannot plan at all."""
    model, args = example()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr("stowplan.techniques.shards.run.shard_planner.draft_step", failing)
        with pytest.raises((BadUse, CaptureError)) as fault:
            fit(model, args, budget="1GiB", mesh=mesh, allow=(), search=Search(moves=1))
    return str(fault.value)


@pytest.fixture(scope="module")
def found() -> list[Findings]:
    return on_workers(2, look)


def test_below_the_smallest_budget_without_tiles_every_worker_runs_in_tiles(found: list[Findings]) -> None:
    for findings in found:
        assert [bool(taken.tiled) for taken in findings.taken] == [False, False, True]
        for taken in findings.taken:
            assert taken.is_kept, taken
        assert findings.far < EXACT


def test_tiles_in_shards_of_two_dims_are_the_step_of_one_process() -> None:
    for budget, measured, tiled, far in on_workers(4, look_in_two_dims):
        assert measured <= budget
        assert tiled
        assert far < EXACT


def test_tiles_meet_a_budget_where_parameters_are_sharded() -> None:
    """Whole parameters are gathered before a segment that reads them, and their gradients are then summed."""
    for alike, own in on_workers(2, look_at_shards):
        assert alike.tiled
        assert alike.gathers_before_a_sweep > 1
        for found in (alike, own):
            assert found.measured_bytes <= found.allowed_bytes
            assert found.sent_bytes[0] == found.sent_bytes[1]
            assert found.far < EXACT
            assert found.far_if_not_summed > 1e-6


def test_collectives_are_between_stages_and_never_in_them(found: list[Findings]) -> None:
    for findings in found:
        collectives, inside = findings.barriers
        assert collectives >= 4
        assert inside == 0


def test_a_worker_with_too_little_is_named_to_all(found: list[Findings]) -> None:
    needs = {findings.too_small[0] for findings in found}
    assert len(needs) == 1
    assert min(needs) > 100_000
    assert all(f"worker {len(found) - 1} needs" in findings.too_small[1] for findings in found)
    assert "reserve" in found[-1].too_small[1]


def test_a_worker_that_fails_leaves_no_other_waiting(found: list[Findings]) -> None:
    assert "in its own way" in found[0].other_fault
    assert all("worker 0 could not plan" in findings.other_fault for findings in found[1:])
