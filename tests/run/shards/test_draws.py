"""Random numbers of which a worker needs a part: those of the whole, without the whole being there."""

import random
from math import prod

import pytest
import torch
from torch import Tensor

from stowplan.run.measure.measure import measure
from stowplan.run.shards import draws

pytestmark = pytest.mark.torch


def part_of(whole: list[int], low: list[int], sizes: list[int]) -> Tensor:
    part: Tensor = torch.ops.stowplan.draw(0.4, whole, low, sizes, torch.float64)
    return part


@pytest.mark.parametrize("piece", [1, 7, 64, 2**16])
def test_a_part_of_a_draw_is_that_part_of_the_whole(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "PIECE", piece)
    chance = random.Random(piece)
    for seed in range(30):
        whole = [chance.randint(1, 9) for _ in range(chance.randint(1, 4))]
        low = [chance.randint(0, size - 1) for size in whole]
        sizes = [chance.randint(0, size - first) for first, size in zip(low, whole, strict=True)]
        torch.manual_seed(seed)
        expected = torch.empty(whole, dtype=torch.float64).bernoulli_(0.4)
        ended = torch.get_rng_state()
        torch.manual_seed(seed)
        found = part_of(whole, low, sizes)
        index = [slice(first, first + size) for first, size in zip(low, sizes, strict=True)]
        assert torch.equal(found, expected[tuple(index)])
        assert torch.equal(torch.get_rng_state(), ended)


def test_a_part_of_a_draw_takes_little_more_memory_than_itself() -> None:
    whole, sizes = [4, 16, 128, 128], [1, 16, 64, 128]
    taken = measure(lambda: part_of(whole, [2, 0, 64, 0], sizes), before=()).measured_rise_bytes
    assert taken < 8 * (prod(sizes) + 1.1 * draws.PIECE) < 8 * prod(whole) / 4
