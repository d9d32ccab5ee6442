"""What forward will read of values that exist before the step runs.

A question such as `if (mask == causal).all():` is asked of a tensor without data. If the few ops that lead to
it begin at small arguments, buffers and numbers written in code, they run ahead on the real ones: the answer
is what eager would find. PyTorch's own transformers ask so whether a mask is causal; a codebook asks a buffer
whether it was initialised. Each call asks again: see `answers`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stowplan.capture.program import draws, leaves, written_arguments
from stowplan.capture.stand_ins import StorageView

if TYPE_CHECKING:
    from stowplan.capture.watching import Event

_MOST_OPS = 16
_MOST_ELEMENTS = 1 << 22  # of a tensor that is computed ahead
MOST_FORESEEN = 1 << 18  # elements of an argument or a buffer: each call asks it again


def value_at(
    events: "Sequence[Event]", view: StorageView, known: Mapping[StorageView, Tensor]
) -> Tensor | None:
    """The tensor as it would be now; None if it follows from more than the `known` tensors, or from draws."""
    chosen = _leading_to(events, view)
    if chosen is None or not _follows_from(chosen, view, known):
        return None
    values: dict[StorageView, Tensor] = {}

    def value_of(item: object) -> object:
        if isinstance(item, tuple):
            return [value_of(part) for part in item]
        if not isinstance(item, StorageView):
            return item
        if item not in values:
            values[item] = known[item].detach().clone()
        return values[item]

    with torch.no_grad():
        for event in chosen:
            named = {name: value_of(value) for name, value in event.kwargs.items()}
            made = event.target(*(value_of(value) for value in event.args), **named)
            results = made if isinstance(made, (tuple, list)) else (made,)
            pairs = zip(event.results, results, strict=True)
            values.update((result, tensor) for result, tensor in pairs if result is not None)
    found = value_of(view)
    assert isinstance(found, Tensor)
    return found


def _follows_from(chosen: "Sequence[Event]", view: StorageView, known: Mapping[StorageView, Tensor]) -> bool:
    """Whether these ops need no other tensors: no parameters, no large ones, no other views of known ones."""
    made, entered = set[StorageView](), {view} if not chosen else set[StorageView]()
    for event in chosen:
        given = leaves((event.args, tuple(event.kwargs.values())))
        entered.update(leaf for leaf in given if isinstance(leaf, StorageView) and leaf not in made)
        made.update(result for result in event.results if result is not None)
    storages = {leaf.storage for leaf in entered}
    is_there = view in made or view in entered
    return is_there and entered <= known.keys() and len(storages) == len(entered)


def _leading_to(events: "Sequence[Event]", view: StorageView) -> "list[Event] | None":
    """The ops that a tensor follows from, in their order; None if they are too many, too large, or draw."""
    needed, found = {view.storage}, list["Event"]()
    for event in reversed(events):
        written = leaves(tuple(written_arguments(event.target, event.args, event.kwargs).values()))
        changed = [made for made in (*event.results, *written) if isinstance(made, StorageView)]
        if needed.isdisjoint(made.storage for made in changed):
            continue
        too_large = any(math.prod(made.shape) > _MOST_ELEMENTS for made in changed)
        if too_large or len(found) == _MOST_OPS or draws(event.target, event.args, event.kwargs):
            return None
        found.append(event)
        given = leaves((event.args, tuple(event.kwargs.values())))
        needed.update(leaf.storage for leaf in given if isinstance(leaf, StorageView))
    return found[::-1]
