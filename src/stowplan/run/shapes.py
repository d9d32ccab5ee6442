"""Shapes declared before training: the dims that vary, and the calls of each size.

`fit(..., shapes=)` names the dims of arguments that vary, each with its smallest and its largest size. Dims
with the same range, or with the same `torch.export.Dim`, are one size. Calls of other sizes are made of the
arguments that `fit` was given: rows are repeated or left out, so that values stay in range.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from stowplan.capture.recording import Step, argument_names
from stowplan.capture.stand_ins import flatten
from stowplan.errors import BadUse


@runtime_checkable
class ExportDim(Protocol):
    """A `torch.export.Dim`."""

    min: int
    max: int
    __name__: str


Range: TypeAlias = "tuple[int, int] | ExportDim"
Shapes: TypeAlias = Mapping[str, Mapping[int, Range]]
Call: TypeAlias = tuple[tuple[object, ...], dict[str, object]]

_EXAMPLE = 'shapes={"input_ids": {1: (16, 2048)}}'
_MOST_ROWS = 16  # of a table: each takes a capture


@dataclass(frozen=True, slots=True)
class DeclaredShapes:
    """The arguments that `fit` was given, and by size the dims that have it: (leaf, dim)."""

    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    places: Mapping[tuple[str, int, int], tuple[tuple[int, int], ...]]  # (name, smallest, largest) -> places

    @staticmethod
    def of(
        model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], shapes: Shapes
    ) -> "DeclaredShapes":
        """Check what was declared against the arguments."""
        names = argument_names(Step(model, args, dict(kwargs), None, torch.device("cpu")))
        leaves = flatten(args, kwargs)[0]
        places: dict[tuple[str, int, int], list[tuple[int, int]]] = {}
        if not isinstance(shapes, Mapping) or not all(isinstance(dims, Mapping) for dims in shapes.values()):
            raise BadUse(f"shapes is {shapes!r}; write {_EXAMPLE}")
        for name, dims in shapes.items():
            if name not in names or not isinstance(leaves[names.index(name)], Tensor):
                known = ", ".join(
                    n for n, leaf in zip(names, leaves, strict=True) if isinstance(leaf, Tensor)
                )
                raise BadUse(f"shapes names {name!r}, which is no tensor of the call; there is {known}")
            place = names.index(name)
            for dim, given in dims.items():
                size = _size_of(name, dim, given)
                _refuse_place(name, leaves[place], dim, size)
                places.setdefault(size, []).append((place, dim))
        if not places:
            raise BadUse(f"shapes is empty; write {_EXAMPLE}")
        return DeclaredShapes(tuple(args), dict(kwargs), {k: tuple(v) for k, v in places.items()})

    def call(self, sizes: Sequence[int]) -> Call:
        """The arguments with these sizes, one for each range, in their order."""
        leaves, spec = flatten(self.args, self.kwargs)
        for size, places in zip(sizes, self.places.values(), strict=True):
            for place, dim in places:
                leaf = leaves[place]
                assert isinstance(leaf, Tensor)
                leaves[place] = _resized(leaf, dim, size)
        args, kwargs = spec.unflatten(leaves)
        return args, kwargs

    @property
    def largest(self) -> tuple[int, ...]:
        """Every size at its largest."""
        return tuple(largest for _, _, largest in self.places)

    def buckets(self) -> list[tuple[int, ...]]:
        """Sizes from the largest to the smallest, each halved again and again; at most `_MOST_ROWS`."""
        steps = 8
        while True:
            each = [_halved(smallest, largest, steps) for _, smallest, largest in self.places]
            found = list(product(*each))
            if len(found) <= _MOST_ROWS or steps == 1:
                return found[:_MOST_ROWS]
            steps -= 1


def _size_of(name: str, dim: int, given: Range) -> tuple[str, int, int]:
    if isinstance(given, tuple) and len(given) == 2 and all(isinstance(end, int) for end in given):
        label, (smallest, largest) = "", given
    elif isinstance(given, ExportDim):
        label, smallest, largest = given.__name__, int(given.min), int(given.max)
    else:
        raise BadUse(f"shapes has {given!r} for dim {dim} of {name!r}; it is (smallest, largest)")
    if not 0 < smallest <= largest:
        raise BadUse(
            f"shapes has {smallest} to {largest} for dim {dim} of {name!r}; give (smallest, largest)"
        )
    return label, smallest, largest


def _refuse_place(name: str, leaf: object, dim: int, size: tuple[str, int, int]) -> None:
    assert isinstance(leaf, Tensor)
    if not 0 <= dim < leaf.dim():
        raise BadUse(f"shapes names dim {dim} of {name!r}, which has {leaf.dim()} dims")
    _, smallest, largest = size
    if not smallest <= leaf.shape[dim] <= largest:
        raise BadUse(
            f"dim {dim} of {name!r} is {leaf.shape[dim]}, outside of {smallest} to {largest}: call fit with"
            " arguments that are within the declared shapes"
        )


def _resized(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Rows repeated or left out, on the tensor's own device; a leaf of its own."""
    rows = torch.arange(size, device=tensor.device) % tensor.shape[dim]
    return tensor.detach().index_select(dim, rows).requires_grad_(tensor.requires_grad)


def _halved(smallest: int, largest: int, steps: int) -> list[int]:
    found = [largest]
    while len(found) < steps and found[-1] // 2 > smallest:
        found.append(found[-1] // 2)
    return found if found[-1] == smallest else [*found, smallest]
