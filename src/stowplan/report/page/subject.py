"""Subject: one thing that a report shows, with the timeline that every view is drawn along."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from stowplan.analyse.timeline import Timeline, timeline_of
from stowplan.errors import BadUse
from stowplan.ir import Document, Graph
from stowplan.plan.explain.peers import Peer
from stowplan.plan.explain.timeline import timeline_of_plan
from stowplan.plan.explain.transfers import Clock, clock_of
from stowplan.plan.frontier import Frontier
from stowplan.plan.plan import Plan, price_by_profile
from stowplan.plan.record import Record

Thing: TypeAlias = Document | Graph | Plan | Record


@dataclass(frozen=True, slots=True)
class Subject:
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


def subject_of(
    thing: Thing, name: str = "", *, frontier: Frontier | None = None, peers: tuple[Peer, ...] = ()
) -> Subject:
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


def _of_document(document: Document, name: str) -> Subject:
    seconds, timed_by = _seconds_of(document)
    return Subject(name, timeline_of(document.graph), document, seconds=seconds, timed_by=timed_by)


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
) -> Subject:
    timeline, clock = timeline_of_plan(plan), clock_of(plan)
    runs = zip(timeline.runs, clock.spans, strict=True)
    return Subject(
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
