"""Language models."""

import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.repositories.families.data import batches, numbers, words
from benchmarks.repositories.sources import definitions, source
from benchmarks.repositories.training import Training, entry, one


@entry("karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291", "model.GPT, configure_optimizers")
def nanogpt(_: Path) -> Training:
    gpt = source("model")
    net = gpt.GPT(gpt.GPTConfig(block_size=32, vocab_size=128, n_layer=3, n_head=4, n_embd=64, dropout=0.1))
    return one(
        net,
        batches(words(128, 4, 32), words(128, 4, 32)),
        lambda net, x, y: net(x, y)[1],
        optimizer=lambda _: net.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu"),
    )


@entry("karpathy/minGPT", "37baab71b9abea1b76ab957409a1cc2fbfba8a26", "GPT, configure_optimizers")
def mingpt(_: Path) -> Training:
    gpt = source("mingpt.model").GPT
    config = gpt.get_default_config()
    config.model_type, config.vocab_size, config.block_size = "gpt-nano", 64, 24
    net = gpt(config)
    train = source("mingpt.trainer").Trainer.get_default_config()
    return one(
        net,
        batches(words(64, 4, 24), words(64, 4, 24)),
        lambda net, x, y: net(x, y)[1],
        optimizer=lambda _: net.configure_optimizers(train),
    )


@entry(
    "karpathy/makemore",
    "988aa59e4d8fefa526d06f3b453ad116258398d4",
    "Transformer",
    absent=("torch.utils.tensorboard",),
)
def makemore(checkout: Path) -> Training:
    code = definitions(checkout / "makemore.py")
    config = code.ModelConfig(block_size=16, vocab_size=27, n_layer=3, n_embd=32, n_embd2=32, n_head=4)
    net = code.Transformer(config)
    return one(net, batches(words(27, 8, 16), words(27, 8, 16)), lambda net, x, y: net(x, y)[1])


@entry(
    "karpathy/llama2.c",
    "350e04fe35433e6d2941dce5a1f53308f87058eb",
    "Transformer, configure_optimizers; the loss is net.last_loss, as in train.py",
)
def llama2c(_: Path) -> Training:
    llama = source("model")
    net = llama.Transformer(llama.ModelArgs(dim=48, n_layers=3, n_heads=4, vocab_size=96, max_seq_len=24))

    def loss(net: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        net(x, y)
        return net.last_loss

    return one(
        net,
        batches(words(96, 4, 24), words(96, 4, 24)),
        loss,
        optimizer=lambda _: net.configure_optimizers(0.1, 5e-4, (0.9, 0.95), "cpu"),
    )


@entry(
    "jadore801120/attention-is-all-you-need-pytorch",
    "132907dd272e2cc92e3c10e6c4e783a87ff8893d",
    "Transformer, cal_loss with smoothing",
    absent=("dill", "torchtext", "tqdm"),
)
def attention_is_all_you_need(checkout: Path) -> Training:
    net = source("transformer.Models").Transformer(
        80, 80, 1, 1, d_word_vec=32, d_model=32, d_inner=64, n_layers=2, n_head=4, d_k=8, d_v=8, n_position=32
    )
    code = definitions(checkout / "train.py")
    return one(
        net,
        batches(words(80, 4, 16), words(80, 4, 17)),
        lambda net, src, trg: code.cal_loss(net(src, trg[:, :-1]), trg[:, 1:], 1, smoothing=True),
    )


@entry(
    "harvardnlp/annotated-transformer",
    "debc9fd747bb2123160a98046ad1c2d4da44a567",
    "make_model, LabelSmoothing, Batch",
    absent=("spacy", "torchtext", "altair", "GPUtil", "pandas"),
)
def annotated_transformer(checkout: Path) -> Training:
    code = definitions(checkout / "the_annotated_transformer.py")
    net, criterion = code.make_model(64, 64, N=2, d_model=32, d_ff=64, h=4), code.LabelSmoothing(64, 0, 0.1)

    def loss(net: Any, src: torch.Tensor, tgt: torch.Tensor) -> Any:
        batch = code.Batch(src, tgt, 0)
        out = net(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)
        compute = code.SimpleLossCompute(net.generator, criterion)
        return compute(out, batch.tgt_y, batch.ntokens)[1]

    return one(
        net,
        batches(words(64, 4, 12, first=1), words(64, 4, 12, first=1)),
        loss,
        optimizer=lambda p: torch.optim.Adam(p, 1e-3, (0.9, 0.98), 1e-9),
    )


@entry(
    "salesforce/awd-lstm-lm",
    "1d466ec5875675ca6b6f0caacbb741240a29da9e",
    "RNNModel with weight drop, SplitCrossEntropyLoss, the loss of main.py",
)
def awd_lstm(_: Path) -> Training:
    net = source("model").RNNModel("LSTM", 60, 24, 32, 2, 0.4, 0.3, 0.4, 0.1, 0.5, tie_weights=True)
    criterion = source("splitcross").SplitCrossEntropyLoss(24, splits=[])

    def loss(net: Any, data: torch.Tensor, targets: torch.Tensor, *hidden: torch.Tensor) -> Any:
        pairs = [*zip(hidden[::2], hidden[1::2], strict=True)]
        output, _, hs, dropped = net(data, pairs, return_h=True)
        found = criterion(net.decoder.weight, net.decoder.bias, output, targets)
        found = found + sum(2 * h.pow(2).mean() for h in dropped[-1:])
        return found + sum((h[1:] - h[:-1]).pow(2).mean() for h in hs[-1:])

    hidden = (numbers(1, 4, 32), numbers(1, 4, 32), numbers(1, 4, 24), numbers(1, 4, 24))
    return one(
        net,
        batches(words(60, 10, 4), words(60, 40), *hidden),
        loss,
        optimizer=lambda p: torch.optim.SGD(p, 1.0, weight_decay=1.2e-6),
    )


@entry("alxndrTL/mamba.py", "2cc168c78b2494557f45072c4b8daa9d6f5608c7", "LM with Mamba")
def mamba(_: Path) -> Training:
    config = source("mambapy.mamba").MambaConfig(d_model=32, n_layers=2)
    net = source("mambapy.lm").LM(config, 64)
    return one(
        net,
        batches(words(64, 2, 16), words(64, 2, 16)),
        lambda net, x, y: F.cross_entropy(net(x).flatten(0, 1), y.flatten()),
    )


@entry("Lightning-AI/litgpt", "26857050fe3ff627cd714fe92f5838f51a3d5efa", "GPT, chunked_cross_entropy")
def litgpt(_: Path) -> Training:
    model, parts = source("litgpt.model"), source("litgpt.utils")
    net = model.GPT.from_name(
        "pythia-14m", n_layer=3, n_embd=64, n_head=4, padded_vocab_size=96, block_size=32
    )
    return one(
        net,
        batches(words(96, 3, 32), words(96, 3, 32)),
        lambda net, x, y: parts.chunked_cross_entropy(net(x), y),
    )


@entry("openai/whisper", "c0d2f624c09dc18e709e37c2ad90c039a4eb72a2", "Whisper", absent=("tiktoken", "numba"))
def whisper(_: Path) -> Training:
    model = source("whisper.model")
    net = model.Whisper(model.ModelDimensions(20, 16, 48, 4, 2, 96, 24, 48, 4, 2))
    torch.nn.init.normal_(net.decoder.positional_embedding, std=0.01)  # which whisper loads, not initialises
    return one(
        net,
        batches(numbers(2, 20, 32), words(96, 2, 20), words(96, 2, 20)),
        lambda net, mel, x, y: F.cross_entropy(net(mel, x).transpose(1, 2), y),
    )


@entry(
    "lucidrains/x-transformers",
    "9252ed7838021ee61e6c5be0930b3a9a88efdf06",
    "TransformerWrapper, AutoregressiveWrapper",
)
def x_transformers(_: Path) -> Training:
    code = source("x_transformers")
    layers = code.Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, rotary_pos_emb=True, attn_dropout=0.1)
    net = code.AutoregressiveWrapper(
        code.TransformerWrapper(num_tokens=64, max_seq_len=24, attn_layers=layers)
    )
    return one(net, batches(words(64, 4, 25)))


@entry(
    "lucidrains/performer-pytorch",
    "fc8b78441b1e27eb5d9b01fc738a8772cee07127",
    "PerformerLM, AutoregressiveWrapper, its projections redrawn by a counter in a buffer",
)
def performer(_: Path) -> Training:
    return _performer(auto=True)


@entry(
    "lucidrains/performer-pytorch",
    "fc8b78441b1e27eb5d9b01fc738a8772cee07127",
    "PerformerLM, AutoregressiveWrapper",
    name="performer-pytorch, fixed projections",
    change="auto_check_redraw=False",
)
def performer_fixed(_: Path) -> Training:
    return _performer(auto=False)


def _performer(*, auto: bool) -> Training:
    sys.modules.setdefault("distutils", types.ModuleType("distutils"))
    version = types.ModuleType("distutils.version")
    vars(version)["LooseVersion"] = lambda text: tuple(map(int, text.partition("+")[0].split(".")))
    sys.modules["distutils.version"] = version
    code = source("performer_pytorch")
    net = code.PerformerLM(
        num_tokens=64,
        dim=32,
        depth=2,
        max_seq_len=16,
        heads=4,
        dim_head=8,
        causal=False,
        nb_features=16,
        use_scalenorm=True,
        shift_tokens=True,
        auto_check_redraw=auto,
    )
    return one(
        net,
        batches(words(64, 2, 16), words(64, 2, 16)),
        lambda net, x, y: F.cross_entropy(net(x).transpose(1, 2), y),
    )


@entry(
    "lucidrains/RETRO-pytorch",
    "d08661313f3ac9e52f2a4e5fac2dad3f1a6d5fd1",
    "RETRO with chunked cross attention",
    absent=("faiss", "autofaiss", "sentencepiece"),
)
def retro(_: Path) -> Training:
    net = source("retro_pytorch.retro_pytorch").RETRO(
        num_tokens=64,
        chunk_size=8,
        max_seq_len=32,
        enc_dim=32,
        enc_depth=1,
        dec_dim=32,
        dec_depth=2,
        dec_cross_attn_layers=(2,),
        heads=2,
        dim_head=32,
        dec_attn_dropout=0.1,
        dec_ff_dropout=0.1,
        use_deepnet=True,
    )
    return one(
        net,
        batches(words(64, 2, 33, first=1), words(64, 2, 4, 2, 16, first=1)),
        lambda net, x, found: net(x, found, return_loss=True),
    )


@entry(
    "codertimo/BERT-pytorch",
    "d10dc4f9d5a6f2ca74380f62039526eb7277c671",
    "BERTLM, the two losses of BERTTrainer",
)
def bert(_: Path) -> Training:
    model = source("bert_pytorch.model")
    net = model.BERTLM(model.BERT(60, hidden=32, n_layers=2, attn_heads=4, dropout=0.1), 60)

    def loss(
        net: Any,
        x: torch.Tensor,
        parts: torch.Tensor,
        labels: torch.Tensor,
        follows: torch.Tensor,
    ) -> Any:
        following, masked = net(x, parts)
        return F.nll_loss(following, follows, ignore_index=0) + F.nll_loss(
            masked.transpose(1, 2), labels, ignore_index=0
        )

    return one(
        net,
        batches(words(60, 4, 16), words(3, 4, 16), words(60, 4, 16), lambda _: torch.tensor([1, 0, 1, 1])),
        loss,
    )


@entry("johnma2006/mamba-minimal", "03de542a36d873f6e6c4057ad687278cc6ae944d", "Mamba")
def mamba_minimal(_: Path) -> Training:
    code = source("model")
    net = code.Mamba(code.ModelArgs(d_model=32, n_layer=2, vocab_size=64))
    return one(
        net,
        batches(words(64, 2, 12), words(64, 2, 12)),
        lambda net, x, y: F.cross_entropy(net(x).transpose(1, 2), y),
    )


@entry(
    "microsoft/LoRA",
    "c4593f060e6a368d7bb5af5273b8e42810cdef90",
    "loralib: Embedding, MergedLinear and Linear in a small decoder of ours",
)
def lora(_: Path) -> Training:
    code = source("loralib")
    net = torch.nn.Sequential(
        code.Embedding(64, 32, r=4),
        code.MergedLinear(32, 96, r=4, lora_alpha=8, lora_dropout=0.1, enable_lora=[True, False, True]),
        torch.nn.GELU(),
        code.Linear(96, 64, r=4, lora_dropout=0.1),
    )
    code.mark_only_lora_as_trainable(net)
    return one(
        net,
        batches(words(64, 4, 12), words(64, 4, 12)),
        lambda net, x, y: F.cross_entropy(net(x).transpose(1, 2), y),
    )
