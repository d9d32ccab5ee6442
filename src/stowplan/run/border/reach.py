"""Reach: what a model's code looks at in addition to its arguments: attributes of modules, globals, closures.

Attributes are noted while the step runs. Global and closure variables are found by a static look at code
objects, starting from `forward` of every class in the model and following the functions and methods that code
names. It finds more than a step reads, and misses what a string names at run time.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import RLock, get_ident
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from stowplan.run.border.frozen import is_closed

_ONE_AT_A_TIME = RLock()
MODULE_STATE = frozenset(vars(nn.Module())) - {"training"}


class Reads:
    """The names that were read, by module. Parameters, buffers and children are among them."""

    def __init__(self) -> None:
        self._names: dict[nn.Module, dict[str, None]] = {}

    def add(self, module: nn.Module, name: str) -> None:
        """Take a name as read."""
        self._names.setdefault(module, {})[name] = None

    def by_path(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        """The names that were read of each module of `model`, by its first path."""
        return {path: tuple(self._names[m]) for path, m in model.named_modules() if m in self._names}

    def outside(self, model: nn.Module) -> Mapping[nn.Module, tuple[str, ...]]:
        """Modules that are read and are not part of the model, such as those in a list."""
        inside = set(model.modules())
        return {module: tuple(names) for module, names in self._names.items() if module not in inside}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within, every attribute that this thread reads of any module is noted.

        Python has no other way to see a read than the class's own `__getattribute__`; it is set on
        `nn.Module`, which has none, and removed again, one recording at a time.
        """
        with _ONE_AT_A_TIME:
            thread, names, plain = get_ident(), self._names, object.__getattribute__

            def noting(module: nn.Module, name: str) -> object:
                if get_ident() == thread and name not in MODULE_STATE and name[:2] != "__":
                    names.setdefault(module, {})[name] = None
                return plain(module, name)

            nn.Module.__getattribute__ = noting  # type: ignore[method-assign,assignment]
            try:
                yield
            finally:
                del nn.Module.__getattribute__


_MOST_FUNCTIONS = 2_000
_LIBRARIES = frozenset(sys.stdlib_module_names) | {"torch", "torchgen", "numpy", "stowplan", "triton"}


@dataclass(slots=True)
class Reach:
    """The variables found so far: label to the mapping that holds them and their key there."""

    variables: dict[str, tuple[Mapping[str, Any], str]] = field(default_factory=dict)
    _followed: set[CodeType] = field(default_factory=set)

    @staticmethod
    def of(model: nn.Module, loss: object = None) -> "Reach":
        """What the forward functions of the model's classes, and a loss function, can come to."""
        found = Reach()
        for kind in dict.fromkeys(type(module) for module in model.modules()):
            found._method(kind, "forward")
        for module in model.modules():
            own = vars(module).get("forward")
            found._value(getattr(own, "__func__", own))
        found._value(loss)
        return found

    def _method(self, kind: type, name: str) -> None:
        for base in kind.__mro__:
            if name in vars(base):
                if base is not nn.Module and not _is_library(base.__module__):
                    self._value(vars(base)[name], kind)
                return

    def _value(self, value: object, kind: type | None = None) -> None:
        """Follow a function, or what a property, a static method or a decorator makes of one."""
        if isinstance(value, property):
            value = value.fget
        value = getattr(value, "__func__", value)
        while not isinstance(value, FunctionType) and hasattr(value, "__wrapped__"):
            value = value.__wrapped__
        if isinstance(value, FunctionType) and not _is_library(value.__module__):
            self._function(value, kind)

    def _function(self, function: FunctionType, kind: type | None) -> None:
        if function.__code__ in self._followed or len(self._followed) > _MOST_FUNCTIONS:
            return
        self._followed.add(function.__code__)
        names = dict.fromkeys(_names_in(function.__code__))
        label = f"of {function.__module__}"
        for name in names:
            if name in function.__globals__:
                self._variable(f"global {name!r} {label}", function.__globals__, name, names)
            if kind is not None:
                self._method(kind, name)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":
                self._cell(f"variable {name!r} around {function.__qualname__} {label}", cell)

    def _variable(self, label: str, owner: Mapping[str, Any], name: str, names: Mapping[str, None]) -> None:
        value = owner[name]
        if isinstance(value, ModuleType):
            if not _is_library(value.__name__):
                for inner in names.keys() & vars(value).keys():
                    if not isinstance(vars(value)[inner], ModuleType):
                        self._variable(f"{inner!r} of {value.__name__}", vars(value), inner, {})
        elif isinstance(value, type):
            if not _is_library(value.__module__):
                for inner in names.keys() & vars(value).keys():
                    self._class_variable(value, inner)
        elif isinstance(value, (FunctionType, MethodType)) or hasattr(value, "__wrapped__"):
            self.variables[label] = owner, name  # another function of that name is another program
            self._value(value)
        elif isinstance(value, Tensor) or not is_closed(value):
            self.variables[label] = owner, name

    def _class_variable(self, kind: type, name: str) -> None:
        value = vars(kind)[name]
        if _is_plain(value):
            self.variables[f"{kind.__qualname__}.{name}"] = vars(kind), name
        else:
            self._value(value, kind)

    def _cell(self, label: str, cell: Any) -> None:
        try:
            value = cell.cell_contents
        except ValueError:  # not bound yet
            return
        if isinstance(value, FunctionType):
            self._value(value)
        elif _is_plain(value):
            self.variables[label] = _Cell(cell), "contents"


class _Cell(Mapping[str, Any]):
    """A closure's variable, looked up like a global one."""

    def __init__(self, cell: Any) -> None:
        self._cell = cell

    def __getitem__(self, _: str) -> Any:
        return self._cell.cell_contents

    def __iter__(self) -> Iterator[str]:
        yield "contents"

    def __len__(self) -> int:
        return 1


def _names_in(code: CodeType) -> Iterator[str]:
    """Globals and attributes that code names, that of functions inside it too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES


def _is_plain(value: object) -> bool:
    return value is None or isinstance(
        value, (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, Tensor)
    )
