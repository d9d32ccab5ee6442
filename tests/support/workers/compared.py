"""Steps over meshes of real processes beside the same step in one process: how far apart they are."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stowplan.techniques.shards.plan.mesh import parse_mesh
from stowplan.techniques.shards.plan.propagation import Chosen
from stowplan.techniques.shards.plan.traffic import traffic_of
from stowplan.techniques.shards.run.step import ShardedStep
from tests.support.nets import NETS, Example

EXACT = 1e-12

_SETTINGS: Mapping[str, dict[str, Any]] = {"unet": {"resolution": 220}, "gpt": {"batch": 3}}


class Cell(NamedTuple):
    """A net on a mesh."""

    net: str
    mesh: str

    @property
    def workers(self) -> int:
        """How many."""
        return parse_mesh(self.mesh).size


@dataclass(frozen=True, slots=True)
class Outcome:
    """How far a sharded step is from the plain one, and what it sent against what was projected."""

    cell: Cell
    loss: float
    gradients: float
    buffers: float
    same_draws: bool
    sent_bytes: tuple[int, int]
    summed_bytes: tuple[int, int]

    @property
    def worst(self) -> float:
        """The largest relative distance."""
        return max(self.loss, self.gradients, self.buffers)

    @property
    def is_right(self) -> bool:
        """Whether all is as it must be."""
        sent, summed = self.sent_bytes, self.summed_bytes
        return self.worst <= EXACT and self.same_draws and sent[0] == sent[1] and summed[0] == summed[1]


def distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference, relative to the largest of the expected values of the tensor.

    A gradient that is zero but for rounding is measured by the largest of all.
    """
    scale = max((float(tensor.double().norm()) for tensor in expected), default=1.0)
    pairs = zip(found, expected, strict=True)
    far = [(float((f - e).double().norm()), float(e.double().norm()), _noise(e)) for f, e in pairs]
    return max((diff / (own if own > noise * scale else scale) for diff, own, noise in far), default=0.0)


def _noise(tensor: Tensor) -> float:
    """How large rounding alone may make what should be zero, relative to the other gradients."""
    return 1e-9 if tensor.dtype is torch.float64 else 3e-4


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def compare(
    cell: Cell, chosen: Chosen | None = None, *, fixed_statistics: bool = False, **settings: Any
) -> Outcome:
    """One step of a net on a mesh, beside the same step in this process alone."""
    model, args = example_of(cell.net, **settings)
    if fixed_statistics:
        for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
            norm.eval()
    plain = copy.deepcopy(model)
    torch.manual_seed(7)
    expected = plain(*args)
    expected.backward()
    drawn = torch.get_rng_state()
    step = ShardedStep(model, args, mesh=parse_mesh(cell.mesh), chosen=chosen)
    torch.manual_seed(7)
    shares, _ = step.share(*args)
    loss = step(*shares)
    assert isinstance(loss, Tensor)
    loss.backward()  # type: ignore[no-untyped-call]
    traffic = traffic_of(step.plan)[step.workers.rank]
    return Outcome(
        cell,
        abs(float((loss - expected).detach() / expected.detach())),
        distance(gradients_of(model), gradients_of(plain)),
        distance(list(model.buffers()), list(plain.buffers())),
        torch.equal(drawn, torch.get_rng_state()),
        (step.workers.sent_bytes, traffic.sent_bytes),
        (step.workers.summed_bytes, traffic.summed_bytes),
    )


def example_of(net: str, **settings: Any) -> Example:
    """A small one, in float64, with dropout behind the activations or RMS norms of nets that have none."""
    model, args = NETS[net].build("tiny", dtype=torch.float64, **{**_SETTINGS.get(net, {}), **settings})
    if not any(isinstance(module, nn.Dropout) for module in model.modules()):
        _add_dropout(model)
    return Example(model, args)


def _add_dropout(model: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.ReLU | nn.LeakyReLU | nn.GELU | nn.RMSNorm):
                setattr(parent, name, nn.Sequential(child, nn.Dropout(0.1)))


def compare_all(cells: Iterable[Cell]) -> list[Outcome]:
    """What a worker finds, net by net."""
    return [compare(cell) for cell in cells]


def differentiate(step: Callable[..., object], args: tuple[Tensor, ...]) -> None:
    loss = step(*args)
    assert isinstance(loss, Tensor)
    loss.backward()  # type: ignore[no-untyped-call]
