"""Sweep probes: how much longer a segment takes in tiles than whole, on this machine and with tiles of this
size.

Small parts may be slower, if launching ops dominates, or faster, if they stay in a cache. A probe of some
tiles shows both before a step with the sweep is captured. Each sweep is probed once, however many candidates
have it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from stowplan.capture import Argument, Call, Ref
from stowplan.errors import NotTileable
from stowplan.ir import DType, Graph, Kind, Phase, Tensor
from stowplan.plan.options import Progress
from stowplan.plan.pricing import Pricing
from stowplan.plan.tiles.candidates import Tiled
from stowplan.plan.tiles.rematerialise import RematerialisedInputs
from stowplan.run.cost.machine import device_of
from stowplan.run.cost.probe import costs_of_calls
from stowplan.run.cost.signature import Signature, call_signature
from stowplan.run.tiles.sweep import Sweep
from stowplan.torch_private import OpOverload

_OPS = torch.ops.stowplan
_OPTIMISM = 0.75  # of the time by work: no sweep is expected to be faster


class SweepProbes:
    """The sweeps of a step's tiled candidates: each is built and probed once, when it is first needed."""

    def __init__(
        self, graph: Graph, calls: Mapping[str, Call], pricing: Pricing, progress: Progress | None = None
    ) -> None:
        self._graph, self._calls, self._pricing, self._progress = graph, calls, pricing, progress
        self._sweeps: dict[Tiled, Sweep] = {}
        self._extra: dict[str, float] = {}

    def sweep(self, tiled: Tiled) -> Sweep:
        """The sweep of a segment on its grid."""
        if tiled not in self._sweeps:
            self._sweeps[tiled] = Sweep(tiled.segment, self._calls, tiled.parts)
        return self._sweeps[tiled]

    def extra_seconds(self, tiled: Tiled) -> float:
        """The measured seconds of a sweep, forward and backward, beyond those of its segment untiled."""
        sweep = self.sweep(tiled)
        if sweep.name not in self._extra:
            self._extra[sweep.name] = self._seconds_in_tiles(sweep) - sum(self._seconds_whole(tiled))
        return self._extra[sweep.name]

    def optimistic_extra_seconds(self, tiled: Tiled) -> float:
        """A lower bound on them without a probe: by work, which small tiles may do faster."""
        forward, backward = self._seconds_whole(tiled)
        times = tiled.costs.forward_macs / max(1, tiled.costs.untiled_macs)
        again = 1 if tiled.segment.loss is None else 0
        return _OPTIMISM * ((1 + again) * times * forward + backward) - forward - backward

    def optimistic_seconds(self, remat: RematerialisedInputs) -> float:
        """A lower bound on the seconds of recomputing the inputs of a sweep."""
        return _OPTIMISM * sum(
            self._pricing.seconds[op.id] for segment in remat.segments for op in segment.ops
        )

    def _seconds_in_tiles(self, sweep: Sweep) -> float:
        costs = costs_of_calls(signatures_of(sweep), device_of(self._graph), progress=self._progress)
        if None in costs.values():
            raise NotTileable(f"{sweep.name} could not be probed on this machine")
        return sum(cost.seconds for cost in costs.values() if cost)

    def _seconds_whole(self, tiled: Tiled) -> tuple[float, float]:
        """Forward and backward."""
        inside = {op.id for op in tiled.segment.ops}
        ops, seconds = self._graph.ops, self._pricing.seconds
        forward = sum(seconds[op] for op in inside)
        backward = sum(seconds[op.id] for op in ops if op.phase is Phase.BACKWARD and op.adjoint_of in inside)
        return forward, backward


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
    incoming = _refs(gradients.get(name, name) for name in segment.outputs)
    ahead, back = tuple(sweep.over_inputs()), tuple(sweep.over_gradients(wanted))
    return [
        *gather,
        _signature(sweep, _OPS.sweep.default, {**given, "over": ahead}),
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
