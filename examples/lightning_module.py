"""Lightning within a budget: `python -m examples.lightning_module`."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

import stowplan
from stowplan.integrations.lightning import FitWithinBudget
from stowplan.plan.plan import Plan


class Segmenter(LightningModule):
    """The network is a submodule and is fitted; the rest of the step stays in eager."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.GELU()) for _ in range(6)]
        self.network = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, nn.Conv2d(16, 2, 1))
        self.losses: list[float] = []
        self.plan: Plan | None = None

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.network(images), labels)
        self.losses.append(loss.item())
        if "_fitting" in vars(self.network):
            (self.plan,) = stowplan.plans_of(self.network)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(budget: str | None, *, optimizer: bool = False, **settings: Any) -> Segmenter:
    """A module after a few steps, within a budget or in eager; `optimizer` puts its update into the plan."""
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(12, 3, 64, 64), torch.randint(0, 2, (12, 64, 64)))
    callbacks = list[Callback]()
    if budget is not None:
        callbacks.append(FitWithinBudget(budget, module="network", optimizer=optimizer))
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    module = Segmenter()
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
    return module


if __name__ == "__main__":
    eager, fitted = train(None), train("9MiB")
    assert fitted.plan is not None
    print(f"eager  needs {fitted.plan.plain_peak_bytes:,} B; losses {eager.losses}")
    print(f"fitted needs {fitted.plan.projected_peak_bytes:,} B; losses {fitted.losses}")
