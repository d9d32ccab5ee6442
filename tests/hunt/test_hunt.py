"""A short hunt: cases of every kind against eager, and planted faults that must be found."""

import os
from collections.abc import Iterator
from random import Random

import pytest
import torch

from .batches import Feed
from .cases import draw_case
from .children import Child
from .counting import Tally
from .lockstep import Verdict, judge
from .machine import same_everywhere
from .networks import Call, Network, Sizes
from .ops import KINDS, Kind
from .plants import PLANTS
from .shrinking import shrunk

pytestmark = pytest.mark.torch

# fmt: off
SEEDS = (
    9, 12, 13, 17, 18, 19, 20, 22, 23, 24, 25, 26, 27, 29, 30, 34, 35, 37, 38, 39, 40, 41, 43, 48,
    50, 51, 52, 53, 63, 64, 65, 66, 67, 68, 71, 72, 74, 77, 78, 81, 83, 86, 87, 88, 89, 90, 96,
    100, 101, 102, 103, 112, 115, 116, 118, 119, 120, 122, 124, 125, 126, 127,
)
# fmt: on
LEAST = {"recomputed": 20, "tiles": 5, "transfers": 5, "loop programs": 10}

# By plant, a case that is without fault and shows it; `python -m tests.hunt --cases 200 --plant NAME` hunts.
PLANTED = {
    "wrong-gradient": (18, Verdict.WRONG),
    "buffer-updated-twice": (72, Verdict.WRONG),
    "budget-exceeded": (19, Verdict.OVER),
    "untyped-error": (29, Verdict.UNTYPED),
}


@pytest.fixture(autouse=True)
def _same_everywhere() -> Iterator[None]:
    with same_everywhere():
        yield


def test_nothing_is_found_in_cases_of_every_kind() -> None:
    tally = Tally()
    for seed in SEEDS:
        case = draw_case(seed)
        tally.add(case, judge(case))
    assert not tally.failures, tally.table()
    assert all(tally.traits[trait] >= least for trait, least in LEAST.items()), tally.table()


def test_a_crash_is_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{Child.__module__}.judge", lambda _: os._exit(3))
    with Child() as child:
        assert [child.judge(seed).message for seed in (0, 1)] == ["exit code 3"] * 2


def test_every_op_runs_in_eager() -> None:
    for kind in KINDS:
        loss = _loss_with(kind)
        torch.autograd.backward(loss)
        assert loss.isfinite(), kind.name


def _loss_with(kind: Kind) -> torch.Tensor:
    call = Call(kind.name, 0, 1, kind.drawn_options(Random(0)))
    network = Network(Sizes(2, 4, 6), torch.float64, (call,), "square", "tensors", reads_all=False)
    batch = Feed("contiguous", "own", wants_gradient=False).batch(network, seed=0, rows=2)
    loss: torch.Tensor = network.build(seed=0).double()(*(part.clone() for part in batch))
    return loss


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_fault_is_found_and_shrinks(plant: str) -> None:
    seed, verdict = PLANTED[plant]
    case = draw_case(seed)
    assert not judge(case).is_finding
    with PLANTS[plant]():
        result = judge(case)
        assert result.verdict is verdict, result.message
        smaller, found = shrunk(case, result, limit_seconds=5)
    assert found.likeness == result.likeness
    assert len(smaller.network.calls) <= len(case.network.calls)
