"""The knee: how much longer ops take on the parts that tiles have than their share of the work says.

Small parts may be slower, when starting an op counts, or faster, when they stay in a cache. Both show when
the ops of a tile are tried, each distinct op and size once.
"""

from collections.abc import Mapping
from dataclasses import replace

from stowplan.capture import Captured
from stowplan.ir import Phase
from stowplan.plan.pricing import Pricing
from stowplan.plan.tiles.candidates import Tiled
from stowplan.plan.tiles.rounds import rounds_of
from stowplan.plan.tiles.samples import sample_step
from stowplan.run.planning import price_captured
from stowplan.run.probe import Progress


def swept_seconds(
    captured: Captured, tiled: Tiled, pricing: Pricing, progress: Progress | None = None
) -> float:
    """What a sweep should take forward and backward, beyond what its segment takes whole."""
    work, graph = tiled.costs.work, tiled.segment.graph
    slowdown = slowdowns(captured, tiled, pricing, progress)
    runs = 1 if tiled.segment.loss else 2  # differentiating begins with another run
    extra = 0.0
    for op in graph.ops:
        if op.id in work:
            extra += pricing.seconds[op.id] * (runs * work[op.id] * slowdown[op.id] - 1)
        elif op.phase is Phase.BACKWARD and op.adjoint_of is not None and op.adjoint_of in work:
            extra += pricing.seconds[op.id] * (work[op.adjoint_of] * slowdown[op.id] - 1)
    return extra


def slowdowns(
    captured: Captured, tiled: Tiled, pricing: Pricing, progress: Progress | None = None
) -> Mapping[str, float]:
    """By op, forward and backward: seconds on the middle tile over its share of those of the whole."""
    segment, work = tiled.segment, tiled.costs.work
    tiles = rounds_of(segment, tiled.parts)[-1].tiles
    ideal = sample_step(segment, tiles[len(tiles) // 2], pricing)
    ops = tuple(op for op in ideal.graph.ops if op.id in work or op.adjoint_of in work)
    tried = price_captured(replace(captured, graph=replace(ideal.graph, ops=ops)), progress).seconds
    shares = ideal.pricing.seconds
    return {op.id: tried[op.id] / shares[op.id] if shares[op.id] else 1.0 for op in ops}
