"""Iterations that end at a random place, by an interrupt or a fault, and what is left of them.

An interrupt comes between two lines of Python, as Ctrl-C does. A fault is an op that raises, or a transfer to
or from disk that the system refuses.
"""

import copy
import errno
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from random import Random
from types import FrameType, MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from stowplan.errors import BadUse, TierFailed
from stowplan.run.fit import fit
from stowplan.techniques.iteration.run.state_elsewhere import bring_back
from stowplan.techniques.offload.run.calls import SystemCalls
from stowplan.techniques.offload.run.disk import DiskTier
from tests.support.asking import asked
from tests.support.failing import Failing

_WIDTH, _DEPTH = 64, 6
_ROOMY = 10**9
_PARAMETERS = 4 * _DEPTH * (_WIDTH + 1) * _WIDTH  # bytes
_WITHOUT_GRADIENTS = 4 * _PARAMETERS - 4096  # parameters and state, but not all gradients at a time
_WITHOUT_STATE = 3 * _PARAMETERS - 4096
_PLACES = ("/stowplan/", "/torch/optim/", "/torch/autograd/", "/torch/nn/utils/", "<stowplan")


class Outcome(StrEnum):
    """What an iteration that was ended in between leaves, and what the next call says."""

    BEFORE = "as before it, and it can be repeated"
    AFTER = "as after it"
    STEP = "completed by optimizer.step(), as the error asks"
    REFUSED = "refused until the saved state is loaded"
    WRONG = "in between, and nothing says so"


class Fault(Exception):
    """An op that failed."""


LOOPS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "consumed": {},
        "clipped": {"clip_norm": 0.01},
        "clipped in two backwards": {"clip_norm": 0.01, "budget": _WITHOUT_GRADIENTS},
        "4 micro-batches": {"accumulate": 4},
        "gradients kept": {"keep_gradients": True},
        "state on disk": {"allow": ("recompute", "offload"), "budget": _WITHOUT_STATE},
    }
)


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(_DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(torch.tanh(layer(x)), 0.1)
        return x.square().mean()


@dataclass(slots=True)
class _Countdown:
    """Raises the fault when it was asked for the `left`-th time; counts how often it was asked."""

    left: int = 0
    asked: int = 0

    def is_due(self) -> bool:
        self.left, self.asked = self.left - 1, self.asked + 1
        return self.left == 0


class _FailingCalls(SystemCalls):
    def __init__(self) -> None:
        self.countdown = _Countdown()

    def write(self, file: int, data: memoryview, offset: int) -> int:
        self._fail()
        return super().write(file, data, offset)

    def read(self, file: int, data: memoryview, offset: int) -> int:
        self._fail()
        return super().read(file, data, offset)

    def _fail(self) -> None:
        if self.countdown.is_due():
            raise OSError(errno.EIO, "the disk failed")


@dataclass(slots=True)
class TornLoop:
    """One training loop, and the contents of its parameters and state around its third iteration."""

    model: nn.Module
    optimizer: AdamW
    fitted: nn.Module
    accumulate: int
    tier: DiskTier | None
    calls: "_FailingCalls | None"
    places: dict[str, int] = field(default_factory=dict)  # where an iteration can end, by kind of fault
    saved: tuple[dict[str, Any], dict[str, Any]] = field(init=False)
    before: list[Tensor] = field(init=False)
    after: list[Tensor] = field(init=False)

    @staticmethod
    def of(folder: Path, *, budget: int = _ROOMY, **options: Any) -> "TornLoop":
        """Made with these options of `fit`. State that goes to disk goes to the folder."""
        model = _Layers()
        optimizer = AdamW(model.parameters(), lr=0.01)
        calls = _FailingCalls() if "allow" in options else None
        tier = DiskTier(folder, chunk_bytes=4096, calls=calls) if calls else None

        with patch("stowplan.techniques.iteration.run.planner.tier_for", lambda _: tier):
            how: dict[str, Any] = {"optimizer": optimizer, "allow": ("recompute",), "moves": 3, **options}
            fitted = fit(model, (_batch(),), budget=budget, **asked(how))
        loop = TornLoop(model, optimizer, fitted, options.get("accumulate", 1), tier, calls)
        for _ in range(2):
            loop.iterate()
        loop.before = loop.contents()
        loop.saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        loop.iterate()
        loop.after = loop.contents()
        return loop

    def close(self) -> None:
        """Give its file back to the disk."""
        if self.tier:
            self.tier.close()

    def iterate(self) -> None:
        """One iteration of the usual loop, always with the same draws."""
        torch.manual_seed(1)
        self.optimizer.zero_grad()
        for _ in range(self.accumulate):
            torch.autograd.backward(self.fitted(_batch()))
        self.optimizer.step()

    def contents(self) -> list[Tensor]:
        """Copies of all parameters and state, wherever they are."""
        bring_back(self.optimizer)
        states = [self.optimizer.state[parameter] for parameter in self.model.parameters()]
        found = [*self.model.parameters(), *(v for state in states for _, v in sorted(state.items()))]
        return [tensor.detach().clone() for tensor in found]

    def resume(self) -> None:
        """Load what was saved before the third iteration."""
        self.model.load_state_dict(self.saved[0])
        self.optimizer.load_state_dict(copy.deepcopy(self.saved[1]))

    def ended_at(self, random: Random, kind: str) -> Outcome:
        """The outcome of the third iteration if it ends at a random place by this kind of fault."""
        ending = {"interrupt": _interrupted, "op": _failing, "transfer": self._refusing_transfers}[kind]
        if kind not in self.places:
            self.resume()
            self.iterate()  # what only the first iterations look at is done
            self.resume()
            with ending(_Countdown()) as counted:
                self.iterate()
            self.places[kind] = counted.asked
        self.resume()
        try:
            with ending(_Countdown(random.randint(1, self.places[kind]))):
                self.iterate()
        except (KeyboardInterrupt, Fault, TierFailed):
            pass
        torch.set_grad_enabled(True)  # an interrupt at the end of a no_grad block leaves it off, as in eager
        return self._outcome()

    @contextmanager
    def _refusing_transfers(self, countdown: _Countdown) -> Iterator[_Countdown]:
        assert self.calls is not None, "nothing goes to disk in this loop"
        with patch.object(self.calls, "countdown", countdown):
            yield countdown

    def _outcome(self) -> Outcome:
        """What is there now, what the next calls do, and whether the saved state helps."""
        found = Outcome.WRONG
        there = self.contents()
        with torch.no_grad():
            refusal = _refusal_of(lambda: self.fitted(_batch()))
        if not refusal:
            if _equal(there, self.before):
                self.iterate()
                found = Outcome.BEFORE if _equal(self.contents(), self.after) else Outcome.WRONG
            elif _equal(there, self.after):
                found = Outcome.AFTER
        elif "optimizer.step() was not called" in refusal:
            self.optimizer.step()
            found = Outcome.STEP if _equal(self.contents(), self.after) else Outcome.WRONG
        elif all(
            "load_state_dict" in _refusal_of(run) for run in (self.optimizer.step, self.optimizer.state_dict)
        ):
            found = Outcome.REFUSED
        self.resume()
        self.iterate()
        return found if _equal(self.contents(), self.after) else Outcome.WRONG


@contextmanager
def _interrupted(countdown: _Countdown) -> Iterator[_Countdown]:
    """Raise KeyboardInterrupt before a line of stowplan, of code it generated, or of PyTorch around it."""

    def on_line(_: FrameType, event: str, __: object) -> Any:
        if event == "line" and countdown.is_due():
            raise KeyboardInterrupt
        return on_line

    def on_call(frame: FrameType, _: str, __: object) -> Any:
        return on_line if any(place in frame.f_code.co_filename for place in _PLACES) else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield countdown
    finally:
        sys.settrace(before)


@contextmanager
def _failing(countdown: _Countdown) -> Iterator[_Countdown]:
    with Failing(Fault(), lambda _: countdown.is_due()):
        yield countdown


def _batch() -> Tensor:
    return torch.linspace(-1, 1, 2 * _WIDTH).view(2, _WIDTH)


def _equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def _refusal_of(run: Callable[[], object]) -> str:
    try:
        run()
    except BadUse as refusal:
        return str(refusal)
    return ""
