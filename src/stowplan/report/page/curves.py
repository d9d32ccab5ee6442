"""The data of the memory curve, and the other curves that are drawn over it on the same axis."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from stowplan.analyse.alignment import curve_onto, timed_onto
from stowplan.plan.explain.timeline import plain_curve_of
from stowplan.plan.record import Record
from stowplan.report.page.columns import WORDS, Columns
from stowplan.report.page.subject import Subject


def curve_of(subject: Subject, others: Sequence[Subject]) -> Columns:
    """Bytes by kind for each run, and the curves to compare with."""
    by_kind = subject.timeline.bytes_by_kind()
    total = subject.timeline.curve_bytes()
    return {
        "kinds": [WORDS["kinds"].index(kind) for kind in by_kind],
        "bytes": [curve.tolist() for curve in by_kind.values()],
        "total": total.tolist(),
        "peak": int(total.argmax()) if len(total) else 0,
        "allowed": subject.plan.allowed_bytes if subject.plan else None,
        "beside": list(_beside(subject, others)),
    }


def _beside(subject: Subject, others: Sequence[Subject]) -> Iterator[Columns]:
    axis = subject.timeline
    if subject.plan:
        name, plain = plain_curve_of(subject.plan, axis)
        yield {"name": name, "bytes": plain.tolist()}
    if axis.away:
        yield {"name": "offloaded", "bytes": axis.away_bytes().tolist()}
    if subject.record:
        yield {"name": "measured", "bytes": _measured(subject, subject.record).tolist()}
    for other in others:
        if other is not subject:
            yield {"name": other.name, "bytes": curve_onto(axis, other.timeline).tolist()}


def _measured(subject: Subject, record: Record) -> NDArray[np.int64]:
    """What a run measured, at the steps where it would have been if it kept to the projected times."""
    runs = subject.timeline.runs
    durations = [0.0 if run.doing.is_transfer else subject.seconds.get(run.op, 0.0) for run in runs]
    curve = np.array(record.measured_curve_bytes, dtype=np.int64)
    return timed_onto(durations, curve, record.measured_curve_seconds)
