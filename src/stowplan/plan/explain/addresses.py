"""The addresses of a plan in one arena, beside those that the plan's file recorded of a run."""

from dataclasses import dataclass

from stowplan.analyse.timeline import packed_arena, recorded_arena
from stowplan.ir import Allocation
from stowplan.plan.explain.timeline import timeline_of_plan
from stowplan.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """One stay of a tensor: its offset in the plan's arena, and the address that the file has, if any."""

    tensor: str
    nbytes: int
    first_step: int
    last_step: int
    offset: int
    recorded: int | None


@dataclass(frozen=True, slots=True)
class AddressesBeside:
    """The bytes that the addresses of the plan and of the file span, and all places, the largest first."""

    arena_bytes: int
    recorded_bytes: int
    tensors: tuple[PlacedTensor, ...]


def addresses_beside(plan: Plan, allocation: Allocation) -> AddressesBeside:
    """A plan packed into one arena, beside recorded addresses. Gaps that no tensor touched are left out."""
    timeline = timeline_of_plan(plan)
    packed, recorded = packed_arena(timeline), recorded_arena(timeline, allocation)
    placed = [
        PlacedTensor(
            stay.tensor,
            stay.nbytes,
            stay.first,
            stay.last,
            offset,
            allocation.places[stay.tensor][0] if stay.tensor in allocation.places else None,
        )
        for stay, offset in zip(timeline.stays, packed.offsets, strict=True)
        if offset is not None
    ]
    placed.sort(key=lambda place: (-place.nbytes, place.first_step))
    return AddressesBeside(packed.nbytes, recorded.nbytes, tuple(placed))
