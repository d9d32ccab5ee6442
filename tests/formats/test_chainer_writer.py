"""Writing Chainer files: what was read comes back equal, and what the format cannot carry is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stowplan.errors import BadUse
from stowplan.formats import chainer
from stowplan.formats.chainer import SavedView
from stowplan.formats.chainer.records import format_slices, parse_slices
from stowplan.ir import Attribute, Document, Graph, Kind, Op, Phase, Tensor
from tests.support.chainer_dump import Call, Json, dump

BOTH_VIEWS = pytest.mark.parametrize("view", list(SavedView))


@pytest.fixture(scope="module")
def text(dump: Callable[[str], Path]) -> str:
    return dump("chainer").read_text()


@pytest.fixture(scope="module")
def documents(text: str) -> dict[SavedView, Document]:
    return {view: chainer.read(text, view) for view in SavedView}


@pytest.fixture(scope="module")
def listed(documents: dict[SavedView, Document]) -> Graph:
    return documents[SavedView.LISTED].graph


@BOTH_VIEWS
def test_the_file_survives_being_written(
    text: str, documents: dict[SavedView, Document], view: SavedView
) -> None:
    written = chainer.write(documents[view].graph)
    for again in SavedView:
        copy = chainer.read(written, again)
        assert copy.graph == documents[again].graph
        assert copy.counts["backward_outputs"] == documents[again].counts["backward_outputs"]
    assert sorted(written.split("\n")[1:109]) == sorted(text.split("\n")[1:109])


def test_what_the_format_cannot_carry_is_refused(listed: Graph) -> None:
    named = replace(listed.tensors["0"], layout="NHWC")
    with pytest.raises(BadUse, match="'0' would come back with another layout"):
        chainer.write(replace(listed, tensors={**listed.tensors, "0": named}))
    with pytest.raises(BadUse, match="held"):
        chainer.write(replace(listed, held=frozenset({"0"})))
    with pytest.raises(BadUse, match="rank is None"):
        chainer.write(Graph({"x": Tensor("x", Kind.ACTIVATION, nbytes=4)}, (Op("f", "f", Phase.FORWARD),)))


SLICES = st.tuples(*[st.none() | st.integers(-9, 9)] * 3)
INDEX_TUPLES = st.lists(SLICES | st.integers(-9, 9) | st.none() | st.just("..."), max_size=4).map(tuple)


@given(INDEX_TUPLES)
def test_slices_are_spelled_as_python_does(indices: tuple[Attribute, ...]) -> None:
    written = format_slices(indices)
    python = [slice(*i) if isinstance(i, tuple) else ... if i == "..." else i for i in indices]
    assert written == str(tuple(python))
    assert parse_slices(str(written)) == indices


def test_other_indices_stay_text() -> None:
    for odd in ("", "__import__('os')", "(array([0, 1]),)", "(slice(1, 2),)", "(1, 2"):
        assert parse_slices(odd) == odd


@st.composite
def steps(draw: st.DrawFn) -> str:
    """Files of small steps with random reuse, sizes, retained indexes and functions nobody knows."""
    variables = {"0": (draw(st.integers(0, 99)), "0"), "1": (8, "/link/W")}
    calls = []
    for number in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(["ReLU", "Dropout", "GetItem", "Concat", "Unheard"]))
        most = 3 if kind in ("Concat", "Unheard") else 1
        inputs = draw(st.lists(st.sampled_from(sorted(variables)), min_size=1, max_size=most))
        indexes = st.none() | st.lists(st.integers(0, len(inputs) - 1), max_size=2)
        attributes: dict[str, Json] = {
            "_input_indexes_to_retain": draw(indexes),
            "_output_indexes_to_retain": draw(st.none() | st.just([0])),
            "slices": str(draw(INDEX_TUPLES.map(format_slices))),
            "odd": draw(st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3)),
        }
        output = str(number + 2)
        calls.append(Call(kind, inputs, [output], attributes))
        variables[output] = (draw(st.integers(0, 99)), "_")
    return dump(variables, calls)


@given(steps(), st.sampled_from(list(SavedView)))
@pytest.mark.slow
def test_any_step_survives_being_written(step: str, view: SavedView) -> None:
    graph = chainer.read(step, view).graph
    assert chainer.read(chainer.write(graph), view).graph == graph
