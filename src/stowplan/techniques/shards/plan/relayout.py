"""Which layout each stage of a net has on a mesh: cut as its inputs are, gathered, or cut along the batch.

Formulation. A stage is a run of ops on images of about one size, and its states are the layouts that its
convolutions may give their outputs:

    follow     axes cut the dims that they cut in the inputs of the step
    gather     axes of space cut nothing: every worker along them has the image whole, and computes it
    batch      the first axis of space cuts samples instead, if there are enough

Where the state changes, `need(w) ∩ share(v)` is sent, as anywhere: all to all from space to batch, all of it
to gathered, nothing from there on. Let T(s_1 .. s_n) be the projected seconds of a step (the slowest worker's
compute, a latency per message, exact bytes over bandwidth) and T that with all stages as follow. Solved is

    minimise   sum_i u_i(s_i) + sum_i p_i(s_i-1, s_i)
    u_i(s)     = T(s at i) - T
    p_i(r, s)  = T(r at i-1, s at i) - T - u_i-1(r) - u_i(s)

which is T(s_1 .. s_n) - T as long as stages touch their neighbours only. Skips reach further: so what comes
out is projected as a whole, and taken only if it is faster than the states that are alike in all stages.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import pairwise, product
from math import log2
from time import perf_counter
from typing import TypeAlias

import numpy as np

from stowplan.errors import BadUse, BudgetTooSmall
from stowplan.ir import Graph
from stowplan.ops.table import shape_of
from stowplan.plan.pricing import Machine
from stowplan.techniques.shards.plan.mesh import MeshAxes
from stowplan.techniques.shards.plan.plan import ShardPlan, shard_plan
from stowplan.techniques.shards.plan.projection import MeshProjection, Network, projection_of
from stowplan.techniques.shards.plan.propagation import Chosen, forward_ops
from stowplan.techniques.shards.plan.scale import MeshTraffic
from stowplan.techniques.shards.plan.traffic import traffic_of
from stowplan.units import format_bytes

MOST_WORKERS = 64  # whose traffic is counted one by one: a layout that changes is no product over axes
_SECONDS_PER_MISSING_BYTE = 1.0  # dearer than any step: the budget comes first


class LayoutState(StrEnum):
    """How a stage is cut."""

    FOLLOW = "follow"
    GATHER = "gather"
    BATCH = "batch"


States: TypeAlias = tuple[LayoutState, ...]
Seconds: TypeAlias = Callable[[States], float]


@dataclass(frozen=True, slots=True)
class Relayout:
    """By opening op of a stage its state, the outputs of ops that are cut otherwise, and what that takes."""

    states: Mapping[str, LayoutState]
    chosen: Chosen
    plan: ShardPlan
    projection: MeshProjection
    alike: Mapping[LayoutState, MeshProjection]  # with the same state in all stages


def choose_layouts(
    graph: Graph,
    mesh: MeshAxes,
    seeds: Chosen,
    ends: Sequence[str],
    machine: Machine,
    network: Network,
    allowed_bytes: int | None = None,
) -> Relayout:
    """The fastest states of all stages whose every worker stays within `allowed_bytes`."""
    if mesh.size > MOST_WORKERS:
        raise BadUse(f"layouts are chosen for up to {MOST_WORKERS} workers, not {mesh.size}")
    stages = _Stages(graph, mesh, seeds, ends, machine, network)

    def seconds(states: States) -> float:
        found = stages.projection(states)
        missing = 0 if allowed_bytes is None else max(0, found.peak_bytes - allowed_bytes)
        return found.step_seconds + missing * _SECONDS_PER_MISSING_BYTE

    alike = {state: (state,) * len(stages.openings) for state in stages.states}
    candidates = [*alike.values(), _solved(len(stages.openings), stages.states, seconds)]
    best = min(candidates, key=seconds)
    if allowed_bytes is not None and stages.projection(best).peak_bytes > allowed_bytes:
        raise _too_small(stages, candidates, allowed_bytes)
    return Relayout(
        dict(zip(stages.openings, best, strict=True)),
        stages.chosen(best),
        stages.plan(best),
        stages.projection(best),
        {state: stages.projection(states) for state, states in alike.items()},
    )


def _too_small(stages: "_Stages", candidates: Sequence[States], allowed_bytes: int) -> BudgetTooSmall:
    least = min(stages.projection(states).peak_bytes for states in candidates)
    return BudgetTooSmall(
        f"{format_bytes(allowed_bytes)} allowed, but each worker needs {format_bytes(least)};"
        " try more workers",
        allowed_bytes=allowed_bytes,
        minimum_bytes=least,
        binding=(),
    )


class _Stages:
    """The stages of a step and what it takes with each in some state; every set of states is planned once."""

    def __init__(
        self,
        graph: Graph,
        mesh: MeshAxes,
        seeds: Chosen,
        ends: Sequence[str],
        machine: Machine,
        network: Network,
    ) -> None:
        self._graph, self._mesh, self._seeds, self._ends = graph, mesh, seeds, tuple(ends)
        self._machine, self._network = machine, network
        self._stages = _stages_of(graph)
        if not self._stages:
            raise BadUse(
                "layouts are chosen for the convolutions of a step of PyTorch, and this step has none: leave"
                " layouts out, and every op follows its inputs"
            )
        self._plain = shard_plan(graph, mesh, seeds, ends)
        self.openings = [stage[0] for stage in self._stages]
        self.plan = cache(self._planned)
        self.projection = cache(self._projected)

    @property
    def states(self) -> States:
        """Those that every stage can have."""
        space = self._space
        samples = min((shape_of(self._graph.tensors[name])[0] for name in self.openings), default=0)
        cuts_batch = any(0 in self._plain.layouts[name].axes for name in self.openings)
        can = bool(space) and not cuts_batch and samples >= self._mesh.axes[space[0]].size
        return (
            (LayoutState.FOLLOW, LayoutState.GATHER, LayoutState.BATCH)
            if can
            else (LayoutState.FOLLOW, LayoutState.GATHER)
        )

    @property
    def _space(self) -> Sequence[int]:
        axes = enumerate(self._mesh.axes)
        return [number for number, axis in axes if axis.name == "space" and axis.size > 1]

    def chosen(self, states: States) -> Chosen:
        """The layouts of all convolutions, if any is not as its inputs tell."""
        if all(state is LayoutState.FOLLOW for state in states):
            return {}
        pairs = zip(self._stages, states, strict=True)
        return {name: self._axes(name, state) for stage, state in pairs for name in stage}

    def _axes(self, name: str, state: LayoutState) -> tuple[int | None, ...]:
        axes = list(self._plain.layouts[name].axes)
        if state is not LayoutState.FOLLOW:
            for axis in self._space:
                axes[axis] = None
        if state is LayoutState.BATCH:
            axes[self._space[0]] = 0
        return tuple(axes)

    def _planned(self, states: States) -> ShardPlan:
        return shard_plan(self._graph, self._mesh, self._seeds, self._ends, self.chosen(states))

    def _projected(self, states: States) -> MeshProjection:
        started = perf_counter()
        plan = self.plan(states)
        traffic = traffic_of(plan)
        counts = MeshTraffic(
            np.array([worker.sent_bytes for worker in traffic]),
            np.array([worker.messages for worker in traffic]),
        )
        return projection_of(plan, counts, self._machine, self._network, started)


def _stages_of(graph: Graph) -> list[list[str]]:
    """The outputs of convolutions, in runs of images of about one size."""
    stages: list[list[str]] = []
    size = 0
    for op in forward_ops(graph):
        name = op.outputs[0].tensor if op.outputs else ""
        if op.type != "aten.convolution.default":
            continue
        shape = shape_of(graph.tensors[name])
        if not stages or abs(log2(shape[2] / size)) > 0.5:
            stages.append([])
            size = shape[2]
        stages[-1].append(name)
    return stages


def _solved(stages: int, states: States, seconds: Seconds) -> States:
    """The cheapest chain of states, by dynamic programming over stages."""
    follow = [LayoutState.FOLLOW] * stages

    def alone(*changes: tuple[int, LayoutState]) -> float:
        found = list(follow)
        for place, state in changes:
            found[place] = state
        return seconds(tuple(found))

    base = seconds(tuple(follow))
    single = [{s: alone((i, s)) - base for s in states} for i in range(stages)]
    best: dict[LayoutState, tuple[float, States]] = {s: (single[0][s], (s,)) for s in states}
    for before, place in pairwise(range(stages)):
        pair = {
            (r, s): alone((before, r), (place, s)) - base - single[before][r] - single[place][s]
            for r, s in product(states, states)
        }
        best = {
            s: min((best[r][0] + pair[r, s] + single[place][s], (*best[r][1], s)) for r in states)
            for s in states
        }
    return min(best.values())[1]
