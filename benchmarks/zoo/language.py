"""Models of transformers: one line for each architecture, with a tiny configuration."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.cases import Batch, Batches, Case, LossOf, drawn, own_loss, package, squared

WORDS, COUNT, LENGTH = 512, 4, 32
SMALL: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": WORDS,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED: Mapping[str, Any] = {**SMALL, "num_key_value_heads": 2}
HEADED: Mapping[str, Any] = {**GROUPED, "head_dim": 8}
GPT: Mapping[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": WORDS, "n_positions": 64}
SEQUENCES: Mapping[str, Any] = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": WORDS,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}
SIGHT: Mapping[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
SPEECH: Mapping[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 32,
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
    "ctc_zero_infinity": True,
}


def _words(seed: int, count: int = COUNT, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, WORDS - 1, (count, length), generator=drawn(seed))


def masked(seed: int) -> Batch:
    """Words with a full attention mask."""
    ids = _words(seed)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def padded(seed: int) -> Batch:
    """Words of which a few are padding."""
    ids = _words(seed)
    mask = torch.ones_like(ids)
    mask[0, -3 - seed :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def plain(seed: int) -> Batch:
    """Words alone."""
    ids = _words(seed)
    return {"input_ids": ids, "labels": ids.clone()}


def translated(seed: int) -> Batch:
    """Words and their translation."""
    ids = _words(seed)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": _words(seed + 50, length=16)}


def pictures(size: int, *, labelled: bool = True, dense: bool = False, count: int = 4) -> Batches:
    """Images under the name that transformers uses."""

    def batch(seed: int) -> Batch:
        draw = drawn(seed)
        shape = (count, size, size) if dense else (count,)
        labels = {"labels": torch.randint(0, 2, shape, generator=draw)} if labelled else {}
        return {"pixel_values": torch.randn(count, 3, size, size, generator=draw), **labels}

    return batch


def captioned(seed: int) -> Batch:
    """Images and words."""
    images = pictures(32, labelled=False)(seed)
    return {"input_ids": _words(seed, length=16), "return_loss": True, **images}


def waves(seed: int) -> Batch:
    """Sound and its letters."""
    draw = drawn(seed)
    sound = torch.randn(2, 1000, generator=draw)
    return {"input_values": sound, "labels": torch.randint(3, 32, (2, 5), generator=draw)}


def spectra(seed: int) -> Batch:
    """Spectra of sound and words."""
    features = torch.randn(2, 16, 40, generator=drawn(seed))
    return {"input_features": features, "labels": _words(seed, 2, 12)}


def objects(seed: int) -> Batch:
    """Images with boxes."""
    draw = drawn(seed)
    labels = [
        {
            "class_labels": torch.randint(0, 5, (3,), generator=draw),
            "boxes": torch.rand(3, 4, generator=draw) * 0.3 + 0.3,
        }
        for _ in range(2)
    ]
    return {"pixel_values": torch.randn(2, 3, 64, 64, generator=draw), "labels": labels}


def series(seed: int) -> Batch:
    """A time series and its continuation."""
    draw = drawn(seed)
    return {
        "past_values": torch.randn(4, 32, 3, generator=draw),
        "future_values": torch.randn(4, 8, 3, generator=draw),
    }


def seen_words(seed: int) -> Batch:
    """Words among which an image stands."""
    ids = _words(seed, 2)
    ids[:, 4:20] = WORDS - 1
    images = torch.randn(2, 3, 16, 16, generator=drawn(seed))
    mask = torch.ones_like(ids)
    labels = ids.masked_fill(ids == WORDS - 1, -100)
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": images, "labels": labels}


def _decoders() -> Iterator[tuple[str, str, Batches, Mapping[str, Any]]]:
    """Name of the configuration, name of the model, batches, and the configuration."""
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
    yield "GPT2", "GPT2LMHeadModel", masked, GPT
    yield "Llama", "LlamaForCausalLM", masked, GROUPED
    yield "Mistral", "MistralForCausalLM", masked, {**GROUPED, "sliding_window": 16}
    yield "Qwen2", "Qwen2ForCausalLM", masked, GROUPED
    yield "Qwen3", "Qwen3ForCausalLM", masked, HEADED
    yield "Gemma", "GemmaForCausalLM", masked, HEADED
    yield "Gemma2", "Gemma2ForCausalLM", masked, {**HEADED, "sliding_window": 16}
    yield "Gemma3Text", "Gemma3ForCausalLM", masked, {**HEADED, "sliding_window": 16}
    yield "Phi", "PhiForCausalLM", masked, SMALL
    yield "Phi3", "Phi3ForCausalLM", masked, GROUPED
    yield (
        "OPT",
        "OPTForCausalLM",
        masked,
        {**_less(SMALL, "intermediate_size"), "ffn_dim": 64, "word_embed_proj_dim": 32},
    )
    yield "Falcon", "FalconForCausalLM", masked, _less(SMALL, "intermediate_size", "max_position_embeddings")
    yield (
        "Bloom",
        "BloomForCausalLM",
        masked,
        {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": WORDS},
    )
    yield "GPTNeoX", "GPTNeoXForCausalLM", masked, SMALL
    neo = {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": WORDS,
        "max_position_embeddings": 64,
    }
    yield "GPTNeo", "GPTNeoForCausalLM", masked, {**neo, "attention_types": [[["global", "local"], 1]]}
    yield "GPTJ", "GPTJForCausalLM", masked, {**GPT, "rotary_dim": 4}
    yield "GPTBigCode", "GPTBigCodeForCausalLM", masked, GPT
    yield "CodeGen", "CodeGenForCausalLM", masked, {**GPT, "rotary_dim": 4}
    yield "StableLm", "StableLmForCausalLM", masked, GROUPED
    yield "Starcoder2", "Starcoder2ForCausalLM", masked, GROUPED
    yield "Olmo", "OlmoForCausalLM", masked, GROUPED
    yield "Olmo2", "Olmo2ForCausalLM", masked, GROUPED
    yield "Cohere", "CohereForCausalLM", masked, GROUPED
    yield "Granite", "GraniteForCausalLM", masked, GROUPED
    yield "Glm", "GlmForCausalLM", masked, HEADED
    yield "Nemotron", "NemotronForCausalLM", masked, GROUPED
    yield "Persimmon", "PersimmonForCausalLM", masked, SMALL
    yield "SmolLM3", "SmolLM3ForCausalLM", masked, GROUPED
    yield "Helium", "HeliumForCausalLM", masked, HEADED
    yield (
        "Mixtral",
        "MixtralForCausalLM",
        masked,
        {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    )
    yield "Qwen3Moe", "Qwen3MoeForCausalLM", masked, {**HEADED, "num_experts": 4, **experts}
    yield (
        "Qwen2Moe",
        "Qwen2MoeForCausalLM",
        masked,
        {**GROUPED, "num_experts": 4, "shared_expert_intermediate_size": 32, **experts},
    )
    yield "Olmoe", "OlmoeForCausalLM", masked, {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}
    yield (
        "Mamba",
        "MambaForCausalLM",
        plain,
        {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "vocab_size": WORDS},
    )
    yield (
        "Rwkv",
        "RwkvForCausalLM",
        plain,
        {
            "hidden_size": 32,
            "attention_hidden_size": 32,
            "num_hidden_layers": 2,
            "vocab_size": WORDS,
            "context_length": 64,
        },
    )
    yield (
        "XGLM",
        "XGLMForCausalLM",
        masked,
        {
            "d_model": 32,
            "ffn_dim": 64,
            "num_layers": 2,
            "attention_heads": 4,
            "vocab_size": WORDS,
            "max_position_embeddings": 64,
        },
    )
    yield "OpenAIGPT", "OpenAIGPTLMHeadModel", plain, {**GPT}
    yield (
        "CTRL",
        "CTRLLMHeadModel",
        plain,
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": WORDS, "n_positions": 64, "dff": 64},
    )
    yield "BioGpt", "BioGptForCausalLM", masked, SMALL
    state = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "vocab_size": WORDS}
    yield "FalconMamba", "FalconMambaForCausalLM", plain, state
    yield (
        "Mamba2",
        "Mamba2ForCausalLM",
        plain,
        {**state, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16},
    )
    yield (
        "Jamba",
        "JambaForCausalLM",
        masked,
        {
            **GROUPED,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    )
    yield (
        "RecurrentGemma",
        "RecurrentGemmaForCausalLM",
        plain,
        {
            **GROUPED,
            "use_cache": False,
            "lru_width": 32,
            "attention_window_size": 16,
            "block_types": ["recurrent", "attention"],
        },
    )


def _encoders() -> Iterator[tuple[str, str, Batches, Mapping[str, Any]]]:
    for name in (
        "Bert",
        "Roberta",
        "Camembert",
        "RoCBert",
        "MPNet",
        "Ernie",
        "Nystromformer",
        "MegatronBert",
        "ConvBert",
        "XLMRoberta",
    ):
        yield name, f"{name}ForMaskedLM", masked, SMALL
    yield "Electra", "ElectraForMaskedLM", masked, {**SMALL, "embedding_size": 32}
    yield "Albert", "AlbertForMaskedLM", masked, {**SMALL, "embedding_size": 16}
    yield (
        "MobileBert",
        "MobileBertForMaskedLM",
        masked,
        {**SMALL, "embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    )
    distil = {
        "dim": 32,
        "hidden_dim": 64,
        "n_layers": 2,
        "n_heads": 4,
        "vocab_size": WORDS,
        "max_position_embeddings": 64,
    }
    yield "DistilBert", "DistilBertForMaskedLM", masked, distil
    yield (
        "Deberta",
        "DebertaForMaskedLM",
        masked,
        {**SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    )
    yield (
        "DebertaV2",
        "DebertaV2ForMaskedLM",
        masked,
        {**SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    )
    yield (
        "ModernBert",
        "ModernBertForMaskedLM",
        masked,
        {**SMALL, "global_attn_every_n_layers": 2, "local_attention": 16},
    )
    yield "FNet", "FNetForMaskedLM", plain, SMALL
    yield "SqueezeBert", "SqueezeBertForMaskedLM", masked, {**SMALL, "embedding_size": 32}
    yield (
        "XLM",
        "XLMWithLMHeadModel",
        masked,
        {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": WORDS, "n_words": WORDS},
    )
    yield (
        "Funnel",
        "FunnelForMaskedLM",
        masked,
        {"d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64, "block_sizes": [1, 1], "vocab_size": WORDS},
    )


def _translators() -> Iterator[tuple[str, str, Batches, Mapping[str, Any]]]:
    t5 = {
        "d_model": 32,
        "d_ff": 64,
        "d_kv": 8,
        "num_layers": 1,
        "num_heads": 4,
        "vocab_size": WORDS,
        "decoder_start_token_id": 0,
    }
    for name in ("T5", "MT5", "UMT5"):
        yield name, f"{name}ForConditionalGeneration", translated, t5
    yield "LongT5", "LongT5ForConditionalGeneration", translated, {**t5, "local_radius": 7}
    yield (
        "SwitchTransformers",
        "SwitchTransformersForConditionalGeneration",
        translated,
        {**t5, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    )
    for name in ("Bart", "MBart", "Pegasus", "Blenderbot", "BlenderbotSmall", "PLBart", "M2M100", "PegasusX"):
        yield name, f"{name}ForConditionalGeneration", translated, SEQUENCES
    yield "Marian", "MarianMTModel", translated, SEQUENCES
    prophet = {
        "hidden_size": 32,
        "encoder_ffn_dim": 64,
        "num_encoder_layers": 1,
        "num_encoder_attention_heads": 4,
        "decoder_ffn_dim": 64,
        "num_decoder_layers": 1,
        "num_decoder_attention_heads": 4,
        "vocab_size": WORDS,
        "max_position_embeddings": 64,
    }
    yield "ProphetNet", "ProphetNetForConditionalGeneration", translated, prophet


def _sounds() -> Iterator[tuple[str, str, Batches, Mapping[str, Any]]]:
    whisper = {
        **_less(SEQUENCES, "max_position_embeddings"),
        "num_mel_bins": 16,
        "max_source_positions": 20,
        "max_target_positions": 32,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "suppress_tokens": [],
        "begin_suppress_tokens": [],
    }
    yield "Whisper", "WhisperForConditionalGeneration", spectra, whisper
    for name in ("Wav2Vec2", "Hubert", "WavLM", "UniSpeech", "SEW", "Data2VecAudio"):
        more = {"squeeze_factor": 2} if name == "SEW" else {}
        yield name, f"{name}ForCTC", waves, {**SPEECH, **more}
    yield (
        "Speech2Text",
        "Speech2TextForConditionalGeneration",
        lambda seed: {**spectra(seed), "input_features": spectra(seed)["input_features"].transpose(1, 2)},
        {
            **_less(whisper, "num_mel_bins"),
            "input_feat_per_channel": 16,
            "conv_channels": 16,
            "max_source_positions": 64,
        },
    )
    yield (
        "AST",
        "ASTForAudioClassification",
        lambda seed: {
            "input_values": torch.randn(2, 32, 16, generator=drawn(seed)),
            "labels": torch.randint(0, 2, (2,), generator=drawn(seed)),
        },
        {**SIGHT, "max_length": 32, "num_mel_bins": 16, "patch_size": 8},
    )


def _sights() -> Iterator[tuple[str, str, Batches, Mapping[str, Any]]]:
    square, patches = pictures(32), {"image_size": 32, "patch_size": 8}
    for name in ("ViT", "DeiT", "Beit", "Dinov2", "ViTMSN", "Data2VecVision", "IJepa", "Dinov2WithRegisters"):
        sizes = _less(SIGHT, "intermediate_size") if name.startswith("Dinov2") else SIGHT
        yield name, f"{name}ForImageClassification", square, {**sizes, **patches}
    yield (
        "Swin",
        "SwinForImageClassification",
        square,
        {"image_size": 32, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4},
    )
    yield (
        "Swinv2",
        "Swinv2ForImageClassification",
        square,
        {"image_size": 32, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4},
    )
    hidden = {"hidden_sizes": [8, 16, 32, 32], "depths": [1, 1, 1, 1]}
    yield "ConvNext", "ConvNextForImageClassification", square, hidden
    yield "ConvNextV2", "ConvNextV2ForImageClassification", square, hidden
    yield "ResNet", "ResNetForImageClassification", square, {**hidden, "embedding_size": 8}
    yield "RegNet", "RegNetForImageClassification", square, {**hidden, "embedding_size": 8, "groups_width": 8}
    yield "MobileNetV2", "MobileNetV2ForImageClassification", square, {"depth_multiplier": 0.35}
    yield (
        "MobileViT",
        "MobileViTForImageClassification",
        pictures(64),
        {"image_size": 64, "hidden_sizes": [16, 16, 16], "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 32]},
    )
    yield "PoolFormer", "PoolFormerForImageClassification", pictures(64), hidden
    yield (
        "Pvt",
        "PvtForImageClassification",
        pictures(64),
        {**hidden, "image_size": 64, "num_attention_heads": [1, 2, 4, 4]},
    )
    yield (
        "Segformer",
        "SegformerForSemanticSegmentation",
        pictures(64, dense=True, count=2),
        {**hidden, "num_attention_heads": [1, 2, 4, 4], "decoder_hidden_size": 16},
    )
    patches = {
        "num_input_channels": 3,
        "context_length": 32,
        "prediction_length": 8,
        "patch_length": 8,
        "patch_stride": 8,
        "d_model": 16,
    }
    attention = {"num_hidden_layers": 1, "num_attention_heads": 4, "ffn_dim": 32}
    yield "PatchTST", "PatchTSTForPrediction", series, {**patches, **attention}
    yield "PatchTSMixer", "PatchTSMixerForPrediction", series, {**patches, "num_layers": 1}


def _less(config: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def _configured(config: str, model: str, values: Mapping[str, Any]) -> nn.Module:
    transformers = package("transformers")
    made: nn.Module = getattr(transformers, model)(getattr(transformers, f"{config}Config")(**values))
    return made


def _composed(config: str, model: str, text: str, vision: Mapping[str, Any]) -> nn.Module:
    """A model of images and words, from two configurations."""
    transformers = package("transformers")
    words = {**GROUPED, "num_hidden_layers": 1} if text == "llama" else {**SMALL, "num_hidden_layers": 1}
    parts: dict[str, Any] = {"text_config": words, "vision_config": dict(vision)}
    if config == "Llava":
        parts = {
            "text_config": transformers.LlamaConfig(**words),
            "vision_config": transformers.CLIPVisionConfig(**vision),
            "image_token_index": WORDS - 1,
            "image_seq_length": 16,
        }
    made: nn.Module = getattr(transformers, model)(getattr(transformers, f"{config}Config")(**parts))
    return made


def _detector() -> nn.Module:
    transformers = package("transformers")
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], out_features=["stage4"]
    )
    sizes = {
        **_less(SEQUENCES, "vocab_size", "max_position_embeddings", "pad_token_id", "decoder_start_token_id")
    }
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        backbone_config=backbone,
        use_pretrained_backbone=False,
        backbone=None,
        num_queries=10,
        num_labels=5,
        **sizes,
    )
    made: nn.Module = transformers.DetrForObjectDetection(config)
    return made


def _adapted(kind: str) -> nn.Module:
    peft, base = package("peft"), _configured("Llama", "LlamaForCausalLM", GROUPED)
    config = peft.LoraConfig(
        r=4,
        use_dora=kind == "DoRA",
        target_modules=["q_proj", "v_proj"],
        lora_dropout=0.1,
        task_type="CAUSAL_LM",
    )
    made: nn.Module = peft.get_peft_model(base, config)
    return made


def _case(
    config: str,
    model: str,
    batches: Batches,
    values: Mapping[str, Any],
    name: str = "",
    loss: LossOf = own_loss,
) -> Case:
    return Case("transformers", name or config, partial(_configured, config, model, values), batches, loss)


def cases() -> Iterator[Case]:
    """All of them."""
    for group in (_decoders, _encoders, _translators, _sounds, _sights):
        for config, model, batches, values in group():
            yield _case(config, model, batches, values)
    yield _case("Llama", "LlamaForCausalLM", padded, GROUPED, "Llama, padded")
    yield _case("Qwen3", "Qwen3ForCausalLM", padded, HEADED, "Qwen3, padded")
    yield _case("GPT2", "GPT2LMHeadModel", padded, GPT, "GPT2, padded")
    yield _case("Bert", "BertForMaskedLM", padded, SMALL, "Bert, padded")
    sight = {**SIGHT, "image_size": 32, "patch_size": 8}
    yield Case(
        "transformers", "CLIP", partial(_composed, "CLIP", "CLIPModel", "", sight), captioned, own_loss
    )
    yield Case(
        "transformers", "Siglip", partial(_composed, "Siglip", "SiglipModel", "", sight), captioned, own_loss
    )
    dropped = {"encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5}
    yield _case(
        "Bart", "BartForConditionalGeneration", translated, {**SEQUENCES, **dropped}, "Bart, LayerDrop"
    )
    yield _case("Wav2Vec2", "Wav2Vec2ForCTC", waves, {**SPEECH, "layerdrop": 0.5}, "Wav2Vec2, LayerDrop")
    small_sight = {**SIGHT, "image_size": 16, "patch_size": 4}
    llava = partial(_composed, "Llava", "LlavaForConditionalGeneration", "llama", small_sight)
    yield Case("transformers", "Llava", llava, seen_words, own_loss)
    yield Case("transformers", "Detr", _detector, objects, own_loss)
    encodec = {
        "num_filters": 4,
        "hidden_size": 16,
        "codebook_size": 16,
        "codebook_dim": 16,
        "upsampling_ratios": [4, 4],
        "num_lstm_layers": 1,
    }
    yield _case(
        "Encodec",
        "EncodecModel",
        lambda seed: {"input_values": torch.randn(2, 1, 512, generator=drawn(seed))},
        encodec,
        loss=squared,
    )
    for kind in ("LoRA", "DoRA"):
        yield Case("peft", f"Llama, {kind}", partial(_adapted, kind), padded, own_loss)
