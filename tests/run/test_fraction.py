"""A part of an op on large tensors tells what the whole takes, and what does not grow along has no part."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stowplan.capture import Captured, capture
from stowplan.run.cost.probe import Signature, call_signature, fraction_of, probed_cost
from tests.support.nets import NETS

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]
CPU = torch.device("cpu")
LARGE_BYTES = 2**20


def large_signatures(captured: Captured) -> Iterator[Signature]:
    calls = captured.program.calls
    tensors = captured.graph.tensors
    made = (op for op in captured.graph.ops if tensors[next(iter(op.writes()))].alias_of is None)
    signatures = {(found := call_signature(captured.graph, calls[op.id])).text: found for op in made}
    for signature in signatures.values():
        if any(each.extent * each.dtype.itemsize > LARGE_BYTES for each in signature.operands):
            yield signature


@pytest.mark.slow
def test_the_memory_of_the_whole_follows_from_a_part() -> None:
    captured = capture(*NETS["vgg16"].build("tiny", resolution=256))
    signatures = list(large_signatures(captured))
    fractions = [(each, fraction_of(each, large_bytes=LARGE_BYTES)) for each in signatures]
    found = [(each, fraction) for each, fraction in fractions if fraction]
    assert len(found) > 0.8 * len(signatures)
    for signature, fraction in found:
        part, whole = (probed_cost(each, CPU, repeats=1) for each in (fraction.signature, signature))
        assert part is not None, signature.text
        assert whole is not None
        assert fraction.whole(part).rise_bytes == pytest.approx(whole.rise_bytes, rel=0.1), signature.text


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x).sum()


@pytest.mark.parametrize(("batch", "is_cut"), [(1, False), (16, True)])
def test_attention_is_cut_by_sample_and_not_by_token(batch: int, is_cut: bool) -> None:
    """Half the tokens are a quarter of the work."""
    captured = capture(Attention(), (torch.rand(batch, 1, 16384 // batch, 50, requires_grad=True),))
    attention = [each for each in large_signatures(captured) if "attention" in each.text]
    assert len(attention) == 2
    assert all(bool(fraction_of(each, large_bytes=LARGE_BYTES)) is is_cut for each in attention)


class Volume(nn.Module):
    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(scores, labels)


def test_a_loss_over_a_volume_has_no_part_or_one_that_fits_together() -> None:
    """Its backward is given scores and labels whose dims do not line up: most parts of them are refused."""
    scores = torch.rand(1, 4, 64, 64, 64, requires_grad=True)
    captured = capture(Volume(), (scores, torch.zeros(1, 64, 64, 64, dtype=torch.long)))
    losses = [each for each in large_signatures(captured) if "nll_loss2d" in each.text]
    assert len(losses) == 2
    for signature in losses:
        fraction = fraction_of(signature, large_bytes=LARGE_BYTES)
        assert fraction is None or probed_cost(fraction.signature, CPU, repeats=1) is not None
