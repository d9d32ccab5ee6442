"""Capturing a step a second time, with sweeps in place of segments of its forward half.

Running statistics of the norms in a sweep: updated outside of it, once a step, however often it runs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from stowplan.capture import Call, Captured, Ref
from stowplan.ir import Graph, Op, Phase
from stowplan.run.planning.recapture import Insertion, Replacement, Trace, recapture, run_call, trace_of
from stowplan.techniques.tiles.plan.skips import Skip
from stowplan.techniques.tiles.run.gathering import Gathering
from stowplan.techniques.tiles.run.operator import call_sweep
from stowplan.techniques.tiles.run.sweep import Sweep
from stowplan.torch_private import OpOverload

_WITH_BUFFERS = torch.ops.aten._native_batch_norm_legit_functional.default


def running_statistics(
    sweep: Sweep, calls: Mapping[str, Call], statistics: Mapping[str, Tensor], values: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The new contents of buffers, by the names that the norms' own outputs have for them."""
    found: dict[str, Tensor] = {}
    for op, gathering in sweep.gatherings.items():
        if calls[op].target is _WITH_BUFFERS:
            found |= _updated(calls[op], gathering, statistics, values)
    return found


def _updated(
    call: Call, gathering: Gathering, statistics: Mapping[str, Tensor], values: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    given = call.arguments()
    momentum, count = given["momentum"], gathering.count
    assert isinstance(momentum, float)
    mean, variance = (statistics[name] for name in gathering.read)
    fresh = (mean, variance * (count / max(1, count - 1)))
    pairs = zip(call.outputs[-2:], ("running_mean", "running_var"), fresh, strict=True)
    updated = {}
    with torch.no_grad():
        for name, buffer, statistic in pairs:
            ref = given[buffer]
            assert isinstance(ref, Ref)
            assert name is not None
            before = values[ref.tensor]
            updated[name] = (before * (1 - momentum) + statistic * momentum).to(before.dtype)
    return updated


def capture_with_sweeps(
    captured: Captured,
    model: nn.Module,
    args: tuple[object, ...],
    kwargs: Mapping[str, object] | None = None,
    *,
    sweeps: Sequence[Sweep],
    skips: Sequence[Skip] = (),
    replacements: Mapping[OpOverload, Replacement] = MappingProxyType({}),
) -> Captured:
    """The step with these sweeps and with these skips recomputed; like the step itself, bound to `model`."""
    order = tuple(_in_order(captured.graph, sweeps, skips))
    return recapture(captured, model, args, kwargs, order, replacements)


@dataclass(frozen=True, slots=True)
class SweepInsertion:
    """A sweep in the place of its segment's ops."""

    sweep: Sweep

    def run(self, captured: Captured, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        sweep = self.sweep
        made, statistics = call_sweep(sweep, [values[name] for name in sweep.segment.inputs])
        outputs = dict(zip(sweep.segment.outputs, made, strict=True))
        known = {**values, **outputs}
        return outputs | running_statistics(sweep, captured.program.calls, statistics, known)

    def traces(self) -> tuple[Trace, ...]:
        """One op gathers its statistics, another runs it."""
        name = self.sweep.name
        return (Trace(self.sweep.segment.ops[0], lambda op: op.attributes.get("name") == name, repeats=True),)


@dataclass(frozen=True, slots=True)
class Late:
    """An op that reads skips which are recomputed for it."""

    op: Op
    skips: tuple[Skip, ...]

    def run(self, captured: Captured, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        remade = {skip.tensor: _recomputed(captured, skip, values) for skip in self.skips}
        return run_call(captured.graph, self.op, captured.program.calls[self.op.id], {**values, **remade})

    def traces(self) -> tuple[Trace, ...]:
        return tuple(map(trace_of, (*(op for skip in self.skips for op in skip.makers), self.op)))


def _recomputed(captured: Captured, skip: Skip, values: Mapping[str, Tensor]) -> Tensor:
    own = dict(values)
    for op in skip.makers:
        own.update(run_call(captured.graph, op, captured.program.calls[op.id], own))
    return own[skip.tensor]


def _in_order(graph: Graph, sweeps: Sequence[Sweep], skips: Sequence[Skip]) -> Iterator[Op | Insertion]:
    """Forward ops and sweeps in an executable order: a sweep takes the place of its last op."""
    last = {sweep.segment.ops[-1].id: sweep for sweep in sweeps}
    inside = {op.id for sweep in sweeps for op in sweep.segment.ops}
    for op in graph.ops:
        if op.phase is Phase.FORWARD and op.id not in inside:
            late = tuple(skip for skip in skips if skip.reader == op.id)
            yield Late(op, late) if late else op
        elif op.id in last:
            yield SweepInsertion(last[op.id])
