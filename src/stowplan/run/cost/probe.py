"""The probe: each distinct op of a step runs alone, to measure its seconds and its kernel's workspace.

Operands exist for one op at a time, so a step can be probed on a machine that it does not fit.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from stowplan.analyse.facts import estimated_workspaces
from stowplan.capture import Call, Captured
from stowplan.errors import NotTileable
from stowplan.ir import Graph, Interval, Op, Phase, Profile
from stowplan.plan.options import Progress
from stowplan.plan.pricing import Machine, price_by_roofline
from stowplan.plan.watch import patience, tell_phase
from stowplan.run.cost.machine import USER_CACHE, device_of, measure_machine, platform_of, release_free_memory
from stowplan.run.cost.probe_cache import Cost, ProbeCache
from stowplan.run.cost.probe_call import PROBES, cost_of_call
from stowplan.run.cost.signature import Signature, call_signature

CLOCK = "probe"
_LIMIT_SECONDS = 120.0  # after which no further op is probed
_RELEASED_BYTES = 2**25  # of operands, after which memory that probes have freed goes back to the system


@dataclass(frozen=True, slots=True)
class Probed:
    """The cost of a captured step on this machine, op by op.

    `workspace_bytes` is the memory of kernels beyond operands and results. `estimated` are the ops that could
    not be probed: their figures come from tables and the machine's roofline.
    """

    profile: Profile
    workspace_bytes: Mapping[str, int]
    estimated: frozenset[str]


def probe(
    captured: Captured,
    *,
    repeats: int = 5,
    limit_seconds: float = _LIMIT_SECONDS,
    progress: Progress | None = None,
    cache: ProbeCache | None = USER_CACHE,
) -> Probed:
    """Probe each distinct op of the step on real tensors, except those that `cache` knows.

    `progress(done, of)` is called after each op. The most expensive ops come first, and after `limit_seconds`
    no other op is probed.
    """
    graph, device = captured.graph, device_of(captured.graph)
    signatures = {op.id: call_signature(graph, captured.program.calls[op.id]) for op in _dearest_first(graph)}
    found = costs_of_calls(
        signatures.values(),
        device,
        repeats=repeats,
        limit_seconds=limit_seconds,
        progress=progress,
        cache=cache,
    )
    costs = {op: found[signature.text] for op, signature in signatures.items()}
    return _probed(captured, costs, lambda: measure_machine(device, cache=cache))


def probe_memory(
    captured: Captured,
    known_workspace: Callable[[Signature], int | None],
    *,
    cache: ProbeCache | None = USER_CACHE,
) -> Mapping[str, int] | None:
    """The workspace of each op, for a step whose seconds do not matter; None if `cache` knows all costs.

    Ops that `known_workspace` does not know, and the cache neither, run three times each. What they took is
    not kept in the cache, for their seconds are not exact.
    """
    graph, calls = captured.graph, captured.program.calls
    signatures = {op.id: call_signature(graph, calls[op.id]) for op in _dearest_first(graph)}
    book = _CostBook(device_of(graph), cache)
    if all(signature.text in book.costs for signature in signatures.values()):
        return None
    known = {signature.text: known_workspace(signature) for signature in signatures.values()}
    unknown = {s.text: s for s in signatures.values() if s.text not in book.costs and known[s.text] is None}
    book.fill(list(unknown.values()), 0, _LIMIT_SECONDS, None, keep=False)
    costs = {op: book.costs.get(s.text) for op, s in signatures.items() if known[s.text] is None}
    workspaces = dict(_probed(captured, costs, Machine).workspace_bytes)
    workspaces.update((op, known[s.text] or 0) for op, s in signatures.items() if op not in costs)
    return workspaces


def costs_of_calls(
    signatures: Iterable[Signature],
    device: torch.device,
    *,
    repeats: int = 5,
    limit_seconds: float = _LIMIT_SECONDS,
    progress: Progress | None = None,
    cache: ProbeCache | None = USER_CACHE,
) -> Mapping[str, Cost | None]:
    """Costs by the text of signatures, probed in their order; None for calls that were not probed."""
    distinct = {signature.text: signature for signature in signatures}
    book = _CostBook(device, cache)
    missing = [signature for text, signature in distinct.items() if text not in book.costs]
    book.fill(missing, repeats, limit_seconds, progress)
    return {text: book.costs.get(text) for text in distinct}


class _CostBook:
    """Costs by the text of signatures: those that the cache had, and those found out since."""

    def __init__(self, device: torch.device, cache: ProbeCache | None) -> None:
        self._device, self._cache, self._platform = device, cache, platform_of(device)
        self.costs = dict(cache.read(self._platform).costs) if cache else {}

    def fill(
        self,
        signatures: list[Signature],
        repeats: int,
        limit_seconds: float,
        progress: Progress | None,
        *,
        keep: bool = True,
    ) -> None:
        """Probe these, as far as there is time; with `keep`, for the cache, even if interrupted."""
        found: dict[str, Cost] = {}
        released = 0  # bytes of operands since free memory was last given back
        deadline = time.perf_counter() + min(limit_seconds, patience().seconds_left / 2)
        try:
            for number, signature in enumerate(signatures, start=1):
                in_time = time.perf_counter() < deadline
                if in_time and (cost := cost_of_call(signature, self._device, repeats=repeats)):
                    found[signature.text] = cost
                    released += signature.operand_bytes
                    if released > _RELEASED_BYTES:
                        release_free_memory(self._device)
                        released = 0
                tell_phase("probing ops", number, len(signatures))
                if progress:
                    progress(number, len(signatures))
        finally:
            release_free_memory(self._device)
            self.costs.update(found)
            if self._cache and found and keep:
                self._cache.add(self._platform, found)


def _probed(captured: Captured, costs: Mapping[str, Cost | None], machine: Callable[[], Machine]) -> Probed:
    """The account of the whole step: ops without an entry only look, those with None are estimated."""
    graph, calls = captured.graph, captured.program.calls
    seconds = dict.fromkeys((op.id for op in graph.ops), 0.0)
    workspaces = dict.fromkeys(seconds, 0)
    estimated = frozenset(op for op, cost in costs.items() if cost is None)
    _refuse_unprobed(graph, estimated)
    if estimated:
        guessed, workspace = price_by_roofline(graph, machine()).seconds, estimated_workspaces(graph)
        seconds.update((op, guessed[op]) for op in estimated)
        workspaces.update((op, workspace[op]) for op in estimated)
    for op, cost in costs.items():
        if cost is not None:
            seconds[op] = cost.seconds
            workspaces[op] = max(0, cost.rise_bytes - _result_bytes(graph, calls[op]))
    return Probed(_profile(seconds, estimated.issuperset(costs)), workspaces, estimated)


def _refuse_unprobed(graph: Graph, estimated: frozenset[str]) -> None:
    """No table has the memory of an op with a probe of its own: one that was not probed cannot be planned."""
    for op in graph.ops:
        if op.id in estimated and op.type in PROBES:
            raise NotTileable(f"{op.id} could not be probed on this machine")


def _result_bytes(graph: Graph, call: Call) -> int:
    """Bytes that the op itself allocates for its results. What it overwrites was copied before."""
    results = call.outputs[: len(call.outputs) - len(call.fresh)]
    tensors = (graph.tensors[name] for name in results if name is not None)
    return sum(tensor.nbytes or 0 for tensor in tensors if tensor.alias_of is None)


def _profile(seconds: Mapping[str, float], is_estimated: bool) -> Profile:
    """A clock on which the ops follow each other without a gap."""
    now, intervals = 0.0, {}
    for op, duration in seconds.items():
        intervals[op] = Interval(now, now, now + duration)
        now += duration
    return Profile({CLOCK: intervals}, is_estimated)


def _dearest_first(graph: Graph) -> list[Op]:
    """The ops that do something: those with a probe of their own, then others by roofline."""
    expected = price_by_roofline(graph, Machine()).seconds
    ops = (op for op in graph.ops if not _only_looks(graph, op))
    return sorted(ops, key=lambda op: (op.type not in PROBES, -expected[op.id]))


def _only_looks(graph: Graph, op: Op) -> bool:
    """Whether the op makes nothing but views."""
    aliases = all(graph.tensors[name].alias_of is not None for name in op.writes())
    return aliases and op.phase is not Phase.UPDATE
