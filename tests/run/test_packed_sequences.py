"""Packed sequences: their lengths are values that forward reads, so each set of lengths has a plan.

Each model runs fitted and in eager on batches of three sequences, with other ids and lengths, and losses and
gradients are compared to the bit.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

from stowplan import Execution, Search
from stowplan.errors import BudgetTooSmall, CaptureError
from stowplan.run.fit import fit, plans_of

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]

LENGTHS = ([5, 7, 2], [2, 7, 5], [3, 6, 7], [6, 6, 3])  # the second has the plan of the first
Batch = tuple[Any, ...]


def ids(seed: int) -> Tensor:
    return torch.randint(1, 20, (3, 7), generator=torch.Generator().manual_seed(seed))


def batches() -> list[Batch]:
    return [(ids(seed), torch.tensor(lengths)) for seed, lengths in enumerate(LENGTHS)]


class Reader(nn.Module):
    """Words, a recurrent net, and what a subclass does with them."""

    def __init__(self, rnn: Callable[..., nn.Module] = nn.LSTM, **named: Any) -> None:
        super().__init__()
        self.words, self.rnn = nn.Embedding(20, 8), rnn(8, 6, batch_first=True, **named)
        self.out = nn.Linear(12 if named.get("bidirectional") else 6, 5)

    def packed(self, words: Tensor, lengths: Any) -> PackedSequence:
        return pack_padded_sequence(self.words(words), lengths, batch_first=True, enforce_sorted=False)

    def forward(self, words: Tensor, lengths: Any) -> Any:
        out, _ = pad_packed_sequence(self.rnn(self.packed(words, lengths))[0], batch_first=True)
        return self.out(out).square().mean()


class ByList(Reader):
    def forward(self, words: Tensor, lengths: Any) -> Any:
        return super().forward(words, lengths.tolist())


class ByArray(Reader):
    """As tacotron2's encoder does."""

    def forward(self, words: Tensor, lengths: Any) -> Any:
        return super().forward(words, lengths.cpu().numpy())


class OfWords(Reader):
    def forward(self, words: Tensor, lengths: Any) -> Any:
        words = words * (torch.arange(7) < lengths[:, None])
        return super().forward(words, (words != 0).sum(1).cpu())


class Masked(Reader):
    def forward(self, words: Tensor, lengths: Any) -> Any:
        out, known = pad_packed_sequence(
            self.rnn(self.packed(words, lengths))[0], batch_first=True, total_length=9
        )
        return self.out(out)[torch.arange(9) < known[:, None]].square().mean()


class Rebuilt(Reader):
    def forward(self, words: Tensor, lengths: Any) -> Any:
        packed = self.packed(words, lengths)
        packed = packed._replace(data=F.dropout(packed.data, 0.5))
        out, (h, _) = self.rnn(packed)
        return self.out(out.data).square().mean() + h.sum()


class Counted(Reader):
    """A decoder that runs over the positions itself."""

    def forward(self, words: Tensor, lengths: Any) -> Any:
        packed: Any = self.packed(words, lengths)
        parts = packed.data.split(packed.batch_sizes.tolist())
        return sum(self.out(part[:, :6]).square().mean() for part in parts) * packed.batch_sizes[0]


class OfList(Reader):
    def forward(self, words: Tensor, lengths: Any) -> Any:
        each = [self.words(row)[:length] for row, length in zip(words, lengths, strict=True)]
        return self.out(self.rnn(pack_sequence(each, enforce_sorted=False))[0].data).square().mean()


class Captions(Reader):
    """Scores and their words are packed alike, and only the lengths are guarded."""

    def forward(self, words: Tensor, lengths: Any) -> Any:
        known, order = lengths.sort(descending=True)
        scores, wanted = self.out(self.rnn(self.words(words[order]))[0]), words[order] % 5
        one, other = (pack_padded_sequence(x, known.tolist(), batch_first=True) for x in (scores, wanted))
        return F.cross_entropy(one.data, other.data)


def agree(eager: nn.Module, given: Sequence[Batch], **settings: Any) -> Any:
    """The fitted model, after each batch gave eager's bits."""
    how = {"budget": "1GiB", "search": Search(moves=3), "allow": ("recompute",), **settings}
    fitted: Any = fit(copy.deepcopy(eager), given[0], **how)
    for batch in given:
        results = []
        for model in (eager, fitted):
            torch.manual_seed(3)
            model.zero_grad()
            loss = model(*batch)
            loss.backward()
            results.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        assert all(map(torch.equal, *results))
    return fitted


@pytest.mark.slow
@pytest.mark.parametrize("rnn", [nn.LSTM, nn.GRU])
def test_a_packed_net_has_eager_s_bits(rnn: Callable[..., nn.Module]) -> None:
    fitted = agree(Reader(rnn, bidirectional=True), batches())
    assert [str(plan.exactness) for plan in plans_of(fitted)] == ["bitwise"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("net", [ByArray, OfWords, Masked, Rebuilt, Counted, OfList, Captions])
def test_what_is_done_with_lengths_and_packed_data_has_eager_s_bits(net: Callable[[], Reader]) -> None:
    fitted = agree(net(), batches())
    plans = plans_of(fitted)
    assert len(plans) == (4 if net in (ByArray, OfList) else 3)  # lists and arrays have an order too
    assert {str(plan.exactness) for plan in plans} == {"bitwise"}


@pytest.mark.slow
def test_a_list_of_lengths_is_guarded() -> None:
    fitted = agree(ByList(), batches()[1:3])
    assert len(plans_of(fitted)) == 2


@pytest.mark.slow
def test_a_packed_sequence_may_be_an_argument() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(8, 6)

        def forward(self, packed: PackedSequence) -> Any:
            return pad_packed_sequence(self.rnn(packed)[0])[0].square().mean()

    given = [
        (pack_padded_sequence(torch.randn(7, 3, 8), torch.tensor(lengths), enforce_sorted=False),)
        for lengths in LENGTHS
    ]
    assert len(plans_of(agree(Net(), given))) == 3


@pytest.mark.slow
def test_tight_plans_and_arenas_hold_packed_sequences() -> None:
    net = Reader(nn.GRU, num_layers=2, dropout=0.5)
    with pytest.raises(BudgetTooSmall) as refusal:
        fit(net, batches()[0], budget=1, search=Search(moves=3), allow=("recompute",))
    agree(copy.deepcopy(net), batches()[:2], budget=refusal.value.minimum_bytes)
    agree(net, batches()[:2], execution=Execution(arena=True))


@pytest.mark.slow
def test_torch_compile_plans_around_packing() -> None:
    eager = Reader()
    torch._dynamo.reset()
    compiled: Any = torch.compile(copy.deepcopy(eager), backend="stowplan", options={"budget": "1GiB"})
    for batch in batches():
        grads = []
        for model in (eager, compiled):
            model.zero_grad()
            model(*batch).backward()
            grads.append([p.grad for p in model.parameters()])
        assert all(map(torch.equal, *grads))


def test_lengths_that_follow_from_unknown_numbers_are_refused() -> None:
    class Shares(Reader):
        def forward(self, words: Tensor, lengths: Any) -> Any:
            return super().forward(words, (lengths * 7).long())

    with pytest.raises(CaptureError, match=r"packs sequences whose lengths .*pass the lengths in as a list"):
        fit(Shares(), (ids(0), torch.tensor([1.0, 0.5, 0.3])), budget="1GiB")


@pytest.mark.slow
def test_lengths_that_eager_refuses_are_refused_with_its_words() -> None:
    class Sorted(Reader):
        def packed(self, words: Tensor, lengths: Any) -> PackedSequence:
            return pack_padded_sequence(self.words(words), lengths, batch_first=True)

    with pytest.raises(CaptureError, match="must be sorted in decreasing order"):
        fit(Sorted(), batches()[0], budget="1GiB")
    assert len(plans_of(agree(Sorted(), [(ids(0), torch.tensor([7, 5, 2]))]))) == 1
