"""Weaving transfers into a schedule: what is stored, freed and loaded where, as steps between its own."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from stowplan.plan.decision import Free, Load, Step, Store
from stowplan.plan.offload.stretches import Stretch


@dataclass(frozen=True, slots=True)
class Move:
    """A stretch spent in the tier: freed behind step `out`, loaded before step `back`."""

    stretch: Stretch
    out: int
    back: int


def weave(steps: Sequence[Step], moves: Sequence[Move]) -> tuple[Step, ...]:
    """The steps with all moves among them. At one place stores come first, then frees, then loads."""
    stores: defaultdict[int, list[Step]] = defaultdict(list)
    frees: defaultdict[int, list[Step]] = defaultdict(list)
    loads: defaultdict[int, list[Step]] = defaultdict(list)
    stored: set[object] = set()
    for move in sorted(moves, key=lambda move: (move.stretch.after, move.stretch.tensors)):
        key = (move.stretch.contents, move.stretch.tensors)
        if key not in stored:
            stores[move.stretch.after].append(Store(move.stretch.tensors))
            stored.add(key)
        frees[move.out].append(Free(move.stretch.tensors))
    for move in sorted(moves, key=lambda move: (move.stretch.before, move.stretch.tensors)):
        loads[move.back].append(Load(move.stretch.tensors))
    woven: list[Step] = []
    for number, step in enumerate(steps):
        woven += [*loads[number], step, *stores[number], *frees[number]]
    return (*woven, *loads[len(steps)])
