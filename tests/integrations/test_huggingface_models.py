"""Fitted models of Hugging Face in the hands of its own tools: saving, Trainer, generate, adapters."""

import copy
import inspect
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stowplan
from stowplan import Search

pytestmark = [
    pytest.mark.slow,
    pytest.mark.torch,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # of the partners' own making
]

MOVES = 10


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TQDM_DISABLE", "1")


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    build: Any = LlamaForCausalLM  # which is not typed
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.1,
    )
    return build(config).train()


def batch(length: int = 16, seed: int = 0) -> dict[str, Tensor]:
    """Two rows, of which one is padded."""
    tokens = torch.randint(1, 64, (2, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(tokens)
    mask[1, length - 3 :] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def fitted(model: Any, given: dict[str, Tensor], share: float = 1.2) -> Any:
    """Fitted to a share of its own peak."""
    roomy = stowplan.fit(copy.deepcopy(model), (), given, budget="1GiB", search=Search(moves=1))
    peak = stowplan.plans_of(roomy)[0].plain_peak_bytes
    return stowplan.fit(
        model, (), given, budget=int(share * peak), allow=("recompute",), search=Search(moves=MOVES)
    )


def gradients(model: nn.Module, given: dict[str, Tensor]) -> dict[str, Tensor | None]:
    torch.manual_seed(3)
    model.zero_grad(set_to_none=True)
    torch.autograd.backward(model(**given).loss)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    assert found.keys() == expected.keys()
    assert any(gradient is not None for gradient in expected.values())
    for name, gradient in expected.items():
        other = found[name]
        assert (gradient is None) == (other is None), name
        assert gradient is None or (other is not None and torch.equal(gradient, other)), name


def test_it_is_saved_and_loaded_under_the_models_own_class(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    model = llama()
    planned = fitted(model, batch())
    assert isinstance(planned, LlamaForCausalLM)
    assert planned.config is model.config
    assert inspect.signature(planned.forward) == inspect.signature(model.forward)
    planned.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(loaded) is LlamaForCausalLM
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(map(torch.equal, loaded.state_dict().values(), model.state_dict().values()))


def test_it_generates_what_the_model_does() -> None:
    model = llama().eval()
    planned = fitted(copy.deepcopy(model).train(), batch()).eval()
    tokens = batch()["input_ids"][:, :5]
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(planned.generate(tokens, **settings), model.generate(tokens, **settings))


@pytest.mark.parametrize("first", [False, True])
def test_gradient_checkpointing_is_switched_off_and_new_shapes_are_planned(first: bool) -> None:
    model, twin = llama(), llama()
    model.gradient_checkpointing_enable()
    if first:
        twin.gradient_checkpointing_enable()
    planned = fitted(twin, batch())
    planned.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    assert not planned.is_gradient_checkpointing
    for length in (16, 12):
        assert_same(gradients(planned, batch(length)), gradients(model, batch(length)))


def test_a_refused_model_keeps_its_checkpoints() -> None:
    model = llama()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    flags = [vars(module).get("gradient_checkpointing") for module in model.modules()]
    with pytest.raises(stowplan.BudgetTooSmall):
        stowplan.fit(model, (), batch(), budget=1000)
    assert model.is_gradient_checkpointing
    assert [vars(module).get("gradient_checkpointing") for module in model.modules()] == flags
    assert hasattr(model, "_require_grads_hook")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_trainer_takes_a_fitted_model(
    tmp_path: Path, checkpointing: bool, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import Trainer, TrainingArguments

    from stowplan import torch_private

    torch_private.tell_of_checkpoints.cache_clear()
    rows = [
        {name: tensor[row] for name, tensor in batch(seed=seed).items()}
        for seed in range(2)
        for row in range(2)
    ]
    for row in rows:  # a column that forward does not know, which the Trainer leaves out
        row["length"] = torch.tensor(16)
    settings = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        max_steps=2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        gradient_checkpointing=checkpointing,
        dataloader_pin_memory=False,
        disable_tqdm=True,
    )
    states = []
    with caplog.at_level(logging.WARNING, "stowplan"):
        for model in (llama(), fitted(llama(), batch())):
            torch.manual_seed(5)
            trainer = Trainer(model=model, args=settings, train_dataset=rows)
            trainer.train()
            states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
            trainer.save_model(str(tmp_path / "saved"))
    assert all(map(torch.equal, states[0].values(), states[1].values()))
    assert not torch.equal(states[0]["lm_head.weight"], llama().lm_head.weight)
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved["architectures"] == ["LlamaForCausalLM"]
    told = [record for record in caplog.records if "gradient_checkpointing" in record.getMessage()]
    assert len([record for record in told if "switched off" in record.getMessage()]) == checkpointing


def test_adapters_can_be_disabled_and_enabled_again() -> None:
    from peft import LoraConfig, get_peft_model

    def adapted() -> Any:
        adapter: dict[str, Any] = {"r": 2, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"]}
        config = LoraConfig(init_lora_weights=False, **adapter)
        torch.manual_seed(1)
        return get_peft_model(llama(), config)

    model, given = adapted(), batch()
    planned = fitted(adapted(), given)
    assert type(planned).__name__ == type(model).__name__
    assert_same(gradients(planned, given), gradients(model, given))
    with torch.no_grad():
        for each in (model, planned):
            each.eval()
        expected = model(**given).logits
        with model.disable_adapter(), planned.disable_adapter():
            disabled = planned(**given).logits
            assert torch.equal(disabled, model(**given).logits)
        assert not torch.equal(disabled, expected)
        assert torch.equal(planned(**given).logits, expected)
    for each in (model, planned):
        each.train()
    with planned.disable_adapter():  # nothing wants a gradient: the model runs eagerly
        assert not planned(**given).loss.requires_grad
    assert_same(gradients(planned, given), gradients(model, given))
    assert len(stowplan.plans_of(planned)) == 1
