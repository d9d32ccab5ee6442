"""Making plans: search the frontier of a graph once, then answer budgets from it."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

import numpy as np

from stowplan.analyse.facts import costs_of, liveness_of, memory_curve
from stowplan.errors import BadUse, BudgetTooSmall
from stowplan.ir import Graph, Kind
from stowplan.ir.text import Labels
from stowplan.plan.bound import bound_of
from stowplan.plan.draft import Draft
from stowplan.plan.frontier import Frontier, Point, baseline_of, focus_on, frontier_of
from stowplan.plan.judge.simulate import alive_at, simulate
from stowplan.plan.judge.verify import verify
from stowplan.plan.ledger import State, gaps_of
from stowplan.plan.options import DEFAULT_OPTIONS, PlanOptions
from stowplan.plan.plan import Plan
from stowplan.plan.prices import price_by_roofline
from stowplan.plan.pricing import Machine, Pricing, Tier
from stowplan.plan.problem import Problem, Values, problem_of, slices_last
from stowplan.plan.sockets import Socket
from stowplan.plan.steps import Decision, Keep, Offload, Recompute, RecomputeOp, Step, Store
from stowplan.units import format_bytes
from stowplan.watch import limited_to

NAMING_SECONDS, NAMING_STEPS = 10.0, 100  # to name the smallest budget: these, and times a step
_ADVICE = "`stowplan plan TARGET --frontier` shows what every budget costs"
_NO_BACKWARD = "the graph has no backward half, so there is nothing to recompute"


FrontierExtension: TypeAlias = Callable[[Problem, Frontier, Pricing, PlanOptions], Frontier]
FRONTIER_EXTENSIONS: Socket[FrontierExtension] = Socket("plan", "offload", "offload-gradients")
"""Techniques that add schedules of the same graph to its frontier."""


@dataclass(frozen=True, slots=True)
class Planner:
    """A graph with its prices and its searched frontier: `plan` answers one budget."""

    problem: Problem
    pricing: Pricing
    frontier: Frontier
    plain_peak_bytes: int
    is_searched: bool = True
    bounds: Mapping[int, float] = field(default_factory=dict)  # known ones, on the extra seconds of budgets

    @staticmethod
    def unsearched(problem: Problem, pricing: Pricing, plain_peak_bytes: int) -> "Planner":
        """A planner that knows one schedule, which keeps every value, for budgets that this schedule fits."""
        return Planner(problem, pricing, baseline_of(problem), plain_peak_bytes, is_searched=False)

    @staticmethod
    def focused(
        problem: Problem,
        pricing: Pricing,
        plain_peak_bytes: int,
        allowed_bytes: int,
        options: PlanOptions,
    ) -> "Planner":
        """A planner for one budget, in a small part of the time that all budgets take."""
        frontier, bound = focus_on(problem, allowed_bytes, options.search.moves, gap=options.search.gap)
        point, plain = frontier.at(allowed_bytes), sum(problem.seconds)
        if point is not None:
            enough = (plain + point.extra_seconds) / (1 + options.search.gap) - plain
            bound = bound if bound >= enough else max(bound, bound_of(problem, allowed_bytes, enough=enough))
        bounds = {allowed_bytes: bound}
        return Planner(problem, pricing, frontier, plain_peak_bytes, is_searched=False, bounds=bounds)

    @staticmethod
    def of(
        graph: Graph,
        pricing: Pricing,
        options: PlanOptions = DEFAULT_OPTIONS,
        *,
        plain_peak_bytes: int | None = None,
    ) -> "Planner":
        """Search the frontier of `graph` as it is; takes seconds. `plan.select` adds other candidates.

        `plain_peak_bytes` is the peak of the step without a plan, where it is known better than from the
        graph.
        """
        refuse_without_ops(graph)
        ordered = slices_last(graph)
        seconds = [pricing.seconds[op.id] for op in ordered.ops]
        problem = problem_of(ordered, seconds, pricing.workspace_bytes)
        if "recompute" not in options.allow:
            problem = replace(problem, droppable=(False,) * len(problem.droppable))
        plain = baseline_peak_of(graph, pricing) if plain_peak_bytes is None else plain_peak_bytes
        frontier = frontier_of(problem, options.search.moves)
        for extend in FRONTIER_EXTENSIONS.offered(options.allow):
            frontier = extend(problem, frontier, pricing, options)
        return Planner(problem, pricing, frontier, plain)

    @property
    def minimum_bytes(self) -> int:
        """The smallest budget for which a plan was found."""
        return self.frontier.points[0].peak_bytes

    def plan(self, allowed_bytes: int) -> Plan:
        """The plan of the draft for this budget."""
        return verify(self.draft(allowed_bytes))

    def draft(self, allowed_bytes: int) -> Draft:
        """The fastest schedule found within `allowed_bytes`; raises BudgetTooSmall if there is none."""
        point = self.frontier.at(allowed_bytes)
        if point is None:
            raise self.refusal(allowed_bytes)
        return self.draft_at(point, allowed_bytes)

    def draft_at(self, point: Point, allowed_bytes: int, steps: tuple[Step, ...] | None = None) -> Draft:
        """The draft of a point of the frontier within `allowed_bytes`, with its steps if they are known."""
        graph, pricing = self.problem.graph, self.pricing
        steps = steps or point.steps(self.problem)
        simulation = simulate(graph, steps, pricing)
        plain_seconds = sum(self.problem.seconds)
        return Draft(
            graph=graph,
            pricing=self.pricing,
            allowed_bytes=allowed_bytes,
            decisions=_decisions_of(self.problem, point, steps) | _offloaded(graph, steps, pricing.tier),
            steps=steps,
            projected_curve_bytes=simulation.curve_bytes,
            projected_seconds=simulation.seconds,
            plain_peak_bytes=self.plain_peak_bytes,
            plain_seconds=plain_seconds,
            minimum_bytes=self.minimum_bytes if self.is_searched else None,
            bound_seconds=plain_seconds + self._bound(allowed_bytes),
            extra_macs=_extra_macs(graph, steps),
            cut_short=self.frontier.ended,
        )

    def _bound(self, allowed_bytes: int) -> float:
        """A lower bound on the extra seconds; 0 with a tier, because transfers may be hidden completely."""
        if self.pricing.tier is not None:
            return 0.0
        known = self.bounds.get(allowed_bytes)
        if known is None:
            return bound_of(self.problem, allowed_bytes) if self.is_searched else 0.0
        return known

    def refusal(self, allowed_bytes: int) -> BudgetTooSmall:
        """The error for a budget below the smallest."""
        graph, pricing = self.problem.graph, self.pricing
        steps = self.frontier.points[0].steps(self.problem)
        curve = simulate(graph, steps, pricing).curve_bytes
        peak = int(np.argmax(curve))
        alive = alive_at(graph, steps, peak)
        labels = Labels(graph)
        return BudgetTooSmall(
            f"{format_bytes(allowed_bytes)} allowed, but the smallest plan found needs "
            f"{format_bytes(self.minimum_bytes)} ({self.minimum_bytes} bytes) at"
            f" {self._place(labels, steps[peak])}; it binds through {labels.largest(alive)};"
            f" {self._advice()}",
            allowed_bytes=allowed_bytes,
            minimum_bytes=self.minimum_bytes,
            binding=alive,
        )

    def _advice(self) -> str:
        if self.problem.turn == len(self.problem.reads):
            return _NO_BACKWARD
        ended = self.frontier.ended
        return f"the search was ended by {ended}, and a longer one may find a smaller" if ended else _ADVICE

    def _place(self, labels: Labels, step: Step) -> str:
        """The op with its module and line, and what its kernel takes for itself."""
        name = getattr(step, "op", "")
        if not name:
            return "a free"
        workspace = self.pricing.workspace_bytes.get(name, 0)
        inside = f", {format_bytes(workspace)} of it inside the kernel" if workspace else ""
        return f"{labels.op(name, with_source=True)}{inside}"


def refuse_hopeless(
    graph: Graph, allowed_bytes: int, options: PlanOptions, smallest: Callable[[], BudgetTooSmall]
) -> None:
    """Raise BudgetTooSmall, before ops are probed, if parameters, inputs and gradients exceed the budget.

    `smallest` finds the smallest budget when the error is asked for it.
    """
    values = Values(graph)
    least = values.standing_bytes
    if "offload-gradients" not in options.allow:
        own = dict(zip(values.owners, values.nbytes, strict=True))
        used: dict[str, int] = defaultdict(int)  # of each storage; a plan may do without the rest
        for name in filter(partial(_is_gradient_of_parameter, graph), graph.held):
            used[graph.storage_of(name)] += graph.tensors[name].nbytes or 0
        least += sum(min(nbytes, own.get(owner, 0)) for owner, nbytes in used.items())
    if allowed_bytes >= least:
        return
    advice = _ADVICE
    there = "parameters, inputs and gradients" if graph.has_backward else "parameters and inputs"
    if 0 < allowed_bytes < 1000:
        advice = f"did you mean {allowed_bytes}GiB?"
    raise BudgetTooSmall(
        f"{format_bytes(allowed_bytes)} allowed, but {there} alone take"
        f" {format_bytes(least)} ({least} bytes); {advice}",
        allowed_bytes=allowed_bytes,
        minimum_bytes=partial(_searched, graph, options, smallest),
        binding=(),
    )


def _searched(graph: Graph, options: PlanOptions, smallest: Callable[[], BudgetTooSmall]) -> BudgetTooSmall:
    step_seconds = sum(price_by_roofline(graph, Machine()).seconds.values())
    with limited_to(options.search.time_limit or NAMING_SECONDS + NAMING_STEPS * step_seconds):
        return smallest()


def _is_gradient_of_parameter(graph: Graph, name: str) -> bool:
    source = graph.tensors[name].gradient_of
    return source is not None and graph.tensors[source].kind is Kind.PARAMETER


def refuse_without_ops(graph: Graph) -> None:
    """A step that runs nothing has no peak to lower."""
    if not graph.ops:
        raise BadUse("the graph has no ops, so there is nothing to plan; `stowplan inspect` says what it has")


def baseline_peak_of(graph: Graph, pricing: Pricing) -> int:
    """The peak of the baseline: the graph in its order, with nothing overwritten and nothing recomputed."""
    curve = memory_curve(graph, liveness_of(graph))
    workspace = np.array([pricing.workspace_bytes.get(op.id, 0) for op in graph.ops], dtype=np.int64)
    return int((curve + workspace).max(initial=0))


def _decisions_of(problem: Problem, point: Point, steps: tuple[Step, ...]) -> dict[str, Decision]:
    remade = {name for step in steps if isinstance(step, RecomputeOp) for name in step.outputs}
    needed = {value for op in range(problem.turn, len(problem.reads)) for value in problem.reads[op]}
    gaps = gaps_of(problem)
    decisions: dict[str, Decision] = {}
    for value in sorted(set(gaps.value_of)):
        owner = problem.owners[value]
        if owner in remade:
            decisions[owner] = Recompute(hold=State.HOLD in (point.states[gap] for gap in gaps.of(value)))
        elif value in needed:
            decisions[owner] = Keep()
    return decisions


def _extra_macs(graph: Graph, steps: tuple[Step, ...]) -> int:
    macs = dict(zip((op.id for op in graph.ops), costs_of(graph).macs.tolist(), strict=True))
    return sum(macs[step.op] for step in steps if isinstance(step, RecomputeOp))


def _offloaded(graph: Graph, steps: Iterable[Step], tier: Tier | None) -> dict[str, Decision]:
    """The decisions of a schedule that moves storages, by their owners."""
    stored = (step.tensors[0] for step in steps if isinstance(step, Store))
    return {graph.storage_of(name): Offload(tier.name) for name in stored} if tier else {}
