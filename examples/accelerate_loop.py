"""Accelerate within a budget: `python -m examples.accelerate_loop`."""

import torch
from accelerate import Accelerator
from torch import nn

import stowplan
from examples.training_script import Network
from stowplan.integrations.accelerate import prepare_within


def train(budget: str | None, steps: int = 3) -> tuple[list[float], nn.Module]:
    """The losses of a few steps, and the prepared model."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    images, labels = torch.randn(4, 3, 64, 64), torch.randint(0, 2, (4, 64, 64))
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if budget is None:
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        model, optimizer = prepare_within(accelerator, budget, model, (images, labels), optimizer)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(images, labels)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses, model


if __name__ == "__main__":
    eager, _ = train(None)
    fitted, model = train("9MiB")
    plan = stowplan.plans_of(model)[0]
    print(f"eager  needs {plan.plain_peak_bytes:,} B; losses {eager}")
    print(f"fitted needs {plan.projected_peak_bytes:,} B; losses {fitted}")
