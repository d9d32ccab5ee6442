"""Streams: inputs of a sweep that are made again to differentiate it, without what they were first made of.

What a sweep reads was made by sweeps before it. Their statistics are known by then, so that it can be made of
what is further back in one go, whatever norms lie between: part by part in the tiles that read it, never
whole; or whole, just before, so that it is made once even if several rounds read it. That is a choice, as is
how far back to begin: fewer bytes wait, and more is computed twice.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from stowplan.errors import NotTileable
from stowplan.ir import Kind, Op
from stowplan.ops.macs import macs_of
from stowplan.ops.regions import Relation
from stowplan.ops.table import site_of
from stowplan.plan.tiles.fitness import refusal_of_tile
from stowplan.plan.tiles.rects import Tile, regions_by_op, tile_of
from stowplan.plan.tiles.rounds import Round, towards
from stowplan.plan.tiles.segment import Segment


@dataclass(frozen=True, slots=True)
class Swept:
    """A segment and the rounds that it is swept in."""

    segment: Segment
    rounds: tuple[Round, ...]

    @property
    def statistics(self) -> tuple[Op, ...]:
        """The ops whose statistics are gathered."""
        return tuple(op for each in self.rounds for op in each.statistics)

    @property
    def read_early(self) -> frozenset[str]:
        """The inputs that other rounds than the last read as well."""
        return frozenset(name for each in self.rounds[:-1] for name in each.segment.inputs)


@dataclass(frozen=True, slots=True)
class Stream:
    """What makes some inputs of a segment again: in parts, and at once, each None if there are none such.

    Both are segments that read what is whole, and in which all statistics are known.
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
        """The work of making them, as often as they are read."""
        in_parts = self.rounds * _macs(self.in_parts) if self.in_parts else 0
        return in_parts + (_macs(self.at_once) if self.at_once else 0)

    @property
    def read(self) -> tuple[str, ...]:
        """What is read as a whole while the reader is differentiated."""
        made = self.in_parts.outputs if self.in_parts else ()
        sources = self.in_parts.inputs if self.in_parts else ()
        return tuple(dict.fromkeys((*(name for name in self.reader.inputs if name not in made), *sources)))

    @property
    def kept(self) -> tuple[str, ...]:
        """The activations that have to wait for it: what tells one stream of a reader from another."""
        tensors = self.reader.graph.tensors
        remade = {name for segment in self.segments for name in segment.outputs}
        sources = (name for segment in self.segments for name in segment.inputs)
        names = dict.fromkeys((*(name for name in self.reader.inputs if name not in remade), *sources))
        return tuple(name for name in names if tensors[name].kind is Kind.ACTIVATION)


def tiles_before(of_round: Round, stream: Segment) -> tuple[Tile | None, ...]:
    """For each tile of a round, the one that makes parts for it; NotTileable if that cannot be made apart."""
    regions = regions_by_op(stream)
    tiles = tuple(_tile_for(reader, stream, regions) for reader in of_round.tiles)
    for tile in filter(None, tiles):
        if refusal := refusal_of_tile(stream, tile):
            raise NotTileable(refusal)
    return tiles


def _tile_for(reader: Tile, stream: Segment, regions: Mapping[str, tuple[Relation, ...]]) -> Tile | None:
    read = {name: reader.held[name] for name in stream.outputs if name in reader.held}
    return tile_of(stream, read, regions) if read else None


def stream_from(
    before: Sequence[Swept], reader: Swept, kept: Iterable[str], whole: Container[str] = ()
) -> Stream | None:
    """What makes the inputs of a sweep of what is `kept`, by the sweeps before it; None if nothing does.

    Those in `whole` are made at once.
    """
    stop = frozenset(kept)
    ops = [op for swept in before for op in swept.segment.ops if stop.isdisjoint(op.writes())]
    made = {name for op in ops for name in op.writes()}
    outside = (name for swept in before for name in swept.segment.inputs if name not in made)
    inputs = dict.fromkeys((*outside, *sorted(stop)))
    merged = replace(reader.segment, ops=tuple(ops), apart=(), inputs=tuple(inputs), loss=None)
    chosen = {op.id for op in ops}
    known = [op for swept in before for op in swept.statistics if op.id in chosen]
    wanted = [name for name in reader.segment.inputs if name in made]
    in_parts = tuple(name for name in wanted if name not in whole)
    at_once = tuple(name for name in wanted if name in whole)
    stream = Stream(
        reader.segment,
        towards(merged, known, in_parts) if in_parts else None,
        towards(merged, known, at_once) if at_once else None,
        sum(not set(in_parts).isdisjoint(each.segment.inputs) for each in reader.rounds),
    )
    return stream if stream.segments else None


def _macs(segment: Segment) -> int:
    return sum(macs_of(site_of(segment.graph, op)) for op in segment.ops)
