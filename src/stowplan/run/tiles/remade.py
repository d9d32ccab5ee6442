"""The step with its largest skips made again for their late readers: further steps to look for tiles in."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import nn

from stowplan.capture import Captured
from stowplan.plan.tiles.borders import in_tiling_order
from stowplan.plan.tiles.skips import cheap_skips
from stowplan.run.tiles.swept import capture_swept


def with_skips_again(
    captured: Captured, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Iterator[Captured]:
    """The same step with one skip made again, with two, and so on; it computes the same."""
    early = replace(captured, graph=in_tiling_order(captured.graph))
    skips = cheap_skips(early.graph)
    for count in range(1, len(skips) + 1):
        yield capture_swept(early, model, args, kwargs, sweeps=(), skips=skips[:count])
