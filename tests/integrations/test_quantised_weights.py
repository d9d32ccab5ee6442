"""Adapters on weights that torchao and bitsandbytes packed: bits as in eager, copies freed by the plan.

A plan takes no more than LoRA on plain weights does beside these, but for one weight that is unpacked.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stowplan
from stowplan import Search
from stowplan.capture.composite import opened
from stowplan.run.measure.measure import measure

pytestmark = [pytest.mark.torch, pytest.mark.slow]

IDS = torch.randint(0, 128, (2, 48), generator=torch.Generator().manual_seed(0))
LARGEST = 4 * 128 * 256  # bytes of a weight
GIVEN = {"input_ids": IDS, "labels": IDS}


@contextmanager
def as_it_comes() -> Iterator[None]:
    """Packages warn when they are imported and used: that is not what is tested."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _linears(model: nn.Module) -> list[nn.Linear]:
    named = model.named_modules()
    return [m for name, m in named if isinstance(m, nn.Linear) and "lm_head" not in name]


def _is_linear(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and "lm_head" not in name


def in_nf4(model: nn.Module) -> None:
    nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    for linear in _linears(model):
        packed = nf4.to_nf4(linear.weight.detach(), 64, 4)
        linear.weight = nn.Parameter(packed, requires_grad=False)


def by_torchao(config: str) -> Callable[[nn.Module], None]:
    def quantise(model: nn.Module) -> None:
        torchao = pytest.importorskip("torchao.quantization")
        torchao.quantize_(model, getattr(torchao, config)(), filter_fn=_is_linear)

    return quantise


def by_bitsandbytes(model: nn.Module) -> None:
    modules = pytest.importorskip("bitsandbytes").nn
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and _is_linear(child, name):
                how: dict[str, Any] = {"bias": False, "quant_type": "nf4", "compute_dtype": torch.float32}
                packed = modules.Linear4bit(child.in_features, child.out_features, **how)
                packed.load_state_dict({"weight": child.weight.detach()})
                setattr(parent, name, packed.to("cpu"))


def in_full(_: nn.Module) -> None:
    """LoRA on weights that are not packed."""


BASES: dict[str, tuple[Callable[[nn.Module], None], str]] = {
    "nf4": (in_nf4, "NF4Tensor"),
    "int8": (by_torchao("Int8WeightOnlyConfig"), "Int8Tensor"),
    "intx": (by_torchao("IntxWeightOnlyConfig"), "IntxUnpackedToInt8Tensor"),
    "float8": (by_torchao("Float8WeightOnlyConfig"), "Float8Tensor"),
    "bitsandbytes": (by_bitsandbytes, "Params4bit"),
}


def adapted(quantise: Callable[[nn.Module], None]) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    how: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4, "use_cache": False}
    targets = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
    with as_it_comes():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=128, **how, **heads))
        quantise(model)
        torch.manual_seed(1)
        config: Any = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
        return get_peft_model(model, config)


def trained(model: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    losses = []
    for _ in range(3):
        loss = model(**GIVEN).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses + [p.detach() for p in model.parameters() if p.requires_grad]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def fitted(model: nn.Module, budget: int | str, **options: Any) -> Any:
    how: dict[str, Any] = {"search": Search(moves=20), "allow": ("recompute",), **options}
    return stowplan.fit(model, (), GIVEN, budget=budget, **how)


@cache
def smallest_of(quantise: Callable[[nn.Module], None]) -> int:
    with pytest.raises(stowplan.BudgetTooSmall) as refusal:
        fitted(adapted(quantise), 1)
    return refusal.value.minimum_bytes


@cache
def beside_frozen(quantise: Callable[[nn.Module], None]) -> int:
    """The smallest peak of a plan without the frozen weights, packed or not."""
    frozen = opened(p for p in adapted(quantise).parameters() if not p.requires_grad)
    return smallest_of(quantise) - sum(tensor.nbytes for tensor in frozen)


def held_by(model: nn.Module) -> list[Tensor]:
    return [*opened((*model.parameters(), *model.buffers())), IDS]


def peak_of(model: Any) -> int:
    measured = measure(lambda: model(**GIVEN).loss.backward(), before=held_by(model)).measured_peak_bytes
    model.zero_grad(set_to_none=True)
    return measured


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", BASES)
def test_adapters_on_packed_weights(name: str) -> None:
    quantise, kind = BASES[name]
    eager = adapted(quantise)
    expected = trained(eager, adam(eager))
    smallest = smallest_of(quantise)
    planned = fitted(adapted(quantise), smallest)
    assert stowplan.plans_of(planned)[0].exactness == "bitwise"
    assert peak_of(planned) <= smallest
    assert all(map(torch.equal, trained(planned, adam(planned)), expected))
    assert len(stowplan.plans_of(planned)) == 1
    assert {type(p).__name__ for p in planned.parameters() if not p.requires_grad} >= {kind}
    assert beside_frozen(quantise) <= beside_frozen(in_full) + 5 * LARGEST  # what one weight unpacks by
    model = adapted(quantise)
    optimizer = adam(model)
    updating = fitted(model, "1GiB", optimizer=optimizer)
    assert all(map(torch.equal, trained(updating, optimizer), expected))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8_training(recipe: str) -> None:
    """Its wrappers live within forward and backward: they are made there, and never kept."""
    float8 = pytest.importorskip("torchao.float8")
    from dataclasses import replace

    def made() -> Any:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        config = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
        return float8.convert_to_float8_training(layers, config=config)

    def gradients(model: Any) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    x = torch.randn(32, 64)
    with as_it_comes():
        model, planned = (
            made(),
            stowplan.fit(made(), (x,), budget="1GiB", search=Search(moves=1), outputs="all"),
        )
        assert all(map(torch.equal, gradients(planned), gradients(model)))


@pytest.mark.filterwarnings("ignore")
def test_trained_wrappers_are_refused_by_name() -> None:
    training = pytest.importorskip("torchao.prototype.quantized_training")
    torchao = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(64, 64))
    torchao.quantize_(model, training.int8_weight_only_quantized_training())
    with pytest.raises(stowplan.BadUse, match=r"0\.weight is a Int8Quantized.* requires"):
        stowplan.fit(model, (torch.ones(2, 64),), budget="1GiB")
