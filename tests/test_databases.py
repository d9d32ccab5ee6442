"""A part of PyTorch's own databases: `make databases` runs all of them."""

import gc
import re
from collections.abc import Iterator

import pytest
import torch

from benchmarks.databases import Answer, Choice, Part, answers, page
from tests.support.databases import (
    Entry,
    Outcome,
    Result,
    Setup,
    module_entries,
    op_entries,
    optimizer_entries,
    results_of,
)
from tests.support.machine import same_everywhere

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _same_everywhere() -> Iterator[None]:
    gc.freeze()  # the databases are many objects, among which fit would look for other models
    with same_everywhere():
        yield
    gc.unfreeze()


def some() -> Iterator[Entry]:
    """A sample of one op in fifty, of fewer in other dtypes, and of some modules and optimizers."""
    yield from op_entries("op_db", torch.float32, 1, slice(0, None, 50))
    yield from op_entries("op_db", torch.bfloat16, 1, slice(10, None, 150))
    yield from op_entries("op_db", torch.complex64, 1, slice(20, None, 200))
    yield from op_entries("custom_op_db", torch.float32, 1, slice(0, None, 5))
    yield from op_entries("hop_db", torch.float32, 1, slice(0, None, 7))
    yield from module_entries(1, slice(0, None, 20))
    yield from optimizer_entries(slice(0, None, 13))


@pytest.mark.slow
def test_entries_are_equal_or_refused_with_a_cause() -> None:
    results = [(entry, way, result) for entry in some() for way, result in results_of(entry).items()]
    faults = [
        f"{e.database}: {e.name}: {w}: {r.outcome}: {r.cause}" for e, w, r in results if r.outcome.is_fault
    ]
    assert not faults, "\n".join(faults)
    assert sum(result.outcome is Outcome.EQUAL for *_, result in results) >= 0.9 * len(results)


@pytest.mark.slow
def test_a_run_goes_on_where_it_ended() -> None:
    part = Part("optim_db", slice(0, 1))
    found = list(answers(part, Choice((), ())))
    read = [Answer.of_line(answer.line()) for answer in found]
    known = frozenset(answer.entry for answer in read)
    assert [answer.entry for answer in read] == [answer.entry for answer in found]
    assert all(one.found == other.found for one, other in zip(read, found, strict=True))
    assert not list(answers(part, Choice((), known)))
    again = list(answers(part, Choice(("weight_decay",), known)))
    assert 0 < len(again) < len(known)


def test_the_page_counts_each_way_and_groups_causes() -> None:
    refused = Result(Outcome.REFUSED, "CaptureError: net.py:3: it reads (2, 3) values; do not")
    results = [
        Answer("op_db, float32", "abs 0", dict.fromkeys(Setup, Result(Outcome.EQUAL)), 30.0),
        Answer("op_db, float32", "item 0", dict.fromkeys(Setup, refused), 30.0),
        Answer("op_db, float32", "none 0", dict.fromkeys(Setup, Result(Outcome.NOT_EAGER)), 60.0),
    ]
    text = page([answer._replace(commit="abc") for answer in results])
    assert "Of `op_db`, 50.0 % (roomy)" in text
    assert "took 2 minutes" in text
    assert "commit abc (3 entries)" in text
    assert re.search(r"\| op_db, float32 \| 3 of \d{3} \| tight \| 2 \| 1 \| 1 \| 0 \| 0 \| 0 \| 0 \|", text)
    assert "| refused | it reads (...) values | 1 | 1 | 1 | item |" in text
