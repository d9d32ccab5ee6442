"""The file form gives back the document it was made of, and nothing but that document."""

import json
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from itertools import product
from random import Random
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stowplan.errors import BadInput, BadUse
from stowplan.formats import stow
from stowplan.ir import Document, Interval, Kind, Profile, Tensor
from stowplan.ir.text import parse_graph
from tests.support.graphs import documents

GRAPH = parse_graph(
    """\
stowplan graph 1 step
parameter W: float32[4,4] bytes=64
input x: float32[1,4] bytes=16
held activation y: float32[1,4] bytes=16
forward fc: MatMul(x, W saved) -> (y) {"scale": Infinity, "sizes": [1, 2]}
"""
)
DOCUMENT = Document("stow", GRAPH, counts={"rows": 5})
FILE = stow.write(DOCUMENT)
ENDLESS = (
    '{"tensors":[],"ops":[],"profile":{"clocks":{"host":{"fc":'
    '{"start_seconds":0.0,"kernel_seconds":0.0,"end_seconds":1e300}}},"estimated":false}}'
)


def signed(document: str) -> str:
    """A file whose digest fits its document, whatever that says."""
    digest = sha256(document.encode()).hexdigest()
    return f'{{"format":"stow","version":1,"digest":"sha256:{digest}","document":{document}}}'


def stow_document(file: str) -> str:
    """The document of a file in its canonical spelling."""
    return json.dumps(json.loads(file)["document"], separators=(",", ":"))


@given(documents())
@pytest.mark.slow
def test_every_document_survives_its_file(document: Document) -> None:
    text = stow.write(document)
    assert stow.recognise(text)
    assert stow.read(text) == document
    assert stow.write(stow.read(text)) == text


def test_the_file_reads_like_the_document() -> None:
    digest = json.loads(FILE)["digest"]
    assert FILE.splitlines() == [
        f'{{"format":"stow","version":1,"digest":"{digest}","document":{{"tensors":[',
        '{"id":"W","kind":"parameter","shape":[4,4],"dtype":"float32","nbytes":64},',
        '{"id":"x","kind":"input","shape":[1,4],"dtype":"float32","nbytes":16},',
        '{"id":"y","kind":"activation","shape":[1,4],"dtype":"float32","nbytes":16}',
        '],"ops":[',
        '{"id":"fc","type":"MatMul","phase":"forward","inputs":["x",["W","saved"]],"outputs":["y"],'
        '"attributes":{"scale":{"$float":"inf"},"sizes":[1,2]}}',
        '],"held":["y"],"name":"step","counts":{"rows":5}}}',
    ]


def test_a_flipped_bit_never_gives_another_document() -> None:
    harmless = 0
    for position, bit in product(range(len(FILE)), range(7)):
        flipped = FILE[:position] + chr(ord(FILE[position]) ^ (1 << bit)) + FILE[position + 1 :]
        with suppress(BadInput):
            assert stow.read(flipped) == DOCUMENT
            harmless += 1
    assert harmless < 50  # one blank for another


def test_damage_under_a_fitting_digest_is_found_by_the_schema_or_harmless() -> None:
    document, random = stow_document(FILE), Random(0)
    refusals = []
    for _ in range(5_000):
        low, high = sorted(random.choices(range(len(document)), k=2))
        piece = random.choice(("", document[low:high], random.choice('"{}[],:0-9.e\\')))
        high = random.choice((low + 1, low + 1, high))
        try:
            assert stow.read(signed(document[:low] + piece + document[high:])).format == "stow"
        except BadInput as error:
            refusals.append(error.where)
    assert len(refusals) > 4_000
    assert all(refusals)


@given(st.integers(0, len(FILE) - 3))
def test_a_truncated_file_is_refused(length: int) -> None:
    with pytest.raises(BadInput):
        stow.read(FILE[:length])


@pytest.mark.parametrize("indent", [None, 1, 4])
def test_another_tool_may_lay_the_file_out_anew(indent: int | None) -> None:
    assert stow.read(json.dumps(json.loads(FILE), indent=indent, sort_keys=True)) == DOCUMENT


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        (FILE.replace("64", "65"), "$.digest", "changed or damaged"),
        (
            FILE.replace('"version":1', '"version":2'),
            "$",
            "is 'stow' version 2, and this stowplan reads version 1",
        ),
        (FILE.replace('"version":1', '"version":1,"version":1'), "$", "key 'version' comes twice"),
        (FILE.replace('"nbytes":64', '"nbytes":8,"nbytes":64'), "$", "key 'nbytes' comes twice"),
        (FILE.replace('"rows":5', '"rows":4,"rows":5'), "$", "key 'rows' comes twice"),
        (FILE.replace('"nbytes":64', '"nbytes":64,"colour":1'), "$.tensors[0]", "unknown field `colour`"),
        (FILE.replace("float32", "float33"), "$.tensors[0].dtype", "Invalid enum value 'float33'"),
        (FILE.replace('"nbytes":64', '"nbytes":6.4'), "$.tensors[0].nbytes", "Expected `int | null`"),
        (FILE.replace("[1,2]", "[" * 100_000), "$", "nested too deeply"),
        (
            signed('{"tensors":[{"id":"x","kind":"input"},{"id":"x","kind":"mask"}],"ops":[]}'),
            "$.tensors",
            "'x' comes twice",
        ),
        (signed('{"tensors":[],"ops":[],"held":["x"]}'), "$.ops", "held tensor 'x' is unknown"),
        (
            signed(
                '{"tensors":[],"ops":[{"id":"f","type":"F","phase":"forward","attributes":{"a":{"$b":1}}}]}'
            ),
            "$.ops",
            "begins with one $",
        ),
        (
            signed(
                '{"tensors":[],"ops":[{"id":"f","type":"F","phase":"forward","attributes":{"a":{"$float":"1"}}}]}'
            ),
            "$.ops",
            "inf, -inf, nan",
        ),
        (signed(ENDLESS), "$.profile", "not within 1e+12 s"),
        ("", "$", "ends in the middle"),
        ("[]", "$", "Expected `object`"),
    ],
)
def test_a_file_that_is_not_what_was_written_is_refused(text: str, where: str, what: str) -> None:
    with pytest.raises(BadInput) as caught:
        stow.read(text)
    assert caught.value.where == where
    assert what in caught.value.what


def test_only_its_own_files_are_recognised() -> None:
    assert stow.recognise(' {\n "format" : "stow", "version": 1}')
    assert not stow.recognise('{"profiler": {"format": "stow"}}')
    assert not stow.recognise("108 120\n")


def test_what_json_cannot_carry_is_refused_when_written() -> None:
    for moment in (float("inf"), float("nan"), 1e300):
        endless = Profile({"host": {"fc": Interval(0.0, 0.0, moment)}})
        with pytest.raises(BadUse, match="op 'fc' has a time on clock 'host'"):
            stow.write(replace(DOCUMENT, profile=endless))
    half_a_pair = {"\ud800": Tensor("\ud800", Kind.INPUT)}
    with pytest.raises(BadUse, match="not Unicode"):
        stow.write(replace(DOCUMENT, graph=replace(GRAPH, tensors=half_a_pair, ops=(), held=frozenset())))


def test_mappings_of_any_type_are_written() -> None:
    frozen = replace(DOCUMENT, profile=Profile(MappingProxyType({"host": MappingProxyType({})})))
    assert stow.read(stow.write(frozen)) == frozen
