"""`check` allows a plan in tiles the rounding that eager has itself, against float64, and no more."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stowplan.plan.draft import Exactness
from stowplan.plan.options import PlanOptions
from stowplan.plan.record import Record
from stowplan.run.measure import check as checking
from stowplan.run.planning.planner import draft_step
from stowplan.run.target import Target

pytestmark = [pytest.mark.torch, pytest.mark.slow]


class Sharp(nn.Module):
    """The sine of large numbers turns rounding into errors that are seen, in eager too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.third = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.third(self.second(self.norm(self.first(x))).relu())
        return h.square().mean() + 1e-4 * torch.sin(1e5 * h).mean()


def checked(target: Target) -> Record:
    planning = partial(draft_step, allowed_bytes=400_000, options=PlanOptions(("tile",)))
    return checking.check(target, planning, steps=1, rounds=1)


def target() -> Target:
    torch.manual_seed(0)
    return Target(Sharp(), (torch.randn(1, 3, 64, 64),))


def test_eagers_own_rounding_is_allowed() -> None:
    record = checked(target())
    assert record.plan.exactness is Exactness.ROUNDING
    assert record.holds


def test_without_a_reference_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "free_bytes", lambda _: 0)
    assert not checked(target()).holds


def test_a_wrong_gradient_is_not() -> None:
    faulty = target()
    parameter: Any = next(faulty.model.parameters())
    parameter.register_hook(lambda gradient: 2 * gradient)
    assert not checked(faulty).holds
