"""Arena: one storage for what a step computes, with an offset for each tensor.

Whatever the allocator does, a step in an arena takes the bytes of the arena and of what lies beside it. Ops
bring their results into it in two ways: some write to memory that they are given, the results of others are
copied, which needs their bytes twice for a moment. A result that would have to be copied stays beside the
arena if the step takes less memory then.

The layout is judged by `refuse_unsafe`, which shares no code with what makes it.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stowplan.analyse.packing import PackedBlock, overlapping, pack
from stowplan.analyse.timeline import Stay, Timeline
from stowplan.errors import IllegalPlan
from stowplan.plan.draft import ArenaUse

_NEAR = 1.002  # times the least memory is as good, if fewer bytes are copied
_SIZES = 24  # limits of copied sizes that are compared
_LIVES = (1, 2, 3, 4, 6, 10, 20, 50)  # runs that a copied tensor lives through at least
_CHANGES, _LOOKED_AT = 200, 12  # bound the effort, to about a second


class Placement(StrEnum):
    """How a result comes into an arena."""

    WRITTEN = "written"  # the op writes to memory that it is given
    COPIED = "copied"  # the op allocates, and its result is copied


Copy: TypeAlias = tuple[str, int]  # a tensor that owns its storage, and how often it was computed before


class Slot(NamedTuple):
    """The bytes of one storage in the arena, from `offset` on."""

    offset: int
    nbytes: int
    placement: Placement

    @property
    def is_copied(self) -> bool:
        """Whether the op allocates its result, which is then copied to the slot."""
        return self.placement is Placement.COPIED


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """The slots, and what the step takes. A tensor without a slot lies beside the arena."""

    slots: Mapping[Copy, Slot]
    use: ArenaUse


class _Storage(NamedTuple):
    """What is in one storage from its first run to its last: a tensor, and those that overwrote it."""

    stays: tuple[Stay, ...]

    @property
    def copy(self) -> Copy:
        return self.stays[0].tensor, self.stays[0].copy

    @property
    def nbytes(self) -> int:
        return max(stay.nbytes for stay in self.stays)

    @property
    def first(self) -> int:
        return self.stays[0].first

    @property
    def last(self) -> int:
        return max(stay.last for stay in self.stays)


def lay_out(
    timeline: Timeline, placements: Mapping[str, Placement], *, leaving: Container[str] = (), alignment: int
) -> ArenaLayout:
    """Offsets for storages in which there are never other tensors than those in `placements`.

    `leaving` are the tensors that others hold after the step. Offsets are multiples of `alignment`.
    """
    there = _storages_of(timeline)
    able = [s for s in there if s.nbytes and all(stay.made and stay.tensor in placements for stay in s.stays)]
    written = [storage for storage in able if placements[storage.copy[0]] is Placement.WRITTEN]
    copied = [storage for storage in able if placements[storage.copy[0]] is Placement.COPIED]
    chosen = _chosen(timeline, there, written, copied, alignment)
    placed = [*written, *chosen]
    blocks = [_block(number, storage, alignment) for number, storage in enumerate(placed)]
    packing = pack(blocks)
    slots = {
        storage.copy: Slot(packing.offsets[block.id], storage.nbytes, placements[storage.copy[0]])
        for storage, block in zip(placed, blocks, strict=True)
    }
    beside = _curve_beside(timeline, there, placed, chosen)
    copies = sum(storage.nbytes for storage in chosen)
    use = ArenaUse(packing.arena_bytes, int(beside.max(initial=0)), copies)
    layout = ArenaLayout(slots, use)
    refuse_unsafe(layout, timeline, able=placements, leaving=leaving, alignment=alignment)
    return layout


def _storages_of(timeline: Timeline) -> list[_Storage]:
    stays: dict[int, list[Stay]] = {}
    for stay in timeline.stays:
        stays.setdefault(stay.place, []).append(stay)
    return [_Storage(tuple(sorted(there, key=lambda stay: stay.first))) for there in stays.values()]


def _block(number: int, storage: _Storage, alignment: int) -> PackedBlock:
    nbytes = -(-storage.nbytes // alignment) * alignment
    return PackedBlock(str(number), nbytes, storage.first, storage.last)


def _chosen(
    timeline: Timeline,
    there: Sequence[_Storage],
    written: Sequence[_Storage],
    copied: Sequence[_Storage],
    alignment: int,
) -> list[_Storage]:
    """Of the storages that would be copied, those with which least is taken, as far as was found.

    Those up to some size that live through at least some runs are compared. Then storages that exist where
    most lies beside the arena change sides, while that helps.
    """
    if not copied:
        return []
    choice = _Choice(timeline, there, written, copied, alignment)
    sizes, lives = choice.nbytes, choice.last - choice.first + 1
    limits = np.unique(np.append(np.quantile(sizes, np.linspace(0, 1, _SIZES), method="nearest"), 0))
    tried = [(sizes <= limit) & (lives >= life) for limit in limits for life in _LIVES]
    found = [(choice.taken_bytes(inside), int(sizes[inside].sum()), inside) for inside in tried]
    least = min(taken for taken, _, _ in found)
    taken, _, inside = min((f for f in found if f[0] <= _NEAR * least), key=lambda f: f[1])
    for _ in range(_CHANGES):
        changed = [choice.changed(inside, number) for number in choice.where_most_is(inside)]
        attempts = [(choice.taken_bytes(attempt), number) for number, attempt in enumerate(changed)]
        if not attempts or min(attempts)[0] >= taken:
            break
        taken, number = min(attempts)
        inside = changed[number]
    return [storage for storage, is_inside in zip(copied, inside.tolist(), strict=True) if is_inside]


class _Choice:
    """What a step takes, for any choice among the storages that would be copied."""

    def __init__(
        self,
        timeline: Timeline,
        there: Sequence[_Storage],
        written: Sequence[_Storage],
        copied: Sequence[_Storage],
        alignment: int,
    ) -> None:
        self._runs = len(timeline.runs)
        self.first = np.array([storage.first for storage in copied], dtype=np.int64)
        self.last = np.array([storage.last for storage in copied], dtype=np.int64)
        self.nbytes = np.array([storage.nbytes for storage in copied], dtype=np.int64)
        self._aligned = -(-self.nbytes // alignment) * alignment
        blocks = [_block(number, storage, alignment) for number, storage in enumerate(written)]
        spans = [(block.start, block.end, block.nbytes) for block in blocks]
        self._within = self._curve(*(np.array(spans, dtype=np.int64).reshape(-1, 3).T))
        self._beside = _curve_beside(timeline, there, [*written, *copied], ())

    def _curve(
        self, first: NDArray[np.int64], last: NDArray[np.int64], nbytes: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        change = np.zeros(self._runs + 1, dtype=np.int64)
        np.add.at(change, first, nbytes)
        np.subtract.at(change, last + 1, nbytes)
        curve: NDArray[np.int64] = np.cumsum(change[:-1])
        return curve

    def _curve_beside(self, inside: NDArray[np.bool_]) -> NDArray[np.int64]:
        last = np.where(inside, self.first, self.last)  # what is copied is beside while it is computed
        return self._beside + self._curve(self.first, last, self.nbytes)

    def taken_bytes(self, inside: NDArray[np.bool_]) -> int:
        """The arena, if it has no gaps, and the most that lies beside it."""
        within = self._within + self._curve(self.first[inside], self.last[inside], self._aligned[inside])
        return int(within.max() + self._curve_beside(inside).max())

    def where_most_is(self, inside: NDArray[np.bool_]) -> list[int]:
        """The largest of the storages that are beside the arena where most is."""
        run = int(self._curve_beside(inside).argmax())
        last = np.where(inside, self.first, self.last)
        there = np.flatnonzero((self.first <= run) & (run <= last))
        found: list[int] = there[np.argsort(-self.nbytes[there], kind="stable")][:_LOOKED_AT].tolist()
        return found

    def changed(self, inside: NDArray[np.bool_], number: int) -> NDArray[np.bool_]:
        """The choice with one storage on the other side."""
        other = inside.copy()
        other[number] = not other[number]
        return other


def _curve_beside(
    timeline: Timeline, there: Iterable[_Storage], placed: Iterable[_Storage], copied: Iterable[_Storage]
) -> NDArray[np.int64]:
    """Bytes outside of the arena during each run; what is copied is there during the run that makes it."""
    inside = {storage.copy for storage in placed}
    change = np.zeros(len(timeline.runs) + 1, dtype=np.int64)
    for storage in there:
        if storage.copy not in inside:
            for stay in storage.stays:
                change[stay.first] += stay.nbytes
                change[stay.last + 1] -= stay.nbytes
    for storage in copied:
        change[storage.first] += storage.nbytes
        change[storage.first + 1] -= storage.nbytes
    aside = np.array([run.aside_bytes for run in timeline.runs], dtype=np.int64)
    curve: NDArray[np.int64] = np.cumsum(change[:-1]) + aside
    return curve


def refuse_unsafe(
    layout: ArenaLayout,
    timeline: Timeline,
    *,
    able: Container[str],
    leaving: Container[str] = (),
    alignment: int = 1,
) -> None:
    """IllegalPlan if two tensors share a byte while both are needed, or one ends that others still hold.

    Only tensors that are `able` may lie in the arena, also where one overwrites another.
    """
    blocks: dict[int, PackedBlock] = {}
    offsets: dict[str, int] = {}
    for stay in sorted(timeline.stays, key=lambda stay: stay.first):
        slot = layout.slots.get((stay.tensor, stay.copy))
        before = blocks.get(stay.place)
        if slot is None and before is None:
            continue
        if before is None and slot is not None:
            if slot.offset % alignment or slot.offset < 0 or slot.offset + slot.nbytes > layout.use.nbytes:
                raise IllegalPlan(f"{stay.tensor!r} lies outside of the arena, or across its lines")
            before = PackedBlock(stay.tensor, slot.nbytes, stay.first, stay.last)
            offsets[str(stay.place)] = slot.offset
        assert before is not None
        if stay.tensor not in able:
            raise IllegalPlan(f"{stay.tensor!r} must not lie in the arena: others may keep it")
        if stay.nbytes > before.nbytes:
            raise IllegalPlan(f"{stay.tensor!r} is larger than its place in the arena")
        blocks[stay.place] = PackedBlock(
            str(stay.place), before.nbytes, before.start, max(before.end, stay.last)
        )
        if stay.tensor in leaving and stay.last < len(timeline.runs) - 1:
            raise IllegalPlan(
                f"{stay.tensor!r} leaves the step, and its place in the arena is used again after run"
                f" {stay.last} of {len(timeline.runs)}"
            )
    names = {str(stay.place): stay.tensor for stay in timeline.stays}
    if met := overlapping(list(blocks.values()), offsets):
        first, second = (names[place] for place in met)
        raise IllegalPlan(f"{first!r} and {second!r} share bytes of the arena while both are needed")
