"""Packages that people train with, on the stand-in: with offloading the losses of eager, to the bit."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stowplan
from stowplan.plan.plan import Plan
from stowplan.plan.steps import Store
from stowplan.units import parse_bytes
from tests.support import device as stand_in

pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages' own making


@pytest.fixture(autouse=True)
def _there(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "standin:0")
    monkeypatch.setenv("TQDM_DISABLE", "1")
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def _offloads(plan: Plan, budget: str) -> None:
    assert plan.projected_peak_bytes <= parse_bytes(budget) < plan.plain_peak_bytes
    assert any(isinstance(step, Store) for step in plan.steps)


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())))


def _accelerated(budget: str | None) -> tuple[list[float], nn.Module, list[Tensor]]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from stowplan.integrations.accelerate import prepare_within

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator()
    assert accelerator.device == torch.device("standin", 0)
    own, rows = _network(), torch.randn(128, 32)
    optimizer: Any = torch.optim.AdamW(own.parameters())
    model: Any = own
    if budget is None:
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        how: Any = {"loss": torch.sum, "allow": ["offload"]}
        model, optimizer = prepare_within(accelerator, budget, model, (rows,), optimizer, **how)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(rows.to(accelerator.device)).sum()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses, model, list(own.parameters())


def test_accelerate_offloads_on_the_device() -> None:
    eager, _, expected = _accelerated(None)
    stand_in.delay(200)
    losses, model, parameters = _accelerated("84000")
    assert losses == eager
    assert all(map(torch.equal, parameters, expected))
    _offloads(stowplan.plans_of(model)[0], "84000")


def test_the_trainer_of_hugging_face_offloads_on_the_device(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from stowplan.integrations.huggingface import fit_trainer

    build: Any = LlamaForCausalLM  # has no types
    widths: Any = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4}

    def trained(budget: str | None) -> tuple[float, Any]:
        torch.manual_seed(0)
        model = build(LlamaConfig(num_hidden_layers=2, num_key_value_heads=2, **widths))
        rows: Any = [{"input_ids": row, "labels": row} for row in torch.randint(0, 100, (8, 64))]
        how: Any = {"num_train_epochs": 1, "report_to": [], "seed": 0, "dataloader_pin_memory": False}
        arguments = TrainingArguments(str(tmp_path), per_device_train_batch_size=4, **how)
        assert arguments.device == torch.device("standin", 0)
        trainer = Trainer(model, arguments, train_dataset=rows)
        if budget is not None:
            fit_trainer(trainer, budget, allow=["offload"])
        return trainer.train().training_loss, trainer.model

    (eager, expected), (loss, model) = trained(None), trained("3MiB")
    assert loss == eager
    assert all(map(torch.equal, model.parameters(), expected.parameters()))
    assert next(model.parameters()).device == torch.device("standin", 0)
    _offloads(stowplan.plans_of(model)[0], "3MiB")


def test_lightning_offloads_on_the_device() -> None:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.strategies import SingleDeviceStrategy

    from stowplan.integrations.lightning import FitWithinBudget

    class StandIn(Accelerator):
        def setup_device(self, device: torch.device) -> None:
            torch.accelerator.set_device_index(device)

        def teardown(self) -> None:
            pass

        @staticmethod
        def parse_devices(devices: Any) -> Any:
            return devices

        @staticmethod
        def get_parallel_devices(_devices: Any) -> Any:
            return [torch.device("standin", 0)]

        @staticmethod
        def auto_device_count() -> int:
            return 1

        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def name() -> str:
            return "standin"

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.losses = _network(), list[float]()
            self.plan: Plan | None = None

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            loss = F.mse_loss(self.network(batch[0]), batch[1])
            self.losses.append(loss.item())
            if "_fitting" in vars(self.network):
                (self.plan,) = stowplan.plans_of(self.network)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    def trained(budget: str | None) -> Module:
        torch.manual_seed(0)
        rows = torch.utils.data.TensorDataset(torch.randn(256, 32), torch.randn(256, 32))
        callbacks = list[Callback]()
        if budget is not None:
            callbacks.append(FitWithinBudget(budget, module="network", allow=["offload"]))
        chatty = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        quiet: Any = dict.fromkeys(chatty, False)
        strategy = SingleDeviceStrategy(torch.device("standin", 0), accelerator=StandIn())
        trainer = Trainer(max_epochs=1, callbacks=callbacks, strategy=strategy, **quiet)
        module = Module()
        trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=128))
        return module

    eager, fitted = trained(None), trained("134000")
    assert fitted.losses == eager.losses
    assert len(eager.losses) == 2
    assert all(map(torch.equal, eager.parameters(), fitted.parameters()))
    assert fitted.plan is not None
    _offloads(fitted.plan, "134000")
