"""`fit` on PyTorch's CUDA build: each technique against eager, in values and in PyTorch's own bytes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stowplan import Execution, Search, fit, plans_of
from stowplan.errors import BudgetTooSmall
from stowplan.plan.draft import Exactness
from tests.hollow_card.measuring import Run, kept_by_cublas, on_card, trained
from tests.hollow_card.nets import NETS, transformer

TECHNIQUES: dict[str, dict[str, Any]] = {
    "recompute": {"allow": ("recompute",)},
    "offload": {"allow": ("offload",)},
    "both": {"allow": ("recompute", "offload")},
    "tile": {"allow": ("recompute", "tile")},
    "arena": {"allow": ("recompute",), "execution": Execution(arena=True)},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True, "lr": 1e-3},
    "foreach": {"foreach": True, "lr": 1e-3},
    "single": {"foreach": False, "lr": 1e-3},
}


def _fitted(model: nn.Module, args: tuple[Tensor, ...], budget: int, **options: Any) -> nn.Module:
    """Within the budget, or the smallest that a refusal names."""
    options = {"search": Search(gap=0.5, time_limit=5.0), **options}
    try:
        return fit(model, args, budget=budget, **options)
    except BudgetTooSmall as refusal:
        return fit(model, args, budget=refusal.minimum_bytes, **options)


def _holds(fitted: nn.Module, run: Run, eager: Run, kept: int) -> None:
    """The run has eager's values, and PyTorch was asked for what the plan projects and cuBLAS keeps."""
    plan = plans_of(fitted)[0]
    if plan.exactness is Exactness.BITWISE:
        assert run.equals(eager)
    else:
        assert run.losses == pytest.approx(eager.losses, rel=1e-5)
    assert run.requested_bytes == plan.projected_peak_bytes + kept
    assert plan.projected_peak_bytes <= plan.allowed_bytes


@pytest.mark.parametrize("share", [0.9, 0.7])
@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize("net", NETS)
def test_a_plan_takes_what_it_projects_and_computes_what_eager_does(
    net: str, technique: str, share: float
) -> None:
    kept = kept_by_cublas()
    model, args = on_card(NETS[net])
    eager = trained(model, args)
    model, args = on_card(NETS[net])
    budget = int((eager.requested_bytes - kept) * share) + kept
    fitted = _fitted(model, args, budget, **TECHNIQUES[technique])
    _holds(fitted, trained(fitted, args), eager, kept)


@pytest.mark.parametrize("allow", [("recompute",), ("recompute", "offload")])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_whole_iteration(optimizer: str, allow: tuple[str, ...]) -> None:
    kept = kept_by_cublas()
    model, args = on_card(transformer)
    chosen = OPTIMIZERS[optimizer]
    eager = trained(model, args, torch.optim.AdamW(model.parameters(), **chosen))
    model, args = on_card(transformer)
    own = torch.optim.AdamW(model.parameters(), **chosen)
    budget = int((eager.requested_bytes - kept) * 0.7) + kept
    fitted = _fitted(model, args, budget, optimizer=own, allow=allow)
    _holds(fitted, trained(fitted, args, own), eager, kept)
