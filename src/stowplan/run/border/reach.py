"""What a model's code looks at beside its arguments: attributes of modules, globals and data of classes.

`Reads` notes the attributes of modules while the step runs. `Reach` finds globals and data of classes by a
static look at code: it starts from `forward` of every class in the model, and follows the functions, methods
and classes that code names, and those that a picture of the attributes came across. It finds more than a step
reads, and misses what a string names at run time.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from threading import get_ident
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from stowplan.alone import replaced
from stowplan.run.border.frozen import Picture, is_closed, is_data, is_library, module_of
from stowplan.torch_private import FORWARD_HOOKS

MODULE_STATE = frozenset(vars(nn.Module())) - {"training"}
_PLACED_BY_FIT = ("_fitting", "forward")


def own_state(module: nn.Module) -> list[str]:
    """The names in a module's `__dict__` that are the user's."""
    own = object.__getattribute__(module, "__dict__")
    return [name for name in own if name not in MODULE_STATE and name not in _PLACED_BY_FIT]


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
    def recording(self, before: Mapping[int, Mapping[str, object]]) -> Iterator[None]:
        """Within, every attribute that this thread reads of any module is noted.

        `before` has the attributes of each module by its identity. One that forward sets and then reads is no
        dependency.

        Python has no other way to see a read than the class's own `__getattribute__`; it is set on
        `nn.Module`, which has none, and removed again. Code of the user's that
        takes the whole `__dict__`, as a `__getattr__` does, may read all that is in it.
        """
        thread, names, plain = get_ident(), self._names, object.__getattribute__

        def is_new(module: nn.Module, name: str) -> bool:
            held, now = before.get(id(module)), vars(module)
            return held is not None and name in now and (name not in held or held[name] is not now[name])

        def noting(module: nn.Module, name: str) -> object:
            if get_ident() == thread:
                if name == "__dict__":
                    if not is_library(sys._getframe(1).f_globals.get("__name__")):
                        names.setdefault(module, {}).update(dict.fromkeys((name, *own_state(module))))
                elif name not in MODULE_STATE and name[:2] != "__" and not is_new(module, name):
                    names.setdefault(module, {})[name] = None
            return plain(module, name)

        with replaced(nn.Module, "__getattribute__", noting):
            yield


_MOST_FUNCTIONS = 2_000
_SPECIAL = (
    "__call__",
    "__getattr__",
    "__getattribute__",
    "__getitem__",
    "__iter__",
    "__len__",
    "__contains__",
)

_OF_WRAPPERS = ("__torch_function__", "__torch_dispatch__", "__tensor_flatten__", "__tensor_unflatten__")


@dataclass(slots=True)
class Reach:
    """The variables found so far: label to the mapping that holds them and their key there."""

    variables: dict[str, tuple[Mapping[str, Any], str]] = field(default_factory=dict)
    _followed: set[CodeType] = field(default_factory=set)
    _names: dict[str, None] = field(default_factory=lambda: dict.fromkeys(_SPECIAL))
    _kinds: dict[type, None] = field(default_factory=dict)

    @staticmethod
    def of(
        model: nn.Module, loss: object = None, leaves: Iterable[object] = (), kinds: Iterable[type] = ()
    ) -> "Reach":
        """What forward of the model's classes, a loss function and functions in arguments can come to.

        `kinds` are classes of tensors that do ops in their own way.
        """
        found = Reach()
        for kind in dict.fromkeys(type(module) for module in model.modules()):
            found._named(kind, "forward")
        for module in model.modules():
            own = vars(module).get("forward")
            found._value(getattr(own, "__func__", own))
        for path, module in model.named_modules():
            for table in FORWARD_HOOKS if path else ():
                for number, hook in enumerate(getattr(module, table).values()):
                    what = table.strip("_").removesuffix("s").replace("_", " ")
                    found._hook(hook, f"{what} {number} of {path}" if number else f"{what} of {path}")
        for kind in kinds:
            found._kinds[kind] = None
            for name in _OF_WRAPPERS:
                found._named(kind, name)
        found._value(loss)
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, (FunctionType, MethodType, type)) and not is_library(leaf.__module__):
                found.variables[f"argument {number}"] = {"": leaf}, ""
        return found

    def _hook(self, hook: object, label: str) -> None:
        """A function, method or object that is called as a part of forward."""
        if not is_library(module_of(hook)):
            self.variables[label] = {"": hook}, ""
            self._value(hook)

    def picture(self, found: Picture) -> None:
        """Add the variables to a picture, and what the functions and objects come to that it came across."""
        pictured = 0
        while True:
            functions, found.functions = found.functions, []
            for function in functions:
                self._function(function, None)
            self.follow(found.kinds)
            new = dict(list(self.variables.items())[pictured:])
            if not new:
                return
            found.add_variables(new)
            pictured += len(new)

    def follow(self, kinds: Iterable[type]) -> None:
        """Follow the methods of these classes that code names, now and later."""
        for kind in kinds:
            if kind not in self._kinds:
                self._kinds[kind] = None
                for name in list(self._names):
                    self._named(kind, name)

    def _named(self, kind: type, name: str) -> None:
        """What a class or the first of its bases calls so, if that is code or data of the user's."""
        bases = [base for base in kind.__mro__ if not is_library(base.__module__)]
        holder = next((base for base in kind.__mro__ if name in vars(base)), None)
        if holder not in bases:
            return
        value = vars(holder)[name]
        if not is_data(value):
            self._value(value, kind)
            return
        for base in bases[: bases.index(holder) + 1]:  # one that comes first may get a value of its own
            self.variables[f"{base.__module__}.{base.__qualname__}.{name}"] = vars(base), name

    def _value(self, value: object, kind: type | None = None) -> None:
        """Follow a function, or what a property, a static method or a decorator makes of one."""
        match value:
            case property():
                value = value.fget
            case staticmethod() | classmethod() | MethodType():
                value = value.__func__
            case cached_property() | partial():
                value = value.func
        while not isinstance(value, FunctionType) and hasattr(value, "__wrapped__"):
            value = value.__wrapped__
        if isinstance(value, FunctionType) and not is_library(value.__module__):
            if value.__closure__ or value.__defaults__ or value.__kwdefaults__ or vars(value):
                label = f"function {value.__qualname__} of {value.__module__}"
                while self.variables.setdefault(label, ({"": value}, ""))[0] != {"": value}:
                    label = f"another {label}"  # the same code in another closure
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
            elif (module := _imported(function, name)) is not None:
                self._module(module, names)
            if kind is not None:
                self._named(kind, name)
        new = [name for name in names if name not in self._names]
        self._names.update(dict.fromkeys(new))
        for other in list(self._kinds):
            for name in new:
                self._named(other, name)

    def _variable(self, label: str, owner: Mapping[str, Any], name: str, names: Mapping[str, None]) -> None:
        value = owner[name]
        if isinstance(value, ModuleType):
            self._module(value, names)
        elif isinstance(value, type):
            if not is_library(value.__module__):
                for inner in names:
                    self._named(value, inner)
        elif isinstance(value, (FunctionType, MethodType)) or hasattr(value, "__wrapped__"):
            self.variables[label] = owner, name  # another function of that name is another program
            self._value(value)
        elif isinstance(value, Tensor) or not is_closed(value):
            self.variables[label] = owner, name

    def _module(self, module: ModuleType, names: Mapping[str, None]) -> None:
        """What code names of a module of the user's."""
        if is_library(module.__name__):
            return
        for name in names.keys() & vars(module).keys():
            label = f"{name!r} of {module.__name__}"
            if label in self.variables:
                continue
            value = vars(module)[name]
            if isinstance(value, ModuleType):
                if value.__name__.startswith(f"{module.__name__}."):
                    self._module(value, names)
            else:
                self._variable(label, vars(module), name, names if isinstance(value, type) else {})


def _imported(function: FunctionType, name: str) -> ModuleType | None:
    """The module that a function imports by this name, if there is one."""
    package = function.__globals__.get("__package__")
    return sys.modules.get(name) or (sys.modules.get(f"{package}.{name}") if package else None)


def _names_in(code: CodeType) -> Iterator[str]:
    """Globals and attributes that code names, that of functions inside it too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
