"""Sampling: a few tiles tell what a sweep takes, for the others differ from them in halos and borders only.

Those that take most are among them, so that none takes more memory. What a sweep does once, such as making
room for sums of gradients, is found out by running it over no tile at all.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from stowplan.ir import Graph
from stowplan.ops.effects import macs_of
from stowplan.ops.table import elements_of, shape_of, site_of
from stowplan.plan.level import Level
from stowplan.plan.tiles.rects import Tile
from stowplan.plan.tiles.rounds import Round, source_of
from stowplan.plan.tiles.segment import Segment
from stowplan.run.cost.machine import Cost, free_bytes
from stowplan.run.cost.probe import PROBES, Signature, probed_cost
from stowplan.run.tiles.sweep import Sweep

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
    once = _tried(sweep, [()] * len(samples), signature, device)
    some = _tried(sweep, [sample.tiles for sample in samples], signature, device)
    if once is None or some is None:
        return None
    times = sum(sample.all_work for sample in seen) / sum(sample.work for sample in seen)
    return Cost(once.seconds + max(0.0, some.seconds - once.seconds) * times, some.rise_bytes)


def sample_of(of_round: Round, remat: Segment | None = None, before: Sequence[Tile | None] = ()) -> Sample:
    """The tile that makes most, the one with the largest op, the largest one, the largest unlike it, and
    for each op a tile in which it makes most.

    A tile is as large as what its ops make and read: of two that make as much, one at a border reads less
    than one in the middle, where kernels copy larger parts and make larger gradients. If inputs are
    rematerialised, the tile of `before` that recomputes a tile's inputs counts as part of it.
    """
    pairs = list(zip(of_round.tiles, before or (None,) * len(of_round.tiles), strict=True))
    price = _prices(of_round.segment) | (_prices(remat) if remat else {})
    levels = [[level for tile in pair if tile for level in tile.levels] for pair in pairs]
    looked_at = [list(_looked_at(of_round, tile)) for tile, _ in pairs]
    graph = of_round.segment.graph
    sizes = [
        sum(level.made.volume + _read(graph, level) for level in of_tile) + sum(size for _, size in seen)
        for of_tile, seen in zip(levels, looked_at, strict=True)
    ]
    by_size = sorted(range(len(pairs)), key=lambda number: -sizes[number])
    unlike = next((n for n in by_size if _shapes(levels[n]) != _shapes(levels[by_size[0]])), by_size[-1])
    made = [
        [*((price[level.op.id], _made_in_all(graph, level)) for level in of_tile), *seen]
        for of_tile, seen in zip(levels, looked_at, strict=True)
    ]
    in_all = max(by_size, key=lambda number: sum(size for _, size in made[number]))
    by_op = max(by_size, key=lambda number: max((each * size for each, size in made[number]), default=0))
    by_each_op = [{level.op.id: _made_in_all(graph, level) for level in of_tile} for of_tile in levels]
    chosen = _with_largest((in_all, by_op, by_size[0], unlike), by_each_op)
    work = [
        1.0
        + sum(price[level.op.id] * level.made.volume for level in of_tile)
        + sum(each * size for each, size in seen)
        for of_tile, seen in zip(levels, looked_at, strict=True)
    ]
    return Sample(chosen, sum(work[number] for number in chosen), sum(work))


def _with_largest(chosen: Iterable[int], sizes: Sequence[Mapping[str, float]]) -> tuple[int, ...]:
    """The chosen tiles and, for each op that is larger in another tile, a tile where it is largest."""
    taken = dict.fromkeys(chosen)
    for op in dict.fromkeys(op for of_tile in sizes for op in of_tile):
        largest = max(range(len(sizes)), key=lambda number: sizes[number].get(op, 0.0))
        if all(sizes[number].get(op, 0.0) < sizes[largest].get(op, 0.0) for number in taken):
            taken[largest] = None
    return tuple(taken)


def _prices(segment: Segment) -> dict[str, float]:
    """By op, the work for an element that it makes: a little even where a loss is all there is."""
    sites = {op.id: site_of(segment.graph, op) for op in segment.ops}
    return {op: _MOVED + macs_of(site) / max(1, elements_of(site.outputs[0])) for op, site in sites.items()}


def _looked_at(of_round: Round, tile: Tile) -> Iterator[tuple[float, int]]:
    """Of what a tile gathers statistics of, the work for an element and how many there are."""
    for op in of_round.statistics:
        part = tile.owned.get(source_of(op, of_round.products))
        if part is not None:
            yield _MOVED + (part.shape[1] if op.id in of_round.products else 0), part.volume


def _read(graph: Graph, level: Level) -> int:
    """Elements that an op reads: padding is none."""
    pairs = zip(level.op.inputs, level.needs, strict=True)
    return sum(need.clip(shape_of(graph.tensors[use.tensor])).volume for use, need in pairs if need)


def _made_in_all(graph: Graph, level: Level) -> float:
    """With what comes too much: windows at one border are padded on both sides, and the result is cut."""
    need, made = level.needs[0] if level.needs else None, level.made.shape
    if need is None or len(need.shape) != len(made):
        return level.made.volume
    overhang = need.overhang(shape_of(graph.tensors[level.op.inputs[0].tensor]))
    return prod(
        size * (1 + abs(before - after) / max(1, length))
        for size, length, (before, after) in zip(made, need.shape, overhang, strict=True)
    )


def _shapes(levels: Iterable[Level]) -> tuple[tuple[int, ...], ...]:
    return tuple(level.made.shape for level in levels)


def _tried(
    sweep: Sweep, tiles: Sequence[Sequence[int]], signature: Signature, device: torch.device
) -> Cost | None:
    some = replace(signature, call=signature.call.replacing({"name": sweep.only(tiles)}))
    return probed_cost(some, device, repeats=1, long_seconds=_LONG_SECONDS)


PROBES.update(dict.fromkeys(SWEEPS, cost_of_sweep))
