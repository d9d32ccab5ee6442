"""All data of a page as one JSON value: columns, memory curves, regions, arenas and frontier."""

from collections.abc import Iterator, Sequence

from stowplan.analyse.inspection import PACKED_UNASKED
from stowplan.analyse.timeline import Offsets, curve_onto, packed_arena, recorded_arena
from stowplan.ir import Document, Graph, RegionLists
from stowplan.plan.plan import Plan
from stowplan.report.page.columns import (
    WORDS,
    Columns,
    arena_columns,
    away_columns,
    held_of,
    largest_first,
    ops_columns,
    plan_words,
    rows_of,
    runs_columns,
    stays_columns,
    tensors_columns,
)
from stowplan.report.page.figures import figures_of
from stowplan.report.page.subject import PageSubject
from stowplan.report.page.tiles import box, tilings_of


def curve_of(subject: PageSubject, others: Sequence[PageSubject]) -> Columns:
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


def _beside(subject: PageSubject, others: Sequence[PageSubject]) -> Iterator[Columns]:
    for name, curve in subject.curves_beside():
        yield {"name": name, "bytes": curve.tolist()}
    for other in others:
        if other is not subject:
            yield {"name": other.name, "bytes": curve_onto(subject.timeline, other.timeline).tolist()}


def frontier_of_subjects(subjects: Sequence[PageSubject]) -> Columns | None:
    """One picture for all subjects that have a plan."""
    plans = [(subject.name, subject.plan) for subject in subjects if subject.plan]
    if not plans:
        return None
    return {
        "lines": [_line(subject) for subject in subjects if subject.frontier and subject.plan],
        "plans": [_chosen(name, plan) for name, plan in plans],
        "plain_bytes": plans[0][1].plain_peak_bytes,
        "minimum_bytes": min((least for _, plan in plans if (least := plan.minimum_bytes)), default=None),
        "measured": [
            [subject.name, subject.record.measured_peak_bytes, subject.record.measured_time_ratio]
            for subject in subjects
            if subject.record and subject.record.measured_time_ratio is not None
        ],
        "peers": [
            [peer.name, peer.peak_bytes, peer.time_ratio] for subject in subjects for peer in subject.peers
        ],
    }


def _line(subject: PageSubject) -> list[tuple[int, float]]:
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


def regions_of(document: Document) -> Columns | None:
    """Per tensor what the worker reads and writes, per op the rectangle of each port."""
    regions = document.regions
    if regions is None:
        return None
    return {
        "tensors": _by_number(document.graph, regions),
        "ops": [
            [[port, box(rect)] for port, rect in regions.ops.get(op.id, {}).items()]
            for op in document.graph.ops
        ],
    }


def _by_number(graph: Graph, regions: RegionLists) -> list[Columns | None]:
    found: list[Columns | None] = []
    for name, tensor in graph.tensors.items():
        region = regions.tensors.get(name)
        found.append(
            {
                "shape": tensor.shape,
                "read": box(region.read) if region.read else None,
                "write": box(region.write) if region.write else None,
            }
            if region
            else None
        )
    return found


def data_of(subjects: Sequence[PageSubject], title: str) -> Columns:
    """The subjects in turn, and the frontier of all of them."""
    return {
        "title": title,
        "words": WORDS,
        "subjects": [_subject(subject, subjects) for subject in subjects],
        "frontier": frontier_of_subjects(subjects),
    }


def _subject(subject: PageSubject, subjects: Sequence[PageSubject]) -> Columns:
    timeline, document = subject.timeline, subject.document
    order = largest_first(timeline)
    return {
        "name": subject.name,
        "what": _what(subject),
        "figures": figures_of(subject),
        "timed_by": subject.timed_by,
        "decisions": plan_words(subject.plan) if subject.plan else [],
        "ops": ops_columns(subject),
        "tensors": tensors_columns(subject),
        "held": held_of(subject.graph),
        "runs": runs_columns(timeline),
        "stays": stays_columns(timeline, order),
        "away": away_columns(timeline),
        "rows": rows_of(timeline),
        "curve": curve_of(subject, subjects),
        "arenas": [arena_columns(arena, order) for arena in _arenas_of(subject)],
        "tilings": tilings_of(subject),
        "regions": regions_of(document) if document else None,
        "notes": [[note.kind, note.where, note.what] for note in document.notes] if document else [],
    }


def _what(subject: PageSubject) -> str:
    """The word for a subject."""
    if subject.record:
        return f"run on {subject.record.device}"
    if subject.plan:
        return "plan"
    return subject.document.format if subject.document else ""


def _arenas_of(subject: PageSubject) -> Iterator[Offsets]:
    """The addresses that the file has, or those that the allocator of a device would give; and one arena."""
    document, timeline = subject.document, subject.timeline
    if document and document.allocation:
        yield recorded_arena(timeline, document.allocation)
        if len(timeline.stays) > PACKED_UNASKED:
            return
    if subject.plan and subject.plan.projected_for:
        from stowplan.plan.allocator.placed import placed_by_allocator
        from stowplan.plan.allocator.settings import AllocatorSettings

        yield placed_by_allocator(subject.plan, AllocatorSettings())
    yield packed_arena(timeline)
