"""Small models that are hard to capture, each for one reason, and one whose plan has a real choice."""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stowplan import Search
from stowplan.capture import capture
from stowplan.plan.options import PlanOptions
from stowplan.plan.steps import RecomputeOp
from stowplan.run.fit import fit, plans_of
from stowplan.run.planning.planner import planner_for_captured


class Normed(nn.Module):
    """Convolution, BatchNorm, an in-place ReLU and dropout at a rate whose scale is not exact."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.15)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)), inplace=True)
        loss: Tensor = self.drop(x).square().mean()
        return loss


class NormFirst(nn.Module):
    """BatchNorm of an input without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = F.relu(self.norm(x)).square().mean()
        return loss


class Tied(nn.Module):
    """One matrix is the embedding and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.mix(self.embed(tokens)))), target)


class Rewriting(nn.Module):
    """Writes into slices, through views and over itself, and counts its calls in a rebound buffer."""

    calls: Tensor
    highest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 6)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("highest", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        rows = torch.zeros(len(x), 6)
        for index in range(len(x)):
            rows[index] = h[index] * (index + 1)
        rows[:, 2:4].mul_(2.0)
        flat = rows.view(-1)
        flat[::3].add_(1.0)
        with torch.no_grad():
            self.highest.copy_(torch.maximum(self.highest, h.amax(0)))
        self.calls = self.calls + 1
        rows.t().sigmoid_()
        return (rows * rows).unsqueeze_(0).transpose_(0, 1).select(0, 1).exp().sum() + rows.sum()


class TwoHeads(nn.Module):
    """Returns two tensors that both take gradients, a count, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 7)
        self.left = nn.Linear(7, 3)
        self.right = nn.Linear(7, 2)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, object]:
        h = torch.relu(self.body(x)) * scale
        return {"left": self.left(h), "right": self.right(h), "active": (h > 0).sum(), "scale": scale}


def images(*shape: int) -> Tensor:
    """The same random tensor of this shape every time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


MOVES = 300  # any plan will do, if it is small enough


class Chain(nn.Module):
    """Blocks of equal width, with statistics and draws in them; returns its loss."""

    def __init__(self, *, dropout: float = 0.0, norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), norm(16), nn.GELU(), nn.Dropout(dropout)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def budget_halfway(model: nn.Module, args: tuple[object, ...]) -> int:
    """Halfway between the smallest budget that is possible and what eager takes."""
    planner = planner_for_captured(capture(model, args), options=PlanOptions(search=Search(moves=MOVES)))
    return (planner.minimum_bytes + planner.plain_peak_bytes) // 2


def fitted_copy(model: nn.Module, args: tuple[object, ...]) -> nn.Module:
    """A copy of `model` that has to make something again to stay within its budget."""
    fitted = fit(
        copy.deepcopy(model),
        args,
        budget=budget_halfway(model, args),
        search=Search(moves=MOVES),
        allow=("recompute",),
    )
    assert all(any(isinstance(step, RecomputeOp) for step in plan.steps) for plan in plans_of(fitted))
    return fitted


class SmallPictures(nn.Module):
    """Recomputation saves a part of its memory; tiles of so small pictures cost many times eager's time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        convolutions = (nn.Conv2d(16 if n else 3, 16, 3, padding=1) for n in range(2))
        self.net = nn.Sequential(*(layer for each in convolutions for layer in (each, nn.ReLU())))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.net(x).square().mean()
        return loss


def small_pictures(batch: int = 4) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Its step."""
    return SmallPictures(), (torch.ones(batch, 3, 12, 12),)
