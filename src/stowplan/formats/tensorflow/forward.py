"""Who feeds whom in the forward half. The table gives shapes, not producers; names and control edges tell.

A candidate for an input is any value of its shape, in either layout. Five facts narrow them down:
- the folded shape constant of a gradient waits for the inputs of its forward op, by name; of these, one that
  has the shape as it is goes before one that has it in the other layout;
- ops of one name scope read each other rather than another scope's values, and the op named like the scope is
  its result, which nothing inside reads;
- a value has one reader in the forward half, so what one input must take no other can;
- no op reads what follows from its own output;
- if that leaves several, layers of one number belong together: lrn2 reads conv2.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import TypeAlias

from stowplan.formats.tensorflow.rows import RowKind, RowListing, TableRow
from stowplan.ir import Shape

_FOLDED_SHAPE = re.compile(r"(?:ConstantFolding/)?gradients/(.+)_grad/.+")

Slot: TypeAlias = tuple[str, int]
"""An op's name and the position of one of its inputs."""


def is_backward(name: str) -> bool:
    """Whether an op belongs to the backward half. (Of a transpose, the prefix says nothing.)"""
    return name.startswith("gradients/")


def forward_operands(listing: RowListing) -> dict[Slot, str]:
    """The value each input of a forward op reads: the read of a variable or another forward op."""
    readers = [row for row in listing.of_kind(RowKind.OP) if not is_backward(row.name)]
    candidates = _candidates(listing, readers, [*listing.of_kind(RowKind.READ), *readers])
    _take_singles(candidates)
    while _break_circles(candidates) or _match_numbers(candidates):
        _take_singles(candidates)
    return {slot: min(names) for slot, names in candidates.items() if len(names) == 1}


def _candidates(listing: RowListing, readers: list[TableRow], values: list[TableRow]) -> dict[Slot, set[str]]:
    by_dims, by_scope = _by_dims(values), _by_scope(values)
    by_control = _named_operands(listing, values)
    found = {}
    for row in readers:
        scope = row.name if row.name in by_scope else row.name.rpartition("/")[0]
        named, near = by_control.get(row.name, []), by_scope.get(scope, [])
        for position, wanted in enumerate(row.inputs):
            as_it_is = [value for value in named if value.output and value.output.shape == wanted.shape]
            groups = (as_it_is, named, near, by_dims.get(tuple(sorted(wanted.shape)), []))
            fitting = ({value.name for value in group if _fits(value, row, wanted.shape)} for group in groups)
            found[row.name, position] = next(filter(None, fitting), set())
    return found


def _by_dims(values: list[TableRow]) -> Mapping[Shape, list[TableRow]]:
    """The values by their sizes in any order."""
    found: defaultdict[Shape, list[TableRow]] = defaultdict(list)
    for value in values:
        found[tuple(sorted(value.output.shape)) if value.output else ()].append(value)
    return found


def _by_scope(values: list[TableRow]) -> Mapping[str, list[TableRow]]:
    """The values inside each name scope, at any depth."""
    found: defaultdict[str, list[TableRow]] = defaultdict(list)
    for value in values:
        scope = value.name.rpartition("/")[0]
        while scope:
            found[scope].append(value)
            scope = scope.rpartition("/")[0]
    return found


def _fits(value: TableRow, reader: TableRow, shape: Shape) -> bool:
    """Whether another row's value has this shape, as it is or in the other layout."""
    if value is reader or value.output is None:
        return False
    return value.output.shape == shape or shape in other_layouts(value.output.shape)


def other_layouts(shape: Shape) -> tuple[Shape, ...]:
    """An image's shape with its channels moved from front to back, and from back to front."""
    if len(shape) != 4:
        return ()
    batch, *rest = shape
    return (batch, *rest[1:], rest[0]), (batch, rest[2], *rest[:2])


def _named_operands(listing: RowListing, values: list[TableRow]) -> Mapping[str, list[TableRow]]:
    """By forward op, what the shape constants of its gradients wait for."""
    value_of = {value.name: value for value in values}
    named: defaultdict[str, list[TableRow]] = defaultdict(list)
    for row in listing.of_kind(RowKind.SHAPE_CONSTANT):
        match = _FOLDED_SHAPE.fullmatch(row.name)
        if match:
            named[match[1]] += [value_of[name] for name in row.controls if name in value_of]
    return named


def _take_singles(candidates: dict[Slot, set[str]]) -> None:
    """Where an input has one candidate left, no other input may read it; repeat until nothing changes."""
    slots_of: defaultdict[str, list[Slot]] = defaultdict(list)
    for slot, names in candidates.items():
        for name in names:
            slots_of[name].append(slot)
    settled = [slot for slot, names in candidates.items() if len(names) == 1]
    while settled:
        (taken,) = candidates[settled.pop()]
        for other in slots_of[taken]:
            if len(candidates[other]) > 1 and taken in candidates[other]:
                candidates[other].remove(taken)
                if len(candidates[other]) == 1:
                    settled.append(other)


def _break_circles(candidates: dict[Slot, set[str]]) -> bool:
    """Drop candidates that follow from the op that would read them; says whether there were any."""
    readers: defaultdict[str, list[str]] = defaultdict(list)
    for (reader, _), names in candidates.items():
        if len(names) == 1:
            readers[min(names)].append(reader)
    changed = False
    for (reader, _), names in candidates.items():
        possible = names - _downstream(reader, readers) if len(names) > 1 else names
        if possible and possible != names:
            names &= possible
            changed = True
    return changed


def _match_numbers(candidates: dict[Slot, set[str]]) -> bool:
    """Settle inputs on the only candidate of their layer's number; says whether there were any."""
    changed = False
    for (reader, _), names in candidates.items():
        number = _number_of(reader)
        same = {name for name in names if _number_of(name) == number} if len(names) > 1 and number else set()
        if len(same) == 1:
            names &= same
            changed = True
    return changed


def _number_of(name: str) -> str:
    """The number of a layer, from the first part of its path: "2" of "conv2/Conv2D"."""
    scope = name.partition("/")[0]
    return scope[len(scope.rstrip("0123456789")) :]


def _downstream(op: str, readers: Mapping[str, list[str]]) -> set[str]:
    """The ops that depend on an op, by the edges that are certain."""
    found, waiting = {op}, [op]
    while waiting:
        fresh = set(readers.get(waiting.pop(), ())) - found
        found |= fresh
        waiting += fresh
    return found
