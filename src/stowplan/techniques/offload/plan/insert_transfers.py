"""Inserting transfers into a schedule: Store, Free and Load steps between its own steps."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from stowplan.plan.steps import Free, Load, Step, Store
from stowplan.techniques.offload.plan.idle_intervals import IdleInterval


@dataclass(frozen=True, slots=True)
class Move:
    """An idle interval spent in the tier: freed after step `out`, loaded before step `back`."""

    interval: IdleInterval
    out: int
    back: int


def insert_transfers(steps: Sequence[Step], moves: Sequence[Move]) -> tuple[Step, ...]:
    """The steps with all transfers inserted. At one place stores come first, then frees, then loads."""
    stores: defaultdict[int, list[Step]] = defaultdict(list)
    frees: defaultdict[int, list[Step]] = defaultdict(list)
    loads: defaultdict[int, list[Step]] = defaultdict(list)
    stored: set[object] = set()
    for move in sorted(moves, key=lambda move: (move.interval.after, move.interval.tensors)):
        key = (move.interval.contents, move.interval.tensors)
        if key not in stored:
            stores[move.interval.after].append(Store(move.interval.tensors))
            stored.add(key)
        frees[move.out].append(Free(move.interval.tensors))
    for move in sorted(moves, key=lambda move: (move.interval.before, move.interval.tensors)):
        loads[move.back].append(Load(move.interval.tensors))
    inserted: list[Step] = []
    for number, step in enumerate(steps):
        inserted += [*loads[number], step, *stores[number], *frees[number]]
    return (*inserted, *loads[len(steps)])
