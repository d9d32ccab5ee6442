"""Sequences: attention in its forms, masks, recurrent nets, packed lengths, position codes."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.idioms.pieces import F, tokens, train
from tests.idioms.side import Side, idiom


class Language(nn.Module):
    """Words, a body under test, and the loss of the next word."""

    def __init__(self, body: nn.Module, *, tied: bool = False) -> None:
        super().__init__()
        self.words, self.body, self.out = nn.Embedding(20, 8), body, nn.Linear(8, 20, bias=False)
        if tied:
            self.out.weight = self.words.weight

    def forward(self, ids: Tensor) -> Any:
        h = self.body(self.words(ids[:, :-1]))
        return F.cross_entropy(self.out(h).flatten(0, 1), ids[:, 1:].flatten())


def _train(side: Side, body: nn.Module, *, tied: bool = False) -> None:
    train(side, side.fit(Language(body, tied=tied), tokens()), ((tokens(),) for _ in range(3)))


class Attention(nn.Module):
    """Causal attention of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def heads(self, x: Tensor) -> list[Tensor]:
        return [t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)]

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.mix(*self.heads(x)).transpose(1, 2).flatten(2))


@idiom("nanoGPT: fused causal attention, tied words")
def fused_attention(side: Side) -> None:
    _train(side, Attention(), tied=True)


@idiom("minGPT: attention by hand with a mask in a buffer, and dropout")
def attention_by_hand(side: Side) -> None:
    class ByHand(Attention):
        mask: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.tril(torch.ones(1, 1, 16, 16)))
            self.drop = nn.Dropout(0.1)

        def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            t = q.shape[2]
            scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
            scores = scores.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
            return self.drop(scores.softmax(-1)) @ v

    _train(side, ByHand())


@idiom("annotated transformer: the attention map is stored on the module")
def attention_map_is_stored(side: Side) -> None:
    class Stored(Attention):
        attention: Tensor | None = None

        def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            self.attention = ((q @ k.transpose(-2, -1)) / 2).softmax(-1)
            return self.attention @ v

    net = Language(Stored())
    model = side.fit(net, tokens())
    for _ in range(3):
        model.zero_grad()
        model(tokens()).backward()
        side.see("map", model.body.attention)


@idiom("llama: rotary position codes as complex numbers in a buffer")
def rotary_codes(side: Side) -> None:
    class Rotary(Attention):
        turns: Tensor

        def __init__(self) -> None:
            super().__init__()
            angles = torch.outer(torch.arange(16), 1 / 10_000 ** (torch.arange(0, 4, 2) / 4))
            self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

        def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            def turn(x: Any) -> Any:
                pairs = torch.view_as_complex(x.unflatten(-1, (2, 2)).contiguous())
                return torch.view_as_real(pairs * self.turns[: x.shape[2]]).flatten(-2)

            return F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)

    _train(side, Rotary())


@idiom("ALiBi: slopes made in forward")
def slopes(side: Side) -> None:
    class Slopes(Attention):
        def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            t = q.shape[2]
            distance = torch.arange(t)[None] - torch.arange(t)[:, None]
            bias = distance * torch.tensor([0.5, 0.25])[:, None, None]
            return F.scaled_dot_product_attention(q, k, v, bias.masked_fill(distance > 0, -torch.inf))

    _train(side, Slopes())


@idiom("T5: learned biases of bucketed distances")
def bucketed_distances(side: Side) -> None:
    class Buckets(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Embedding(4, 2)

        def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            places = torch.arange(q.shape[2])
            bias = self.bias((places[:, None] - places[None]).clamp(0, 3)).permute(2, 0, 1)
            return F.scaled_dot_product_attention(q, k, v, bias)

    _train(side, Buckets())


@idiom("linear attention: a cumulative sum over the sequence")
def linear_attention(side: Side) -> None:
    class Linear(Attention):
        def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            q, k = F.elu(q) + 1, F.elu(k) + 1
            state = (k[..., None] * v[..., None, :]).cumsum(2)
            return (q[..., None] * state).sum(-2) / (q * k.cumsum(2)).sum(-1, keepdim=True)

    _train(side, Linear())


@idiom("nn.MultiheadAttention with weights that are returned")
def module_attention(side: Side) -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)

        def forward(self, x: Tensor) -> Any:
            out, weights = self.attention(x, x, x, need_weights=True, average_attn_weights=False)
            return out + weights.mean()

    _train(side, Module())


@idiom("pytorch.org, language modeling with nn.TransformerEncoder: a float causal mask")
def encoder_with_a_float_mask(side: Side) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, x: Tensor) -> Any:
            return self.encoder(x, nn.Transformer.generate_square_subsequent_mask(x.shape[1]))

    _train(side, Encoder())


@idiom("BERT-like: a boolean padding mask as an argument")
def padding_mask(side: Side) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 4)
            self.encoder = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)

        def forward(self, ids: Tensor, y: Tensor) -> Any:
            h = self.encoder(self.words(ids), src_key_padding_mask=ids == 0)
            return F.cross_entropy(self.out(h[:, 0]), y)

    def padded() -> tuple[Tensor, Tensor]:
        ids = torch.randint(1, 20, (3, 6))
        ids[0, 4:] = 0
        return ids, torch.randint(0, 4, (3,))

    train(side, side.fit(Net(), *padded()), (padded() for _ in range(3)))


@idiom("pytorch.org, nn.Transformer: encoder, decoder and a causal target mask")
def encoder_and_decoder(side: Side) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(20, 8), nn.Linear(8, 20)
            self.net = nn.Transformer(8, 2, 1, 1, 16, 0.1, batch_first=True)

        def forward(self, source: Tensor, target: Tensor) -> Any:
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1] - 1)
            h = self.net(self.words(source), self.words(target[:, :-1]), tgt_mask=mask, tgt_is_causal=True)
            return F.cross_entropy(self.out(h).flatten(0, 1), target[:, 1:].flatten())

    train(side, side.fit(Net(), tokens(), tokens()), ((tokens(), tokens()) for _ in range(3)))


@idiom("pytorch.org, sequence models: an LSTM of two layers with dropout")
def lstm(side: Side) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(8, 8, 2, batch_first=True, dropout=0.2)

        def forward(self, x: Tensor) -> Any:
            return self.rnn(x)[0]

    _train(side, Net())


@idiom("sequence tagging: a bidirectional GRU over packed sequences")
def packed_sequences(side: Side) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.rnn = nn.Embedding(20, 8), nn.GRU(8, 6, batch_first=True, bidirectional=True)
            self.out = nn.Linear(12, 4)

        def forward(self, ids: Tensor, lengths: Tensor) -> Any:
            packed = pack_padded_sequence(self.words(ids), lengths, batch_first=True, enforce_sorted=False)
            out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
            return self.out(out).square().mean()

    lengths = [torch.tensor(each) for each in ([6, 4], [6, 4], [3, 6])]
    train(side, side.fit(Net(), tokens(), lengths[0]), ((tokens(), each) for each in lengths))


@idiom("pytorch.org, seq2seq translation: a decoder in a loop, teacher forcing always")
def decoder_in_a_loop(side: Side) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.cell, self.out = nn.Embedding(20, 8), nn.GRUCell(8, 8), nn.Linear(8, 20)

        def forward(self, target: Tensor) -> Any:
            state, loss = torch.zeros(target.shape[0], 8), torch.zeros(())
            for t in range(target.shape[1] - 1):
                state = self.cell(F.relu(self.words(target[:, t])), state)
                loss = loss + F.nll_loss(F.log_softmax(self.out(state), 1), target[:, t + 1])
            return loss

    train(side, side.fit(Net(), tokens()), ((tokens(),) for _ in range(3)))


@idiom("CRF: the forward algorithm in a loop with logsumexp")
def crf(side: Side) -> None:
    class Crf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emit, self.move = nn.Linear(8, 4), nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor, tags: Tensor) -> Any:
            scores = self.emit(x)
            alpha = scores[:, 0]
            for t in range(1, x.shape[1]):
                alpha = (alpha[:, :, None] + self.move + scores[:, t, None]).logsumexp(1)
            gold = scores.gather(2, tags[..., None]).sum((1, 2)) + self.move[tags[:, :-1], tags[:, 1:]].sum(1)
            return (alpha.logsumexp(1) - gold).mean()

    def example() -> tuple[Tensor, Tensor]:
        return torch.randn(2, 5, 8), torch.randint(0, 4, (2, 5))

    train(side, side.fit(Crf(), *example()), (example() for _ in range(3)))


@idiom("fastText: EmbeddingBag with offsets")
def embedding_bag(side: Side) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.EmbeddingBag(20, 8, mode="mean"), nn.Linear(8, 4)

        def forward(self, ids: Tensor, offsets: Tensor, y: Tensor) -> Any:
            return F.cross_entropy(self.out(self.words(ids, offsets)), y)

    def example() -> tuple[Tensor, Tensor, Tensor]:
        return torch.randint(0, 20, (10,)), torch.tensor([0, 3, 7]), torch.randint(0, 4, (3,))

    train(side, side.fit(Net(), *example()), (example() for _ in range(3)))


@idiom("large vocabularies: adaptive softmax")
def adaptive_softmax(side: Side) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(20, 8), nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10])

        def forward(self, ids: Tensor, goal: Tensor) -> Any:
            return self.out(self.words(ids), goal).loss

    ids, goal = torch.randint(0, 20, (8,)), torch.tensor([0, 1, 6, 7, 12, 13, 3, 19])
    train(side, side.fit(Net(), ids, goal), ((torch.randint(0, 20, (8,)), goal) for _ in range(3)))


@idiom("a loss in chunks over the vocabulary, in a Python loop")
def chunked_loss(side: Side) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(20, 8), nn.Linear(8, 20)

        def forward(self, ids: Tensor) -> Any:
            h: Any = self.words(ids[:, :-1]).flatten(0, 1)
            goal: Any = ids[:, 1:].flatten()
            losses = [
                F.cross_entropy(self.out(part), labels, reduction="sum")
                for part, labels in zip(h.split(4), goal.split(4), strict=True)
            ]
            return torch.stack(losses).sum() / goal.numel()

    train(side, side.fit(Net(), tokens()), ((tokens(),) for _ in range(3)))


@idiom("masked language modeling: a random mask drawn in forward")
def masked_language(side: Side) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(21, 8), nn.Linear(8, 20)

        def forward(self, ids: Tensor) -> Any:
            masked = torch.rand(ids.shape) < 0.3
            scores = self.out(self.words(torch.where(masked, 20, ids)).cumsum(1))
            return F.cross_entropy(
                scores.flatten(0, 1), torch.where(masked, ids, -100).flatten().clamp(min=-100)
            ).nan_to_num()

    train(side, side.fit(Net(), tokens()), ((tokens(),) for _ in range(3)))
