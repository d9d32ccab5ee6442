"""The data of the memory curve, and the other curves that are drawn over it on the same axis."""

from collections.abc import Iterator, Sequence

import numpy as np

from stowplan.analyse.alignment import curve_onto, stretched
from stowplan.plan.timeline import plain_timeline_of
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
        yield {"name": "plain", "bytes": curve_onto(axis, plain_timeline_of(subject.plan)).tolist()}
    if subject.record:
        measured = np.array(subject.record.measured_curve_bytes, dtype=np.int64)
        yield {"name": "measured", "bytes": stretched(measured, len(axis.runs)).tolist()}
    for other in others:
        if other is not subject:
            yield {"name": other.name, "bytes": curve_onto(axis, other.timeline).tolist()}
