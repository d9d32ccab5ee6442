"""Where the time of a measured step goes, clock by clock."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from stowplan.ir import Graph, Interval, Profile


@dataclass(frozen=True, slots=True)
class ClockTimes:
    """The times on one clock: from the first start to the last end, and what kernels took, longest first."""

    span_seconds: float
    seconds_by_type: Mapping[str, float]
    seconds_by_op: Mapping[str, float]


def times_of(graph: Graph, profile: Profile) -> dict[str, ClockTimes]:
    """The times of each clock. Clocks need not be aligned, so nothing is said across them."""
    types = {op.id: op.type for op in graph.ops}
    return {clock: _clock_times(intervals, types) for clock, intervals in profile.clocks.items() if intervals}


def _clock_times(intervals: Mapping[str, Interval], types: Mapping[str, str]) -> ClockTimes:
    by_op = {op: interval.end_seconds - interval.kernel_seconds for op, interval in intervals.items()}
    by_type: dict[str, float] = defaultdict(float)
    for op, seconds in by_op.items():
        by_type[types.get(op, "?")] += seconds
    first = min(interval.start_seconds for interval in intervals.values())
    last = max(interval.end_seconds for interval in intervals.values())
    return ClockTimes(last - first, _longest_first(by_type), _longest_first(by_op))


def _longest_first(seconds: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))
