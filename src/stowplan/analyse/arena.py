"""The arena of a timeline: at which address every stay lies, as packed here or as a run recorded it."""

from collections.abc import Mapping
from dataclasses import dataclass

from stowplan.analyse.packing import Block, pack
from stowplan.analyse.timeline import Stay, Timeline
from stowplan.ir import Allocation


@dataclass(frozen=True, slots=True)
class Arena:
    """Offsets by stay (None where no place is known) and, for what ops take aside, by run."""

    offsets: tuple[int | None, ...]
    aside_offsets: Mapping[int, int]
    nbytes: int
    recorded: bool


def packed_arena(timeline: Timeline) -> Arena:
    """One arena for the whole step; stays in one place keep one address."""
    aside = [Block(f"aside {n}", r.aside_bytes, n, n) for n, r in enumerate(timeline.runs) if r.aside_bytes]
    packing = pack([*_blocks_of(timeline), *aside])
    return Arena(
        offsets=tuple(packing.offsets[str(stay.place)] for stay in timeline.stays),
        aside_offsets={block.start: packing.offsets[block.id] for block in aside},
        nbytes=packing.arena_bytes,
        recorded=False,
    )


def _blocks_of(timeline: Timeline) -> list[Block]:
    """A block per place, over all the stays that follow one another in it."""
    stays: dict[int, list[Stay]] = {}
    for stay in timeline.stays:
        stays.setdefault(stay.place, []).append(stay)
    return [
        Block(str(place), there[0].nbytes, min(s.first for s in there), max(s.last for s in there))
        for place, there in stays.items()
    ]


def recorded_arena(timeline: Timeline, allocation: Allocation) -> Arena:
    """The addresses of a run. Gaps that no tensor touches are closed, for address spaces are mostly gaps."""
    known = [allocation.places.get(stay.tensor) for stay in timeline.stays]
    shown = sorted(place for place in known if place is not None)
    offset_of: dict[int, int] = {}
    reach = used = 0
    for address, nbytes in shown:
        used += max(0, address + nbytes - max(address, reach))
        reach = max(reach, address + nbytes)
        offset_of[address] = used - (reach - address)
    return Arena(tuple(offset_of[place[0]] if place else None for place in known), {}, used, recorded=True)
