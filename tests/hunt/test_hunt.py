"""A short hunt: cases of every kind against eager, and planted faults that must be found."""

import os
from collections.abc import Iterator
from random import Random

import pytest
import torch

from tests.support.machine import same_everywhere

from .batches import Feed
from .cases import draw_case
from .children import Child
from .counting import Tally
from .lockstep import Verdict, judge
from .networks import Call, Network, Sizes
from .ops import KINDS, Kind
from .plants import PLANTS
from .shrinking import shrunk
from .undone import UNDONE

pytestmark = pytest.mark.torch

# fmt: off
SEEDS = (
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 17, 18, 19, 21, 22, 23, 24, 25, 26, 27, 29, 30,
    31, 32, 33, 34, 35, 36, 37, 39, 40, 41, 42, 43, 44, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 59,
    60, 61, 62, 64, 65, 66, 67, 68, 69, 70, 71, 72, 75, 77, 78, 80, 81, 82, 83, 87, 88, 89, 90, 91, 92,
    93, 94, 95, 96, 98, 99, 100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110, 111, 112, 115, 116,
    117, 118, 119, 120, 121, 122, 123, 124, 125, 126, 127, 128, 129, 130, 131, 134, 137, 139, 141, 142,
    143, 145, 146, 147, 148, 149, 150, 152, 153, 154, 155, 156, 157, 159,
    372,  # a sweep with nothing inside was told as bitwise
    492,  # ways to join stages were listed without end
    4030,  # parameters that nothing depends on got zeros as gradients
    57495,  # an argument that only a norm's statistics depend on got zeros as gradient
    55525,  # a backward kernel laid out its result otherwise than its shape function says
    10036,  # a copy into a part cloned the whole storage of the part
    10052,  # a tile in a corner took more than the sampled tiles
)
# fmt: on
LEAST = {"recomputed": 10, "tiles": 4, "transfers": 2, "loop programs": 12}  # of each half

# By plant, a case that is without fault and shows it; `python -m tests.hunt --cases 200 --plant NAME` hunts.
PLANTED = {
    "wrong-gradient": (9, Verdict.WRONG),
    "buffer-updated-twice": (57, Verdict.WRONG),
    "redrawn-number": (134, Verdict.WRONG),
    "budget-exceeded": (19, Verdict.OVER),
    "stale-attribute": (46, Verdict.WRONG),
    "untyped-error": (37, Verdict.UNTYPED),
}


# By class of fault, a case that shows it if its repair is undone; `python -m tests.hunt.undone` hunts.
SHOWN = {
    "arguments": 96,
    "derivatives": 344,
    "heads": 136,
    "inner-outputs": 68,
    "marks": 872,
    "optimizers": 198,
    "outputs": 8,
    "own-calls": 176,
    "places": 128,
    "states": 88,
    "storages": 260,
}


@pytest.fixture(autouse=True)
def _same_everywhere() -> Iterator[None]:
    with same_everywhere():
        yield


@pytest.mark.parametrize("half", range(2))
@pytest.mark.slow
def test_nothing_is_found_in_cases_of_every_kind(half: int) -> None:
    tally = Tally()
    for seed in SEEDS[half::2]:
        case = draw_case(seed)
        tally.add(case, judge(case))
    assert not tally.failures, tally.table()
    assert all(tally.traits[trait] >= least for trait, least in LEAST.items()), tally.table()


@pytest.mark.slow
def test_a_crash_is_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{Child.__module__}.judge", lambda _: os._exit(3))
    with Child() as child:
        assert [child.judge(seed).message for seed in (0, 1)] == ["exit code 3"] * 2


@pytest.mark.slow
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


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.slow
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


@pytest.mark.parametrize("undone", SHOWN)
@pytest.mark.slow
def test_a_repair_that_is_undone_is_found(undone: str) -> None:
    case = draw_case(SHOWN[undone])
    assert not judge(case).is_finding
    with UNDONE[undone]():
        assert judge(case).is_finding


def test_each_repair_that_can_be_undone_is_shown() -> None:
    hidden = {"profiles"}  # a case shows it while its ops are probed, not once their prices are known
    assert UNDONE.keys() - SHOWN.keys() == hidden
