"""A training loop in less than half of eager's memory: `python -m examples.plain_loop`."""

import torch
from torch import Tensor, nn

import stowplan


class Network(nn.Module):
    """A few convolutions and the loss, so that one plan covers the whole step."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.GELU()) for _ in range(6)]
        self.layers = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, nn.Conv2d(16, 2, 1))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layers(images), labels)


def train(budget: str | None, steps: int = 5) -> tuple[list[float], nn.Module]:
    """The losses of a few steps, within a budget or in eager."""
    torch.manual_seed(0)
    images, labels = torch.randn(4, 3, 64, 64), torch.randint(0, 2, (4, 64, 64))
    model = Network()
    if budget is not None:
        model = stowplan.fit(model, (images, labels), budget=budget)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(images, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


if __name__ == "__main__":
    eager, _ = train(None)
    fitted, model = train("9MiB")
    plan = stowplan.plans_of(model)[0]
    print(f"eager  needs {plan.plain_peak_bytes:,} B; losses {eager}")
    print(f"fitted needs {plan.projected_peak_bytes:,} B; losses {fitted}")
