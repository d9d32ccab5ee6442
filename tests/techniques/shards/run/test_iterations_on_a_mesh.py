"""Iterations with whole parameters on real processes: exact, sent once, and what goes wrong is refused."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stowplan import Iteration, Search, fit, shards_of
from stowplan.errors import BadUse
from stowplan.techniques.shards.run.bucket import Earlier
from tests.support.workers.compared import distance, example_of
from tests.support.workers.processes import on_workers
from tests.support.workers.sharded import CLIP, Trained, Training, iterate

pytestmark = [pytest.mark.torch, pytest.mark.distributed]

_TIMES = 4


@dataclass(frozen=True, slots=True)
class Findings:
    """All that a worker finds out."""

    once: Trained
    accumulated: Trained
    summed_bytes: tuple[int, int]  # in an iteration of one backward, and of several
    fewer: float  # how far an iteration leads that ends before the last backward
    fault: float
    refusals: dict[str, str]


def look() -> Findings:
    once = Training("1GiB", parameters="replicate")
    found_once, bytes_once = once.run(3), _summed_bytes(once, 1)
    several = Training("1GiB", parameters="replicate", accumulate=_TIMES)
    found_several, bytes_several = several.run(3), _summed_bytes(several, _TIMES)
    fewer = _fewer(several)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Earlier, "add_to", lambda *_: None)
        fault = several.run(2).far
    summed = bytes_once, bytes_several
    return Findings(found_once, found_several, summed, fewer, fault, dict(_refusals(several)))


def _summed_bytes(training: Training, times: int) -> int:
    """Of gradients in one iteration."""
    sharded = shards_of(training.fitted)
    shares, _ = sharded.share(*training.args)
    sharded.workers.summed_bytes = 0
    iterate(training.fitted, shares, training.optimizer, None, times)
    of_loss = 4 * 8  # sums and weights in float64, in each forward
    return sharded.workers.summed_bytes - times * of_loss


def _fewer(training: Training) -> float:
    """An iteration of three backwards, where the plan is for four, beside one process."""
    sharded, alone = shards_of(training.fitted), copy.deepcopy(training.model)
    shares, _ = sharded.share(*training.args)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-3)
    optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
    torch.manual_seed(3)
    iterate(alone, training.args, optimizer, alone, _TIMES - 1)
    torch.manual_seed(3)
    iterate(training.fitted, shares, training.optimizer, None, _TIMES - 1)
    pairs = zip(training.model.parameters(), alone.parameters(), strict=True)
    return distance(*map(list, zip(*((a.detach(), b.detach()) for a, b in pairs), strict=True)))


def _refusals(training: Training) -> Iterator[tuple[str, str]]:
    fitted, model = training.fitted, training.model
    shares, _ = shards_of(fitted).share(*training.args)
    with pytest.raises(BadUse) as refusal:
        DistributedDataParallel(fitted)(*shares)
    yield "DistributedDataParallel", str(refusal.value)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(BadUse) as refusal:
        copy.deepcopy(fitted)
    yield "a copy", str(refusal.value)
    with pytest.raises(BadUse) as refusal:
        torch.autograd.grad(fitted(*shares), list(model.parameters()))
    yield "torch.autograd.grad", str(refusal.value)
    model.zero_grad()
    fitted(*shares).backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP / 100)
    with pytest.raises(BadUse) as refusal:
        training.optimizer.step()
    yield "clipping before the sum", str(refusal.value)
    assert all(map(torch.equal, before, model.parameters()))


@pytest.fixture(scope="module")
def two() -> list[Findings]:
    return on_workers(2, look)


def test_training_whole_parameters_is_training_in_one_process(two: list[Findings]) -> None:
    for found in two:
        assert found.once.is_right, found.once
        assert found.accumulated.is_right, found.accumulated


def test_gradients_of_several_backwards_are_sent_once(two: list[Findings]) -> None:
    for found in two:
        assert found.summed_bytes[0] == found.summed_bytes[1] > 0


def test_a_step_before_the_last_backward_sums_then(two: list[Findings]) -> None:
    for found in two:
        assert found.fewer <= 1e-12


def test_gradients_that_are_left_out_of_the_sum_are_found(two: list[Findings]) -> None:
    for found in two:
        assert found.fault > 1e-6


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("DistributedDataParallel", "average gradients after the plan has consumed them"),
        ("a copy", "cannot be copied"),
        ("torch.autograd.grad", "call backward() for all parameters"),
        ("clipping before the sum", "after 1 of 4 backwards"),
    ],
)
def test_what_would_be_wrong_is_refused(two: list[Findings], what: str, why: str) -> None:
    assert why in two[0].refusals[what]


def in_ddp() -> tuple[bool, str]:
    """Whether DDP around a fitted module trains to the bits of plain DDP; and a refusal."""
    found = list[list[Tensor]]()
    for is_fitted in (False, True):
        model, args = example_of("gpt", batch=2)
        wrapped = DistributedDataParallel(
            fit(model, args, budget="1GiB", search=Search(moves=3)) if is_fitted else model
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        torch.manual_seed(torch.distributed.get_rank())
        for _ in range(4):
            with wrapped.no_sync():
                wrapped(*args).backward()
            wrapped(*args).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    with pytest.raises(BadUse) as refusal:
        fit(model, args, budget="1GiB", optimizer=Iteration(optimizer, accumulate=2))
    return all(map(torch.equal, *found)), str(refusal.value)


def test_fitted_modules_in_ddp_have_its_bits_and_its_no_sync() -> None:
    for is_equal, refusal in on_workers(2, in_ddp):
        assert is_equal
        assert 'mesh="data=2"' in refusal
