"""LocalStep: one tile made ready to run, where its inputs lie, its calls, and what it writes where."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stowplan.capture import Call
from stowplan.geometry import Rect
from stowplan.plan.level import Level
from stowplan.run.parts.folding import folded, read_by
from stowplan.run.parts.kernels import run_local
from stowplan.run.parts.part import Index, LocalCall, PartSource, index_of, index_within, local_call
from stowplan.run.step.last_uses import last_uses
from stowplan.techniques.tiles.plan.not_needed import not_needed_in_backward
from stowplan.techniques.tiles.plan.rects import TileLevels
from stowplan.techniques.tiles.plan.segment import Segment
from stowplan.techniques.tiles.run.gathering import Gathering


@dataclass(frozen=True, slots=True)
class TileCalls:
    """Calls in order; `frees[i]` are the names that none after number i reads."""

    calls: tuple[LocalCall, ...]
    frees: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class TileRun:
    """The calls of a tile, in order: those to differentiate, and fewer to run it only."""

    reads: Mapping[str, Index]
    calls: TileCalls
    only_run: TileCalls
    writes: Mapping[str, Index]  # outputs, or the operands of the loss: where in the whole they lie
    owned: Mapping[str, Index]  # where in what the tile holds of them, which may be more
    rects: Mapping[str, Rect]  # what `writes` are indices of
    before: "TileRun | None" = None  # makes parts that are read of nothing whole

    def made_before(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parts that are made of others just before they are read."""
        if self.before is None:
            return {}
        with torch.no_grad():
            return self.before.run({name: given[name][index] for name, index in self.before.reads.items()})

    def run(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """The parts that the tile writes, from the parts it reads; `values` is emptied on the way."""
        calls = self.calls if torch.is_grad_enabled() else self.only_run
        for call, gone in zip(calls.calls, calls.frees, strict=True):
            values[call.name] = run_local(call, values)
            for name in gone:
                del values[name]
        ends = {name: values[name][index] for name, index in self.owned.items()}
        values.clear()
        return ends


def local_step(
    segment: Segment,
    calls: Mapping[str, Call],
    tile: TileLevels,
    gatherings: Mapping[str, Gathering],
    *,
    ends_are_outputs: bool,
) -> TileRun:
    """A tile with the calls that compute it, given the statistics of `gatherings`, which are by op.

    Where its ends are outputs, and not what something is gathered of, backward does not look at them.
    """
    local = (_local(segment, calls, tile, level, gatherings) for level in tile.levels)
    idle = not_needed_in_backward(segment) if ends_are_outputs else frozenset()
    made = [replace(call, idle=level.op.id in idle) for level, call in zip(tile.levels, local, strict=True)]
    reads = {name: index_of(tile.held[name]) for name in segment.inputs if name in tile.held}
    reads |= {source.tensor: () for call in made for source in call.statistics}
    return TileRun(
        reads=reads,
        calls=_in_order(made, tile.owned),
        only_run=_in_order(folded(segment.graph, made, tile.owned), tile.owned),
        writes={name: index_of(rect) for name, rect in tile.owned.items()},
        owned={name: index_within(rect, tile.held[name]) for name, rect in tile.owned.items()},
        rects=tile.owned,
    )


def _local(
    segment: Segment,
    calls: Mapping[str, Call],
    tile: TileLevels,
    level: Level,
    gatherings: Mapping[str, Gathering],
) -> LocalCall:
    call = local_call(segment.graph, calls[level.op.id], level, tile.held)
    if level.op.id not in segment.known:
        return call
    gathering = gatherings[level.op.id]
    place = gathering.seen_by(level.made)
    return replace(call, statistics=tuple(PartSource(name, place, (), ()) for name in gathering.read))


def _in_order(calls: Sequence[LocalCall], kept: Container[str]) -> TileCalls:
    return TileCalls(tuple(calls), last_uses([tuple(read_by(call)) for call in calls], kept))
