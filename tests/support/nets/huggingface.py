"""Four models of Hugging Face `transformers`, from their configuration: no weights are fetched.

The library takes seconds to import, so each model imports it when it is built.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.support.nets.net import Example, Net


class OwnLoss(nn.Module):
    """A model that computes its loss itself, called with positional arguments of these names."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *args: Tensor) -> Tensor:
        loss: Tensor = self.model(**dict(zip(self.names, args, strict=True))).loss
        return loss


def trainable(model_type: Callable[..., nn.Module], config: object, *names: str) -> nn.Module:
    """A freshly initialised model of this type in training mode."""
    return OwnLoss(model_type(config).train(), *names)


def make_gpt2(*, batch: int, sequence: int, vocabulary: int, dim: int, layers: int, heads: int) -> Example:
    """Tokens, which are their own labels; with the configuration's dropout of 0.1 everywhere."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=sequence,
        n_embd=dim,
        n_layer=layers,
        n_head=heads,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    tokens = torch.randint(0, vocabulary, (batch, sequence))
    return Example(trainable(GPT2LMHeadModel, config, "input_ids", "labels"), (tokens, tokens.clone()))


def make_llama(
    *, batch: int, sequence: int, vocabulary: int, dim: int, layers: int, heads: int, hidden: int
) -> Example:
    """Tokens, which are their own labels; two query heads share one head of keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        max_position_embeddings=sequence,
        hidden_size=dim,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        use_cache=False,
    )
    tokens = torch.randint(0, vocabulary, (batch, sequence))
    return Example(trainable(LlamaForCausalLM, config, "input_ids", "labels"), (tokens, tokens.clone()))


def make_t5(
    *, batch: int, sequence: int, vocabulary: int, dim: int, layers: int, heads: int, hidden: int
) -> Example:
    """Source tokens, the target shifted right by one, and the target (half as long as the source)."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=vocabulary,
        d_model=dim,
        d_kv=dim // heads,
        d_ff=hidden,
        num_layers=layers,
        num_heads=heads,
        use_cache=False,
    )
    source = torch.randint(0, vocabulary, (batch, sequence))
    target = torch.randint(0, vocabulary, (batch, sequence // 2))
    shifted = torch.cat([torch.zeros_like(target[:, :1]), target[:, :-1]], dim=1)
    model = trainable(T5ForConditionalGeneration, config, "input_ids", "decoder_input_ids", "labels")
    return Example(model, (source, shifted, target))


def make_vit(*, batch: int, resolution: int, patch: int, dim: int, layers: int, heads: int) -> Example:
    """Images of two classes."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=resolution,
        patch_size=patch,
        hidden_size=dim,
        intermediate_size=4 * dim,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        problem_type="single_label_classification",  # else the first forward sets it
    )
    images, labels = torch.randn(batch, 3, resolution, resolution), torch.randint(0, 2, (batch,))
    return Example(trainable(ViTForImageClassification, config, "pixel_values", "labels"), (images, labels))


GPT2 = Net(
    "hf_gpt2",
    "Hugging Face GPT-2",
    make_gpt2,
    tiny={"batch": 2, "sequence": 16, "vocabulary": 101, "dim": 32, "layers": 2, "heads": 4},
    real={"batch": 2, "sequence": 256, "vocabulary": 50257, "dim": 768, "layers": 12, "heads": 12},
)
LLAMA = Net(
    "hf_llama",
    "Hugging Face Llama",
    make_llama,
    tiny={"batch": 2, "sequence": 16, "vocabulary": 101, "dim": 32, "layers": 2, "heads": 4, "hidden": 88},
    real={
        "batch": 2,
        "sequence": 256,
        "vocabulary": 32000,
        "dim": 768,
        "layers": 8,
        "heads": 12,
        "hidden": 2048,
    },
)
T5 = Net(
    "hf_t5",
    "Hugging Face T5",
    make_t5,
    tiny={"batch": 2, "sequence": 16, "vocabulary": 101, "dim": 32, "layers": 2, "heads": 4, "hidden": 64},
    real={
        "batch": 4,
        "sequence": 256,
        "vocabulary": 32128,
        "dim": 512,
        "layers": 6,
        "heads": 8,
        "hidden": 2048,
    },
)
VIT = Net(
    "hf_vit",
    "Hugging Face ViT",
    make_vit,
    tiny={"batch": 2, "resolution": 32, "patch": 8, "dim": 32, "layers": 2, "heads": 4},
    real={"batch": 8, "resolution": 224, "patch": 16, "dim": 384, "layers": 12, "heads": 6},
)
