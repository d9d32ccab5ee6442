"""All that a page shows, as one JSON value."""

from collections.abc import Sequence

from stowplan.analyse.arena import Arena, packed_arena, recorded_arena
from stowplan.report.page.columns import (
    WORDS,
    Columns,
    away_columns,
    held_of,
    ops_columns,
    plan_words,
    rows_of,
    runs_columns,
    stays_columns,
    tensors_columns,
)
from stowplan.report.page.curves import curve_of
from stowplan.report.page.figures import figures_of
from stowplan.report.page.frontier import frontier_of_subjects
from stowplan.report.page.regions import regions_of
from stowplan.report.page.subject import Subject
from stowplan.report.page.tiles import tilings_of


def data_of(subjects: Sequence[Subject], title: str) -> Columns:
    """The subjects in turn, and what is told of all of them together."""
    return {
        "title": title,
        "words": WORDS,
        "subjects": [_subject(subject, subjects) for subject in subjects],
        "frontier": frontier_of_subjects(subjects),
    }


def _subject(subject: Subject, subjects: Sequence[Subject]) -> Columns:
    timeline, document = subject.timeline, subject.document
    arena = _arena_of(subject)
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
        "stays": stays_columns(timeline, arena.offsets),
        "away": away_columns(timeline),
        "rows": rows_of(timeline),
        "curve": curve_of(subject, subjects),
        "arena": _arena(arena),
        "tilings": tilings_of(subject),
        "regions": regions_of(document) if document else None,
        "notes": [[note.kind, note.where, note.what] for note in document.notes] if document else [],
    }


def _what(subject: Subject) -> str:
    """The word for a subject."""
    if subject.record:
        return f"run on {subject.record.device}"
    if subject.plan:
        return "plan"
    return subject.document.format if subject.document else ""


def _arena_of(subject: Subject) -> Arena:
    document = subject.document
    if document and document.allocation:
        return recorded_arena(subject.timeline, document.allocation)
    return packed_arena(subject.timeline)


def _arena(arena: Arena) -> Columns:
    return {
        "bytes": arena.nbytes,
        "recorded": arena.recorded,
        "asides": [[run, offset] for run, offset in sorted(arena.aside_offsets.items())],
    }
