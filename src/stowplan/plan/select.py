"""Selection: the baseline graph and other candidates answer a budget, and the best answer is used.

Candidates are graphs for one step; techniques add theirs. The budget comes first, exactness second, time
third. A plan without tiles gives eager's gradients bit for bit, one with tiles gives them within rounding.
Tiles are therefore used if nothing else is within the budget, or, if the caller prefers time, if they are
faster. The candidate with the smallest bound is examined next, more closely each time, and only while it
could still win. If the baseline graph has a plan within the budget, no other candidate is examined.
A group of candidates that take long to make is made only when the bound of the group is the smallest.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from math import inf
from operator import itemgetter
from typing import Generic, Protocol, TypeAlias, TypeVar

from stowplan.errors import BudgetTooSmall, NotTileable, PlanTooSlow
from stowplan.ir import Graph
from stowplan.plan.bound import relaxed_bound_of
from stowplan.plan.draft import Draft, Exactness, Schedule
from stowplan.plan.frontier import Frontier, floor_of
from stowplan.plan.judge.verify import verify
from stowplan.plan.options import PlanOptions, Preference
from stowplan.plan.plan import Plan
from stowplan.plan.planner import Planner, baseline_peak_of, refuse_without_ops
from stowplan.plan.pricing import Pricing
from stowplan.plan.problem import Problem, problem_of, slices_last
from stowplan.plan.sockets import Socket
from stowplan.units import format_bytes
from stowplan.watch import patience


@dataclass(frozen=True, slots=True)
class Tradeoff:
    """A peak, the seconds of the whole step at that peak, and how exact its gradients are."""

    peak_bytes: int
    seconds: float
    exactness: Exactness


@dataclass(frozen=True, slots=True)
class Baseline:
    """The step without a plan, which plans are compared with."""

    seconds: float
    peak_bytes: int


class Candidate(Protocol):
    """A graph for the step that can answer a budget. Its bounds are known before its plans are searched.

    Every method may raise NotTileable; the graph is then dropped as a candidate.
    """

    @property
    def stretches(self) -> tuple[str, ...]:
        """The parts of the step that it computes in another way, by names that a user knows."""

    @property
    def floor_bytes(self) -> int:
        """The smallest peak expected of its plans."""

    def bounds(self, allowed_bytes: int) -> Iterator[float]:
        """Lower bounds on the seconds of its plans within a budget; infinite if no plan is.

        Each bound is closer than the one before, and takes longer to compute. The last may be what a short
        search found.
        """

    def draft(self, allowed_bytes: int) -> Draft:
        """The fastest schedule found; raises BudgetTooSmall."""

    def tradeoffs(self) -> Iterable[Tradeoff]:
        """All pairs of peak and time that its plans have."""


class Refusals:
    """Why stretches of a step are in no candidate: each reason once, with the first stretch it holds for."""

    def __init__(self) -> None:
        self._stretches: dict[str, str] = {}

    def add(self, stretch: str, refusal: NotTileable) -> None:
        """No candidate has this stretch, for this reason."""
        self._stretches.setdefault(refusal.reason, stretch)

    def sentences(self) -> tuple[str, ...]:
        """All reasons, in the order in which they were found."""
        return tuple(f"{stretch}: {reason}" for reason, stretch in self._stretches.items())


GraphCandidates: TypeAlias = Callable[[Graph, Pricing, Baseline, PlanOptions, Refusals], Iterable[Candidate]]
GRAPH_CANDIDATES: Socket[GraphCandidates] = Socket("plan", "tile")
"""What techniques make of a graph of which nothing but its file is known."""


def tradeoffs_of(planner: Planner, exactness: Exactness) -> tuple[Tradeoff, ...]:
    """The frontier of a planner as offers."""
    base = sum(planner.problem.seconds)
    return tuple(Tradeoff(p.peak_bytes, base + p.extra_seconds, exactness) for p in planner.frontier.points)


def problem_in_order(graph: Graph, pricing: Pricing) -> Problem:
    """The problem that a planner of the graph has."""
    ordered = slices_last(graph)
    return problem_of(ordered, [pricing.seconds[op.id] for op in ordered.ops], pricing.workspace_bytes)


class GraphCandidate:
    """A graph whose frontier is searched when it is first asked.

    With `is_one_of_many`, the search for one budget alone is enough if it finds a plan.
    """

    def __init__(
        self,
        graph: Graph,
        pricing: Pricing,
        baseline: Baseline,
        options: PlanOptions,
        *,
        is_one_of_many: bool = False,
    ) -> None:
        self.graph, self.pricing, self.baseline, self.options = graph, pricing, baseline, options
        self._is_one_of_many = is_one_of_many
        self._alone: dict[int, Planner] = {}  # by budget, the search for it alone
        self.searched: Frontier | None = None  # for the latest plan, by one budget or by all

    @property
    def stretches(self) -> tuple[str, ...]:
        return ()

    @cached_property
    def floor_bytes(self) -> int:
        # What may leave for a tier need not be in memory.
        return self._problem.standing_bytes if self.options.offloads else floor_of(self._problem)

    def bounds(self, allowed_bytes: int) -> Iterator[float]:
        yield self.least_seconds(allowed_bytes)

    def least_seconds(self, allowed_bytes: int) -> float:
        """A lower bound on the seconds of any plan within a budget; infinite if no plan is."""
        if allowed_bytes < self.floor_bytes:
            return inf
        bound = 0.0 if self.options.offloads else relaxed_bound_of(self._problem, allowed_bytes)
        return sum(self._problem.seconds) + bound

    @cached_property
    def _problem(self) -> Problem:
        return problem_in_order(self.graph, self.pricing)

    @cached_property
    def planner(self) -> Planner:
        """The searched frontier."""
        return Planner.of(self.graph, self.pricing, self.options)

    @cached_property
    def _baseline(self) -> Planner:
        """The schedule that recomputes nothing."""
        return Planner.unsearched(self._problem, self.pricing, self.baseline.peak_bytes)

    def draft(self, allowed_bytes: int) -> Draft:
        return self.told(self.answered(allowed_bytes, Planner.draft))

    def answered(self, allowed_bytes: int, ask: Callable[[Planner, int], Draft]) -> Draft:
        """The draft of the first planner that is good enough; `ask` asks a planner for the budget.

        The planners are the baseline, a search for this budget alone, and the search for all budgets.
        """
        if self._baseline.minimum_bytes <= allowed_bytes:
            return ask(self._baseline, allowed_bytes)
        focused = self._focused(allowed_bytes)
        self.searched = focused.frontier if focused else self.searched
        near = _asked(focused, allowed_bytes, ask)
        if near is not None and (self._is_one_of_many or self._is_near_enough(near)):
            return near
        self.searched = self.planner.frontier
        try:
            found = ask(replace(self.planner, bounds=focused.bounds if focused else {}), allowed_bytes)
        except BudgetTooSmall:
            if near is None:
                raise
            found = near
        if near is not None and near.projected_seconds < found.projected_seconds:
            found = near
        return replace(found, cut_short=self.planner.frontier.ended)

    def _is_near_enough(self, near: Draft) -> bool:
        """Whether the draft of a search for one budget is the answer, or the first one."""
        is_soon = self.options.is_first and near.time_ratio <= self.options.slowest
        return is_soon or near.gap <= self.options.search.gap

    def _focused(self, allowed_bytes: int) -> Planner | None:
        """A search for this budget alone; None where it cannot know how near it is to the bound."""
        options = self.options
        unbounded = options.offloads or "recompute" not in options.allow or options.search.gap == 0
        if unbounded or allowed_bytes < self.floor_bytes:
            return None
        if allowed_bytes not in self._alone:
            self._alone[allowed_bytes] = Planner.focused(
                self._problem,
                self.pricing,
                self.baseline.peak_bytes,
                allowed_bytes,
                self.options,
            )
        return self._alone[allowed_bytes]

    def seconds_found(self, allowed_bytes: int) -> float:
        """The seconds of the schedule that a search for this budget alone finds.

        If it finds none, `_LAST`: all other candidates are asked for a plan first.
        """
        if self._baseline.minimum_bytes <= allowed_bytes:
            return sum(self._problem.seconds)
        focused = self._focused(allowed_bytes)
        if focused is None:
            return self.least_seconds(allowed_bytes)
        point = focused.frontier.at(allowed_bytes)
        return sum(self._problem.seconds) + point.extra_seconds if point else _LAST

    def told(self, draft: Draft) -> Draft:
        """A draft of its planner, compared with the baseline."""
        return replace(draft, plain_peak_bytes=self.baseline.peak_bytes)

    def tradeoffs(self) -> tuple[Tradeoff, ...]:
        return tradeoffs_of(self.planner, Exactness.BITWISE)


def _asked(planner: Planner | None, allowed_bytes: int, ask: Callable[[Planner, int], Draft]) -> Draft | None:
    """The draft of a planner; None if it has none."""
    try:
        return ask(planner, allowed_bytes) if planner else None
    except BudgetTooSmall:
        return None


C = TypeVar("C", bound=Candidate)
T = TypeVar("T")


@dataclass(frozen=True)
class CandidateGroup(Generic[C]):
    """Candidates that are made when they are first needed; no plan of theirs is expected to take less time
    than `least_seconds`."""

    least_seconds: float
    make: Callable[[], Iterable[C]]

    @cached_property
    def candidates(self) -> tuple[C, ...]:
        return tuple(_while_there_is_time(self.make()))


_LAST = 1e300  # seconds
_NO_BUDGET = 1 << 62  # bytes, of a step that takes longer than eager's at any budget
_ROUNDING = 1e-9  # of sums of seconds in another order


@dataclass(slots=True)
class Selector(Generic[C]):
    """Answers budgets from the baseline graph and, if that is not enough, from the tiled candidates."""

    plain: C
    baseline: Baseline
    find_candidates: Callable[[Refusals], Iterable[C | CandidateGroup[C]]]
    prefer: Preference = "exactness"
    compare: Callable[[Draft], Draft] = lambda draft: draft  # with eager, where there is a model
    compiled: C | None = None  # the step with compiled kernels, which is used where it is faster
    gap: float = 0.0  # of the best plan's seconds: a candidate that can save less is not examined
    slowest: float = inf  # times the baseline's seconds: a plan that takes more is refused
    _found: tuple[CandidateGroup[C], ...] | None = field(default=None, repr=False)
    _refusals: Refusals = field(default_factory=Refusals, repr=False)

    def plan(self, allowed_bytes: int) -> Plan:
        """The best plan within `allowed_bytes`; raises BudgetTooSmall with the smallest that was found."""
        return self.plan_of(self.answer(allowed_bytes)[0])

    def plan_of(self, draft: Draft) -> Plan:
        """The plan of an answer: compared with eager, where there is a model, and verified."""
        return verify(self.compare(draft))

    def answer(self, allowed_bytes: int) -> tuple[Draft, C]:
        """The best draft and its candidate; raises PlanTooSlow if it is slow, and nobody asked for it."""
        untiled = self._untiled_answer(allowed_bytes)
        try:
            best = self._best_beside(untiled, allowed_bytes)
        except BudgetTooSmall as refusal:
            raise self._told(refusal) from None
        if self._times_eager(best[0]) > self.slowest:
            raise self._too_slow(best, allowed_bytes, is_one_of_two=untiled is not None)
        return best

    def _best_beside(self, best: tuple[Draft, C] | None, allowed_bytes: int) -> tuple[Draft, C]:
        """The best answer there is beside the untiled one."""
        if best is not None and self._is_enough(best[0]):
            return best
        groups = [] if patience().over else list(self._groups)
        made, queue = list[C](), list[tuple[float, int, Iterator[float]]]()
        while not patience().over:
            limit = inf if best is None else (1 - self.gap) * best[0].projected_seconds
            nearest = min(limit, queue[0][0]) if queue else limit
            if groups and groups[0].least_seconds <= nearest:
                for candidate in groups.pop(0).candidates:
                    heappush(queue, (0.0, len(made), candidate.bounds(allowed_bytes)))
                    made.append(candidate)
                continue
            if nearest >= limit:
                break
            _, number, bounds = heappop(queue)
            closer = self._closer(made[number], bounds)
            if closer is None:
                best = _faster(best, self._answered(made[number], allowed_bytes))
            elif closer < inf:
                heappush(queue, (closer, number, bounds))
        if over := patience().over:
            return self._so_far(best, allowed_bytes, over)
        return best or self._by_the_smallest(allowed_bytes)

    def _untiled_answer(self, allowed_bytes: int) -> tuple[Draft, C] | None:
        """The answer with compiled kernels, if there are any, unless that of the baseline graph is faster."""
        if self.compiled is None:
            return self._answered(self.plain, allowed_bytes)
        best = self._answered(self.compiled, allowed_bytes)
        if best is not None and next(self.plain.bounds(allowed_bytes)) >= best[0].projected_seconds:
            return best
        return _faster(best, self._answered(self.plain, allowed_bytes))

    @property
    def _untiled(self) -> tuple[C, ...]:
        return (self.plain,) if self.compiled is None else (self.plain, self.compiled)

    def _so_far(self, best: tuple[Draft, C] | None, allowed_bytes: int, over: str) -> tuple[Draft, C]:
        """The best answer when the search was ended; without one, a refusal that says so."""
        if best is not None:
            return replace(best[0], cut_short=over), best[1]
        try:
            return self.plain.draft(allowed_bytes), self.plain
        except BudgetTooSmall as refusal:
            if over in refusal.what:
                raise
            raise refusal.with_untiled((f"not all, because the search was ended by {over}",)) from None

    def _is_enough(self, plan: Schedule) -> bool:
        """Whether no tiles could be better than a plan without them."""
        if self.prefer == "exactness":
            return self._times_eager(plan) <= self.slowest
        return self._times_eager(plan) <= 1 + _ROUNDING

    def _times_eager(self, plan: Schedule) -> float:
        return plan.projected_seconds / self.baseline.seconds if self.baseline.seconds else 1.0

    def _too_slow(self, best: tuple[Draft, C], allowed_bytes: int, *, is_one_of_two: bool) -> PlanTooSlow:
        """The refusal of the fastest plan. Of two, who asks for tiles gets the one without."""
        plan, _ = best
        allow = 'allow=("recompute", "tile")' if plan.is_tiled else 'allow=("recompute",)'
        return PlanTooSlow(
            "tiles" if plan.is_tiled else "recomputation",
            allowed_bytes=allowed_bytes,
            minimum_bytes=self._fast_enough_bytes,
            time_ratio=self._times_eager(plan),
            slowest=self.slowest,
            asking='prefer="time"' if plan.is_tiled and is_one_of_two else allow,
        )

    def _told(self, refusal: BudgetTooSmall) -> BudgetTooSmall:
        """A refusal that names a budget with a plan that is not too slow, or what ended the search for it."""
        if over := patience().over:
            return refusal.ended_by(over)
        if self.slowest == inf:
            return refusal
        enough = self._fast_enough_bytes
        if enough <= refusal.minimum_bytes:
            return refusal
        return refusal.above(
            enough,
            f"that plan is slow, and {format_bytes(enough)} ({enough} bytes) is the smallest known budget"
            f" with a plan that takes at most {self.slowest:g} times eager's time",
        )

    @property
    def _fast_enough_bytes(self) -> int:
        """The smallest known budget with a plan without tiles that is not too slow.

        A search for one budget may end with a plan that is slower than the frontier's by a share of `gap`,
        and states of generators come on top of a peak: each budget is tried, then some above the largest.
        """
        enough = max(1 + _ROUNDING, self.slowest / (1 + self.gap)) * self.baseline.seconds
        offers = ((offer, each) for each in self._untiled for offer in self._offered(each))
        fast = sorted(((o.peak_bytes, each) for o, each in offers if o.seconds <= enough), key=itemgetter(0))
        above = [(peak + (1 << power), each) for peak, each in fast[-1:] for power in range(12, 40)]
        least, further = 0, 1 << 12
        for peak_bytes, candidate in (*fast, *above):
            if peak_bytes >= least or peak_bytes == fast[-1][0]:
                found = self._answered(candidate, peak_bytes)
                if found is not None and self._times_eager(found[0]) <= self.slowest:
                    return peak_bytes
                least, further = peak_bytes + further, 2 * further
        return _NO_BUDGET

    @property
    def _groups(self) -> tuple[CandidateGroup[C], ...]:
        """The tiled candidates: those that are there at once, then others by what they take at least."""
        if self._found is None:
            found = list(_while_there_is_time(self.find_candidates(self._refusals)))
            at_once = tuple(each for each in found if not isinstance(each, CandidateGroup))
            later = (each for each in found if isinstance(each, CandidateGroup))
            by_bound = sorted(later, key=lambda group: group.least_seconds)
            self._found = (CandidateGroup(0.0, lambda: at_once), *by_bound)
        return self._found

    @property
    def candidates(self) -> tuple[C, ...]:
        """All tiled candidates."""
        return tuple(
            candidate for group in _while_there_is_time(self._groups) for candidate in group.candidates
        )

    def tradeoffs(self) -> tuple[Tradeoff, ...]:
        """Budget against time over all candidates, from the smallest budget on."""
        exact = tuple(self.plain.tradeoffs())
        if self.compiled is not None:
            exact = tuple(_undominated((*exact, *self.compiled.tradeoffs())))
        least = min(offer.peak_bytes for offer in exact)
        tiled = [offer for candidate in self.candidates for offer in self._offered(candidate)]
        if self.prefer == "exactness":
            return (*_undominated(offer for offer in tiled if offer.peak_bytes < least), *exact)
        return tuple(_undominated((*exact, *tiled)))

    def faster_in_tiles(self, plan: Plan) -> Tradeoff | None:
        """The fastest tiles within the plan's budget, if they beat a plan without tiles by more than 1 %."""
        if plan.is_tiled:
            return None
        offers = (offer for candidate in self.candidates for offer in self._offered(candidate))
        within = [offer for offer in offers if offer.peak_bytes <= plan.allowed_bytes]
        best = min(within, key=lambda offer: offer.seconds, default=None)
        return best if best and best.seconds < 0.99 * plan.projected_seconds else None

    @property
    def minimum_bytes(self) -> int:
        """The smallest budget for which a plan was found; searches wherever it could be."""
        return self.smallest.minimum_bytes

    @property
    def smallest(self) -> BudgetTooSmall:
        """The refusal of a budget of no bytes."""
        try:
            plan, _ = self._by_the_smallest(0)
        except BudgetTooSmall as refusal:
            return self._told(refusal)
        return BudgetTooSmall("", allowed_bytes=0, minimum_bytes=plan.projected_peak_bytes, binding=())

    def _by_the_smallest(self, allowed_bytes: int) -> tuple[Draft, C]:
        """The answer of a candidate that seemed to need more; else BudgetTooSmall with the smallest found.

        The floor of a candidate is an estimate: its ops may turn out to take less when they are probed.
        """
        floors: dict[int, float] = {}
        for number, candidate in enumerate(self.candidates):
            if patience().over:
                break
            if (floor := self._floor(candidate)) < inf:
                floors[number] = floor
        smallest: BudgetTooSmall | None = None
        candidates = (
            *self._untiled,
            *(self.candidates[number] for number in sorted(floors, key=floors.__getitem__)),
        )
        for candidate in candidates:
            if smallest is not None and patience().over:
                break
            if smallest is not None and candidate.floor_bytes >= smallest.minimum_bytes:
                continue
            try:
                return candidate.draft(allowed_bytes), candidate
            except BudgetTooSmall as refusal:
                if smallest is None or refusal.minimum_bytes < smallest.minimum_bytes:
                    smallest = refusal
            except NotTileable as refusal:
                self._note(candidate, refusal)
        assert smallest is not None, "a step that refuses no budget"
        raise smallest.with_untiled((*self._refusals.sentences(), *self._needs_in_tiles(floors)))

    def _needs_in_tiles(self, floors: Mapping[int, float]) -> Iterator[str]:
        """By stretch what the step needs at least with it in tiles."""
        least: dict[str, float] = {}
        for number, floor in floors.items():
            for stretch in self.candidates[number].stretches:
                least[stretch] = min(floor, least.get(stretch, inf))
        for stretch, floor in least.items():
            yield f"{stretch}: in tiles the step still needs at least about {format_bytes(int(floor))}"

    def _closer(self, candidate: C, bounds: Iterator[float]) -> float | None:
        """None if there is no closer bound, infinite if it turns out to be no candidate at all."""
        try:
            return next(bounds, None)
        except NotTileable as refusal:
            self._note(candidate, refusal)
            return inf

    def _answered(self, candidate: C, allowed_bytes: int) -> tuple[Draft, C] | None:
        """A candidate's plan; None if it turns out to need more memory."""
        try:
            return (
                None if candidate.floor_bytes > allowed_bytes else (candidate.draft(allowed_bytes), candidate)
            )
        except BudgetTooSmall:
            return None
        except NotTileable as refusal:
            self._note(candidate, refusal)
            return None

    def _floor(self, candidate: C) -> float:
        try:
            return candidate.floor_bytes
        except NotTileable as refusal:
            self._note(candidate, refusal)
            return inf

    def _offered(self, candidate: C) -> tuple[Tradeoff, ...]:
        try:
            return tuple(candidate.tradeoffs())
        except NotTileable as refusal:
            self._note(candidate, refusal)
            return ()

    def _note(self, candidate: C, refusal: NotTileable) -> None:
        for stretch in candidate.stretches:
            self._refusals.add(stretch, refusal)


def _while_there_is_time(found: Iterable[T]) -> Iterator[T]:
    """What is found before somebody ends the search."""
    for each in found:
        yield each
        if patience().over:
            return


def _faster(one: tuple[Draft, C] | None, other: tuple[Draft, C] | None) -> tuple[Draft, C] | None:
    """Of two answers, or none; the first if they are as fast."""
    if one is None or other is None:
        return one or other
    return other if other[0].projected_seconds < one[0].projected_seconds else one


def _undominated(offers: Iterable[Tradeoff]) -> Iterator[Tradeoff]:
    """By ascending peak, those that no smaller one matches in time; of equals the more exact."""
    fastest = inf
    for offer in sorted(offers, key=lambda o: (o.peak_bytes, o.seconds, o.exactness is Exactness.ROUNDING)):
        if offer.seconds < fastest:
            fastest = offer.seconds
            yield offer


def planner_of(
    graph: Graph, pricing: Pricing, options: PlanOptions, *, plain_peak_bytes: int | None = None
) -> Selector[Candidate]:
    """Plans a graph that cannot run here; searches when a budget first asks for it.

    `plain_peak_bytes` is the option of `Planner.of`.
    """
    refuse_without_ops(graph)
    seconds = sum(pricing.seconds[op.id] for op in graph.ops)
    peak = baseline_peak_of(graph, pricing) if plain_peak_bytes is None else plain_peak_bytes
    baseline = Baseline(seconds, peak)
    plain: Candidate = GraphCandidate(graph, pricing, baseline, options)

    def find_candidates(refusals: Refusals) -> Iterator[Candidate]:
        for candidates in GRAPH_CANDIDATES.offered(options.allow):
            yield from candidates(graph, pricing, baseline, options, refusals)

    return Selector(plain, baseline, find_candidates, options.prefer)
