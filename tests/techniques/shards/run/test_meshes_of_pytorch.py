"""Meshes of PyTorch's own, and its wrappers around a step over one: data is theirs, space is ours."""

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from stowplan import Search
from stowplan.errors import BadUse
from stowplan.run.fit import fit
from stowplan.techniques.shards.plan.traffic import traffic_of
from stowplan.techniques.shards.run.fit import shards_of
from tests.support.nets import NETS
from tests.support.workers.compared import EXACT, distance, gradients_of
from tests.support.workers.processes import on_workers

pytestmark = [pytest.mark.torch, pytest.mark.distributed]


def net(batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The same in all processes; nothing is dropped, for that depends on the sample's place in the batch."""
    model, args = NETS["unet"].build("tiny", dtype=torch.float64, batch=batch)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model, args


def by_ddp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh.get_group("data"))


def by_fsdp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    fully_shard(model, mesh=mesh["data"])
    return model


@dataclass(frozen=True, slots=True)
class Outcome:
    """How far a step is from one process's, and what our workers summed against what was projected."""

    gradients: float
    summed_bytes: tuple[int, int]


def outcome_of(
    step: nn.Module, fitted: nn.Module, whole: tuple[Tensor, ...], own: tuple[Tensor, ...]
) -> Outcome:
    """One step of `step`, which is `fitted` or around it, beside one process's on all samples."""
    plain, _ = net(4)
    plain(*whole).backward()
    sharded = shards_of(fitted)
    before = sharded.workers.summed_bytes
    fitted.zero_grad()
    shares, _ = sharded.share(*own)
    step(*shares).backward()
    found = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients_of(fitted)]
    projected = traffic_of(sharded.plan)[sharded.workers.rank].summed_bytes
    return Outcome(distance(found, gradients_of(plain)), (sharded.workers.summed_bytes - before, projected))


def around(wrap: Callable[[nn.Module, DeviceMesh], nn.Module], mesh: DeviceMesh) -> tuple[Outcome, Outcome]:
    """Without the wrapper and with it. Each row of workers has two images, and shares their pixels."""
    model, args = net(4)
    row = mesh.get_local_rank("data")
    own = tuple(tensor[2 * row : 2 * row + 2] for tensor in args)
    fitted = fit(model, own, mesh=mesh["space"], budget="1GiB", search=Search(moves=20))
    without = outcome_of(fitted, fitted, args, own)
    return without, outcome_of(wrap(fitted, mesh), fitted, args, own)


def refusals(fitted: nn.Module, shares: tuple[Tensor, ...]) -> list[str]:
    """What is said where something cannot be done, in order."""
    model, args = net(4)
    nameless, other = (
        init_device_mesh("cpu", (4,)),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")),
    )
    ddp = DistributedDataParallel(copy.deepcopy(model))
    tried: list[Callable[[], object]] = [
        lambda: fit(model, args, mesh=nameless, budget="1GiB"),
        lambda: fit(model, args, mesh=other, budget="1GiB"),
        lambda: fit(model, args, mesh="space=4", budget="auto"),
        lambda: fit(model, args, mesh="space=4", budget="1GiB", allow=("offload-gradients",)),
        lambda: fit(ddp, args, mesh="space=4", budget="1GiB"),
        lambda: fit(model, args, budget="1GiB", **cast(Any, {"dims": {"args.0": (2,)}})),
        lambda: shards_of(model),
        lambda: fitted.eval()(*shares),
    ]
    return [_refusal(each) for each in tried]


def _refusal(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except BadUse as refused:
        return str(refused)
    return ""


def look() -> tuple[dict[str, Outcome], list[str]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "space"))
    neither, ddp = around(by_ddp, mesh)
    _, fsdp = around(by_fsdp, mesh)
    model, args = net(4)
    fitted = fit(model, args, mesh=mesh, budget="1GiB", search=Search(moves=20))
    found = {"neither": neither, "DDP": ddp, "FSDP2": fsdp, "ours": outcome_of(fitted, fitted, args, args)}
    return found, refusals(fitted, shards_of(fitted).share(*args)[0])


Found = list[tuple[dict[str, Outcome], list[str]]]


@pytest.fixture(scope="module")
def four() -> Found:
    return on_workers(4, look)


@pytest.mark.parametrize("way", ["DDP", "FSDP2", "ours"])
def test_gradients_are_reduced_once_over_each_axis(four: Found, way: str) -> None:
    for outcomes, _ in four:
        outcome = outcomes[way]
        assert outcome.gradients < EXACT
        assert outcome.summed_bytes[0] == outcome.summed_bytes[1]


def test_a_data_axis_that_nobody_reduces_over_is_caught(four: Found) -> None:
    for outcomes, _ in four:
        assert outcomes["neither"].gradients > 1e3 * EXACT


def test_what_cannot_be_done_is_refused_with_the_reason(four: Found) -> None:
    reasons = ["mesh_dim_names", "does not say what it cuts", "workers may share", "cannot be offloaded"]
    reasons += [
        r"DistributedDataParallel\(fit\(...\)\)",
        "there is no mesh",
        "has no shards",
        "training changed from True to False",
    ]
    for _, refused in four:
        for found, reason in zip(refused, reasons, strict=True):
            assert re.search(reason, found), found
