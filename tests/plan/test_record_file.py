"""Records and peers keep what they say in files, and damage is noticed."""

import pytest

from stowplan import Search
from stowplan.errors import BadInput
from stowplan.plan.explain.peers import Peer, read_peers
from stowplan.plan.files import record_file
from stowplan.plan.options import PlanOptions
from stowplan.plan.planner import Planner
from stowplan.plan.record import Difference, Record
from tests.support.steps import random_step, uneven_prices


@pytest.fixture(scope="module")
def record() -> Record:
    graph = random_step(3, layers=8)
    planner = Planner.of(graph, uneven_prices(graph, 3), options=PlanOptions(search=Search(moves=100)))
    plan = planner.plan(planner.minimum_bytes)
    return Record(
        plan,
        "cpu",
        measured_curve_bytes=(100, 300, 200),
        measured_curve_seconds=(0.0, 0.5, 1.0),
        measured_seconds=1.25,
        plain_measured_peak_bytes=400,
        plain_measured_seconds=1.0,
        differences=(Difference("w.grad", 0.0, 2.0), Difference("b.grad", 1e-7, 0.5)),
    )


def test_a_record_comes_back_from_its_file(record: Record) -> None:
    text = record_file.write(record)
    assert record_file.recognise(text)
    assert record_file.read(text) == record


def test_a_damaged_record_is_refused(record: Record) -> None:
    text = record_file.write(record)
    with pytest.raises(BadInput, match="digest"):
        record_file.read(text.replace('"measured_seconds":1.25', '"measured_seconds":1.26'))
    for broken in (text[:-3], text.replace("stowplan.record", "stowplan.recorf"), "{}", ""):
        with pytest.raises(BadInput):
            record_file.read(broken)


def test_a_record_says_what_it_comes_to(record: Record) -> None:
    assert record.measured_peak_bytes == 300
    assert record.measured_time_ratio == 1.25
    assert record.worst is not None
    assert record.worst.tensor == "b.grad"


def test_peers_are_read_from_a_benchmark_file() -> None:
    text = '{"peers": [{"name": "checkpoint", "peak_bytes": 5, "time_ratio": 1.3}], "machine": "any"}'
    assert read_peers(text) == (Peer("checkpoint", 5, 1.3),)
    with pytest.raises(BadInput):
        read_peers('{"peers": [{"name": "checkpoint"}]}')
