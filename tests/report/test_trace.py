"""Traces obey the rules of those who open them: known fields, slices that nest, counters that go forward."""

import gzip
import json
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stowplan.ir import Document, Graph
from stowplan.plan.record import Record
from stowplan.plan.steps import RecomputeOp
from stowplan.report.files import opened
from stowplan.report.page import PageSubject, subject_of
from stowplan.report.trace import trace_of
from tests.support.pages import plan_of, planner_of
from tests.support.plans import moved

FIELDS = {
    "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"},
    "C": {"ph", "name", "pid", "tid", "ts", "args"},
    "M": {"ph", "name", "pid", "tid", "args"},
    "s": {"ph", "name", "cat", "id", "pid", "tid", "ts"},
    "f": {"ph", "name", "cat", "id", "pid", "tid", "ts", "bp"},
}

Dump = Callable[[str], Path]
Event = dict[str, Any]


def events_of(*subjects: PageSubject) -> list[Event]:
    trace = json.loads(gzip.decompress(trace_of(subjects)))
    events: list[Event] = trace["traceEvents"]
    return events


def check(events: list[Event]) -> None:
    """Raises where a viewer would drop or misplace something."""
    slices, counters, arrows = defaultdict(list), defaultdict(list), defaultdict(list)
    for event in events:
        assert set(event) == FIELDS[event["ph"]]
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
            counters[event["pid"], event["name"]].append(event["ts"])
        elif event["ph"] in "sf":
            arrows[event["id"]].append(event)
    for spans in slices.values():
        assert all(one[1] <= other[0] + 1e-6 for one, other in pairwise(sorted(spans)))
    for times in counters.values():
        assert times == sorted(times)
    for start, end in arrows.values():
        assert (start["ph"], end["ph"]) == ("s", "f")
        assert start["ts"] < end["ts"]
        for mark in (start, end):
            spans = slices[mark["pid"], mark["tid"]]
            assert any(begin <= mark["ts"] <= stop for begin, stop in spans)


@pytest.mark.parametrize("name", ["chainer", "megengine", "regiongraph", "tensorflow", "tilelog"])
def test_the_trace_of_every_document_is_sound(name: str, dump: Dump) -> None:
    subject = subject_of(opened(dump(name)), name)
    events = events_of(subject)
    check(events)
    assert sum(event["ph"] == "X" for event in events) >= len(subject.graph.ops)


def test_a_profile_stands_on_its_two_clocks(dump: Dump) -> None:
    events = events_of(subject_of(opened(dump("megengine")), "resnet"))
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert processes == ["resnet: host clock", "resnet: device clock"]
    kernels = [event for event in events if event["ph"] == "X" and event["cat"] == "kernel"]
    ends: defaultdict[int, float] = defaultdict(float)
    for event in kernels:
        ends[event["pid"]] = max(ends[event["pid"]], event["ts"] + event["dur"])
    assert [round(end / 1000, 3) for end in ends.values()] == [3.895, 22.797]  # milliseconds
    assert any(event["ph"] == "C" for event in events)


def test_a_plan_has_an_arrow_for_every_recomputed_tensor(dump: Dump) -> None:
    plan = plan_of(dump("chainer"))
    events = events_of(subject_of(plan, "plan"))
    check(events)
    remade = sum(len(step.outputs) for step in plan.steps if isinstance(step, RecomputeOp))
    assert sum(event["ph"] == "s" for event in events) == remade > 0
    memory = [sum(event["args"].values()) for event in events if event["ph"] == "C"]
    assert max(memory) == plan.projected_peak_bytes


def test_transfers_have_streams_of_their_own_and_arrows_from_store_to_load(dump: Dump) -> None:
    planner = planner_of(dump("chainer"))
    plan = moved(planner.plan(planner.plain_peak_bytes))
    events = events_of(subject_of(plan, "moved"))
    check(events)
    threads = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert threads == ["steps", "stores", "loads"]
    slices = {(event["tid"], event["ts"], event["dur"]): event for event in events if event["ph"] == "X"}
    arrows = [event for event in events if event["ph"] in "sf" and event["cat"] == "offloaded"]
    assert len(arrows) == 2 * 4
    assert {event["tid"] for event in arrows if event["ph"] == "s"} == {2}
    assert {event["tid"] for event in arrows if event["ph"] == "f"} == {3}
    assert sum(event["cat"] == "wait" for event in slices.values()) > 0
    away = [event["args"]["bytes"] for event in events if event["name"] == "offloaded" and event["ph"] == "C"]
    assert max(away) > 0
    assert away[0] == 0


def test_a_run_brings_what_it_measured(dump: Dump) -> None:
    record = Record(plan_of(dump("chainer")), "cpu", (1, 3, 2), (0.0, 0.1, 0.2), 0.3)
    events = events_of(subject_of(record, "run"))
    check(events)
    measured = [event["args"]["bytes"] for event in events if event["name"] == "measured memory"]
    assert measured == [1, 3, 2]


def test_several_subjects_keep_apart(dump: Dump) -> None:
    plan = plan_of(dump("chainer"))
    events = events_of(subject_of(plan, "one"), subject_of(plan, "two"))
    check(events)
    assert len({event["pid"] for event in events}) == 2


def test_an_empty_graph_has_an_empty_trace() -> None:
    check(events_of(subject_of(Document("graph", Graph({}, ())), "empty")))


def test_the_check_itself_sees_slices_that_overlap(dump: Dump) -> None:
    events = events_of(subject_of(plan_of(dump("chainer")), "plan"))
    first = next(event for event in events if event["ph"] == "X" and event["dur"])
    first["dur"] *= 10
    with pytest.raises(AssertionError):
        check(events)
