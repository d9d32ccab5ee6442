"""Addresses of a run against a brute-force look at every pair of tensors."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stowplan.analyse import Liveness, liveness_of
from stowplan.analyse.inspection import addresses_of
from stowplan.ir import Allocation, Graph, Kind
from tests.support.graphs import legal_graphs


def are_together(liveness: Liveness, one: str, other: str) -> bool:
    """Whether the storages of two tensors exist at a common op."""
    a, b = (liveness.storages.number_of[name] for name in (one, other))
    return bool(max(liveness.start[a], liveness.start[b]) <= min(liveness.end[a], liveness.end[b]))


@given(legal_graphs(sized=True), st.data())
@pytest.mark.slow
def test_pairs_share_bytes_only_if_reported(graph: Graph, data: st.DataObject) -> None:
    liveness, spots = liveness_of(graph), st.tuples(st.integers(0, 6), st.integers(0, 4))
    places = {name: data.draw(spots) for name in graph.tensors}
    dynamic = [name for name in places if graph.tensors[name].kind is not Kind.CONSTANT]
    span = {name: set(range(places[name][0], sum(places[name]))) for name in dynamic}

    found = addresses_of(graph, Allocation(places), liveness)
    reported = {frozenset(pair) for pair in (*found.overlaps, *found.views)}
    sharing = {
        frozenset((one, other))
        for one, other in combinations(dynamic, 2)
        if span[one] & span[other] and are_together(liveness, one, other)
    }
    assert reported <= sharing
    assert bool(reported) == bool(sharing)
    assert found.tensors == len(dynamic)
    assert found.start_addresses == len({places[name][0] for name in dynamic})
    assert found.touched_bytes == len(set().union(*span.values()))


@given(legal_graphs(sized=True))
@pytest.mark.slow
def test_views_of_one_storage_are_no_overlap(graph: Graph) -> None:
    found = addresses_of(graph, Allocation(dict.fromkeys(graph.tensors, (0, 8))), liveness_of(graph))
    number_of = liveness_of(graph).storages.number_of
    assert all(number_of[one] == number_of[other] for one, other in found.views)
    assert all(number_of[one] != number_of[other] for one, other in found.overlaps)
