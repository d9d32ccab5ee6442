"""The table of workspaces agrees with what kernels take here, for the convolutions it tells apart."""

import pytest
import torch
from torch import nn

from stowplan.analyse.facts import estimated_workspaces
from stowplan.capture import capture
from stowplan.run.cost.probe import probe
from tests.support.models import images

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]

CONVOLUTIONS = {
    "plain": (nn.Conv2d(32, 64, 3), (2, 32, 40, 40)),
    "few channels": (nn.Conv2d(4, 8, 3), (2, 4, 64, 64)),
    "strided": (nn.Conv2d(32, 64, 3, stride=2), (2, 32, 40, 40)),
    "large weight": (nn.Conv2d(256, 256, 3, padding=1), (2, 256, 8, 8)),
    "depthwise": (nn.Conv2d(64, 64, 3, padding=1, groups=64), (2, 64, 40, 40)),
    "transposed": (nn.ConvTranspose2d(64, 32, 2, stride=2), (2, 64, 20, 20)),
    "three dims": (nn.Conv3d(16, 16, 3), (2, 16, 16, 16, 16)),
    "small and alone": (nn.Conv2d(16, 16, 3), (1, 16, 20, 20)),
    "three dims, small and alone": (nn.Conv3d(4, 4, 3), (1, 4, 16, 16, 16)),
    "transposed, small and alone": (nn.ConvTranspose2d(16, 16, 3), (1, 16, 20, 20)),
    "three dims, double precision": (nn.Conv3d(4, 4, 3, dtype=torch.float64), (2, 4, 16, 16, 16)),
    "double precision": (nn.Conv2d(16, 16, 3, dtype=torch.float64), (2, 16, 20, 20)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.slow
def test_convolutions_take_what_the_table_says(name: str) -> None:
    model, shape = CONVOLUTIONS[name]
    image = images(*shape).to(next(model.parameters()).dtype).requires_grad_()
    captured = capture(model, (image,), loss=lambda y: y.square().sum())
    found = probe(captured, repeats=1, cache=None).workspace_bytes
    table = estimated_workspaces(captured.graph)
    for op in captured.graph.ops:
        if op.type.startswith("aten.convolution"):
            slack = 0.05 * image.nbytes
            assert table[op.id] == pytest.approx(found[op.id], rel=0.05, abs=slack), op.type


def test_other_ops_take_none_by_default() -> None:
    captured = capture(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), (images(2, 8),), loss=torch.sum)
    assert set(estimated_workspaces(captured.graph).values()) == {0}
