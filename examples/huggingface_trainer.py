"""Hugging Face's Trainer within a budget: `python -m examples.huggingface_trainer`."""

from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import stowplan
from stowplan.integrations.huggingface import fit_trainer


class Tokens(torch.utils.data.Dataset[dict[str, Any]]):
    """Random text of one length, so that nothing is downloaded."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = torch.randint(0, 100, (64,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def train(budget: str | None, *, optimizer: bool = False, **settings: Any) -> tuple[float, Any]:
    """The mean loss of an epoch, and the trainer's model; `optimizer` puts its update into the plan."""
    torch.manual_seed(0)
    build: Any = GPT2LMHeadModel  # has no types
    model = build(GPT2Config(vocab_size=100, n_positions=64, n_embd=64, n_layer=4, n_head=4))
    with TemporaryDirectory() as folder:
        how: Any = {"num_train_epochs": 1, "report_to": [], "use_cpu": True, "seed": 0} | settings
        arguments = TrainingArguments(folder, per_device_train_batch_size=4, **how)
        trainer = Trainer(model, arguments, train_dataset=Tokens())
        if budget is not None:
            fit_trainer(trainer, budget, optimizer=optimizer)
        return trainer.train().training_loss, trainer.model


if __name__ == "__main__":
    eager, _ = train(None)
    fitted, model = train("7MiB")
    plan = stowplan.plans_of(model)[0]
    print(f"eager  needs {plan.plain_peak_bytes:,} B; loss {eager}")
    print(f"fitted needs {plan.projected_peak_bytes:,} B; loss {fitted}")
