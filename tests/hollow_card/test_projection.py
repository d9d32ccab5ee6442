"""What is projected for a card that is not here, held to what PyTorch's CUDA build is asked for."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stowplan.capture import capture
from stowplan.ops.cuda_workspace import Chip, cuda_workspace_of, peak_of
from stowplan.ops.table import site_of
from stowplan.plan.cards import Card, card_named
from stowplan.run.project import project_step
from stowplan.run.target import Target
from tests.hollow_card.measuring import on_card
from tests.hollow_card.nets import NETS
from tests.hollow_card.test_card import SETTINGS

CAPABILITY = torch.cuda.get_device_capability()
CHIP = Chip(CAPABILITY[0] + CAPABILITY[1] / 10, torch.cuda.get_device_properties(0).multi_processor_count)
ITERATIONS = 3


def card() -> Card:
    """The card of the table that is most like the one here."""
    attentions = ("efficient",) if CHIP.capability < 8.0 else ("flash", "efficient")
    like = card_named("a100-80gb")
    chip = {"capability": CHIP.capability, "multiprocessors": CHIP.multiprocessors}
    return replace(like, attentions=attentions, **chip)  # type: ignore[arg-type]


@pytest.mark.parametrize("net", NETS)
def test_eager_takes_what_is_projected(net: str) -> None:
    """Requested and reserved bytes, to the byte, from the second iteration on."""
    if CAPABILITY == (9, 0) and net == "narrow_transformer":
        pytest.skip("PyTorch chooses cuDNN's attention, whose newer interface is not written")
    torch.manual_seed(0)
    model, args = NETS[net]()
    projected = project_step(Target(model, args), card()).without_a_plan(SETTINGS)
    assert projected is not None
    there = torch.cuda.memory_stats()
    torch.cuda.reset_peak_memory_stats()
    model, args = on_card(NETS[net])
    for _ in range(ITERATIONS):
        model(*args).backward()
        model.zero_grad(set_to_none=True)
    found = torch.cuda.memory_stats()
    names = "requested_bytes.all", "reserved_bytes.all"
    requested, reserved = (found[f"{name}.peak"] - there[f"{name}.current"] for name in names)
    if CHIP.capability < 8.0 and net == "narrow_transformer":  # dropout inside of attention's own ops
        assert requested <= projected.figures.requested_peak_bytes <= 1.02 * requested
        return
    assert projected.figures.requested_peak_bytes == requested
    assert projected.figures.reserved_peak_bytes == reserved


def rise_of(call: Callable[[], object]) -> int:
    """The most that a call takes beyond its results."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    made = call()
    tensors = made if isinstance(made, tuple) else (made,)
    kept = sum(t.untyped_storage().nbytes() for t in tensors if isinstance(t, Tensor))
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    return int(peak - before - kept)


class Sum(nn.Module):
    """Sums over the leading dim."""

    def forward(self, rows: Tensor) -> Tensor:
        return rows.sum(0)


def workspace(model: nn.Module, args: tuple[Tensor, ...], op_type: str) -> int:
    """Of the only op of a type in a step, by its rule."""
    graph = capture(model, args, all_outputs=True).graph
    (op,) = (op for op in graph.ops if op.type.startswith(op_type))
    return peak_of(cuda_workspace_of(site_of(graph, op))(CHIP))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(20))
def test_the_workspace_of_sums(seed: int, dtype: torch.dtype) -> None:
    random = Random(seed)
    rows, columns = random.randint(1, 20000), random.choice((random.randint(1, 100), random.randint(1, 3000)))
    numbers = torch.empty(rows, columns, device="cuda", dtype=dtype, requires_grad=True)
    with torch.no_grad():
        rise = rise_of(lambda: numbers.sum(0))
    assert workspace(Sum(), (numbers,), "aten.sum.dim_IntList") == rise


class Attention(nn.Module):
    """Attention, with keys that heads may share."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=key.shape[1] < query.shape[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("features", [16, 64, 80, 96, 128, 160, 256])
@pytest.mark.parametrize(
    ("heads", "rows", "columns"), [(4, 64, 64), (4, 200, 64), (2, 64, 200), (1, 300, 100)]
)
def test_the_workspace_of_attention(
    dtype: torch.dtype, features: int, heads: int, rows: int, columns: int
) -> None:
    """Of the backward of the memory-efficient kernel, where no other is allowed."""
    shapes = (4, rows), (heads, columns), (heads, columns)
    given = [
        torch.empty(2, length, count, features, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_()
        for count, length in shapes
    ]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        expected = workspace(
            Attention(), tuple(given), "aten._scaled_dot_product_efficient_attention_backward"
        )
        own = torch.ops.aten._scaled_dot_product_efficient_attention
        with torch.no_grad():
            result, sums, seed, offset = own(*given, None, True)
            of_result = torch.empty_like(result)
            saved = result, sums, seed, offset
            backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
            rise = rise_of(lambda: backward(of_result, *given, None, *saved, 0.0, [True, True, True, False]))
    assert expected == rise
