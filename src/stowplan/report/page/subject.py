"""Subject: one thing that a report shows, with the timeline that every view is drawn along."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from stowplan.analyse.timeline import Timeline, timed_onto, timeline_of
from stowplan.errors import BadUse
from stowplan.ir import Document, Graph
from stowplan.plan.explain.peers import Peer
from stowplan.plan.explain.timeline import baseline_curve_of, timeline_of_plan
from stowplan.plan.explain.transfers import Clock, clock_of
from stowplan.plan.frontier import Frontier
from stowplan.plan.plan import Plan
from stowplan.plan.prices import price_by_profile
from stowplan.plan.record import Record

Thing: TypeAlias = Document | Graph | Plan | Record


@dataclass(frozen=True, slots=True)
class PageSubject:
    """A document, a plan, or a record with its plan. `seconds` are by op and come from `timed_by`.

    A plan has a `clock`, because its transfers overlap with ops.
    """

    name: str
    timeline: Timeline
    document: Document | None = None
    plan: Plan | None = None
    record: Record | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    timed_by: str = ""
    clock: Clock | None = None
    frontier: Frontier | None = None
    peers: tuple[Peer, ...] = ()

    @property
    def graph(self) -> Graph:
        return self.timeline.graph

    def curves_beside(self) -> Iterator[tuple[str, NDArray[np.int64]]]:
        """What its memory is compared with, on its own axis: the baseline, what waits in a tier, the run."""
        if self.plan:
            yield baseline_curve_of(self.plan, self.timeline)
        if self.timeline.away:
            yield "offloaded", self.timeline.away_bytes()
        if self.record:
            yield "measured", self._measured(self.record)

    def _measured(self, record: Record) -> NDArray[np.int64]:
        """The measured curve on the axis of steps, as if the run had kept to the projected times."""
        runs = self.timeline.runs
        durations = [0.0 if run.doing.is_transfer else self.seconds.get(run.op, 0.0) for run in runs]
        curve = np.array(record.measured_curve_bytes, dtype=np.int64)
        return timed_onto(durations, curve, record.measured_curve_seconds)


def subject_of(
    thing: Thing, name: str = "", *, frontier: Frontier | None = None, peers: tuple[Peer, ...] = ()
) -> PageSubject:
    """The subject of a thing; its default name is that of the graph."""
    match thing:
        case Graph():
            return subject_of(Document("graph", thing), name)
        case Document():
            return _of_document(thing, name or thing.graph.name or thing.format)
        case Plan():
            return _of_plan(thing, name or thing.graph.name or "plan", None, frontier, peers)
        case Record():
            return _of_plan(thing.plan, name or thing.plan.graph.name or "run", thing, frontier, peers)


def _of_document(document: Document, name: str) -> PageSubject:
    seconds, timed_by = _seconds_of(document)
    return PageSubject(name, timeline_of(document.graph), document, seconds=seconds, timed_by=timed_by)


def _seconds_of(document: Document) -> tuple[Mapping[str, float], str]:
    """The times of a profile, if it has one for every op."""
    if document.profile is None:
        return {}, ""
    try:
        pricing = price_by_profile(document.graph, document.profile, {})
    except BadUse:
        return {}, ""
    return pricing.seconds, str(pricing.basis)


def _of_plan(
    plan: Plan, name: str, record: Record | None, frontier: Frontier | None, peers: tuple[Peer, ...]
) -> PageSubject:
    timeline, clock = timeline_of_plan(plan), clock_of(plan)
    runs = zip(timeline.runs, clock.spans, strict=True)
    return PageSubject(
        name,
        timeline,
        plan=plan,
        record=record,
        seconds={**{run.op: span.seconds for run, span in runs}, **plan.pricing.seconds},
        timed_by=str(plan.pricing.basis),
        clock=clock,
        frontier=frontier,
        peers=peers,
    )
