"""The table of docs/limits.md that says what a plan depends on: each example in it is run."""

import math
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stowplan
from stowplan import Search
from stowplan.errors import CaptureError
from tests.support.equality import copied, equal
from tests.support.packed import Packed

PAGE = Path(__file__).parents[2] / "docs" / "limits.md"
ROW = re.compile(
    r"^\| (?P<what>[^|]+) \| (?P<kind>re-read|guarded|repeated|refused|run eagerly) \| (?P<example>[^|]+) \|$"
)
ROWS = [found.groupdict() for line in PAGE.read_text().splitlines() if (found := ROW.match(line))]

FORWARD = """
def forward(self, x, y, seen=None):
    h = self.net(x) + SHIFT
    {line}
    h = h + torch.mm(self.adjacency, self.mean[:, None])[:, 0]
    h = h + (torch.ones(1, 16) @ self.packed)[0, :3]
    scale = SCALE * self.beta * sum(self.config.sizes) * getattr(self, "extra", 1.0)
    scale *= self.places()
    return scale * F.cross_entropy(h.float(), y, weight=self.weights)
"""


@dataclass(slots=True)
class Slots:
    """An object without `__dict__`."""

    scale: float = 1.0

    def method(self) -> float:
        return self.scale


class Found:
    """An object that looks its attributes up."""

    def __init__(self) -> None:
        self.table = {"scale": 1.0}

    def __getattr__(self, name: str) -> float:
        scale: float = vars(self)["table"][name]
        return scale


class Program(nn.Module):
    """A step whose forward holds one more line."""

    def __init__(self, scope: dict[str, Any], line: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 16), nn.Linear(16, 3)
        )
        self.weights, self.beta, self.count = torch.ones(3), 1.0, 0
        self.config = SimpleNamespace(sizes=[1, 2])
        self.slots: Any = type("Own", (Slots,), {"unit": 1.0, "__slots__": ()})()
        self.method, self.partial = Slots().method, partial(Slots.method, Slots())
        around, defaults = 1.0, [1.0]
        self.closure: Any = lambda: around
        self.default: Any = lambda scales=defaults: scales[0]
        self.found, self.context = Found(), ContextVar("context", default=1.0)
        self.numbers = iter([1.0] * 100)
        self.twin = nn.Linear(16, 3).requires_grad_(False)
        self.register_buffer("mean", torch.ones(3))
        self.register_buffer("adjacency", torch.eye(3).to_sparse())
        self.register_buffer("packed", Packed.of(torch.eye(16)))
        self.register_buffer("calls", torch.tensor(0))
        exec(FORWARD.format(line=line), scope)  # noqa: S102 -- the page's own lines

    def places(self) -> float:
        """Numbers from every place that may hold one."""
        numbers = (
            *(self.slots.scale, self.slots.unit, self.method(), self.partial(), self.closure()),
            *(self.default(), self.found.scale, self.context.get()),
        )
        return math.prod(numbers)


def made(line: str) -> tuple[Any, dict[str, Any]]:
    """A model with this line in forward, of a class of its own, and the globals that it reads."""
    scope: dict[str, Any] = {
        "__name__": "program",
        "F": F,
        "random": random,
        "np": np,
        "torch": torch,
        "SCALE": 1.0,
        "SHIFT": torch.zeros(3),
        "LOG": [],
        "HIDDEN": repeat(torch.ones(3)),  # an iterator keeps what it hands out to itself
    }
    model = Program(scope, line)
    kind = type("Program", (Program,), {"forward": scope["forward"], "__module__": "program"})
    model.__class__ = kind
    return model, scope


@contextmanager
def as_before() -> Iterator[None]:
    """Within, an example may change switches of torch."""
    hooks = nn.modules.module._global_forward_hooks
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_autocast_enabled("cpu", False)
        torch.set_grad_enabled(True)
        hooks.clear()


def outcome(model: Any, *args: Any) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    loss = model(*args)
    if loss.requires_grad:
        loss.backward()
    return [loss.detach(), *(torch.zeros(()) if p.grad is None else p.grad for p in model.parameters())]


def repeated(model: Any, x: Tensor, y: Tensor) -> Iterator[object]:
    """What three steps leave in the model and in their arguments, the last of them on others."""
    given, seen = x.clone(), dict[str, Tensor]()
    for step in range(3):
        given, seen = (given, seen) if step < 2 else (x.clone(), {})
        yield outcome(model, given, y, seen)
        dense = (held for held in (*model.parameters(), *model.buffers()) if not held.is_sparse)
        yield [(copied(tensor), tensor.stride()) for tensor in dense]
        yield copied([given, seen])


def test_the_table_has_all_classes() -> None:
    assert {row["kind"] for row in ROWS} == {"re-read", "guarded", "repeated", "refused", "run eagerly"}
    assert len(ROWS) >= 30


@pytest.mark.parametrize("row", ROWS, ids=[row["what"] for row in ROWS])
@pytest.mark.slow
def test_an_example_is_dealt_with_as_its_row_says(row: dict[str, str]) -> None:
    place, _, code = (
        row["example"].rpartition(": `") if row["example"].startswith("in ") else ("", "", row["example"])
    )
    code = code.strip("`")
    sides = [made(code if place else "pass") for _ in range(2)]
    x, y = torch.randn(32, 8), torch.arange(32) % 3
    with as_before():
        if row["kind"] == "repeated" or (place and row["kind"] == "run eagerly"):
            refitted = stowplan.fit(sides[1][0], (x.clone(), y, {}), budget="1GiB", search=Search(moves=3))
            assert equal(list(repeated(sides[0][0], x, y)), list(repeated(refitted, x, y)))
            return
        if place:
            with pytest.raises(CaptureError):
                stowplan.fit(sides[0][0], (x, y), budget="1GiB", search=Search(moves=3), allow=("recompute",))
            return
        fitted = stowplan.fit(
            sides[1][0], (x, y), budget="1GiB", search=Search(moves=3), allow=("recompute",)
        )
        found = []
        for model, scope in ((sides[0][0], sides[0][1]), (fitted, sides[1][1])):
            torch.manual_seed(2)
            given = x.clone()
            names = {
                "__name__": "program",
                "torch": torch,
                "nn": nn,
                "model": model,
                "x": given,
                "globals": lambda scope=scope: scope,
            }
            exec(code, names)  # noqa: S102 -- the page's own lines
            if row["kind"] == "refused" and model is fitted:
                with pytest.raises(CaptureError):
                    outcome(model, given, y)
                return
            found.append([outcome(model, given, y) for _ in range(2)])
    for eager, planned in zip(*found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(eager, planned, strict=True))
    assert len(stowplan.plans_of(fitted)) == (2 if row["kind"] == "guarded" else 1)
