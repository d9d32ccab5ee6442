"""The master problem: the step as it is and all ways to tile it answer a budget, and one answer is taken.

The budget comes first, exactness second, time third. A plan without tiles gives the plain step's gradients
bit for bit, one with tiles within rounding: so tiles enter where nothing else is within the budget, or, for
whoever prefers time, where they are faster. The way that could take least is always looked at next, closer
each time, and only while it could still win; a budget that the step as it is meets is answered without
looking at any.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heappop, heappush
from math import inf
from typing import Generic, TypeVar

from stowplan.errors import BadUse, BudgetTooSmall, CaptureError
from stowplan.plan.plan import Exactness, Plan
from stowplan.plan.tiles.ways import Offer, PlainStep, Way


class Prefer(StrEnum):
    """What decides between plans that are within the budget."""

    EXACTNESS = "exactness"  # bits before time
    TIME = "time"  # whatever is fastest


def preference(word: str) -> Prefer:
    """The preference by this name."""
    if word not in set(Prefer):
        raise BadUse(f"no preference {word!r}; there is {', '.join(Prefer)}")
    return Prefer(word)


W = TypeVar("W", bound=Way)
_ROUNDING = 1e-9  # of sums of seconds in another order


@dataclass(slots=True)
class MasterPlanner(Generic[W]):
    """Answers budgets from the plain step and, where that asks for it, from the ways to tile it."""

    plain: W
    step: PlainStep
    find_ways: Callable[[], Iterable[W]]
    prefer: Prefer = Prefer.EXACTNESS
    _ways: tuple[W, ...] | None = field(default=None, repr=False)

    def plan(self, allowed_bytes: int) -> Plan:
        """The best plan within `allowed_bytes`; raises BudgetTooSmall with the smallest that was found."""
        return self.answer(allowed_bytes)[0]

    def answer(self, allowed_bytes: int) -> tuple[Plan, W]:
        """The best plan and the way it is for."""
        best = _answer(self.plain, allowed_bytes)
        if best is not None and (self.prefer is Prefer.EXACTNESS or self._costs_nothing(best[0])):
            return best
        queue = [(0.0, number, way.bounds(allowed_bytes)) for number, way in enumerate(self.ways)]
        while queue and (best is None or queue[0][0] < best[0].projected_seconds):
            _, number, bounds = heappop(queue)
            closer = _next(bounds)
            if closer is None:
                best = _faster(best, _answer(self.ways[number], allowed_bytes))
            elif closer < inf:
                heappush(queue, (closer, number, bounds))
        if best is None:
            raise self._too_small(allowed_bytes)
        return best

    def _costs_nothing(self, plan: Plan) -> bool:
        return plan.projected_seconds <= self.step.seconds * (1 + _ROUNDING)

    @property
    def ways(self) -> tuple[W, ...]:
        """All ways to tile."""
        if self._ways is None:
            self._ways = tuple(self.find_ways())
        return self._ways

    def offers(self) -> tuple[Offer, ...]:
        """Budget against time over all ways, from the smallest budget on."""
        exact = tuple(self.plain.offers())
        least = min(offer.peak_bytes for offer in exact)
        tiled = [offer for way in self.ways for offer in _offers(way)]
        if self.prefer is Prefer.EXACTNESS:
            return (*_undominated(offer for offer in tiled if offer.peak_bytes < least), *exact)
        return tuple(_undominated((*exact, *tiled)))

    @property
    def minimum_bytes(self) -> int:
        """The smallest budget for which a plan was found; searches wherever it could be."""
        return self._too_small(0).minimum_bytes

    def _too_small(self, allowed_bytes: int) -> BudgetTooSmall:
        smallest = _refusal(self.plain, allowed_bytes)
        for way in sorted(self.ways, key=lambda way: way.floor_bytes):
            if smallest is not None and way.floor_bytes >= smallest.minimum_bytes:
                break
            refused = _refusal(way, allowed_bytes)
            if refused is not None and (smallest is None or refused.minimum_bytes < smallest.minimum_bytes):
                smallest = refused
        assert smallest is not None, "a step that refuses no budget"
        return smallest


def _next(bounds: Iterator[float]) -> float | None:
    """None if there is no closer bound, infinite if it turns out to be no way at all."""
    try:
        return next(bounds, None)
    except (BadUse, CaptureError):
        return inf


def _answer(way: W, allowed_bytes: int) -> tuple[Plan, W] | None:
    """What a way answers, unless it now knows that it takes too much memory."""
    try:
        return None if way.floor_bytes > allowed_bytes else (way.plan(allowed_bytes), way)
    except (BudgetTooSmall, BadUse, CaptureError):
        return None


def _faster(one: tuple[Plan, W] | None, other: tuple[Plan, W] | None) -> tuple[Plan, W] | None:
    """Of two answers, or none; the first if they are as fast."""
    if one is None or other is None:
        return one or other
    return other if other[0].projected_seconds < one[0].projected_seconds else one


def _refusal(way: Way, allowed_bytes: int) -> BudgetTooSmall | None:
    try:
        way.plan(allowed_bytes)
    except BudgetTooSmall as fault:
        return fault
    except (BadUse, CaptureError):
        return None
    raise AssertionError("a way answers a budget that it was too small for")


def _offers(way: Way) -> Iterable[Offer]:
    try:
        return way.offers()
    except (BadUse, CaptureError):
        return ()


def _undominated(offers: Iterable[Offer]) -> Iterator[Offer]:
    """By ascending peak, those that no smaller one matches in time; of equals the more exact."""
    fastest = inf
    for offer in sorted(offers, key=lambda o: (o.peak_bytes, o.seconds, o.exactness is Exactness.ROUNDING)):
        if offer.seconds < fastest:
            fastest = offer.seconds
            yield offer
