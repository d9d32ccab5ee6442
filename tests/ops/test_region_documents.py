"""Region rules on the five documents: what has a rule, and what tiles of a whole network need."""

from collections.abc import Callable
from pathlib import Path

import pytest

from stowplan.formats.door import read_document
from stowplan.geometry import Rect
from stowplan.ir import Phase
from stowplan.ops.regions import Partial, regions_of
from stowplan.ops.table import site_of
from tests.support.regions import pulled

# Ops that hand tensors in and out, or that the document says too little about.
BARRIERS = {
    "chainer": set[str](),
    "megengine": {"ImmutableTensor", "InputCallback", "OutputCallback", "SharedDeviceTensor"},
    "regiongraph": {"data", "evaluate", "accuracy"},
    "tensorflow": {"Conv2D", "MaxPool"},
    "tilelog": set[str](),
}


@pytest.mark.parametrize("name", BARRIERS)
def test_forward_ops_of_the_documents_have_rules(name: str, dump: Callable[[str], Path]) -> None:
    graph = read_document(dump(name)).graph
    forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
    barriers = {op.type for op in forward if regions_of(site_of(graph, op)).barrier}
    assert barriers <= BARRIERS[name]


@pytest.mark.parametrize("rows", [(0, 20), (64, 132), (368, 388), (0, 388)])
def test_a_tile_of_the_unet_needs_its_rows_and_184_more(
    rows: tuple[int, int], dump: Callable[[str], Path]
) -> None:
    graph = read_document(dump("chainer")).graph
    score = next(op for op in graph.ops if op.attributes.get("rank") == 54).outputs[0].tensor
    low, high = rows
    needed = pulled(graph, score, Rect((2, 0, low, 0), (3, 2, high, 388)))
    assert needed["53"] == Rect((2, 0, low, 0), (3, 1, high + 184, 572))


def test_the_loss_of_the_unet_is_a_mean_over_all_pixels(dump: Callable[[str], Path]) -> None:
    graph = read_document(dump("chainer")).graph
    loss = next(op for op in graph.ops if op.type == "SoftmaxCrossEntropy")
    reduction = regions_of(site_of(graph, loss)).outputs[0].reduction
    assert reduction is not None
    assert reduction.partial is Partial.MEAN
    assert reduction.dims == {0: (0, 2, 3), 1: (0, 1, 2)}
