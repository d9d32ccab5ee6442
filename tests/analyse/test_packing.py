"""Packing: what it returns is judged by a separate check, and the check by comparing every pair."""

from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path
from random import Random
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stowplan.analyse import facts_of
from stowplan.analyse.inspection import blocks_of
from stowplan.analyse.packing import (
    Offsets,
    PackedBlock,
    arena_bytes,
    best_fit,
    lanes,
    max_live_bytes,
    overlapping,
    pack,
)
from stowplan.errors import BadUse
from stowplan.formats import chainer, megengine
from stowplan.formats.chainer import SavedView
from stowplan.ir import Document, Graph
from tests.support.timing import timed


@st.composite
def block_lists(draw: st.DrawFn) -> list[PackedBlock]:
    lives = st.tuples(st.integers(0, 12), st.integers(0, 6), st.sampled_from([0, 1, 2, 3, 5, 8, 64]))
    drawn = draw(st.lists(lives, max_size=24))
    return [PackedBlock(str(i), size, start, start + life) for i, (start, life, size) in enumerate(drawn)]


def meet(one: PackedBlock, other: PackedBlock, offsets: Offsets) -> bool:
    """Whether two blocks share a byte, straight from the definition."""
    together = one.start <= other.end and other.start <= one.end
    low = max(offsets[one.id], offsets[other.id])
    high = min(offsets[one.id] + one.nbytes, offsets[other.id] + other.nbytes)
    return together and low < high


@given(block_lists())
@pytest.mark.slow
def test_no_two_live_blocks_overlap(blocks: list[PackedBlock]) -> None:
    packing = pack(blocks)
    assert overlapping(blocks, packing.offsets) is None
    assert packing.arena_bytes >= packing.max_live_bytes == max_live_bytes(blocks)
    assert packing.gap >= 0


@given(block_lists())
@pytest.mark.slow
def test_lanes_alone_give_a_valid_packing(blocks: list[PackedBlock]) -> None:
    assert overlapping(blocks, lanes(blocks)) is None


@given(block_lists(), st.randoms(use_true_random=False))
def test_the_check_agrees_with_comparing_every_pair(blocks: list[PackedBlock], random: Random) -> None:
    offsets = {block.id: random.randrange(40) for block in blocks}
    meeting = {(one.id, other.id) for one, other in combinations(blocks, 2) if meet(one, other, offsets)}
    found = overlapping(blocks, offsets)
    assert (found is None) == (not meeting)
    assert found is None or tuple(sorted(found, key=int)) in meeting


def test_the_check_finds_one_planted_overlap_among_many() -> None:
    blocks = [PackedBlock(str(i), 8, i % 50, i % 50 + 500) for i in range(5_000)]
    offsets = {block.id: 8 * i for i, block in enumerate(blocks)}
    assert overlapping(blocks, offsets) is None
    offsets["4321"] = 8 * 1234 + 7
    found = overlapping(blocks, offsets)
    assert found is not None
    assert set(found) < {"1234", "1235", "4321"}


def test_lives_that_nest_are_packed_without_a_gap() -> None:
    """Forward activations and their gradients, the way a chain of layers makes them."""
    saved = [PackedBlock(f"a{i}", 100 + 7 * i, i, 100 - i) for i in range(50)]
    kept = [PackedBlock(f"g{i}", 10 + i, 50 + i, 100) for i in range(50)]
    assert pack([*saved, *kept]).gap == 0


def test_what_is_there_all_along_costs_the_search_nothing() -> None:
    standing = [PackedBlock(f"p{i}", 10, 0, 9) for i in range(3)]
    packing = pack([PackedBlock("x", 4, 2, 3), *standing])
    assert [packing.offsets[name] for name in ("p0", "p1", "p2", "x")] == [0, 10, 20, 30]


@pytest.mark.slow
def test_same_blocks_same_offsets() -> None:
    random = Random(3)
    blocks = [
        PackedBlock(str(i), random.randrange(1, 1 << 20), s := random.randrange(80), s + 9) for i in range(90)
    ]
    assert pack(blocks) == pack(blocks)


@pytest.mark.parametrize(
    "blocks", [[PackedBlock("a", -1, 0, 0)], [PackedBlock("a", 1, 1, 0)], [PackedBlock("a", 1, 0, 0)] * 2]
)
def test_impossible_blocks_are_refused(blocks: list[PackedBlock]) -> None:
    with pytest.raises(BadUse):
        pack(blocks)


def test_offsets_must_be_complete() -> None:
    with pytest.raises(BadUse, match="'b'"):
        overlapping([PackedBlock("a", 1, 0, 0), PackedBlock("b", 1, 0, 0)], {"a": 0, "b": -3})


DOCUMENTS: dict[str, tuple[str, Callable[[str], Document]]] = {
    "Chainer step, listed": ("chainer", chainer.read),
    "Chainer step, retain": ("chainer", partial(chainer.read, saved=SavedView.RETAIN)),
    "MegEngine run": ("megengine", megengine.read),
}


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.slow
def test_documents_are_packed_without_a_gap(
    dump: Callable[[str], Path], capsys: pytest.CaptureFixture[str], name: str, in_place: bool
) -> None:
    format_name, read = DOCUMENTS[name]
    graph = read(dump(format_name).read_text()).graph
    peak, gap = packed(graph, in_place)
    with capsys.disabled():
        print(f"\n{name}{' in place' if in_place else ''}: {peak:,} B, gap {gap:.3%}", end=" ")
    assert gap == 0


def packed(graph: Graph, in_place: bool) -> tuple[int, float]:
    """The arena of a graph and its gap, checked."""
    facts = facts_of(graph, in_place=in_place)
    blocks = blocks_of(graph, facts.liveness)
    packing = pack(blocks)
    assert overlapping(blocks, packing.offsets) is None
    assert packing.max_live_bytes == facts.peak.bytes
    return packing.arena_bytes, packing.gap


@timed
def test_a_hundred_thousand_blocks_take_seconds() -> None:
    random, ops = Random(1), 50_000
    sizes = [random.randrange(64, 1 << 24) for _ in range(300)]
    blocks = [_like_a_step(str(i), random.choice(sizes), random, ops) for i in range(100_000)]
    began = process_time()
    packing = pack(blocks)
    assert overlapping(blocks, packing.offsets) is None
    assert process_time() - began < 20
    assert packing.gap < 0.01


def _like_a_step(name: str, size: int, random: Random, ops: int) -> PackedBlock:
    """Saved from forward to backward, or used at once, or a gradient kept to the end."""
    start = random.randrange(ops)
    match random.randrange(10):
        case 0:
            return PackedBlock(name, size, start, ops - 1)
        case 1 | 2 | 3 | 4:
            return PackedBlock(name, size, min(start, ops - start), max(start, ops - start))
        case _:
            return PackedBlock(name, size, start, start + random.randrange(8))


def test_orders_other_than_the_largest_first_close_the_gap() -> None:
    """A U-Net's levels: what is saved shrinks and grows again, and no size is a multiple of another."""
    random = Random(5)
    saved = [PackedBlock(f"s{i}", 997 * (40 - 3 * i), 2 * i, 60 - 2 * i) for i in range(12)]
    passing = [PackedBlock(f"t{i}", random.randrange(9_000, 40_000), i, i + 2) for i in range(60)]
    blocks = [*saved, *passing]
    largest_first = best_fit(sorted(blocks, key=lambda block: -block.nbytes))
    packing = pack(blocks)
    assert overlapping(blocks, packing.offsets) is None
    assert packing.gap <= 0.005 < arena_bytes(blocks, largest_first) / packing.max_live_bytes - 1
