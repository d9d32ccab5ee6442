"""Random numbers of which a worker needs a part: those of the whole, without the whole being there."""

import random
from math import prod

import pytest
import torch
from torch import Tensor

from stowplan.run.measure.measure import measure
from stowplan.techniques.shards.run import draws
from stowplan.techniques.shards.run.skip_ahead import skip_ahead

pytestmark = pytest.mark.torch


def part_of(whole: list[int], low: list[int], sizes: list[int]) -> Tensor:
    part: Tensor = torch.ops.stowplan.draw(0.4, whole, low, sizes, torch.float64)
    return part


@pytest.mark.parametrize(("piece", "skipped"), [(1, 10**9), (7, 10**9), (64, 700), (2**16, 1000)])
def test_a_part_of_a_draw_is_that_part_of_the_whole(
    piece: int, skipped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draws, "PIECE", piece)
    monkeypatch.setattr(draws, "LEAST_SKIPPED", skipped)
    chance = random.Random(piece)
    for seed in range(15):
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


def test_numbers_of_others_are_skipped_without_being_drawn() -> None:
    torch.manual_seed(5)
    whole = torch.empty(12 * 10**6).bernoulli_(0.4)
    ended = torch.get_rng_state()
    torch.manual_seed(5)
    found = torch.ops.stowplan.draw(0.4, [3, 4 * 10**6], [1, 17], [1, 1000], torch.float32)
    assert torch.equal(found[0], whole[4 * 10**6 + 17 :][:1000])
    assert torch.equal(torch.get_rng_state(), ended)


@pytest.mark.parametrize("before", [0, 1, 311, 312])
@pytest.mark.parametrize("words", [1, 623, 624, 625, 12345])
def test_skipping_is_drawing(before: int, words: int) -> None:
    torch.manual_seed(words)
    torch.empty(before).bernoulli_(0.5)
    state = torch.get_rng_state()
    drawn = torch.empty(2 * words).bernoulli_(0.5)
    torch.set_rng_state(state)
    skip_ahead(2 * words)
    assert torch.equal(torch.empty(words).bernoulli_(0.5), drawn[words:])


def test_a_skip_may_be_longer_than_any_draw() -> None:
    """Two skips are one of their sum."""
    torch.manual_seed(1)
    skip_ahead(10**15 + 123456789)
    ended = torch.get_rng_state()
    torch.manual_seed(1)
    skip_ahead(10**15)
    skip_ahead(123456789)
    assert torch.equal(torch.get_rng_state(), ended)
