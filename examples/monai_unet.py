"""A three-dimensional U-Net of MONAI within a budget: `python -m examples.monai_unet`."""

import torch
from monai.data.meta_tensor import MetaTensor
from monai.losses.dice import DiceLoss
from monai.networks.nets.unet import UNet
from torch import nn

import stowplan
from stowplan.integrations.monai import fit_network


def train(budget: str | None, steps: int = 3) -> tuple[list[float], nn.Module]:
    """The losses of a few steps on one volume, and the network."""
    torch.manual_seed(0)
    volume = MetaTensor(torch.randn(1, 1, 24, 24, 24))
    labels = torch.randint(0, 2, (1, 1, 24, 24, 24)).float()
    network: nn.Module = UNet(3, 1, 1, channels=(8, 16, 32), strides=(2, 2), num_res_units=2)
    if budget is not None:
        network = fit_network(network, volume, budget)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = DiceLoss(sigmoid=True)(network(volume), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, network


if __name__ == "__main__":
    eager, _ = train(None)
    fitted, network = train("2400KiB")
    plan = stowplan.plans_of(network)[0]
    print(f"eager  needs {plan.plain_peak_bytes:,} B; losses {eager}")
    print(f"fitted needs {plan.projected_peak_bytes:,} B; losses {fitted}")
