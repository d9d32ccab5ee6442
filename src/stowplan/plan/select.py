"""The master problem: the step as it is and all ways to tile it answer a budget, and one answer is taken.

The budget comes first, exactness second, time third. A plan without tiles gives the plain step's gradients
bit for bit, one with tiles within rounding: so tiles enter where nothing else is within the budget, or, for
whoever prefers time, where they are faster. The way that could take least is always looked at next, closer
each time, and only while it could still win; a budget that the step as it is meets is answered without
looking at any.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heappop, heappush
from math import inf
from typing import Generic, TypeVar

from stowplan.errors import BadUse, BudgetTooSmall, NotTileable
from stowplan.plan.candidate import Offer, PlainStep, Way
from stowplan.plan.plan import Exactness, Plan
from stowplan.plan.untiled import Untiled
from stowplan.units import format_bytes


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
    find_ways: Callable[[Untiled], Iterable[W]]
    prefer: Prefer = Prefer.EXACTNESS
    compare: Callable[[Plan], Plan] = lambda plan: plan  # with eager, where there is a model
    _ways: tuple[W, ...] | None = field(default=None, repr=False)
    _untiled: Untiled = field(default_factory=Untiled, repr=False)

    def plan(self, allowed_bytes: int) -> Plan:
        """The best plan within `allowed_bytes`; raises BudgetTooSmall with the smallest that was found."""
        return self.compare(self.answer(allowed_bytes)[0])

    def answer(self, allowed_bytes: int) -> tuple[Plan, W]:
        """The best plan and the way it is for."""
        best = self._answered(self.plain, allowed_bytes)
        if best is not None and (self.prefer is Prefer.EXACTNESS or self._costs_nothing(best[0])):
            return best
        queue = [(0.0, number, way.bounds(allowed_bytes)) for number, way in enumerate(self.ways)]
        while queue and (best is None or queue[0][0] < best[0].projected_seconds):
            _, number, bounds = heappop(queue)
            closer = self._closer(self.ways[number], bounds)
            if closer is None:
                best = _faster(best, self._answered(self.ways[number], allowed_bytes))
            elif closer < inf:
                heappush(queue, (closer, number, bounds))
        return best or self._by_the_smallest(allowed_bytes)

    def _costs_nothing(self, plan: Plan) -> bool:
        return plan.projected_seconds <= self.step.seconds * (1 + _ROUNDING)

    @property
    def ways(self) -> tuple[W, ...]:
        """All ways to tile."""
        if self._ways is None:
            self._ways = tuple(self.find_ways(self._untiled))
        return self._ways

    def offers(self) -> tuple[Offer, ...]:
        """Budget against time over all ways, from the smallest budget on."""
        exact = tuple(self.plain.offers())
        least = min(offer.peak_bytes for offer in exact)
        tiled = [offer for way in self.ways for offer in self._offered(way)]
        if self.prefer is Prefer.EXACTNESS:
            return (*_undominated(offer for offer in tiled if offer.peak_bytes < least), *exact)
        return tuple(_undominated((*exact, *tiled)))

    @property
    def minimum_bytes(self) -> int:
        """The smallest budget for which a plan was found; searches wherever it could be."""
        try:
            return self._by_the_smallest(0)[0].minimum_bytes
        except BudgetTooSmall as refusal:
            return refusal.minimum_bytes

    def _by_the_smallest(self, allowed_bytes: int) -> tuple[Plan, W]:
        """The answer of a way that seemed to need more; else BudgetTooSmall with the smallest that was found.

        What a way needs at least is an estimate: its sweeps may turn out to take less when they are tried.
        """
        floors = {number: floor for number, way in enumerate(self.ways) if (floor := self._floor(way)) < inf}
        smallest: BudgetTooSmall | None = None
        ways = (self.plain, *(self.ways[number] for number in sorted(floors, key=floors.__getitem__)))
        for way in ways:
            if smallest is not None and way.floor_bytes >= smallest.minimum_bytes:
                break
            try:
                return way.plan(allowed_bytes), way
            except BudgetTooSmall as refusal:
                if smallest is None or refusal.minimum_bytes < smallest.minimum_bytes:
                    smallest = refusal
            except NotTileable as refusal:
                self._note(way, refusal)
        assert smallest is not None, "a step that refuses no budget"
        raise smallest.with_untiled((*self._untiled.told(), *self._needs_in_tiles(floors)))

    def _needs_in_tiles(self, floors: Mapping[int, float]) -> Iterator[str]:
        """By stretch what the step needs at least with it in tiles."""
        least: dict[str, float] = {}
        for number, floor in floors.items():
            for stretch in self.ways[number].stretches:
                least[stretch] = min(floor, least.get(stretch, inf))
        for stretch, floor in least.items():
            yield f"{stretch}: in tiles the step still needs at least about {format_bytes(int(floor))}"

    def _closer(self, way: W, bounds: Iterator[float]) -> float | None:
        """None if there is no closer bound, infinite if it turns out to be no way at all."""
        try:
            return next(bounds, None)
        except NotTileable as refusal:
            self._note(way, refusal)
            return inf

    def _answered(self, way: W, allowed_bytes: int) -> tuple[Plan, W] | None:
        """What a way answers, unless it now knows that it takes too much memory."""
        try:
            return None if way.floor_bytes > allowed_bytes else (way.plan(allowed_bytes), way)
        except BudgetTooSmall:
            return None
        except NotTileable as refusal:
            self._note(way, refusal)
            return None

    def _floor(self, way: W) -> float:
        try:
            return way.floor_bytes
        except NotTileable as refusal:
            self._note(way, refusal)
            return inf

    def _offered(self, way: W) -> tuple[Offer, ...]:
        try:
            return tuple(way.offers())
        except NotTileable as refusal:
            self._note(way, refusal)
            return ()

    def _note(self, way: W, refusal: NotTileable) -> None:
        for stretch in way.stretches:
            self._untiled.add(stretch, refusal)


def _faster(one: tuple[Plan, W] | None, other: tuple[Plan, W] | None) -> tuple[Plan, W] | None:
    """Of two answers, or none; the first if they are as fast."""
    if one is None or other is None:
        return one or other
    return other if other[0].projected_seconds < one[0].projected_seconds else one


def _undominated(offers: Iterable[Offer]) -> Iterator[Offer]:
    """By ascending peak, those that no smaller one matches in time; of equals the more exact."""
    fastest = inf
    for offer in sorted(offers, key=lambda o: (o.peak_bytes, o.seconds, o.exactness is Exactness.ROUNDING)):
        if offer.seconds < fastest:
            fastest = offer.seconds
            yield offer
