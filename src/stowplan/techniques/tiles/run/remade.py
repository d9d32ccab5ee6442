"""Steps whose largest skips are recomputed for their late readers; tiles are sought in them as well."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import nn

from stowplan.capture import Captured
from stowplan.techniques.tiles.plan.borders import in_tiling_order
from stowplan.techniques.tiles.plan.skips import cheap_skips
from stowplan.techniques.tiles.run.insertions import capture_with_sweeps


def with_skips_recomputed(
    captured: Captured, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Iterator[Captured]:
    """The same step with one skip recomputed, with two, and so on; the results are the same."""
    early = replace(captured, graph=in_tiling_order(captured.graph))
    skips = cheap_skips(early.graph)
    for count in range(1, len(skips) + 1):
        yield capture_with_sweeps(early, model, args, kwargs, sweeps=(), skips=skips[:count])
