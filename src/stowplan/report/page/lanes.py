"""Lanes: at which height each run is drawn, so that a branch or a skip connection gets a line of its own.

A run holds its lane until the last run of its half that uses what it made. A run that ends some lanes takes
the lowest of them: chains stay level, a U-Net is drawn as its name says. An op that runs again does so in the
lane where it first ran.
"""

from dataclasses import dataclass
from heapq import heappop, heappush

from stowplan.analyse.timeline import Doing, Timeline
from stowplan.ir import Phase


@dataclass(frozen=True, slots=True)
class Lanes:
    """By run: whether it is drawn in the backward half, and its lane there, 0 next to the border."""

    backward: tuple[bool, ...]
    lanes: tuple[int, ...]


def lanes_of(timeline: Timeline) -> Lanes:
    """Lanes for every run of a timeline."""
    backward = _backward_runs(timeline)
    ending = _ending_at(timeline, backward)
    lanes: list[int] = []
    free: dict[bool, list[int]] = {False: [], True: []}
    used = {False: 0, True: 0}
    first: dict[str, int] = {}
    for run, half in enumerate(backward):
        if timeline.runs[run].op in first:
            lanes.append(first[timeline.runs[run].op])
            continue
        freed = sorted({lanes[maker] for maker in ending[run] if maker != run})
        if freed:
            lanes.append(freed.pop(0))
        elif free[half]:
            lanes.append(heappop(free[half]))
        else:
            lanes.append(used[half])
            used[half] += 1
        first[timeline.runs[run].op] = lanes[run]
        for lane in [*freed, *([lanes[run]] if run in ending[run] else [])]:
            heappush(free[half], lane)
    return Lanes(tuple(backward), tuple(lanes))


def _backward_runs(timeline: Timeline) -> list[bool]:
    """Ops that are of neither half belong to the one that is being computed."""
    phases = {op.id: op.phase for op in timeline.graph.ops}
    found, turned = [], False
    for run in timeline.runs:
        phase = phases[run.op]
        turned = turned or phase is Phase.BACKWARD
        found.append(turned and phase is not Phase.FORWARD)
    return found


def _ending_at(timeline: Timeline, backward: list[bool]) -> list[list[int]]:
    """By run: the makers whose results nobody in their half uses afterwards."""
    once = [run.doing is Doing.COMPUTE for run in timeline.runs]
    last = list(range(len(backward)))
    for stay in timeline.stays:
        if stay.made and once[stay.first]:
            uses = (use for use in stay.uses if backward[use] == backward[stay.first] and once[use])
            last[stay.first] = max(last[stay.first], *uses, stay.first)
    ending: list[list[int]] = [[] for _ in backward]
    for maker, run in enumerate(last):
        ending[run].append(maker)
    return ending
