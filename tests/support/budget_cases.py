"""Training loops drawn at random, each in a process of its own whose live bytes are counted below PyTorch.

A case is a network, how it is fitted, and the loop around it, all from one seed. The question of each is
whether an iteration took more than the budget before the user had heard that it would.

`python -m tests.support.budget_cases SEED` runs one case in a process started with `counted`.
"""

import copy
import gc
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from stowplan import Search, fit, plans_of
from stowplan.errors import BudgetTooSmall
from tests.support.asking import asked
from tests.support.live_bytes import LiveBytes, counted
from tests.support.nets import NETS

ROOT = Path(__file__).parents[2]
_ITERATIONS = 4


class Recurrent(nn.Module):
    """A recurrent layer of PyTorch's and a mean square."""

    def __init__(self, kind: Callable[..., nn.RNNBase], hidden: int, **options: Any) -> None:
        super().__init__()
        self.layer = kind(24, hidden, **options)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layer(x)[0].square().mean()
        return loss


class Perceptron(nn.Module):
    """Parameters weigh as much as activations."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        pairs = ((nn.Linear(width, width), nn.GELU()) for _ in range(layers))
        self.net = nn.Sequential(*(layer for pair in pairs for layer in pair))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.net(x).square().mean()
        return loss


@dataclass(frozen=True, slots=True)
class Case:
    """What is drawn. `share` says where the budget lies between the smallest and eager's peak."""

    seed: int
    net: str
    share: float
    optimizer: str  # "adamw" or "sgd"
    made: str  # the optimizer: "before", "after" or "counted", which is optimizer=
    accumulate: int
    zero: str  # gradients: "none", "in place" or "never"
    copies: str  # of the weights: "", "before", "after the first", as a "dict"
    arena: bool
    allow: tuple[str, ...]
    bfloat16: bool
    autocast: str  # "", "both", or only around the "loop"
    sliced: bool
    shapes: int
    clip: bool


def drawn(seed: int) -> Case:
    """The case of a seed."""
    dice = Random(seed)
    made = dice.choice(("before", "after", "after", "counted"))
    counted = made == "counted"
    net = dice.choice((*sorted(NETS), *("perceptron",) * 5, *("lstm layer", "gru layer", "rnn layer") * 2))
    arena = dice.random() < 0.25
    return Case(
        seed=seed,
        net=net,
        share=dice.choice((0.0, 0.1, 0.3, 0.6, 1.0, 1.2)),
        optimizer=dice.choice(("adamw", "adamw", "sgd")),
        made=made,
        accumulate=dice.choice((1, 1, 2)),
        zero="none" if counted else dice.choice(("none", "none", "in place", "never")),
        copies=dice.choice(("", "", "before", "after the first", "dict")),
        arena=arena,
        allow=dice.choice((("recompute",), ("recompute",), ("recompute", "tile"), ())),
        bfloat16=dice.random() < 0.15 and "layer" not in net,
        autocast=dice.choice(("", "", "", "both", "loop")) if not counted else "",
        sliced=dice.random() < 0.3,
        shapes=dice.choice((1, 1, 1, 2)),
        clip=dice.random() < 0.2,
    )


def is_small(seed: int) -> bool:
    """Whether the case takes seconds."""
    case = drawn(seed)
    return (case.net == "perceptron" or case.net.endswith(" layer")) and "tile" not in case.allow


@dataclass(slots=True)
class Outcome:
    """Of each iteration: bytes above the budget (below 0 if within), and what was said before it ended."""

    case: Case
    budget: int = 0
    over: list[int] = field(default_factory=list)
    told: list[bool] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    refused: str = ""

    @property
    def is_silent(self) -> bool:
        """Whether an iteration took more than the budget before anything was said."""
        return any(over > 0 and not told for over, told in zip(self.over, self.told, strict=True))


def run_in_processes(seeds: Iterable[int], library: Path) -> Iterator[Outcome]:
    """The outcomes, one process after another."""
    for seed in seeds:
        command = [sys.executable, "-m", "tests.support.budget_cases", str(seed)]
        run = subprocess.run(
            command, cwd=ROOT, env=counted(library), capture_output=True, text=True, check=False
        )
        if run.returncode:
            raise RuntimeError(f"case {seed}, {drawn(seed)}, failed:\n{run.stderr[-3000:]}")
        found = json.loads(run.stdout.splitlines()[-1])
        yield Outcome(**{**found, "case": drawn(seed)})


class _Words(logging.Handler):
    """Keeps what the logger says by default."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


class _Loop:
    """The model and the batches of a case."""

    def __init__(self, case: Case) -> None:
        self.case, self.live = case, LiveBytes()
        torch.manual_seed(case.seed)
        self.model, args = _built(case)
        dtype = torch.bfloat16 if case.bfloat16 else torch.float32
        self.model = self.model.to(dtype)
        args = tuple(arg.to(dtype) if arg.is_floating_point() else arg for arg in args)
        self.data = [torch.cat([arg] * 8) if case.sliced and arg.dim() else arg for arg in args]
        self.rows = [arg.shape[0] if arg.dim() else 0 for arg in args]
        del args

    def batch(self, number: int) -> tuple[Tensor, ...]:
        """Rows of the data set, or all of it; of another length if there are several shapes."""
        if not self.case.sliced:
            return tuple(self.data)
        start = number % 4
        less = 1 if self.case.shapes > 1 and number % 2 and min(self.rows) > 1 else 0
        return tuple(
            whole[start * rows : (start + 1) * rows - less] if rows else whole
            for whole, rows in zip(self.data, self.rows, strict=True)
        )

    def aside(self, number: int) -> int:
        """Bytes of the data set that the step with this batch does not need."""
        data, read = (sum(tensor.nbytes for tensor in each) for each in (self.data, self.batch(number)))
        return data - read

    def cast(self, where: str) -> AbstractContextManager[object]:
        """Autocast, if it is on there."""
        on = self.case.autocast == "both" or self.case.autocast == where
        return torch.autocast("cpu", torch.bfloat16) if on else nullcontext()

    def options(self, optimizer: Optimizer | None) -> dict[str, Any]:
        """What fit is called with, beside the budget."""
        case = self.case
        counted = case.made == "counted"
        found: dict[str, Any] = {"allow": case.allow, "arena": case.arena, "moves": 3}
        if counted:
            found |= {"optimizer": optimizer, "accumulate": case.accumulate}
            found |= {"clip_norm": 1.0} if case.clip and case.accumulate == 1 else {}
        return asked(found)


def _built(case: Case) -> tuple[nn.Module, tuple[Tensor, ...]]:
    dice = Random(case.seed + 1)
    if case.net == "perceptron":
        width = dice.choice((64, 160))
        return Perceptron(width, dice.choice((2, 5))), (torch.randn(dice.choice((64, 512)), width),)
    if case.net.endswith(" layer"):
        kinds: Mapping[str, Callable[..., nn.RNNBase]] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
        layers = dice.choice((1, 2))
        options: dict[str, Any] = {
            "num_layers": layers,
            "bidirectional": dice.random() < 0.5,
            "batch_first": True,
        }
        options["dropout"] = 0.1 if layers > 1 and dice.random() < 0.5 else 0.0
        if case.net == "lstm layer" and dice.random() < 0.3:
            options["proj_size"] = 8
        kind = kinds[case.net.split()[0]]
        return Recurrent(kind, dice.choice((16, 64)), **options), (torch.randn(6, 12, 24),)
    example = NETS[case.net].build("tiny", seed=case.seed)
    return example.model, example.args


def _optimizer(case: Case, model: nn.Module) -> Optimizer:
    return (AdamW if case.optimizer == "adamw" else SGD)(model.parameters(), lr=1e-4)


def ran(case: Case) -> Outcome:
    """Train by a plan and compare each iteration with the budget."""
    words = _Words()
    logging.getLogger("stowplan").addHandler(words)
    live = LiveBytes()
    before = live.now()
    loop, outcome = _Loop(case), Outcome(case)
    model, batch = loop.model, loop.batch(0)
    optimizer = _optimizer(case, model) if case.made != "after" else None
    copies: list[object] = [copy.deepcopy(model)] if case.copies == "before" else []
    with loop.cast("fit"):
        try:
            fit(model, batch, budget=1, **loop.options(optimizer))
        except BudgetTooSmall as refusal:
            smallest = refusal.minimum_bytes
        eager = max(
            plan.plain_peak_bytes
            for plan in plans_of(fit(model, batch, budget="4GiB", search=Search(moves=3)))
        )
        outcome.budget = smallest + int(case.share * max(0, eager - smallest))
        fitted = fit(model, batch, budget=outcome.budget, **loop.options(optimizer))
    optimizer = optimizer or _optimizer(case, model)
    gc.collect()
    for number in range(_ITERATIONS):
        most = 0
        for _ in range(case.accumulate):
            plans = len(plans_of(fitted))
            live.forget_most()
            try:
                with loop.cast("loop"):
                    loss = fitted(*loop.batch(number))
            except BudgetTooSmall as refusal:
                outcome.refused = str(refusal)
                return outcome
            loss.backward()
            if plans == len(plans_of(fitted)):  # else probes of ops ran, which are no part of a step
                most = max(most, live.most() - before - loop.aside(number))
            del loss
        outcome.over.append(most - outcome.budget)
        outcome.told.append(any("more than the budget" in word for word in words.said))
        optimizer.step()
        if case.zero != "never":
            optimizer.zero_grad(set_to_none=case.zero == "none")
        if number == 0 and case.copies == "after the first":
            copies.append(copy.deepcopy(model))
        if number == 0 and case.copies == "dict":
            copies.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    outcome.words = words.said
    return outcome


def main() -> None:
    """Run the case of the seed on the command line; print its outcome as JSON."""
    torch.set_num_threads(1)
    outcome = ran(drawn(int(sys.argv[1])))
    print(json.dumps({**asdict(outcome), "case": None}))


if __name__ == "__main__":
    main()
