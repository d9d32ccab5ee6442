"""Speech: recognised and spoken."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from benchmarks.repositories.families.data import batches, numbers, words
from benchmarks.repositories.sources import source
from benchmarks.repositories.training import Networks, Training, drawn, entry, one

_SOUND = ("librosa", "scipy.io", "tensorflow", "matplotlib", "soundfile", "numba", "unidecode", "inflect")


def _lengths(*lengths: int) -> Any:
    return lambda _: torch.tensor(lengths)


@entry(
    "NVIDIA/tacotron2", "185cd24e046cc1304b4f8e564734d2498c6e2e6f", "Tacotron2, Tacotron2Loss", absent=_SOUND
)
def tacotron2(_: Path) -> Training:
    options = SimpleNamespace(
        mask_padding=True,
        fp16_run=False,
        n_mel_channels=8,
        n_frames_per_step=1,
        n_symbols=20,
        symbols_embedding_dim=16,
        encoder_kernel_size=5,
        encoder_n_convolutions=1,
        encoder_embedding_dim=16,
        decoder_rnn_dim=16,
        prenet_dim=16,
        max_decoder_steps=20,
        gate_threshold=0.5,
        p_attention_dropout=0.1,
        p_decoder_dropout=0.1,
        attention_rnn_dim=16,
        attention_dim=8,
        attention_location_n_filters=4,
        attention_location_kernel_size=5,
        postnet_embedding_dim=16,
        postnet_kernel_size=5,
        postnet_n_convolutions=2,
    )
    source("utils").get_mask_from_lengths = source("model").get_mask_from_lengths = _mask
    net, criterion = source("model").Tacotron2(options), source("loss_function").Tacotron2Loss()

    def loss(net: Any, text: Tensor, text_lengths: Tensor, mel: Tensor, gate: Tensor, lengths: Tensor) -> Any:
        return criterion(net((text, text_lengths, mel, 6, lengths)), (mel, gate))

    return one(
        net,
        batches(
            words(20, 2, 6), _lengths(6, 5), numbers(2, 8, 5), lambda _: torch.zeros(2, 5), _lengths(5, 4)
        ),
        loss,
        optimizer=lambda p: torch.optim.Adam(p, 1e-3, weight_decay=1e-6),
    )


def _mask(lengths: Tensor) -> Tensor:
    """Theirs makes its numbers on CUDA alone."""
    return torch.arange(0, int(lengths.max())) < lengths.unsqueeze(1)


@entry(
    "jik876/hifi-gan",
    "4769534d45265d52a904b850da5a622601885777",
    "Generator, the two discriminators and their losses, the loop; each fitted",
    absent=_SOUND,
)
def hifi_gan(_: Path) -> Training:
    code = source("models")
    options = SimpleNamespace(
        resblock="2",
        upsample_rates=[4, 4],
        upsample_kernel_sizes=[8, 8],
        upsample_initial_channel=16,
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1, 2]],
    )
    generator = code.Generator(options)
    mpd, msd = code.MultiPeriodDiscriminator(), code.MultiScaleDiscriminator()
    for judge in (mpd, msd):
        judge.discriminators = judge.discriminators[:1]

    def iteration(networks: Networks, optimizers: Sequence[Optimizer], seed: int) -> list[Tensor]:
        draw = drawn(seed)
        x, y = numbers(1, 80, 8)(draw), numbers(1, 1, 128)(draw)
        made = networks["generator"](x)
        optimizers[1].zero_grad()
        loss = sum(
            code.discriminator_loss(*networks[name](y, made.detach())[:2])[0] for name in ("mpd", "msd")
        )
        torch.autograd.backward(loss)
        optimizers[1].step()
        optimizers[0].zero_grad()
        other = F.l1_loss(y, made) * 45
        for name in ("mpd", "msd"):
            _, fake, features, others = networks[name](y, made)
            other = other + code.feature_loss(features, others) + code.generator_loss(fake)[0]
        torch.autograd.backward(other)
        optimizers[0].step()
        return [loss, other]

    def optimizers(networks: Networks) -> list[Optimizer]:
        judges = [*networks["msd"].parameters(), *networks["mpd"].parameters()]
        return [
            AdamW(networks["generator"].parameters(), 2e-4, (0.8, 0.99)),
            AdamW(judges, 2e-4, (0.8, 0.99)),
        ]

    sound = torch.randn(1, 1, 128)
    return Training(
        {"generator": generator.train(), "mpd": mpd.train(), "msd": msd.train()},
        {"generator": (torch.randn(1, 80, 8),), "mpd": (sound, sound), "msd": (sound, sound)},
        optimizers,
        iteration,
        outputs="all",
    )


def _aligned(model: Any) -> None:
    """Their `maximum_path` is Cython: here is one that aligns along the diagonal."""

    def path(value: Tensor, mask: Tensor) -> Tensor:
        count, length = value.shape[-2:]
        rows, columns = torch.arange(count)[:, None], torch.arange(length)[None]
        return ((columns * count // length) == rows).to(value.dtype).expand_as(value) * mask

    model.monotonic_align = SimpleNamespace(maximum_path=path)


@entry(
    "jaywalnut310/glow-tts",
    "13e997689d643410f5d9f1f9a73877ae85e19bc2",
    "FlowGenerator, mle_loss, duration_loss; maximum_path, which is Cython, is a diagonal of ours",
    absent=(*_SOUND, "monotonic_align"),
)
def glow_tts(_: Path) -> Training:
    model, commons = source("models"), source("commons")
    _aligned(model)
    net = model.FlowGenerator(
        20,
        16,
        24,
        16,
        8,
        n_layers_enc=1,
        n_blocks_dec=2,
        n_block_layers=1,
        p_dropout=0.1,
        window_size=4,
        n_sqz=2,
        mean_only=True,
        hidden_channels_enc=16,
        hidden_channels_dec=16,
        prenet=True,
    )

    def loss(net: Any, x: Tensor, x_lengths: Tensor, y: Tensor, y_lengths: Tensor) -> Any:
        (z, mean, logs, logdet, mask), _, (_, logw, logw_) = net(x, x_lengths, y, y_lengths, gen=False)
        found = commons.mle_loss(z, mean, logs, logdet, mask)
        return found + commons.duration_loss(logw, logw_, x_lengths)

    return one(net, batches(words(20, 2, 6), _lengths(6, 5), numbers(2, 8, 16), _lengths(16, 12)), loss)


@entry(
    "jaywalnut310/vits",
    "2e561ba58618d021b5b8323d3765880f7e0ecfdb",
    "SynthesizerTrn, kl and duration losses; maximum_path, which is Cython, is a diagonal of ours",
    absent=(*_SOUND, "monotonic_align"),
)
def vits(_: Path) -> Training:
    model, losses, commons = source("models"), source("losses"), source("commons")
    _aligned(model)
    net = model.SynthesizerTrn(
        20,
        9,
        4,
        inter_channels=8,
        hidden_channels=8,
        filter_channels=16,
        n_heads=2,
        n_layers=1,
        kernel_size=3,
        p_dropout=0.1,
        resblock="2",
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1, 2]],
        upsample_rates=[2, 2],
        upsample_initial_channel=16,
        upsample_kernel_sizes=[4, 4],
    )
    del commons

    def loss(net: Any, x: Tensor, x_lengths: Tensor, spec: Tensor, spec_lengths: Tensor) -> Any:
        made, length, _, _, _, mask, (_, z_p, m_p, logs_p, _, logs_q) = net(x, x_lengths, spec, spec_lengths)
        kl = losses.kl_loss(z_p, logs_q, m_p, logs_p, mask)
        return made.abs().mean() * 45 + length.float().sum() + kl

    return one(net, batches(words(20, 2, 6), _lengths(6, 5), numbers(2, 9, 12), _lengths(12, 10)), loss)


@entry(
    "SeanNaren/deepspeech.pytorch",
    "b88a631ef6b96553e16bbaa5bd6a621435bed278",
    "DeepSpeech with packed sequences, CTCLoss",
    absent=(
        "pytorch_lightning",
        "hydra",
        "Levenshtein",
        "deepspeech_pytorch.validation",
        "deepspeech_pytorch.decoder",
        "deepspeech_pytorch.configs",
    ),
)
def deepspeech(_: Path) -> Training:
    code = source("deepspeech_pytorch.model")
    rnn, size = code.BatchRNN, 16
    convolutions = code.MaskConv(
        nn.Sequential(
            nn.Conv2d(1, 4, (41, 11), (2, 2), (20, 5)), nn.BatchNorm2d(4), nn.Hardtanh(0, 20, inplace=True)
        )
    )

    class Recogniser(nn.Module):
        """`DeepSpeech.forward` without Lightning, whose class has no base here."""

        def __init__(self) -> None:
            super().__init__()
            self.conv = convolutions
            self.rnns = nn.Sequential(
                rnn(4 * 16, size, nn.LSTM, bidirectional=True, batch_norm=False),
                rnn(size, size, nn.LSTM, bidirectional=True),
            )
            self.fc = nn.Sequential(
                code.SequenceWise(nn.Sequential(nn.BatchNorm1d(size), nn.Linear(size, 12)))
            )

        def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
            lengths = (lengths + 2 * 5 - 11) // 2 + 1
            x, _ = self.conv(x, lengths)
            x = x.view(x.size(0), -1, x.size(3)).transpose(1, 2).transpose(0, 1).contiguous()
            for each in self.rnns:
                x, _ = each(x, lengths)
            return self.fc(x), lengths

    def loss(net: Any, x: Tensor, lengths: Tensor, targets: Tensor, sizes: Tensor) -> Any:
        out, out_lengths = net(x, lengths)
        return F.ctc_loss(
            out.log_softmax(-1), targets, out_lengths, sizes, reduction="sum", zero_infinity=True
        )

    return one(
        Recogniser(),
        batches(numbers(2, 1, 32, 24), _lengths(24, 20), words(12, 6, first=1), _lengths(3, 3)),
        loss,
    )


@entry(
    "lucidrains/conformer",
    "fc70d518d3770788d17a5d9799e08d23ad19c525",
    "Conformer with dropout, a squared error",
)
def conformer(_: Path) -> Training:
    net = source("conformer.conformer").Conformer(
        24,
        depth=2,
        dim_head=8,
        heads=2,
        conv_kernel_size=7,
        attn_dropout=0.1,
        ff_dropout=0.1,
        conv_dropout=0.1,
    )
    return one(net, batches(numbers(2, 20, 24), numbers(2, 20, 24)), lambda net, x, y: F.mse_loss(net(x), y))
