"""The costs of a sweep: the work of its tiles against computing the segment once, and the peak in a tile."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from stowplan.ir import Graph, Kind, Phase
from stowplan.ops.effects import macs_of
from stowplan.ops.table import shape_of, site_of
from stowplan.plan.level import Level
from stowplan.techniques.tiles.plan.not_needed import not_needed_in_backward
from stowplan.techniques.tiles.plan.rects import TileLevels
from stowplan.techniques.tiles.plan.rounds import Round
from stowplan.techniques.tiles.plan.segment import Segment


@dataclass(frozen=True, slots=True)
class SweepCosts:
    """The work and the memory of a sweep.

    `work` is, by op, the share of its output that all tiles together compute; 1.0 if nothing is computed
    twice. `idle` is the part of that work that is not needed in backward. `gathered` is, by product, the work
    of gathering covariances of its input, relative to the product. Peaks are the memory of the largest tile,
    without the segment's inputs, outputs and their gradients: while it gathers statistics, runs forward only,
    or runs forward and backward; in a step without a backward half, the last is the larger of the others.
    `part_bytes` is the largest single part that a tile computes; `again_macs`
    are the multiply-accumulates of recomputing the segment when its statistics are known.
    """

    tiles: int
    work: Mapping[str, float]
    idle: Mapping[str, float]
    gathered: Mapping[str, float]
    forward_macs: int
    again_macs: int
    untiled_macs: int
    gathering_peak_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    part_bytes: int

    @property
    def halo_share(self) -> float:
        """The share of multiply-accumulates that are there only because tiles overlap.

        It is 0 where tiles do less than the whole, because they leave out what nothing reads.
        """
        return max(0.0, self.forward_macs / self.untiled_macs - 1.0) if self.untiled_macs else 0.0


def costs_of_sweep(segment: Segment, rounds: Sequence[Round]) -> SweepCosts:
    """Count all tiles of all rounds, and walk each as it runs."""
    macs = {op.id: macs_of(site_of(segment.graph, op)) for op in segment.ops}
    work = dict.fromkeys(macs, 0.0)
    of_rounds = [_work(each.segment, each.tiles.kinds) for each in rounds]
    for of_round in of_rounds:
        for op, share in of_round.items():
            work[op] += share
    unlike = [_unlike(tile for tile, _ in each.tiles.kinds) for each in rounds]
    forward_peaks = [
        max(_forward_peak(each.segment, tile) for tile in tiles)
        for each, tiles in zip(rounds, unlike, strict=True)
    ]
    gathered = {product.op.id: product.work for each in rounds for product in each.products.values()}
    last, last_work = rounds[-1], of_rounds[-1]
    is_differentiated = segment.graph.has_backward
    backward_peaks = (
        _largest_backward_peak(each.segment, tiles) for each, tiles in zip(rounds, unlike, strict=True)
    )
    return SweepCosts(
        tiles=max(len(each.tiles) for each in rounds),
        work=work,
        idle={op: last_work[op] for op in not_needed_in_backward(last.segment)} if is_differentiated else {},
        gathered=gathered,
        forward_macs=round(sum(macs[op] * share for op, share in (*work.items(), *gathered.items()))),
        again_macs=round(sum(macs[op] * share for op, share in last_work.items())),
        untiled_macs=sum(macs.values()),
        gathering_peak_bytes=max(forward_peaks[:-1], default=0),
        forward_peak_bytes=forward_peaks[-1],
        backward_peak_bytes=max(backward_peaks if is_differentiated else forward_peaks),
        part_bytes=max(
            _largest_part(each.segment, tile)
            for each, tiles in zip(rounds, unlike, strict=True)
            for tile in tiles
        ),
    )


def _unlike(tiles: Iterable[TileLevels]) -> list[TileLevels]:
    """One tile of each shape."""
    return list({tuple([level.made.shape for level in tile.levels]): tile for tile in tiles}.values())


def _largest_backward_peak(segment: Segment, tiles: Iterable[TileLevels]) -> int:
    saved = _saved_by_op(segment)
    return max(_backward_peak(segment, tile, saved) for tile in tiles)


def _work(segment: Segment, kinds: Iterable[tuple[TileLevels, int]]) -> dict[str, float]:
    made = dict.fromkeys((op.id for op in segment.ops), 0.0)
    whole = dict[str, int]()
    for tile, count in kinds:
        outputs = Counter(level.op.id for level in tile.levels)
        for level in tile.levels:
            name = _made_by(level)
            if name not in whole:
                whole[name] = max(1, prod(shape_of(segment.graph.tensors[name])))
            made[level.op.id] += count * level.made.volume / whole[name] / outputs[level.op.id]
    if segment.loss is not None:
        made[segment.loss.id] = 1.0
    return made


def _made_by(level: Level) -> str:
    return level.op.outputs[level.output].tensor


def _saved_by_op(segment: Segment) -> dict[str, frozenset[str]]:
    """By op of the segment, the tensors made in it that the op's backward reads."""
    inside = {name for op in segment.ops for name in op.writes()}
    saved: dict[str, set[str]] = {op.id: set() for op in segment.ops}
    for op in segment.graph.ops:
        if op.phase is Phase.BACKWARD and op.adjoint_of in saved:
            saved[op.adjoint_of].update(
                segment.graph.storage_of(name) for name in op.reads() if name in inside
            )
    return {op: frozenset(names & inside) for op, names in saved.items()}


def _part_bytes(graph: Graph, tile: TileLevels, name: str) -> int:
    """Bytes of what the tile holds of a tensor; views and what only backward sees by its side take none."""
    tensor = graph.tensors[name]
    if name not in tile.held or tensor.alias_of is not None or tensor.kind is Kind.PARAMETER:
        return 0
    return tile.held[name].volume * (tensor.dtype.itemsize if tensor.dtype else 4)


def _largest_part(segment: Segment, tile: TileLevels) -> int:
    made = (_part_bytes(segment.graph, tile, _made_by(level)) for level in tile.levels)
    return max(made, default=0)


def _last_reads(segment: Segment, tile: TileLevels) -> dict[str, int]:
    last: dict[str, int] = {}
    for number, level in enumerate(tile.levels):
        for use, need in zip(level.op.inputs, level.needs, strict=True):
            if need is not None:
                last[segment.graph.storage_of(use.tensor)] = number
    return last


def _forward_peak(segment: Segment, tile: TileLevels) -> int:
    """Every part from its op to its last reader."""
    graph, last = segment.graph, _last_reads(segment, tile)
    level_bytes = peak = 0
    for number, level in enumerate(tile.levels):
        level_bytes += _part_bytes(graph, tile, _made_by(level))
        peak = max(peak, level_bytes)
        level_bytes -= sum(
            _part_bytes(graph, tile, name)
            for name, reader in last.items()
            if reader == number and name not in segment.inputs and name not in tile.owned
        )
    return peak


def _backward_peak(segment: Segment, tile: TileLevels, saved: Mapping[str, frozenset[str]]) -> int:
    """Forward with everything that backward reads kept, then back: gradients come, what was kept goes."""
    graph, last = segment.graph, _last_reads(segment, tile)
    kept = {name for names in saved.values() for name in names}
    alive: dict[str, int] = {}
    peak = 0
    for number, level in enumerate(tile.levels):
        alive[_made_by(level)] = _part_bytes(graph, tile, _made_by(level))
        peak = max(peak, sum(alive.values()))
        for name, reader in last.items():
            if reader == number and name not in kept:
                alive.pop(name, None)
    return max(peak, _way_back(segment, tile, saved, alive))


def _way_back(
    segment: Segment, tile: TileLevels, saved: Mapping[str, frozenset[str]], alive: dict[str, int]
) -> int:
    graph = segment.graph
    gradients = {name: _part_bytes(graph, tile, name) for name in tile.owned if name not in segment.inputs}
    left = [saved[level.op.id] for level in tile.levels]
    peak = 0
    for number in reversed(range(len(tile.levels))):
        level = tile.levels[number]
        for use in level.op.inputs:
            name = graph.storage_of(use.tensor)
            if graph.tensors[name].dtype is not None and name in tile.held:
                gradients[name] = _gradient_bytes(graph, tile, name)
        peak = max(peak, sum(alive.values()) + sum(gradients.values()))
        gradients.pop(graph.storage_of(_made_by(level)), None)
        for name in segment.inputs:
            gradients.pop(name, None)
        needed = set().union(*left[:number])
        for name in [name for name in alive if name not in needed]:
            del alive[name]
    return peak


def _gradient_bytes(graph: Graph, tile: TileLevels, name: str) -> int:
    """A gradient is as large as the part it is of; that of a parameter is whole, on its way to the sum."""
    tensor = graph.tensors[name]
    if tensor.kind is Kind.PARAMETER:
        return tensor.nbytes or 0
    return _part_bytes(graph, tile, name)
