"""Train on a volume larger than memory: `python -m examples.large_volume --side 256 --budget 8GiB`.

The step is a 3-D U-Net of MONAI. stowplan plans it without running it, so eager PyTorch need not fit. Where
eager fits too, as with the small volume that is the default, both are run and their losses printed.
"""

import argparse
import os

import torch
from monai.losses.dice import DiceLoss
from monai.networks.nets.basic_unet import BasicUNet
from torch import Tensor, nn

import stowplan
from stowplan import Search
from stowplan.units import format_bytes


class Segmentation(nn.Module):
    """The network and its loss as one module, so that one plan covers the whole step."""

    def __init__(self) -> None:
        super().__init__()
        separate = ("LeakyReLU", {"inplace": False})  # an activation in place could not be computed in tiles
        self.network = BasicUNet(3, 1, 1, features=(8, 8, 16, 16, 32, 8), act=separate)
        self.loss = DiceLoss(sigmoid=True)

    def forward(self, volume: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.loss(self.network(volume), labels)
        return loss


def step(side: int = 64) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The model and one volume of `side` voxels a side."""
    torch.manual_seed(0)
    size = (1, 1, side, side, side)
    return Segmentation(), (torch.randn(size), torch.randint(0, 2, size).float())


def train(side: int, budget: str | None, steps: int = 2) -> tuple[list[float], nn.Module]:
    """The losses of a few steps, and the model."""
    model, (volume, labels) = step(side)
    if budget is not None:
        model = stowplan.fit(model, (volume, labels), budget=budget, search=Search(gap=0.05))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(volume, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", type=int, default=32, help="voxels along each side of the volume")
    parser.add_argument("--budget", default="64MiB")
    told = parser.parse_args()
    fitted, model = train(told.side, told.budget)
    plan = stowplan.plans_of(model)[0]
    print(f"fitted needs {format_bytes(plan.projected_peak_bytes)}; losses {fitted}; {plan.exactness}")
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if plan.plain_peak_bytes < free:
        print(f"eager  needs {format_bytes(plan.plain_peak_bytes)}; losses {train(told.side, None)[0]}")
    else:
        needed = format_bytes(plan.plain_peak_bytes)
        print(f"eager  needs {needed}, more than the {format_bytes(free)} that are free: not run")
