"""A part of PyTorch's own databases: `make databases` runs all of them."""

from collections.abc import Iterator

import pytest
import torch

from tests.support.databases import (
    Entry,
    Outcome,
    module_entries,
    op_entries,
    optimizer_entries,
    result_of,
)


def some() -> Iterator[Entry]:
    """One op in sixteen, one module in eight, one optimizer in three; a sample of each."""
    yield from op_entries(torch.float32, 1, every=16)
    yield from module_entries(1, every=8)
    yield from optimizer_entries(every=3)


@pytest.mark.slow
def test_entries_are_equal_or_refused_with_a_cause() -> None:
    results = [(entry, result_of(entry)) for entry in some()]
    faults = [f"{e.database}: {e.name}: {r.outcome}: {r.cause}" for e, r in results if r.outcome.is_fault]
    assert not faults, "\n".join(faults)
    assert sum(result.outcome is Outcome.EQUAL for _, result in results) >= 0.9 * len(results)
