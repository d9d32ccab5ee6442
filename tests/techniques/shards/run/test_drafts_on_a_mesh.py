"""On a mesh every worker verifies the plan that it will run, once; an illegal draft of one ends all."""

import pytest
import torch
import torch.distributed as dist

from stowplan import fit, plans_of
from stowplan.errors import BadUse, IllegalPlan
from stowplan.plan.problem import slices_last
from tests.support.asking import asked
from tests.support.models import Chain, images
from tests.support.plans import note_verified, spoil_drafts
from tests.support.workers.processes import on_workers

pytestmark = [pytest.mark.torch, pytest.mark.distributed]


def look(parameters: str) -> tuple[int, bool, str]:
    """How many plans were verified, whether the plan is for the worker's own graph, and what a fault says."""
    torch.manual_seed(0)
    model, x = Chain(), images(64, 16)
    how = asked({"allow": ("recompute",), "moves": 1, "mesh": "data=2", "parameters": parameters})
    with pytest.MonkeyPatch.context() as patch:
        seen = note_verified(patch)
        fitted = fit(model, (x,), budget="1GiB", **how)
        (plan,), captured = plans_of(fitted), fitted.__dict__["_fitting"].planned.captured
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            spoil_drafts(patch)
        with pytest.raises((BadUse, IllegalPlan)) as fault:
            fit(Chain(), (x,), budget="1GiB", **how)
    return len(seen), plan.graph == slices_last(captured.graph), str(fault.value)


@pytest.mark.parametrize("parameters", ["replicate", "shard"])
def test_each_worker_verifies_its_plan(parameters: str) -> None:
    found = on_workers(2, look, parameters)
    assert [(count, is_own) for count, is_own, _ in found] == [(1, True), (1, True)]
    assert "never runs" in found[0][2]
    assert "never runs" in found[1][2] or "worker 0 could not plan" in found[1][2]
