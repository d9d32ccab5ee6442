"""Two plans, runs or baselines side by side: changed decisions, and differences in bytes and seconds."""

from collections.abc import Mapping
from dataclasses import dataclass

from stowplan.analyse.timeline import Doing, Timeline
from stowplan.plan.explain.reasons import decisions_of
from stowplan.plan.plan import Plan
from stowplan.plan.record import Record


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two. A graph without a plan is the baseline."""

    timeline: Timeline
    plan: Plan | None = None
    record: Record | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one side; None where the side has no such figure."""

    peak_bytes: int
    peak_op: str
    allowed_bytes: int | None
    seconds: float | None
    time_ratio: float | None
    runs: int
    runs_again: int
    extra_macs: int
    measured_peak_bytes: int | None
    measured_seconds: float | None


@dataclass(frozen=True, slots=True)
class Change:
    """A tensor that fares otherwise: on each side its bytes, its decision, and whether it is at the peak."""

    tensor: str
    nbytes_before: int
    nbytes: int
    before: str
    after: str
    at_peak_before: bool
    at_peak_after: bool

    @property
    def is_decided_otherwise(self) -> bool:
        return self.before != self.after


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both sides' figures, and the tensors that fare otherwise: what left or joined the peak first."""

    before: Figures
    after: Figures
    changes: tuple[Change, ...]
    only_before: int  # tensors that the other side does not have
    only_after: int


def comparison_of(before: Side, after: Side) -> Comparison:
    """Compare two sides tensor by tensor, by name."""
    fates_before, fates_after = _fates(before), _fates(after)
    shared = fates_before.keys() & fates_after.keys()
    changes = [
        Change(
            name,
            fates_before[name].nbytes,
            fates_after[name].nbytes,
            *_pairs(fates_before[name], fates_after[name]),
        )
        for name in shared
        if fates_before[name] != fates_after[name]
    ]
    return Comparison(
        _figures(before),
        _figures(after),
        tuple(sorted(changes, key=_by_weight)),
        len(fates_before.keys() - shared),
        len(fates_after.keys() - shared),
    )


def _by_weight(change: Change) -> tuple[bool, int, str]:
    """A sort key: changes that count at the peak first, then the largest."""
    return change.at_peak_before == change.at_peak_after, -change.nbytes, change.tensor


@dataclass(frozen=True, slots=True)
class _Fate:
    nbytes: int
    decision: str
    at_peak: bool


def _pairs(before: _Fate, after: _Fate) -> tuple[str, str, bool, bool]:
    return before.decision, after.decision, before.at_peak, after.at_peak


def _fates(side: Side) -> Mapping[str, _Fate]:
    """By tensor with memory of its own what becomes of it."""
    timeline = side.timeline
    decided = decisions_of(side.plan, timeline) if side.plan else {}
    peak = int(timeline.curve_bytes().argmax()) if timeline.runs else 0
    fates: dict[str, _Fate] = {}
    for stay in timeline.stays:
        there = stay.first <= peak <= stay.last
        before = fates.get(stay.tensor)
        word = type(decided[stay.tensor]).__name__.lower() if stay.tensor in decided else "keep"
        fates[stay.tensor] = _Fate(stay.nbytes, word, there or (before is not None and before.at_peak))
    return fates


def _figures(side: Side) -> Figures:
    timeline, plan, record = side.timeline, side.plan, side.record
    curve = timeline.curve_bytes()
    return Figures(
        peak_bytes=int(curve.max(initial=0)),
        peak_op=timeline.runs[int(curve.argmax())].op if len(curve) else "",
        allowed_bytes=plan.allowed_bytes if plan else None,
        seconds=plan.projected_seconds if plan else None,
        time_ratio=plan.time_ratio if plan else None,
        runs=len(timeline.runs),
        runs_again=sum(run.doing is Doing.RECOMPUTE for run in timeline.runs),
        extra_macs=plan.extra_macs if plan else 0,
        measured_peak_bytes=record.measured_peak_bytes if record else None,
        measured_seconds=record.measured_seconds if record else None,
    )
