"""Region rules on captured networks: every forward op has one, and together they miss nothing."""

from random import Random

import pytest
import torch
from torch import Tensor

from stowplan.capture import capture
from stowplan.geometry import Rect
from stowplan.ir import Graph, Kind, Phase
from stowplan.ops.regions import regions_of
from stowplan.ops.table import site_of
from tests.support.nets import NETS
from tests.support.regions import pulled

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", NETS)
@pytest.mark.slow
def test_no_forward_op_of_a_network_is_a_barrier(name: str) -> None:
    graph = capture(*NETS[name].build("tiny")).graph
    forward = (op for op in graph.ops if op.phase is Phase.FORWARD)
    assert {reason for op in forward if (reason := regions_of(site_of(graph, op)).barrier)} == set()


@pytest.mark.slow
def test_what_a_tile_of_the_unet_pulls_is_all_it_needs_and_no_row_more() -> None:
    example = NETS["unet"].build("tiny", dtype=torch.float64, resolution=380, width=2)
    image, _ = example.args
    graph = capture(*example).graph
    whole, random = predicted(example.model, image), Random(0)
    for _ in range(6):
        tile = random_tile(random, tuple(whole.shape))
        part = pulled(graph, scores_of(graph), tile)[image_of(graph)].clip(image.shape)
        assert part.volume < image.numel()
        poisoned = torch.full_like(image, float("nan"))
        poisoned[slices(part)] = image[slices(part)]
        assert torch.equal(predicted(example.model, poisoned)[slices(tile)], whole[slices(tile)])
        poisoned[:, :, part.lo[2]] = float("nan")
        assert predicted(example.model, poisoned)[slices(tile)].isnan().any(), "one row less would do"


def predicted(model: torch.nn.Module, image: Tensor) -> Tensor:
    """The network's scores, with the same dropout every time."""
    torch.default_generator.manual_seed(0)
    scores: Tensor = model.get_submodule("network")(image).detach()
    return scores


def scores_of(graph: Graph) -> str:
    """What the last convolution makes."""
    return [op for op in graph.ops if op.type == "aten.convolution.default"][-1].outputs[0].tensor


def image_of(graph: Graph) -> str:
    return next(t.id for t in graph.tensors.values() if t.kind is Kind.INPUT and len(t.shape or ()) == 4)


def random_tile(random: Random, shape: tuple[int, ...]) -> Rect:
    """A tile of all classes, at most 60 pixels high and wide."""
    lo = [random.randrange(size) for size in shape[2:]]
    hi = [min(size, low + random.randint(1, 60)) for low, size in zip(lo, shape[2:], strict=True)]
    return Rect((0, 0, *lo), (*shape[:2], *hi))


def slices(rect: Rect) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in zip(rect.lo, rect.hi, strict=True))
