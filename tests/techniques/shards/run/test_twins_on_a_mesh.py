"""Two steps on one mesh, alike but for their dtype, take turns: neither has a collective of the other."""

import gc

import pytest
import torch
from torch import Tensor, nn

from stowplan import Search
from stowplan.capture.program import living_handles
from stowplan.run.fit import fit
from stowplan.techniques.shards.run.fit import shards_of
from tests.support.workers.processes import on_workers

pytestmark = [pytest.mark.torch, pytest.mark.distributed]
DTYPES = (torch.float32, torch.float64)


class Net(nn.Module):
    """A halo to exchange, statistics to sum, a loss to add up."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).square().mean()  # type: ignore[no-any-return]


def gradients(model: nn.Module, *args: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    model(*args).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def look() -> tuple[list[float], list[int]]:
    """By call how far gradients are from eager's; how many collectives there are with two steps and one."""
    images = [torch.ones(2, 2, 8, 8, dtype=dtype).cumsum(2).sin() for dtype in DTYPES]
    models = [Net().to(dtype) for dtype in DTYPES]
    expected = [gradients(Net().to(dtype), x) for dtype, x in zip(DTYPES, images, strict=True)]
    fitted = [
        fit(model, (x,), budget="1GiB", mesh="space=2", allow=(), search=Search(moves=1))
        for model, x in zip(models, images, strict=True)
    ]
    far = []
    for _ in range(2):
        for model, x, wanted in zip(fitted, images, expected, strict=True):
            args, _ = shards_of(model).share(x)
            found = gradients(model, *args)
            assert [g.dtype for g in found] == [g.dtype for g in wanted]
            far.append(max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True)))
    gc.collect()
    counts = [living_handles()]
    del model, fitted[0]
    gc.collect()
    return far, [*counts, living_handles()]


def test_twins_take_turns_on_a_mesh_and_their_collectives_go_with_them() -> None:
    for far, (both, one) in on_workers(2, look):
        assert max(far) < 1e-5
        assert 0 < one < both
