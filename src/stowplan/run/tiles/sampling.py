"""Sampling: a few tiles tell what a sweep takes, for the others differ from them in halos and borders only.

The largest tile is one of them, so that none takes more memory. What a sweep does once, such as making room
for sums of gradients, is found out by running it over no tile at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from stowplan.ops.macs import macs_of
from stowplan.ops.table import elements_of, site_of
from stowplan.plan.tiles.rects import Tile
from stowplan.plan.tiles.rounds import Round
from stowplan.run.machine import free_bytes
from stowplan.run.probe_cache import Cost
from stowplan.run.signature import Signature
from stowplan.run.tiles.operator import known_for_now, sweep_named
from stowplan.run.tiles.sweep import Sweep
from stowplan.run.trial import cost_of, tried

SWEEPS = {
    "stowplan.gather.default": slice(0, -1),
    "stowplan.sweep.default": slice(-1, None),
    "stowplan.sweep_backward.default": slice(None),
    "stowplan.sweep_loss.default": slice(None),
}
"""The ops that run a sweep, and which of its rounds each runs."""

_MOVED = 16  # multiply-accumulates that take about as long as reading and writing one element


@dataclass(frozen=True, slots=True)
class Sample:
    """Some tiles of a round, by number, and how much there is to do in these and in all."""

    tiles: tuple[int, ...]
    work: float
    all_work: float


def cost_of_call(signature: Signature, device: torch.device, *, repeats: int) -> Cost | None:
    """What one run of an op takes, a sweep by its sample; None if that cannot be tried."""
    rounds_run = SWEEPS.get(str(signature.call.target))
    if rounds_run is None:
        return cost_of(signature, device, repeats=repeats)
    sweep = sweep_named(str(signature.call.args[-1]))
    if signature.operand_bytes > free_bytes(device):
        return None
    samples = [sample_of(of_round) for of_round in sweep.rounds]
    seen = samples[rounds_run]
    once = _tried(sweep, [()] * len(samples), signature, device)
    some = _tried(sweep, [sample.tiles for sample in samples], signature, device)
    if once is None or some is None:
        return None
    times = sum(sample.all_work for sample in seen) / sum(sample.work for sample in seen)
    return Cost(once.seconds + max(0.0, some.seconds - once.seconds) * times, some.rise_bytes)


def sample_of(of_round: Round) -> Sample:
    """The largest tile, and the largest that is unlike it; another one if all are alike."""
    sizes = [sum(level.made.volume for level in tile.levels) for tile in of_round.tiles]
    by_size = sorted(range(len(sizes)), key=lambda number: -sizes[number])
    shapes = {number: _shapes(of_round.tiles[number]) for number in by_size}
    unlike = next((n for n in by_size if shapes[n] != shapes[by_size[0]]), by_size[-1])
    tiles = tuple(dict.fromkeys((by_size[0], unlike)))
    work = work_of(of_round)
    return Sample(tiles, sum(work[number] for number in tiles), sum(work))


def work_of(of_round: Round) -> list[float]:
    """How much each tile of a round has to do: a little even where a loss is all there is."""
    graph, price = of_round.segment.graph, dict[str, float]()
    for op in of_round.segment.ops:
        site = site_of(graph, op)
        price[op.id] = _MOVED + macs_of(site) / max(1, elements_of(site.outputs[0]))
    return [
        1.0 + sum(price[level.op.id] * level.made.volume for level in tile.levels) for tile in of_round.tiles
    ]


def _shapes(tile: Tile) -> tuple[tuple[int, ...], ...]:
    return tuple(level.made.shape for level in tile.levels)


def _tried(
    sweep: Sweep, tiles: Sequence[Sequence[int]], signature: Signature, device: torch.device
) -> Cost | None:
    call = signature.call
    with known_for_now(sweep.only(tiles)) as name:
        some = replace(signature, call=replace(call, args=(*call.args[:-1], name)))
        return tried(some, device, repeats=1)
