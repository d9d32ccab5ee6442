"""A training script with stowplan in three marked lines: `python -m examples.training_script`.

The three lines end with `# stowplan`. Without them the script trains the same way, in twice the memory: the
tests delete them, and compare what both scripts print.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stowplan  # stowplan


class Network(nn.Module):
    """A few convolutions and the loss, so that one plan covers the whole step."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.GELU()) for _ in range(6)]
        self.layers = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, nn.Conv2d(16, 2, 1))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layers(images), labels)


def step(batch: int = 4) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and one batch, for `stowplan check examples.training_script:step --budget 7.6MiB`."""
    torch.manual_seed(0)
    return Network(), (torch.randn(batch, 3, 64, 64), torch.randint(0, 2, (batch, 64, 64)))


def main() -> None:
    """Two epochs of three batches."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(12, 3, 64, 64), torch.randint(0, 2, (12, 64, 64)))
    model = Network()
    model = stowplan.fit(model, data[:4], budget="7.6MiB")  # stowplan
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(2):
        for images, labels in DataLoader(data, batch_size=4, shuffle=True):
            optimizer.zero_grad()
            loss = model(images, labels)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item()}")
    print(stowplan.plans_of(model)[0])  # stowplan


if __name__ == "__main__":
    main()
