"""A vocabulary divided over a `model` axis: head, loss and embedding are those of one process."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from stowplan.techniques.shards.plan.mesh import parse_mesh
from stowplan.techniques.shards.plan.traffic import traffic_of
from stowplan.techniques.shards.run.actions import LocalValues, Lookup
from stowplan.techniques.shards.run.step import ShardedStep
from stowplan.techniques.shards.run.workers import Workers
from tests.support.nets.heads import HEADS, heads
from tests.support.workers.compared import EXACT, distance, gradients_of
from tests.support.workers.processes import on_workers

pytestmark = [pytest.mark.torch, pytest.mark.distributed]

MESH = "model=3"


@dataclass(frozen=True, slots=True)
class Findings:
    """All that a worker finds out, so that processes are started once."""

    far: dict[str, float]
    cut: dict[str, list[str]]
    summed_bytes: list[tuple[int, int]]
    faults: dict[str, float]
    refusal: str


_add_up, _run = Workers.add_up, Lookup.run


def a_rank_s_own_maximum(self: Workers, tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
    del self, axes
    return tensor.clone()


def a_rank_s_own_sum(self: Workers, tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
    return tensor.clone() if tensor.dim() == 2 and tensor.shape[1] == 1 else _add_up(self, tensor, axes)


def rows_of_others_counted(self: Lookup, values: LocalValues) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "masked_fill", lambda given, *_: given)
        _run(self, values)


def look() -> Findings:
    far, cut, summed = dict[str, float](), dict[str, list[str]](), list[tuple[int, int]]()
    for kind in HEADS:
        for tied in (False, True):
            name = f"{kind}, {'tied' if tied else 'apart'}"
            far[name], step = _compared(kind, tied=tied)
            cut[name] = list(step.plan.cut_weights)
            projected = traffic_of(step.plan)[step.workers.rank].summed_bytes
            summed.append((step.workers.summed_bytes, projected))
    return Findings(far, cut, summed, dict(_faults()), _refusal())


def _compared(kind: str, *, tied: bool) -> tuple[float, ShardedStep]:
    torch.manual_seed(1)
    model, args = heads(kind, tied=tied)
    plain = copy.deepcopy(model)
    torch.manual_seed(7)
    expected = plain(*args)
    expected.backward()
    step = ShardedStep(model, args, mesh=parse_mesh(MESH))
    torch.manual_seed(7)
    loss = step(*step.share(*args)[0])
    assert isinstance(loss, Tensor)
    loss.backward()  # type: ignore[no-untyped-call]
    apart = float((loss - expected).detach().abs() / expected.detach().abs())
    return max(apart, distance(gradients_of(model), gradients_of(plain))), step


def _faults() -> Iterator[tuple[str, float]]:
    for owner, method, fault in (
        (Workers, "greatest", a_rank_s_own_maximum),
        (Workers, "add_up", a_rank_s_own_sum),
        (Lookup, "run", rows_of_others_counted),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, method, fault)
            yield fault.__name__, _compared("shifted", tied=True)[0]


def _refusal() -> str:
    model, (words, labels) = heads("shifted", tied=True)
    step = ShardedStep(model, (words, labels), mesh=parse_mesh(MESH))
    try:
        step(words, torch.full_like(labels, 11))
    except IndexError as refusal:
        return str(refusal)
    return ""


@pytest.fixture(scope="module")
def three() -> list[Findings]:
    return on_workers(3, look)


def test_losses_over_parts_of_a_vocabulary_are_those_of_one_process(three: list[Findings]) -> None:
    for found in three:
        assert max(found.far.values()) <= EXACT, found.far


def test_a_head_is_cut_with_its_bias_and_a_tied_embedding(three: list[Findings]) -> None:
    for name, cut in three[0].cut.items():
        head = "words.weight" if "tied" in name else "head.weight"
        assert set(cut) == {head, "head.bias"}, name


def test_bytes_handed_to_sums_are_those_projected(three: list[Findings]) -> None:
    assert all(sent == projected for found in three for sent, projected in found.summed_bytes)


def test_planted_faults_in_the_vocabulary_are_caught(three: list[Findings]) -> None:
    for name in three[0].faults:
        assert max(found.faults[name] for found in three) > 1e3 * EXACT, name


def test_a_class_beyond_the_vocabulary_is_refused(three: list[Findings]) -> None:
    assert all("11 is no place among 11" in found.refusal for found in three)
