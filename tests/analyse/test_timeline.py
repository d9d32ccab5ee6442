"""The timeline of a graph adds up to its memory curve."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings

from stowplan.analyse import facts_of
from stowplan.analyse.timeline import timeline_of
from stowplan.formats.door import read_document
from stowplan.ir import Graph, Kind
from tests.support.graphs import legal_graphs


@given(legal_graphs(sized=True))
@settings(max_examples=100)
@pytest.mark.slow
def test_stays_add_up_to_the_memory_curve(graph: Graph) -> None:
    timeline = timeline_of(graph)
    assert timeline.curve_bytes().tolist() == facts_of(graph).curve_bytes.tolist()
    assert [run.op for run in timeline.runs] == [op.id for op in graph.ops]


@pytest.mark.parametrize("name", ["chainer", "megengine", "regiongraph", "tensorflow", "tilelog"])
def test_of_the_documents_too(name: str, dump: Callable[[str], Path]) -> None:
    graph = read_document(dump(name)).graph
    timeline, facts = timeline_of(graph), facts_of(graph)
    assert timeline.curve_bytes().tolist() == facts.curve_bytes.tolist()
    assert sum(map(sum, timeline.bytes_by_kind().values())) == facts.curve_bytes.sum()
    assert all(graph.tensors[stay.tensor].kind is not Kind.CONSTANT for stay in timeline.stays)
    for stay in timeline.stays:
        assert stay.uses == tuple(sorted(set(stay.uses)))
        assert all(stay.first <= use <= stay.last for use in stay.uses)
