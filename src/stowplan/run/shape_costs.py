"""What calls of several shapes cost under one budget: of declared shapes, or of a data loader's batches."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stowplan.capture.stand_ins import flatten
from stowplan.errors import BadUse, BudgetTooSmall, PlanTooSlow
from stowplan.run.fitting import Fitting
from stowplan.run.shapes import Call
from stowplan.units import format_bytes

_AS_IT_IS = "runs as it is"


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


def _fitting_of(fitted: nn.Module) -> Fitting:
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


def _cost_of(fitting: Fitting, fitted: nn.Module, made: Call, batches: tuple[int, ...] = ()) -> ShapeCost:
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
