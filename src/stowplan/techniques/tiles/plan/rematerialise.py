"""Rematerialised inputs: a sweep's backward recomputes inputs of the sweep instead of keeping them.

The inputs of a sweep are the outputs of earlier sweeps. The statistics of those are known in backward, so an
input can be recomputed from tensors further back in one pass, whatever norms lie between. It is recomputed
part by part in the tiles that read it, never whole; or whole, just before, so that it is computed once even
if several passes read it. The further back the recomputation begins, the fewer bytes are kept and the more is
computed twice.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from stowplan.ir import Kind, Op
from stowplan.ops.effects import macs_of
from stowplan.ops.regions import Relation
from stowplan.ops.table import site_of
from stowplan.techniques.tiles.plan.fitness import refuse_tiles
from stowplan.techniques.tiles.plan.rects import TileLevels, regions_by_op, tile_of
from stowplan.techniques.tiles.plan.rounds import Round, towards
from stowplan.techniques.tiles.plan.segment import Segment


@dataclass(frozen=True, slots=True)
class PlannedSweep:
    """A segment and its passes over the tiles."""

    segment: Segment
    rounds: tuple[Round, ...]

    @property
    def statistics(self) -> tuple[Op, ...]:
        """The ops whose statistics are gathered."""
        return tuple(op for each in self.rounds for op in each.statistics)

    @property
    def read_early(self) -> frozenset[str]:
        """The inputs that passes before the last one read."""
        return frozenset(name for each in self.rounds[:-1] for name in each.segment.inputs)


@dataclass(frozen=True, slots=True)
class RematerialisedInputs:
    """The segments that recompute some inputs of `reader`: in parts, and at once; None if there are no such
    inputs.

    Both read whole tensors, and all their statistics are known.
    """

    reader: Segment
    in_parts: Segment | None
    at_once: Segment | None
    rounds: int = 1  # that read what is made in parts

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(segment for segment in (self.in_parts, self.at_once) if segment is not None)

    @property
    def macs(self) -> int:
        """The multiply-accumulates of recomputing the inputs, as often as they are read."""
        in_parts = self.rounds * _macs(self.in_parts) if self.in_parts else 0
        return in_parts + (_macs(self.at_once) if self.at_once else 0)

    @property
    def read(self) -> tuple[str, ...]:
        """The tensors that the reader's backward reads whole."""
        made = self.in_parts.outputs if self.in_parts else ()
        sources = self.in_parts.inputs if self.in_parts else ()
        return tuple(dict.fromkeys((*(name for name in self.reader.inputs if name not in made), *sources)))

    @property
    def kept(self) -> tuple[str, ...]:
        """The activations that are kept for the reader's backward; they identify this choice."""
        tensors = self.reader.graph.tensors
        remade = {name for segment in self.segments for name in segment.outputs}
        sources = (name for segment in self.segments for name in segment.inputs)
        names = dict.fromkeys((*(name for name in self.reader.inputs if name not in remade), *sources))
        return tuple(name for name in names if tensors[name].kind is Kind.ACTIVATION)


def tiles_before(of_round: Round, remat: Segment) -> tuple[TileLevels | None, ...]:
    """For each tile of a pass, the tile that recomputes its inputs; NotTileable if those cannot be cut so."""
    regions = regions_by_op(remat)
    tiles = tuple(_tile_for(reader, remat, regions) for reader in of_round.tiles)
    refuse_tiles(remat, filter(None, tiles))
    return tiles


def _tile_for(
    reader: TileLevels, remat: Segment, regions: Mapping[str, tuple[Relation, ...]]
) -> TileLevels | None:
    read = {name: reader.held[name] for name in remat.outputs if name in reader.held}
    return tile_of(remat, read, regions) if read else None


def rematerialise(
    before: Sequence[PlannedSweep], reader: PlannedSweep, kept: Iterable[str], whole: Container[str] = ()
) -> RematerialisedInputs | None:
    """The segments of earlier sweeps that recompute a sweep's inputs from `kept` tensors; None if none does.

    Inputs in `whole` are recomputed at once.
    """
    stop = frozenset(kept)
    ops = [op for sweep in before for op in sweep.segment.ops if stop.isdisjoint(op.writes())]
    made = {name for op in ops for name in op.writes()}
    outside = (name for sweep in before for name in sweep.segment.inputs if name not in made)
    inputs = dict.fromkeys((*outside, *sorted(stop)))
    merged = replace(reader.segment, ops=tuple(ops), apart=(), inputs=tuple(inputs), loss=None)
    chosen = {op.id for op in ops}
    known = [op for sweep in before for op in sweep.statistics if op.id in chosen]
    wanted = [name for name in reader.segment.inputs if name in made]
    in_parts = tuple(name for name in wanted if name not in whole)
    at_once = tuple(name for name in wanted if name in whole)
    remat = RematerialisedInputs(
        reader.segment,
        towards(merged, known, in_parts) if in_parts else None,
        towards(merged, known, at_once) if at_once else None,
        sum(not set(in_parts).isdisjoint(each.segment.inputs) for each in reader.rounds),
    )
    return remat if remat.segments else None


def _macs(segment: Segment) -> int:
    return sum(macs_of(site_of(segment.graph, op)) for op in segment.ops)
