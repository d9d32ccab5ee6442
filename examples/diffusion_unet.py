"""A diffusion U-Net of diffusers (a package to install) in a budget: `python -m examples.diffusion_unet`."""

import torch
from diffusers import DDPMScheduler, UNet2DModel
from torch import Tensor, nn

import stowplan
from stowplan import Search


class NoiseLoss(nn.Module):
    """The network and its loss as one module: the distance of the predicted noise from the real one."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, noisy: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.network(noisy, times).sample, noise)


def train(budget: str | None, steps: int = 3) -> tuple[list[float], nn.Module]:
    """The losses of a few steps on random images, and the model."""
    torch.manual_seed(0)
    model: nn.Module = NoiseLoss(
        UNet2DModel(
            sample_size=32,
            layers_per_block=1,
            block_out_channels=(32, 64),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            norm_num_groups=8,
        )
    )
    scheduler = DDPMScheduler()
    images = torch.randn(4, 3, 32, 32)
    example = (images, torch.zeros(4, dtype=torch.long), images.clone())  # other tensors, as in training
    if budget is not None:
        model = stowplan.fit(model, example, budget=budget, search=Search(gap=0.05))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        noise, times = torch.randn_like(images), torch.randint(0, 1000, (4,))
        optimizer.zero_grad()
        loss = model(scheduler.add_noise(images, noise, times), times, noise)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


if __name__ == "__main__":
    eager, _ = train(None)
    fitted, model = train("24MiB")
    plan = stowplan.plans_of(model)[0]
    print(f"eager  needs {plan.plain_peak_bytes:,} B; losses {eager}")
    print(f"fitted needs {plan.projected_peak_bytes:,} B; losses {fitted}")
