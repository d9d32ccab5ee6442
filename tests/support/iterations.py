"""Whole iterations of the networks, with dropout: in eager, and with a plan for the same loop."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

from stowplan import Iteration, Search
from stowplan.plan.options import PlanOptions
from stowplan.plan.plan import Plan
from stowplan.run.fit import fit
from stowplan.run.planning.planner import Subject, step_planner
from stowplan.run.target import Target, subject_of
from stowplan.techniques.iteration.run.planner import IterationPlanner
from tests.support.asking import asked
from tests.support.nets import NETS
from tests.support.nets.net import Example

OPTIMIZERS: Mapping[str, Callable[[Iterable[Tensor]], Optimizer]] = MappingProxyType(
    {
        "momentum": lambda p: SGD(p, lr=0.01, momentum=0.9),
        "single": lambda p: AdamW(p, foreach=False),
        "foreach": lambda p: AdamW(p, foreach=True),
        "fused": lambda p: AdamW(p, fused=True),
    }
)
ROOMY = 10**11
CLIP_NORM = 0.05  # below the norms that these networks have

_SMALLER: Mapping[str, Mapping[str, Any]] = MappingProxyType(  # for networks that are searched for long
    {
        "unet3d": {"resolution": 8, "levels": 2},
        "resnet50": {"resolution": 32, "layers": (1, 1)},
        "densenet121": {"resolution": 32, "layers": (1, 2)},
        "vgg16": {"resolution": 32},
        "vit": {"layers": 1},
        "swin": {"layers": (1, 1)},
        "gpt": {"layers": 1},
        "llama": {"layers": 1},
        "t5": {"layers": 1},
        "moe": {"layers": 1},
        "lstm": {"sequence": 3},
        "ssm": {"sequence": 3, "layers": 1},
        "diffusion": {"levels": 2},
        "hf_gpt2": {"layers": 1},
        "hf_llama": {"layers": 1},
        "hf_t5": {"layers": 1},
        "hf_vit": {"layers": 1},
    }
)


class Drawn(nn.Module):
    """A network with dropout of its pictures and of its loss, beside what it has itself."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *args: Tensor) -> Tensor:
        first, *others = args
        if first.is_floating_point():
            first = F.dropout(first, 0.1)
        loss: Tensor = self.network(first, *others)
        return loss * F.dropout(loss.new_ones(8), 0.5).mean()


@cache
def _subject(net: str) -> Subject:
    model, args = Loop(net, "momentum").example()
    return subject_of(Target(model, args))


@dataclass(frozen=True, slots=True)
class Loop:
    """A network, an optimizer, and what happens in each iteration."""

    net: str
    optimizer: str
    clips: bool = False
    accumulate: int = 1

    def example(self) -> Example:
        """Each time the same weights and arguments."""
        model, args = NETS[self.net].build(**_SMALLER.get(self.net, {}))
        return Example(Drawn(model), args)

    def fit_options(self) -> dict[str, Any]:
        """What `fit` is told of the loop."""
        return {"search": Search(moves=1), "allow": ("recompute",)}

    def loop_of(self, optimizer: Optimizer, **more: Any) -> Iteration:
        """The whole iteration."""
        clip_norm = CLIP_NORM if self.clips else None
        return Iteration(optimizer, **{"clip_norm": clip_norm, "accumulate": self.accumulate, **more})

    def smallest_plan(self) -> Plan:
        """The plan for the smallest budget. The network is captured once for all its loops."""
        subject = _subject(self.net)
        iteration = IterationPlanner(self.loop_of(OPTIMIZERS[self.optimizer](subject.model.parameters())))
        *_, smallest = iteration.variants(subject.captured, subject.model)
        step = replace(subject, captured=iteration.planned(subject.captured, subject.model, smallest))
        planner = step_planner(step, iteration.options(PlanOptions(search=Search(moves=1))))
        return planner.plan(planner.minimum_bytes)

    def in_eager(self, iterations: int) -> dict[str, Tensor]:
        """Losses, parameters, buffers and state by name, after some iterations."""
        model, args = self.example()
        optimizer = OPTIMIZERS[self.optimizer](model.parameters())
        losses = self._run(model, args, optimizer, iterations, clips=self.clips)
        return result_of(model, optimizer, losses)

    def planned(self, iterations: int, budget: int = ROOMY, **options: Any) -> dict[str, Tensor]:
        """The same with a plan in this budget, or with one that is given."""
        model, args = self.example()
        optimizer = OPTIMIZERS[self.optimizer](model.parameters())
        loop = asked({"optimizer": self.loop_of(optimizer), **self.fit_options(), **options})
        fitted = fit(model, args, budget=budget, **loop)
        losses = self._run(fitted, args, optimizer, iterations, clips=False)
        return result_of(model, optimizer, losses)

    def _run(
        self, run: nn.Module, args: tuple[Tensor, ...], optimizer: Optimizer, iterations: int, *, clips: bool
    ) -> list[Tensor]:
        torch.manual_seed(5)
        losses = list[Tensor]()
        for _ in range(iterations):
            for _ in range(self.accumulate):
                loss = run(*args)
                loss.backward()
                losses.append(loss.detach())
                args = tuple(arg.roll(1, 0) for arg in args)
            if clips:
                nn.utils.clip_grad_norm_(run.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
        return losses


def result_of(model: nn.Module, optimizer: Optimizer, losses: Iterable[Tensor] = ()) -> dict[str, Tensor]:
    """Parameters, buffers and optimizer state by name, and losses."""
    found = {f"loss {number}": loss for number, loss in enumerate(losses)}
    found |= {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for number, state in sorted(optimizer.state_dict()["state"].items()):
        found |= {f"{name} of {number}": v for name, v in state.items() if isinstance(v, Tensor)}
    return found


def differing(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors that are not equal to the bit, or are not in both."""
    both = expected.keys() & found.keys()
    apart = {name for name in both if not torch.equal(expected[name], found[name])}
    return sorted(apart | (expected.keys() ^ found.keys()))
