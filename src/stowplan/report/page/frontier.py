"""The data of the frontier: budget against time, the plans that were chosen, and what others reached."""

from collections.abc import Sequence

from stowplan.plan.plan import Plan
from stowplan.report.page.columns import Columns
from stowplan.report.page.subject import Subject


def frontier_of_subjects(subjects: Sequence[Subject]) -> Columns | None:
    """One picture for all subjects that have a plan."""
    plans = [(subject.name, subject.plan) for subject in subjects if subject.plan]
    if not plans:
        return None
    return {
        "lines": [_line(subject) for subject in subjects if subject.frontier and subject.plan],
        "plans": [_chosen(name, plan) for name, plan in plans],
        "plain_bytes": plans[0][1].plain_peak_bytes,
        "minimum_bytes": min(plan.minimum_bytes for _, plan in plans),
        "measured": [
            [subject.name, subject.record.measured_peak_bytes, subject.record.measured_time_ratio]
            for subject in subjects
            if subject.record and subject.record.measured_time_ratio is not None
        ],
        "peers": [
            [peer.name, peer.peak_bytes, peer.time_ratio] for subject in subjects for peer in subject.peers
        ],
    }


def _line(subject: Subject) -> list[tuple[int, float]]:
    plain = subject.plan.plain_seconds if subject.plan else 0.0
    points = subject.frontier.points if subject.frontier else ()
    return [(point.peak_bytes, 1 + point.extra_seconds / (plain or 1.0)) for point in points]


def _chosen(name: str, plan: Plan) -> Columns:
    return {
        "name": name,
        "allowed": plan.allowed_bytes,
        "bytes": plan.projected_peak_bytes,
        "ratio": plan.time_ratio,
        "bound": plan.bound,
    }
