"""Any stretch of any network, on any grid: refused with a reason, or exact."""

from random import Random

import pytest
import torch

from stowplan.capture import Captured, capture
from stowplan.errors import NotTileable
from stowplan.ir import DType, Phase
from stowplan.ops.table import shape_of
from stowplan.run.parts.losses import tiled_loss
from stowplan.techniques.tiles.plan.rects import cut_tensors
from stowplan.techniques.tiles.plan.rounds import refusal
from stowplan.techniques.tiles.plan.segment import Segment
from tests.support.in_tiles import error_in_tiles, stretch
from tests.support.nets import NETS

pytestmark = [pytest.mark.slow, pytest.mark.torch]
SIZES: dict[str, dict[str, int]] = {"unet": {"batch": 2, "resolution": 220}}


def random_segment(captured: Captured, random: Random) -> Segment:
    names = [op.id for op in captured.graph.ops if op.phase is Phase.FORWARD]
    first = random.randrange(len(names))
    last = min(len(names) - 1, first + random.randint(1, 14))
    return stretch(captured, names[first], names[last])


def is_float64(segment: Segment) -> bool:
    """Some networks compute positions in float32 whatever their own dtype."""
    made = (segment.graph.tensors[name].dtype for op in segment.ops for name in op.writes())
    return DType.FLOAT32 not in made


def random_grid(segment: Segment, random: Random) -> tuple[int, ...]:
    """Every sample apart or none, and up to three parts of every other dim."""
    cut = cut_tensors(segment)
    shape = shape_of(segment.graph.tensors[cut[0]]) if cut else ()
    return tuple(random.choice((1, size if dim == 0 else min(3, size))) for dim, size in enumerate(shape))


@pytest.mark.parametrize(
    "name",
    ["unet", "vgg16", "gpt", "vit", "diffusion", "unet3d", "llama", "efficientnet", "resnet50"],
)
def test_random_segments_are_exact_or_refused(name: str) -> None:
    sizes = SIZES.get(name, {})
    captured = capture(*NETS[name].build("tiny", device="cpu", dtype=torch.float64, seed=0, **sizes))
    random, exact = Random(name), 0
    for _ in range(40):
        segment = random_segment(captured, random)
        parts = random_grid(segment, random)
        if not parts or max(parts) == 1 or not is_float64(segment) or refusal(segment, parts):
            continue
        if segment.loss is not None:
            try:
                tiled_loss(captured.program.calls[segment.loss.id])
            except NotTileable:
                continue
        assert error_in_tiles(captured, segment, parts) < 1e-12, (
            segment.ops[0].id,
            segment.ops[-1].id,
            parts,
        )
        exact += 1
    assert exact >= 3
