"""Wherever Python keeps what forward takes as a constant, a change of it is seen at the next call."""

import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stowplan
from stowplan import Search
from stowplan.errors import BadUse, CaptureError

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
IN_CONTEXT: ContextVar[float] = ContextVar("IN_CONTEXT", default=2.0)
IN_THREAD = threading.local()
SETTINGS = ModuleType("own_settings")
EXPONENT = [2.0]


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def factor(self) -> float:
        raise NotImplementedError

    def change(self) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x)
        return (made * self.factor()).square().mean()


@dataclass(slots=True)
class Slotted:
    scale: float = 2.0
    sizes: list[int] = field(default_factory=lambda: [1, 2])


class Slots(Step):
    def __init__(self) -> None:
        super().__init__()
        self.config = Slotted()

    def factor(self) -> float:
        return self.config.scale

    def change(self) -> None:
        self.config.scale = 5.0


class InsideSlots(Slots):
    def factor(self) -> float:
        return float(sum(self.config.sizes))

    def change(self) -> None:
        self.config.sizes.append(4)


class Unset:
    __slots__ = ("extra",)
    extra: float


class EmptySlot(Step):
    def __init__(self) -> None:
        super().__init__()
        self.config = Unset()

    def factor(self) -> float:
        return getattr(self.config, "extra", 2.0)

    def change(self) -> None:
        self.config.extra = 5.0


class Schedule:
    base = 1.0

    def __init__(self) -> None:
        self.scale = 2.0

    def value(self) -> float:
        scale: float = self.scale * self.base ** EXPONENT[0]
        return scale

    def __call__(self) -> float:
        return self.value()


class BoundMethod(Step):
    def __init__(self) -> None:
        super().__init__()
        self.schedule = Schedule()
        self.factor = self.schedule.value  # type: ignore[method-assign]

    def change(self) -> None:
        self.schedule.scale = 5.0


class MethodOfC(Step):
    def __init__(self) -> None:
        super().__init__()
        self.table = {"scale": 2.0}
        self.look_up = self.table.get

    def factor(self) -> float:
        return self.look_up("scale") or 0.0

    def change(self) -> None:
        self.table["scale"] = 5.0


class Closure(Step):
    def __init__(self) -> None:
        super().__init__()
        scale = 2.0

        def put(value: float) -> None:
            nonlocal scale
            scale = value

        self.put = put
        self.act: Callable[[], float] = lambda: scale

    def factor(self) -> float:
        return self.act()

    def change(self) -> None:
        self.put(5.0)


class ObjectInClosure(Step):
    def __init__(self) -> None:
        super().__init__()
        schedule = Schedule()
        self.act: Callable[[], float] = lambda: schedule.value()
        self.put = functools.partial(setattr, schedule, "scale")

    def factor(self) -> float:
        return self.act()

    def change(self) -> None:
        self.put(5.0)


def scaled(by: Schedule) -> float:
    return by.scale


class Partial(Step):
    def __init__(self) -> None:
        super().__init__()
        self.schedule = Schedule()
        self.act = functools.partial(scaled, by=self.schedule)

    def factor(self) -> float:
        return self.act()

    def change(self) -> None:
        self.schedule.scale = 5.0


class OwnGetattr(Step):
    def __init__(self) -> None:
        super().__init__()
        self.__dict__["options"] = {"scale": 2.0}

    def __getattr__(self, name: str) -> Any:
        options = self.__dict__.get("options", {})
        return options[name] if name in options else super().__getattr__(name)

    def factor(self) -> float:
        scale: float = self.scale
        return scale

    def change(self) -> None:
        self.__dict__["options"]["scale"] = 5.0


class Property(Step):
    def __init__(self) -> None:
        super().__init__()
        self.schedule = Schedule()

    @property
    def scale(self) -> float:
        return self.schedule()

    def factor(self) -> float:
        return self.scale

    def change(self) -> None:
        EXPONENT[0] = 3.0
        self.schedule.base = 2.0


class ClassOfAnObject(Step):
    def __init__(self) -> None:
        super().__init__()
        self.schedule = Schedule()

    def factor(self) -> float:
        return self.schedule.value()

    def change(self) -> None:
        Schedule.base = 3.0


class Limits:
    low = 2.0


class OwnLimits(Limits):
    pass


class InheritedByAClass(Step):
    limits = OwnLimits

    def factor(self) -> float:
        return self.limits.low

    def change(self) -> None:
        OwnLimits.low = 5.0


class OwnType(Step):
    scale = 2.0

    def factor(self) -> float:
        return type(self).scale

    def change(self) -> None:
        type(self).scale = 5.0


def remembering(scales: list[float] = [2.0], *, more: dict[str, float] = {"scale": 1.0}) -> float:  # noqa: B006
    return scales[0] * more["scale"]


class MutableDefault(Step):
    def factor(self) -> float:
        return remembering()

    def change(self) -> None:
        defaults = remembering.__defaults__
        assert defaults
        defaults[0][0] = 5.0


class KeywordDefault(Step):
    def factor(self) -> float:
        return remembering()

    def change(self) -> None:
        assert remembering.__kwdefaults__
        remembering.__kwdefaults__["more"]["scale"] = 5.0


class InContext(Step):
    def factor(self) -> float:
        return IN_CONTEXT.get()

    def change(self) -> None:
        IN_CONTEXT.set(5.0)


class InThread(Step):
    def factor(self) -> float:
        scale: float = IN_THREAD.scale
        return scale

    def change(self) -> None:
        IN_THREAD.scale = 5.0


class OfAModule(Step):
    def factor(self) -> float:
        scale: float = SETTINGS.current.scale
        return scale

    def change(self) -> None:
        SETTINGS.current.scale = 5.0


class ImportedWithin(Step):
    def factor(self) -> float:
        from own_settings import SCALE  # type: ignore[import-not-found]

        scale: float = SCALE
        return scale

    def change(self) -> None:
        vars(SETTINGS)["SCALE"] = 5.0


class WeaklyReferred(Step):
    def __init__(self) -> None:
        super().__init__()
        schedule = Schedule()
        self.keep: Callable[[], Schedule] = lambda: schedule
        self.schedule = weakref.ref(self.keep())

    def factor(self) -> float:
        schedule = self.schedule()
        assert schedule is not None
        return schedule.scale

    def change(self) -> None:
        self.keep().scale = 5.0


class Helper(nn.Module):
    def scale(self) -> float:
        return EXPONENT[0]


class MethodOfAnInnerModule(Step):
    def __init__(self) -> None:
        super().__init__()
        self.helper = Helper()

    def factor(self) -> float:
        return self.helper.scale()

    def change(self) -> None:
        EXPONENT[0] = 5.0


PROGRAMS = [kind for kind in (*Step.__subclasses__(), InsideSlots) if kind.__module__ == __name__]


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "own_settings", SETTINGS)
    vars(SETTINGS).update(SCALE=2.0, current=Schedule())
    EXPONENT[0] = 2.0
    IN_THREAD.scale = 2.0
    for kind, name, value in ((Schedule, "base", 1.0), (OwnType, "scale", 2.0)):
        monkeypatch.setattr(kind, name, value)
    defaults = remembering.__defaults__
    assert defaults
    assert remembering.__kwdefaults__
    defaults[0][0] = remembering.__kwdefaults__["more"]["scale"] = 1.0
    token = IN_CONTEXT.set(2.0)
    yield
    IN_CONTEXT.reset(token)
    if "low" in vars(OwnLimits):
        del OwnLimits.low


def outcome(model: Any) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    loss = model(X)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def fitted(model: nn.Module) -> Any:
    return stowplan.fit(model, (X,), budget="1GiB", search=Search(moves=3), allow=("recompute",))


@pytest.mark.parametrize("kind", PROGRAMS, ids=lambda kind: kind.__name__)
def test_a_constant_is_guarded_wherever_python_keeps_it(kind: type[Step]) -> None:
    eager, planned = (model := kind()), fitted(model)
    before = outcome(eager)
    assert all(map(torch.equal, before, outcome(planned)))
    model.change()
    for _ in range(2):
        expected = outcome(eager)
        assert not torch.equal(expected[0], before[0])
        assert all(map(torch.equal, expected, outcome(planned)))
    assert len(stowplan.plans_of(planned)) == 2


class Counting(Step):
    """Changes what `write` says, in forward."""

    def __init__(self, write: Callable[[], object]) -> None:
        super().__init__()
        self.write = write

    def factor(self) -> float:
        self.write()
        return 1.0


def slot_writer() -> Callable[[], object]:
    config = Slotted()
    return lambda: setattr(config, "scale", config.scale + 1)


def cell_writer() -> Callable[[], object]:
    count = 0

    def write() -> None:
        nonlocal count
        count += 1

    return write


def iterator_writer() -> Callable[[], object]:
    numbers = iter([1.0, 2.0, 3.0, 4.0])
    return lambda: next(numbers)


def generator_writer() -> Callable[[], object]:
    numbers = (float(number) for number in range(100))
    return lambda: next(numbers)


WRITERS = (
    slot_writer,
    cell_writer,
    iterator_writer,
    generator_writer,
    lambda: functools.partial(next, itertools.count()),
    lambda: lambda: IN_CONTEXT.set(IN_CONTEXT.get() + 1),
    lambda: lambda: remembering.__kwdefaults__["more"].update(scale=remembering() + 1),  # type: ignore[index]
)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_write_to_such_a_place_is_refused(writer: Callable[[], Callable[[], object]]) -> None:
    with pytest.raises(CaptureError, match="forward changes the state of the program"):
        fitted(Counting(writer()))
    assert IN_CONTEXT.get() == 2.0


class Doubling(Step):
    def __call__(self, x: Tensor, *, times: int = 2) -> Any:
        return super().__call__(x + 1.0) * times

    def factor(self) -> float:
        return 1.0


class NeverForward(Step):
    def __call__(self, x: Tensor) -> Any:
        return self.layer(x).sum()


def test_a_call_of_the_class_itself_runs_once_around_the_plan() -> None:
    torch.manual_seed(0)
    eager, planned = Doubling(), fitted(Doubling())
    for _ in range(3):
        assert all(map(torch.equal, outcome(eager), outcome(planned)))
    assert torch.equal(eager(X, times=3), planned(X, times=3))
    assert torch.equal(eager.forward(X), planned.forward(X))
    assert len(stowplan.plans_of(planned)) == 1
    with torch.no_grad():
        assert torch.equal(eager(X), planned(X))


def test_a_call_that_has_no_place_around_the_plan_is_refused() -> None:
    with pytest.raises(BadUse, match="does not call forward"):
        fitted(NeverForward())
    with pytest.raises(BadUse, match="would run after loss="):
        stowplan.fit(Doubling(), (X,), budget="1GiB", loss=torch.sum)


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x)
        return made.square().mean()


def test_a_lazy_module_is_refused_until_it_was_called_once() -> None:
    model, eager = Lazy(), Lazy()
    with pytest.raises(BadUse, match="call the model once before fit"):
        fitted(model)
    for each in (model, eager):
        torch.manual_seed(0)
        each(X)
    planned = fitted(model)
    for _ in range(3):
        assert all(map(torch.equal, outcome(eager), outcome(planned)))
