"""The hunter among files finds nothing in a fixed run, and finds each kind of fault that is planted."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from stowplan.errors import BadInput

from .files import BAD, MOST_BYTES, Action, Kind, batch, drawn, judged, kinds, shrunk, told

CASES = 700  # of each kind, in the suite


@pytest.mark.parametrize("name", kinds())
@pytest.mark.slow
def test_damaged_files_get_typed_answers(name: str, tmp_path: Path) -> None:
    tally = batch(kinds()[name], range(CASES))
    assert tally.cases == CASES
    assert not tally.findings, "\n".join(told(kinds()[n], s, v, tmp_path) for n, s, v in tally.findings[:3])
    assert not any(tally.outcomes[name][outcome] for outcome in BAD)


@pytest.mark.slow
def test_a_number_repeats_its_case() -> None:
    for kind in kinds().values():
        assert drawn(kind, 3) == drawn(kind, 3)
        assert len({drawn(kind, seed) for seed in range(20)}) > 10


def planted(fault: Callable[[bytes], object], actions: Mapping[str, Action] | None = None) -> Kind:
    """A kind whose files are lines with a word in them, read by something broken."""

    def read(data: bytes, _: Path) -> object:
        return fault(data)

    return Kind("planted", (b"one\ntwo\nbad three\nfour\n" * 20,), read, None, actions or {})


def lose_the_key(data: bytes) -> object:
    known: dict[bytes, int] = {}
    return known[data] if b"bad" in data else None


def refuse_without_a_place(_: bytes) -> object:
    raise BadInput("bad")


def open_a_file(_: bytes) -> object:
    return Path(__file__).read_bytes()


def spin(_: bytes) -> object:
    while True:
        pass


def hoard(_: bytes) -> object:
    return bytearray(2 * MOST_BYTES)


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        (lose_the_key, "untyped"),
        (refuse_without_a_place, "unplaced"),
        (open_a_file, "touched"),
        (spin, "slow"),
        (hoard, "large"),
    ],
)
@pytest.mark.slow
def test_a_planted_fault_is_found(fault: Callable[[bytes], object], outcome: str) -> None:
    found = batch(planted(fault), range(1))
    assert [verdict.outcome for _, _, verdict in found.findings] == [outcome]
    assert found.outcomes["planted"] == {outcome: 1}


def test_a_fault_after_reading_is_found(tmp_path: Path) -> None:
    def act(value: object, _: bytes, __: Path) -> None:
        raise IndexError(value)

    kind = planted(len, {"act": act})
    assert judged(kind, b"x", None, tmp_path).outcome == "accepted"
    verdict = judged(kind, b"x", "act", tmp_path)
    assert (verdict.outcome, verdict.action) == ("untyped", "act")


def test_a_process_that_dies_is_a_finding_and_the_others_are_judged() -> None:
    def die(data: bytes) -> object:
        return os._exit(7) if len(data) < 200 else None

    found = batch(planted(die), range(30))
    assert found.cases == 30
    assert {verdict.what for _, _, verdict in found.findings} == {"the process died"}


def test_a_finding_shrinks_to_what_matters(tmp_path: Path) -> None:
    kind = planted(lose_the_key)
    (data, *_) = kind.samples
    verdict = judged(kind, data, None, tmp_path)
    assert shrunk(kind, data, verdict) == b"bad"
    said = told(kind, 0, verdict, tmp_path / "kept")
    assert "python -m tests.hunt.files --kind planted --seed 0 --count 1" in said
    assert (tmp_path / "kept" / "planted-0").exists()
