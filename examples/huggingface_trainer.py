"""Fine-tune a Hugging Face model within a budget: `python -m examples.huggingface_trainer [whole|lora]`.

`whole` trains all parameters. The plan has the Trainer's optimizer in it: the budget counts parameters,
gradients, optimizer state and activations. `lora` trains adapters of peft on a frozen model.
"""

import sys
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import stowplan
from stowplan.integrations.huggingface import fit_trainer


class Tokens(torch.utils.data.Dataset[dict[str, Any]]):
    """Random text of one length, so that nothing is downloaded."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = torch.randint(0, 100, (64,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def pretrained(*, lora: bool) -> Any:
    """A tiny Llama in place of `AutoModelForCausalLM.from_pretrained(...)`, with adapters or without."""
    torch.manual_seed(0)
    build: Any = LlamaForCausalLM  # has no types
    model = build(
        LlamaConfig(
            vocab_size=100,
            hidden_size=64,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
    return model


def train(
    budget: str | None, *, optimizer: bool = False, lora: bool = False, **settings: Any
) -> tuple[float, Any]:
    """The mean loss of an epoch, and the trainer's model; `optimizer` puts its update into the plan."""
    model = pretrained(lora=lora)
    with TemporaryDirectory() as folder:
        how: Any = {"num_train_epochs": 1, "report_to": [], "use_cpu": True, "seed": 0} | settings
        arguments = TrainingArguments(folder, per_device_train_batch_size=4, **how)
        trainer = Trainer(model, arguments, train_dataset=Tokens())
        if budget is not None:
            fit_trainer(trainer, budget, optimizer=optimizer)
        return trainer.train().training_loss, trainer.model


if __name__ == "__main__":
    lora = sys.argv[1:] == ["lora"]
    eager, _ = train(None, lora=lora)
    fitted, model = train("5MiB" if lora else "7MiB", lora=lora, optimizer=True)
    plan = stowplan.plans_of(model)[0]
    print(f"eager  needs {plan.plain_peak_bytes:,} B; loss {eager}")
    print(f"fitted needs {plan.projected_peak_bytes:,} B; loss {fitted}")
