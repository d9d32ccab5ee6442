"""Sweep probes: how much longer a segment takes in tiles than whole, on this machine and with tiles of this
size.

Small parts may be slower, if launching ops dominates, or faster, if they stay in a cache. A probe of some
tiles shows both before a step with the sweep is planned. Each sweep is probed once, however many candidates
have it, and its speed bounds that of other grids for the same segment.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from math import inf

import torch

from stowplan.capture import Argument, Call, Captured, Ref
from stowplan.errors import NotTileable
from stowplan.ir import DType, Graph, Kind, Phase, Tensor
from stowplan.plan.frontier import floor_of
from stowplan.plan.options import Progress
from stowplan.plan.pricing import Pricing
from stowplan.plan.problem import Problem
from stowplan.plan.select import problem_in_order
from stowplan.run.cost.machine import device_of
from stowplan.run.cost.probe import Signature, call_signature, costs_of_calls
from stowplan.techniques.tiles.plan.barriers import gathered_in
from stowplan.techniques.tiles.plan.candidates import Tiled
from stowplan.techniques.tiles.plan.rematerialise import RematerialisedInputs
from stowplan.techniques.tiles.run.sweep import Sweep
from stowplan.torch_private import OpOverload

_OPS = torch.ops.stowplan
OPTIMISM = 0.75  # of the time by work: no sweep is expected to be faster
_ALIKE = 0.85  # of the fastest probed grid for the same segment: no other is expected to be faster

Key = tuple[tuple[str, ...], tuple[int, ...]]


class SweepProbes:
    """The sweeps of a step's tiled candidates: each is built and probed once, when it is first needed."""

    def __init__(
        self, graph: Graph, calls: Mapping[str, Call], pricing: Pricing, progress: Progress | None = None
    ) -> None:
        self._graph, self._calls, self._pricing, self._progress = graph, calls, pricing, progress
        self._sweeps: dict[Key, Sweep] = {}
        self._whole: dict[tuple[str, ...], tuple[float, float]] = {}
        self._measured: dict[Key, float] = {}
        self._returned: dict[tuple[str, ...], int] = {}  # bytes that are there before outputs' gradients are
        self._speeds: dict[tuple[str, ...], float] = {}  # by segment, the least of the time by its work

    def sweep(self, tiled: Tiled) -> Sweep:
        """The sweep of a segment on its grid."""
        key = key_of(tiled)
        if key not in self._sweeps:
            self._sweeps[key] = Sweep(tiled.segment, self._calls, tiled.parts)
        return self._sweeps[key]

    def measured_seconds(self, tiled: Tiled, captured: Captured | None = None) -> float:
        """The measured seconds of a sweep, forward and backward, by its calls in `captured`, if it has both.

        Another captured step may lay out the tensors that it reads in another way, which takes about as long.
        """
        key = key_of(tiled)
        if key not in self._measured:
            self._measured[key] = seconds = self._seconds_in_tiles(self.sweep(tiled), captured)
            by_work = sum(self._seconds_by_work(tiled))
            if by_work > 0:
                self._speeds[key[0]] = min(seconds / by_work, self._speeds.get(key[0], inf))
        return self._measured[key]

    def optimistic_seconds(self, tiled: Tiled) -> tuple[float, float]:
        """Lower bounds on them, forward and backward: by a probe, if there was one, or else by work."""
        ops, _ = key = key_of(tiled)
        forward, backward = self._seconds_by_work(tiled)
        speed = max(OPTIMISM, _ALIKE * self._speeds.get(ops, 0.0))
        if key in self._measured and forward + backward > 0:
            speed = self._measured[key] / (forward + backward)
        return speed * forward, speed * backward

    def seconds_whole(self, tiled: Tiled) -> float:
        """The seconds of its segment untiled, forward and backward."""
        return sum(self._seconds_whole(tiled))

    def _seconds_by_work(self, tiled: Tiled) -> tuple[float, float]:
        """Forward and backward, if tiles were as fast as the whole; backward recomputes all but a loss."""
        forward, backward = self._seconds_whole(tiled)
        ahead = forward * tiled.costs.forward_macs / max(1, tiled.costs.untiled_macs)
        is_again = tiled.segment.loss is None and self._graph.has_backward
        return ahead, backward + (ahead if is_again else 0.0)

    def floor_beside(self, in_sweeps: Collection[str]) -> int:
        """The least memory of the ops outside all sweeps, where `in_sweeps` are the forward ops inside.

        Sweeps may also do what ops do that add up gradients, so those do not count.
        """
        gone = {None, *in_sweeps}
        without = {
            place
            for place, op in enumerate(self._problem.graph.ops)
            if op.id in gone or (op.phase is Phase.BACKWARD and op.adjoint_of in gone)
        }
        return floor_of(self._problem, without)

    def surely_there(self, tiled: Tiled) -> int:
        """The bytes in memory beside a sweep while it is differentiated: parameters, buffers and inputs, and
        results of the step that are made before, such as gradients of the parameters of later layers."""
        problem, segment = self._problem, tiled.segment
        if segment.loss is not None:
            return problem.standing_bytes
        if segment.outputs not in self._returned:
            before = _waited_for(problem.graph, set(segment.outputs))
            returned = (v for v, held in enumerate(problem.held) if held and problem.producer[v] in before)
            self._returned[segment.outputs] = sum(problem.nbytes[value] for value in returned)
        return problem.standing_bytes + self._returned[segment.outputs]

    @cached_property
    def _problem(self) -> Problem:
        """The step, without parameters that are gathered of shards: not all are there at a time."""
        problem = problem_in_order(self._graph, self._pricing)
        gathered = sum(self._graph.tensors[name].nbytes or 0 for name in gathered_in(self._graph))
        return replace(problem, standing_bytes=problem.standing_bytes - gathered)

    def optimistic_again(self, remat: RematerialisedInputs) -> float:
        """A lower bound on the seconds of recomputing the inputs of a sweep."""
        return OPTIMISM * sum(
            self._pricing.seconds[op.id] for segment in remat.segments for op in segment.ops
        )

    def _seconds_in_tiles(self, sweep: Sweep, captured: Captured | None) -> float:
        signatures = _signatures_in(captured, sweep) if captured else signatures_of(sweep)
        costs = costs_of_calls(signatures, device_of(self._graph), progress=self._progress)
        if None in costs.values():
            raise NotTileable(f"{sweep.name} could not be probed on this machine")
        return sum(cost.seconds for cost in costs.values() if cost)

    def _seconds_whole(self, tiled: Tiled) -> tuple[float, float]:
        """Forward and backward."""
        inside, _ = key_of(tiled)
        if inside not in self._whole:
            ops, seconds = set(inside), self._pricing.seconds
            back = (op for op in self._graph.ops if op.phase is Phase.BACKWARD and op.adjoint_of in ops)
            self._whole[inside] = sum(seconds[op] for op in inside), sum(seconds[op.id] for op in back)
        return self._whole[inside]


def _waited_for(graph: Graph, outputs: Collection[str]) -> set[int]:
    """The places of the ops that come before the gradients of these tensors."""
    wanted = {tensor.id for tensor in graph.tensors.values() if tensor.gradient_of in outputs}
    found = set[int]()
    for place, op in reversed(list(enumerate(graph.ops))):
        if not wanted.isdisjoint(op.writes()):
            found.add(place)
            wanted.update(op.reads())
    return found


def key_of(tiled: Tiled) -> Key:
    """The same for the same ops of a graph on the same grid."""
    return tuple(op.id for op in tiled.segment.ops), tiled.parts


def _signatures_in(captured: Captured, sweep: Sweep) -> list[Signature]:
    """The calls of a sweep in a captured step."""
    graph, calls = captured.graph, captured.program.calls
    ops = (op.id for op in graph.ops if op.attributes.get("name") == sweep.name)
    return [call_signature(graph, calls[op]) for op in ops]


def signatures_of(sweep: Sweep) -> list[Signature]:
    """The calls of a sweep in a captured step, on the tensors of the step without it."""
    segment, tensors = sweep.segment, sweep.segment.graph.tensors
    gradients = {t.gradient_of: t.id for t in tensors.values() if t.gradient_of is not None}
    wanted = tuple(place for place, name in enumerate(segment.inputs) if name in gradients)
    given: dict[str, Argument] = {
        "inputs": _refs(segment.inputs),
        "statistics": _refs(sweep.statistics),
        "wanted": wanted,
    }
    looked_at = {"inputs": _refs(sweep.looks_at)}
    gather = [_signature(sweep, _OPS.gather.default, looked_at)] if sweep.statistics else []
    if segment.loss is not None:
        return [*gather, _signature(sweep, _OPS.sweep_loss.default, given)]
    ahead, back = tuple(sweep.over_inputs()), tuple(sweep.over_gradients(wanted))
    forward = _signature(sweep, _OPS.sweep.default, {**given, "over": ahead})
    if not segment.graph.has_backward:
        return [*gather, forward]
    incoming = _refs(gradients.get(name, name) for name in segment.outputs)
    return [
        *gather,
        forward,
        _signature(sweep, _OPS.sweep_backward.default, {**given, "gradients": incoming, "over": back}),
    ]


def _refs(names: Iterable[str]) -> tuple[Ref, ...]:
    return tuple(map(Ref, names))


def _signature(sweep: Sweep, target: OpOverload, given: Mapping[str, Argument]) -> Signature:
    graph = sweep.segment.graph
    tensors = {**graph.tensors, **{t.id: t for t in _statistics(sweep)}}
    return call_signature(replace(graph, tensors=tensors), Call.by_name(target, {**given, "name": sweep}))


def _statistics(sweep: Sweep) -> Iterator[Tensor]:
    """Descriptions of the statistics that a sweep gathers."""
    device = sweep.segment.graph.tensors[sweep.segment.inputs[0]].device
    for gathering in sweep.gatherings.values():
        dtype = DType(str(gathering.dtype).removeprefix("torch."))
        for name, shape in zip(gathering.names, gathering.shapes, strict=True):
            yield Tensor(name, Kind.ACTIVATION, shape, dtype, device=device)
