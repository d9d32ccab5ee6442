"""The largest batch, resolution or sequence whose step fits a budget, technique by technique.

Sizes are `first + k * multiple`. The memory of a step grows nearly linearly with its size, so the next size
is where the line through two known sizes meets the budget, between the largest that fits and the smallest
that does not. Every reported size was captured, probed and planned; none is extrapolated.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, signature
from math import inf
from typing import TypeAlias

from stowplan.errors import BadUse, BudgetTooSmall
from stowplan.plan.cards import Card
from stowplan.plan.options import (
    TECHNIQUES,
    USUAL_EXECUTION,
    USUAL_SEARCH,
    Execution,
    PlanOptions,
    Search,
)
from stowplan.plan.plan import Plan
from stowplan.plan.progress import showing_progress
from stowplan.request import Iteration, facts_of, refuse_together
from stowplan.run.planning.iterations import iterations
from stowplan.run.planning.planner import Subject, step_planner
from stowplan.run.planning.road import draft_for
from stowplan.run.target import Target, function_named, load_optimizer, load_target, subject_of

Techniques: TypeAlias = tuple[str, ...]

_MOST_STEPS = 2**20
_GROWTH = 4  # how many times larger than the largest that fits the next may be


@dataclass(frozen=True, slots=True)
class Fit:
    """A size that fits: its projected peak and seconds, and the seconds of the baseline at that size."""

    size: int
    projected_peak_bytes: int
    projected_seconds: float
    plain_seconds: float


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest size with some techniques, none if the first does not fit; and what the next one needs."""

    techniques: Techniques
    fit: Fit | None
    next_needs_bytes: int | None


@dataclass(frozen=True, slots=True)
class SizeAttempt:
    """One size: the least bytes that it was found to take, and how it fits if it does."""

    needed_bytes: int
    fit: Fit | None


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a MODULE:FUNCTION that takes the one that varies as an argument."""

    target: str
    vary: str
    first: int
    multiple: int
    options: PlanOptions  # with the techniques that are allowed in the end; where eager fits, it is eager
    card: Card | None = None  # another device, on which the budget is of reserved bytes
    optimizer: str | None = None  # of whole iterations

    def attempt(self, techniques: Techniques, allowed_bytes: int, step: int) -> SizeAttempt:
        """Whether a size fits: capture it, probe its ops, and plan it, or take the plan that is cached."""
        size = self.first + step * self.multiple
        target = load_target(self.target, **{self.vary: size})
        options = replace(self.options, allow=techniques)
        if self.card is not None:
            return self._attempt_on(self.card, target, options, allowed_bytes, size)
        captured = subject = subject_of(target)

        def planned(variant: Subject) -> Plan:
            return draft_for(variant, allowed_bytes, options).verified().plan

        iteration = None
        if self.optimizer is not None:
            optimizer = load_optimizer(self.optimizer, subject.model)
            iteration = iterations().planner(Iteration(optimizer), offloads="offload" in techniques)
            subject, options = iteration.of_step(captured, options)
        plain = step_planner(subject, replace(options, execution=Execution())).baseline
        if plain.peak_bytes <= allowed_bytes:
            return SizeAttempt(plain.peak_bytes, Fit(size, plain.peak_bytes, plain.seconds, plain.seconds))
        if not techniques:
            return SizeAttempt(plain.peak_bytes, None)
        try:
            if iteration is None:
                plan = planned(captured)
            else:
                plan = iteration.first_that_fits(captured, captured.model, planned)[2]
        except BudgetTooSmall as refused:
            return SizeAttempt(refused.minimum_bytes, None)
        fit = Fit(size, plan.projected_peak_bytes, plan.projected_seconds, plain.seconds)
        return SizeAttempt(plan.projected_peak_bytes, fit)

    def _attempt_on(
        self, card: Card, target: Target, options: PlanOptions, allowed_bytes: int, size: int
    ) -> SizeAttempt:
        """The same on a card that is not here: captured as if there, priced by its figures, and planned."""
        from stowplan.run.project import first_that_fits, project_step

        steps = [project_step(target, card)]
        if self.optimizer is not None:
            optimizer = load_optimizer(self.optimizer, target.model)
            asked = Iteration(optimizer, keep_gradients=not options.allow)
            steps = steps[0].iterations(asked, offloads="offload" in options.allow)
        try:
            _, plan, heap = first_that_fits(steps, allowed_bytes, options)
        except BudgetTooSmall as refused:
            return SizeAttempt(refused.minimum_bytes, None)
        taken = heap.figures.reserved_peak_bytes if heap else plan.projected_peak_bytes
        return SizeAttempt(taken, Fit(size, taken, plan.projected_seconds, plan.plain_seconds))


def largest_of(
    target: str,
    allowed_bytes: int,
    *,
    vary: str = "batch",
    first: int | None = None,
    multiple: int = 1,
    most: int | None = None,
    allow: Iterable[str] | None = None,
    card: Card | None = None,
    optimizer: str | None = None,
    search: Search = USUAL_SEARCH,
    execution: Execution = USUAL_EXECUTION,
) -> Iterator[Largest]:
    """The largest sizes of the baseline and with more and more techniques, as they are found.

    `first` is the function's default size if it is not given; `most` bounds the search for a size, `search`
    that for each plan. On a `card`, another device than this one, bytes are reserved ones, and tiles
    are not planned. With an `optimizer`, a name of torch.optim or MODULE:FUNCTION, whole iterations shall
    fit; with "offload", its state may wait in a tier. With compiled `kernels`, each size that is planned has
    kernels of its own to compile. Without `allow`, a size whose plan takes more than twice eager's time does
    not fit.
    """
    options = PlanOptions.of_call(allow, search, execution)
    if card is not None:
        refuse_together({"card", *facts_of(options)})
        options = replace(options, slowest=inf)
    start = _first_size(target, vary) if first is None else first
    sizes = Sizes(target, vary, start, multiple, options, card, optimizer)
    growing: Iterable[str] = TECHNIQUES if allow is None else allow
    limit = _MOST_STEPS if most is None else (most - sizes.first) // multiple
    if optimizer is not None:  # whose iterations have no tiles, and whose state a tier takes
        growing = [technique for technique in growing if technique in ("recompute", "offload")]
    if card is not None:
        growing = [technique for technique in growing if technique != "tile"]
    for techniques in _growing(growing):
        attempt = partial(_shown_attempt, sizes, techniques, allowed_bytes, [])
        fit, next_needs = last_that_fits(attempt, allowed_bytes, limit)
        yield Largest(techniques, fit, next_needs)


def _shown_attempt(
    sizes: Sizes, techniques: Techniques, allowed_bytes: int, fitting: list[int], step: int
) -> SizeAttempt:
    """An attempt whose size is shown, and beside it the largest that was found to fit."""
    size, means = sizes.first + step * sizes.multiple, " + ".join(techniques) or "eager"
    so_far = f" ({max(fitting)} fits)" if fitting else ""
    with showing_progress(f"{means}, {sizes.vary} {size}{so_far}", allowed_bytes=allowed_bytes):
        attempt = sizes.attempt(techniques, allowed_bytes, step)
    if attempt.fit is not None:
        fitting.append(size)
    return attempt


def _first_size(target: str, vary: str) -> int:
    parameters = signature(function_named(target)).parameters
    default = parameters[vary].default if vary in parameters else Parameter.empty
    if vary not in parameters or not isinstance(default, int):
        raise BadUse(f"{target} must take {vary!r} with a default that fits, as in `def step({vary}=1)`")
    return default


def _growing(techniques: Iterable[str]) -> Iterator[Techniques]:
    """None, the first, the first two, and so on."""
    chosen: Techniques = ()
    yield chosen
    for technique in techniques:
        chosen = (*chosen, technique)
        yield chosen


def last_that_fits(
    attempt: Callable[[int], SizeAttempt], allowed_bytes: int, limit: int = _MOST_STEPS
) -> tuple[Fit | None, int | None]:
    """The last step that fits, and what the one after it needs; None where no limit was met."""
    attempts = {0: attempt(0)}
    if attempts[0].fit is None:
        return None, attempts[0].needed_bytes
    low, high = 0, limit + 1
    while high - low > 1:
        step = _next_step(attempts, low, high, allowed_bytes)
        attempts[step] = attempt(step)
        if attempts[step].fit is None:
            high = step
        else:
            low = step
    return attempts[low].fit, attempts[high].needed_bytes if high in attempts else None


def _next_step(attempts: dict[int, SizeAttempt], low: int, high: int, allowed_bytes: int) -> int:
    """Where the budget is met by the line through the two sizes nearest to it; every third time, halfway."""
    if high in attempts and len(attempts) % 3 == 0:
        return (low + high) // 2
    before = high if high in attempts else max((step for step in attempts if step < low), default=None)
    furthest = high - 1 if high in attempts else min(high - 1, _GROWTH * (low + 1))
    if before is None:
        return min(low + 1, furthest)
    slope = (attempts[low].needed_bytes - attempts[before].needed_bytes) / (low - before)
    met = low + int((allowed_bytes - attempts[low].needed_bytes) / slope) if slope > 0 else 2 * low + 1
    return min(max(met, low + 1), furthest)
