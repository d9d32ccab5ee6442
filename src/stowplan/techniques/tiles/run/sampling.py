"""Sampling: a few tiles tell what a sweep takes, for the others differ from them in halos and borders only.

Those that take most are among them, so that none takes more memory. What a sweep does once, such as bringing
its outputs and the sums of gradients into memory, is found out by running it over no tile at all.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from stowplan.ir import Graph
from stowplan.ops.effects import macs_of
from stowplan.ops.table import elements_of, shape_of, site_of
from stowplan.plan.level import Level
from stowplan.run.cost.machine import Cost, free_bytes
from stowplan.run.cost.probe import PROBES, Signature, probed_cost
from stowplan.techniques.tiles.plan.rects import TileLevels
from stowplan.techniques.tiles.plan.rounds import Round, source_of
from stowplan.techniques.tiles.plan.segment import Segment
from stowplan.techniques.tiles.run.sweep import Sweep

SWEEPS = {
    "stowplan.gather.default": slice(0, -1),
    "stowplan.sweep.default": slice(-1, None),
    "stowplan.sweep_backward.default": slice(None),
    "stowplan.sweep_loss.default": slice(None),
}
"""The ops that run a sweep, and which of its rounds each runs."""

_LONG_SECONDS = 0.25  # of a sample: it is run once, because kernels for its shapes are built in far less
_MOVED = 16  # multiply-accumulates that take about as long as reading and writing one element


@dataclass(frozen=True, slots=True)
class Sample:
    """Some tiles of a round, by number, and how much there is to do in these and in all."""

    tiles: tuple[int, ...]
    work: float
    all_work: float


def cost_of_sweep(signature: Signature, device: torch.device) -> Cost | None:
    """The cost of one run of a sweep, from a sample of its tiles; None if that cannot be probed."""
    rounds_run = SWEEPS[str(signature.call.target)]
    sweep = signature.call.arguments()["name"]
    assert isinstance(sweep, Sweep)
    if signature.operand_bytes > free_bytes(device):
        return None
    samples = [
        sample_of(of_round, sweep.remat, before)
        for of_round, before in zip(sweep.rounds, sweep.before, strict=True)
    ]
    seen = samples[rounds_run]
    once = probed_cost(_over(sweep, [()] * len(samples), signature), device, repeats=1)
    sampled = _over(sweep, [sample.tiles for sample in samples], signature)
    some = probed_cost(sampled, device, repeats=1, long_seconds=_LONG_SECONDS)
    if once is None or some is None:
        return None
    times = sum(sample.all_work for sample in seen) / sum(sample.work for sample in seen)
    return Cost(once.seconds + max(0.0, some.seconds - once.seconds) * times, some.rise_bytes)


def sample_of(
    of_round: Round, remat: Segment | None = None, before: Sequence[TileLevels | None] = ()
) -> Sample:
    """The tiles that may need the most memory; if there is only one, also the one of another shape with the
    most work.

    The sample assumes that a tile needs no more memory than another that is at least as large along each dim
    of all that its ops make and read. At a border, windows compute more than is wanted, so a tile in the
    middle does not cover those at borders. If inputs are rematerialised, the tile of `before` that recomputes
    a tile's inputs counts as part of it.
    """
    pairs = list(zip(of_round.tiles, before or (None,) * len(of_round.tiles), strict=True))
    price = _prices(of_round.segment) | (_prices(remat) if remat else {})
    levels = [[level for tile in pair if tile for level in tile.levels] for pair in pairs]
    work = [
        1.0
        + sum(price[level.op.id] * level.made.volume for level in of_tile)
        + sum(each * size for each, size in _looked_at(of_round, tile))
        for of_tile, (tile, _) in zip(levels, pairs, strict=True)
    ]
    graph = of_round.segment.graph
    chosen = _uncovered([_sizes(graph, pair) for pair in pairs])
    if len(chosen) == 1:
        by_work = sorted(range(len(pairs)), key=lambda number: -work[number])
        shapes = _shapes(levels[chosen[0]])
        unlike = next((n for n in by_work if _shapes(levels[n]) != shapes), by_work[-1])
        chosen = list(dict.fromkeys((*chosen, unlike)))
    return Sample(tuple(chosen), sum(work[number] for number in chosen), sum(work))


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What a tile makes, reads and writes, along each dim; tiles compare if these are the same tensors."""

    tensors: tuple[str, ...]
    along: tuple[float, ...]


def _sizes(graph: Graph, pair: Iterable[TileLevels | None]) -> _Sizes:
    tensors, along = list[str](), list[float]()
    for tile in (tile for tile in pair if tile):
        for level in tile.levels:
            tensors.append(level.op.outputs[level.output].tensor)
            along += _made_in_all(graph, level)
            for use, need in zip(level.op.inputs, level.needs, strict=True):
                if need:
                    tensors.append(use.tensor)
                    along += need.clip(shape_of(graph.tensors[use.tensor])).shape
        for name, part in tile.owned.items():
            tensors.append(name)
            along += part.shape
    return _Sizes(tuple(tensors), tuple(along))


def _uncovered(sizes: Sequence[_Sizes]) -> list[int]:
    """By number those that no other is as large as along each dim; the first of equals."""
    firsts = {size: number for number, size in reversed(list(enumerate(sizes)))}
    alike: dict[tuple[str, ...], list[_Sizes]] = {}
    for size in firsts:
        alike.setdefault(size.tensors, []).append(size)
    found = list[int]()
    for group in alike.values():
        table = np.array([size.along for size in group])
        found += (
            firsts[size]
            for size, row in zip(group, table, strict=True)
            if (table >= row).all(axis=1).sum() == 1  # itself
        )
    return sorted(found)


def _prices(segment: Segment) -> dict[str, float]:
    """By op, the work for an element that it makes: a little even where a loss is all there is."""
    sites = {op.id: site_of(segment.graph, op) for op in segment.ops}
    return {op: _MOVED + macs_of(site) / max(1, elements_of(site.outputs[0])) for op, site in sites.items()}


def _looked_at(of_round: Round, tile: TileLevels) -> Iterator[tuple[float, int]]:
    """Of what a tile gathers statistics of, the work for an element and how many there are."""
    for op in of_round.statistics:
        part = tile.owned.get(source_of(op, of_round.products))
        if part is not None:
            yield _MOVED + (part.shape[1] if op.id in of_round.products else 0), part.volume


def _made_in_all(graph: Graph, level: Level) -> list[float]:
    """Along each dim, with what comes too much: windows at one border are padded on both sides, and the
    result is cut."""
    need, made = level.needs[0] if level.needs else None, level.made.shape
    if need is None or len(need.shape) != len(made):
        return list(made)
    overhang = need.overhang(shape_of(graph.tensors[level.op.inputs[0].tensor]))
    return [
        size * (1 + abs(before - after) / max(1, length))
        for size, length, (before, after) in zip(made, need.shape, overhang, strict=True)
    ]


def _shapes(levels: Iterable[Level]) -> tuple[tuple[int, ...], ...]:
    return tuple(level.made.shape for level in levels)


def _over(sweep: Sweep, tiles: Sequence[Sequence[int]], signature: Signature) -> Signature:
    return replace(signature, call=signature.call.replacing({"name": sweep.only(tiles)}))


PROBES.update(dict.fromkeys(SWEEPS, cost_of_sweep))
