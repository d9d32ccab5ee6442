"""Two memory curves on one axis: where one step stands in another, told by the ops they share or by time."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from stowplan.analyse.timeline import Doing, Timeline

_SHARED = 0.5  # of the ops: fewer in common, and the two are not the same step


def curve_onto(axis: Timeline, other: Timeline) -> NDArray[np.int64]:
    """The curve of `other`, one value for each run of `axis`: the most alive since the run before."""
    position = {run.op: at for at, run in enumerate(other.runs) if run.doing is Doing.COMPUTE}
    shared = sum(run.op in position for run in axis.runs)
    if shared < _SHARED * max(len(axis.runs), len(position)):
        return stretched(other.curve_bytes(), len(axis.runs))
    stops, at = [], 0
    for run in axis.runs:
        if run.doing is Doing.COMPUTE:
            at = max(at, position.get(run.op, at))
        stops.append(at)
    return _highest_between(stops, other.curve_bytes())


def stretched(curve: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """A curve of any length over `length` runs, as if both went through their steps evenly."""
    stops = [max(0, (at + 1) * len(curve) // length - 1) for at in range(length)]
    return _highest_between(stops, curve)


def timed_onto(
    durations: Sequence[float], curve: NDArray[np.int64], seconds: Sequence[float]
) -> NDArray[np.int64]:
    """A curve with the time of each value, over runs that take `durations`, scaled to the same length."""
    ends = np.cumsum(np.maximum(durations, 0.0))
    if not len(curve) or not len(ends) or not ends[-1]:
        return stretched(curve, len(durations))
    times = np.array(seconds) - seconds[0]
    stops = np.searchsorted(times, ends / ends[-1] * times[-1], side="right") - 1
    stops[-1] = len(curve) - 1
    return _highest_between(stops.tolist(), curve)


def _highest_between(stops: Sequence[int], curve: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each stop the highest value behind the stop before, up to and including its own."""
    if not len(curve):
        return np.zeros(len(stops), dtype=np.int64)
    begins = [0, *(min(before + 1, stop) for before, stop in pairwise(stops))]
    highest = [curve[begin : stop + 1].max() for begin, stop in zip(begins, stops, strict=False)]
    return np.array(highest, dtype=np.int64)
