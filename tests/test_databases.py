"""A part of PyTorch's own databases: `make databases` runs all of them."""

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.support.databases import (
    Entry,
    Outcome,
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
