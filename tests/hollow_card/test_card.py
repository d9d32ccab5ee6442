"""The card itself: what PyTorch sees of it, values of its ops, and the allocator's model beside PyTorch's."""

import os
from random import Random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stowplan.plan.allocator.caching import CachingAllocator
from stowplan.plan.allocator.settings import MIB, parse_settings
from tests.support.heap_streams import random_size

SETTINGS = parse_settings(os.environ.get("PYTORCH_ALLOC_CONF", ""))


def test_pytorch_sees_the_card_that_was_described() -> None:
    assert torch.version.cuda is not None
    assert torch.cuda.get_device_name().startswith("Hollow card")
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    assert capability == os.environ["HOLLOW_CAPABILITY"]
    assert torch.cuda.mem_get_info()[1] == int(os.environ["HOLLOW_MEMORY"])


def test_a_request_that_is_too_large_ends_in_pytorchs_own_error() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        torch.empty(int(os.environ["HOLLOW_MEMORY"]) + 1, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("causal", "heads"), [(False, 4), (True, 4), (True, 2)])
def test_attention_has_right_values(dtype: torch.dtype, causal: bool, heads: int) -> None:
    """In whatever kernel the capability chooses."""
    if torch.cuda.get_device_capability() in ((9, 0), (10, 0)) and dtype is torch.bfloat16:
        pytest.skip("PyTorch chooses cuDNN's attention, whose newer interface is not written")
    given = [torch.randn(2, count, 24, 16, dtype=dtype) for count in (4, heads, heads)]
    results = list[list[Tensor]]()
    for device in ("cpu", "cuda"):
        own = [tensor.detach().to(device).requires_grad_() for tensor in given]
        query, key, value = own
        made = F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=heads < 4)
        made.square().sum().backward()  # type: ignore[no-untyped-call]
        results.append([made, *(tensor.grad for tensor in own if tensor.grad is not None)])
    tolerance = 1e-4 if dtype is torch.float32 else 5e-2
    for here, there in zip(*results, strict=True):
        torch.testing.assert_close(there.cpu().float(), here.float(), rtol=tolerance, atol=tolerance)


def test_convolutions_norms_and_draws_have_right_values() -> None:
    layers = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.GroupNorm(2, 8)
    )
    image = torch.randn(2, 3, 12, 12)
    here = layers(image)
    torch.testing.assert_close(layers.cuda()(image.cuda()).cpu(), here, rtol=1e-4, atol=1e-4)
    torch.manual_seed(3)
    drawn = torch.rand(64, device="cuda"), F.dropout(torch.ones(4096, device="cuda"), 0.25)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(64, device="cuda"), drawn[0])
    assert torch.equal(F.dropout(torch.ones(4096, device="cuda"), 0.25), drawn[1])
    assert abs(float((drawn[1] == 0).float().mean()) - 0.25) < 0.05


@pytest.mark.parametrize("seed", range(12))
def test_the_allocators_model_reserves_what_pytorch_does(seed: int) -> None:
    """Random requests and frees: the same counts after each, and the same blocks in the same segments."""
    torch.cuda.empty_cache()
    random, model = Random(seed), CachingAllocator(SETTINGS)
    there = torch.cuda.memory_stats()
    first = [there[name] for name in _COUNTS]
    living = list[tuple[Tensor, int]]()
    for _ in range(400):
        if living and random.random() < 0.45:
            model.free(living.pop(random.randrange(len(living)))[1])
        else:
            nbytes = min(random_size(random), 64 * MIB)
            living.append((torch.empty(nbytes, dtype=torch.uint8, device="cuda"), model.malloc(nbytes)))
        stats, figures = torch.cuda.memory_stats(), model.figures()
        found = [stats[name] - before for name, before in zip(_COUNTS, first, strict=True)]
        assert found == [figures.requested_bytes, figures.allocated_bytes, figures.reserved_bytes]


_COUNTS = [f"{name}_bytes.all.current" for name in ("requested", "allocated", "reserved")]
