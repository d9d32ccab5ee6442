"""The memory of an eager step: the storages that came and went while the step was watched.

Autograd keeps what its formulas need, Python what its variables hold; neither follows from the graph. The
watched run shows it exactly, with one exception: on stand-ins, autograd allocates a tensor in some places
where eager overwrites one that nothing else holds. Those allocations are removed here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from stowplan.capture.functional import FunctionalStep
from stowplan.capture.recording import Recording
from stowplan.capture.storage_views import StorageView
from stowplan.capture.watching import Event
from stowplan.ir import Kind

aten = torch.ops.aten

# Autograd's formulas write these in place, unless a tensor is of a subclass, as stand-ins are.
_WRITTEN_BY_FORMULAS = (
    aten.index_put.default,
    aten.scatter_add.default,
    aten.scatter.src,
    aten.index_add.default,
    aten.masked_fill.Scalar,
)


@dataclass(frozen=True, slots=True)
class Span:
    """A storage that exists from one event to another, inclusive; named after the first tensor in it."""

    tensor: str
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class EagerMemory:
    """The storages of an eager step. `ops` are the ids of the graph's ops that each event became."""

    ops: tuple[tuple[str, ...], ...]
    spans: tuple[Span, ...]

    def curve_bytes(self, workspace_bytes: Mapping[str, int] | None = None) -> NDArray[np.int64]:
        """Bytes alive during each event, including `workspace_bytes` of kernels, by op id."""
        change = np.zeros(len(self.ops) + 1, dtype=np.int64)
        for span in self.spans:
            change[span.first] += span.nbytes
            change[span.last + 1] -= span.nbytes
        known = workspace_bytes or {}
        workspace = [max((known.get(op, 0) for op in ops), default=0) for ops in self.ops]
        curve: NDArray[np.int64] = np.cumsum(change[:-1]) + np.array(workspace, dtype=np.int64)
        return curve

    def peak_bytes(self, workspace_bytes: Mapping[str, int] | None = None) -> int:
        """The most bytes alive at once, including parameters."""
        return int(self.curve_bytes(workspace_bytes).max(initial=0))


def eager_memory(recording: Recording, functional: FunctionalStep) -> EagerMemory:
    """The spans of everything but constants, which belong to the loaded program."""
    ops: list[list[str]] = [[] for _ in recording.events]
    for call in functional.calls:
        ops[call.event].append(call.id)
    return EagerMemory(tuple(map(tuple, ops)), tuple(_spans(recording, functional)))


def _spans(recording: Recording, functional: FunctionalStep) -> Iterator[Span]:
    names = {
        value.view.storage: name
        for name, value in reversed(list(functional.values.items()))
        if value.root == name
    }
    constants = {o.view.storage for o in recording.externals if o.kind is Kind.CONSTANT}
    tangents = {
        view.storage: _tangent_end(recording, view) for view in recording.tangents if view is not None
    }
    latest = len(recording.events) - 1  # before the turn if gradients pass through a backward without ops
    last = [latest if life.died is None else life.died for life in recording.lifetimes]
    taken_over = _taken_over(recording, last)
    for later, earlier in reversed(taken_over.items()):
        last[earlier] = last[later]
    for number, life in enumerate(recording.lifetimes):
        if number in tangents:
            first, end = min(recording.turn, latest), min(tangents[number], latest)
        else:
            first, end = max(0, life.born), last[number]
        if number not in constants and number not in taken_over and first <= end:
            yield Span(names.get(number, ""), life.nbytes, first, end)


def _taken_over(recording: Recording, last: list[int]) -> dict[int, int]:
    """Storages that eager does not allocate, and the storages it overwrites in their place.

    Eager overwrites only a tensor that nothing else holds; a view holds the tensor it views.
    """
    taken: dict[int, int] = {}
    views: set[StorageView] = set()
    for position, event in enumerate(recording.events):
        source, result = event.args[0] if event.args else None, event.results[0]
        if _writes_in_eager(event) and isinstance(source, StorageView) and result is not None:
            sole = last[source.storage] == position and source not in views
            if sole and source.is_dense():
                taken[result.storage] = source.storage
        views.update(
            view for view in event.results if view and recording.lifetimes[view.storage].born != position
        )
    return taken


def _writes_in_eager(event: Event) -> bool:
    return event.merges or (event.node is not None and event.target in _WRITTEN_BY_FORMULAS)


def _tangent_end(recording: Recording, tangent: StorageView) -> int:
    """The call of backward holds the gradient of a loss; others die at their last reader or are handed on."""
    handed_on = {gradient.storage for gradient in recording.gradients.values()}
    if not tangent.shape or tangent.storage in handed_on:
        return len(recording.events) - 1
    readers = (position for position, event in enumerate(recording.events) if tangent in event.args)
    return max(readers, default=recording.turn)
