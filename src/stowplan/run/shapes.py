"""Shapes declared before training, and shapes found in a data loader: what each costs, and which do not fit.

`fit(..., shapes=)` names the dims of arguments that vary, each with its smallest and its largest size. Dims
with the same range, or with the same `torch.export.Dim`, are one size. Calls of other sizes are made of the
arguments that `fit` was given: rows are repeated or left out, so that values stay in range.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from stowplan.capture.recording import Step, argument_names
from stowplan.capture.stand_ins import flatten
from stowplan.errors import BadUse, BudgetTooSmall, PlanTooSlow
from stowplan.units import format_bytes

if TYPE_CHECKING:
    from stowplan.run.fitting import Fitting


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
_AS_IT_IS = "runs as it is"
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


@dataclass(frozen=True, slots=True)
class ShapeCost:
    """What calls with tensors of these shapes cost, and how they are run. A call that is refused has no peak.

    `batches` are the positions of the batches with these shapes, where a data loader was walked.
    """

    shapes: tuple[tuple[int, ...], ...]
    how: str
    peak_bytes: int | None = None
    time_ratio: float | None = None
    minimum_bytes: int | None = None
    batches: tuple[int, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the budget holds such a call."""
        return self.peak_bytes is not None


@dataclass(frozen=True, slots=True)
class ShapeCosts:
    """The costs of several shapes under one budget. Printed, they are a table."""

    allowed_bytes: int
    rows: tuple[ShapeCost, ...]

    @property
    def refused(self) -> tuple[ShapeCost, ...]:
        """The shapes that do not fit."""
        return tuple(row for row in self.rows if not row.fits)

    def __str__(self) -> str:
        head = ("shapes", "batches", "peak", "time", "")
        body = [head, *map(_cells, self.rows)]
        used = [n for n in range(5) if n != 1 or any(row.batches for row in self.rows)]
        widths = [max(len(line[n]) for line in body) for n in range(5)]
        lines = ["  ".join(line[n].ljust(widths[n]) for n in used).rstrip() for line in body]
        return "\n".join([f"budget {format_bytes(self.allowed_bytes)}", *lines])


def _cells(row: ShapeCost) -> tuple[str, ...]:
    shapes = ", ".join("x".join(map(str, shape)) or "scalar" for shape in row.shapes)
    peak = "" if row.peak_bytes is None else format_bytes(row.peak_bytes)
    peak = f"at most {peak}" if row.how == _AS_IT_IS else peak
    ratio = "" if row.time_ratio is None else f"{row.time_ratio:.3f} x"
    needs = f", needs {format_bytes(row.minimum_bytes)}" if row.minimum_bytes is not None else ""
    return shapes, str(len(row.batches)), peak, ratio, row.how + needs


def shape_costs(fitted: nn.Module) -> ShapeCosts:
    """What the declared shapes cost, from the largest to the smallest, each size halved again and again.

    `fitted` comes from `fit(..., shapes=...)`. The plans are kept, so that training does not wait for them.
    """
    fitting = _fitting_of(fitted)
    if fitting.shapes is None:
        raise BadUse('no shapes were declared: fit(..., shapes={"input_ids": {1: (16, 2048)}})')
    rows = [_cost_of(fitting, fitted, fitting.shapes.call(sizes)) for sizes in fitting.shapes.buckets()]
    return ShapeCosts(fitting.allowed_bytes + fitting.reserve_bytes, tuple(rows))


def scan(
    loader: Iterable[Any],
    fitted: nn.Module,
    call: Callable[[Any], Call] | None = None,
) -> ShapeCosts:
    """Walk a data loader and find which batches fit the budget of a fitted module, without training.

    A batch that is a mapping is passed as keyword arguments, a tuple or list as arguments, and anything else
    as one argument. For other batches, `call` makes `(args, kwargs)` of one. Each shape is planned once, the
    largest first, and its plan is kept. One batch of each shape is held until then.
    """
    fitting = _fitting_of(fitted)
    calls: dict[tuple[tuple[int, ...], ...], Call] = {}
    batches: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for number, batch in enumerate(loader):
        made = call(batch) if call else _called_with(batch)
        shapes = tuple(_shapes_in(made))
        calls.setdefault(shapes, made)
        batches.setdefault(shapes, []).append(number)
    largest_first = sorted(calls, key=lambda each: -sum(map(_elements, each)))
    rows = [_cost_of(fitting, fitted, calls.pop(each), tuple(batches[each])) for each in largest_first]
    return ShapeCosts(fitting.allowed_bytes + fitting.reserve_bytes, tuple(rows))


def _fitting_of(fitted: nn.Module) -> "Fitting":
    from stowplan.run.fitting import Fitting

    fitting = fitted.__dict__.get("_fitting")
    if not isinstance(fitting, Fitting):
        raise BadUse(f"{type(fitted).__name__} does not come from fit in one process, which plans its shapes")
    return fitting


def _called_with(batch: object) -> Call:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


def _shapes_in(made: Call) -> Iterator[tuple[int, ...]]:
    return (tuple(leaf.shape) for leaf in flatten(*made)[0] if isinstance(leaf, Tensor))


def _elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _cost_of(fitting: "Fitting", fitted: nn.Module, made: Call, batches: tuple[int, ...] = ()) -> ShapeCost:
    shapes = tuple(_shapes_in(made))
    try:
        with torch.enable_grad():
            found = fitting.foreseen(fitted, *made)
    except BudgetTooSmall as refusal:
        minimum = refusal.known_minimum_bytes
        how = "does not fit"
        if isinstance(refusal, PlanTooSlow):
            how = f"refused at {refusal.time_ratio:.1f} x"
        return ShapeCost(shapes, how, minimum_bytes=minimum, batches=batches)
    if found is None:
        return ShapeCost(shapes, "wants no gradient", 0, 1.0, batches=batches)
    plan, is_smaller = found
    if is_smaller:  # than this plan's call, and seen to fit
        most = min(plan.plain_peak_bytes, plan.allowed_bytes)
        return ShapeCost(shapes, _AS_IT_IS, most, 1.0, batches=batches)
    how = f"planned, {plan.exactness}"
    return ShapeCost(shapes, how, plan.projected_peak_bytes, plan.time_ratio, batches=batches)
