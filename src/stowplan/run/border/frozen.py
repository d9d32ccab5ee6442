"""Frozen: a picture of a Python value to compare with later. Reach: what a model's code looks at.

Containers and plain objects are opened to the end. Tensors are pictured by their look, for their contents are
read anew at each call. Functions, classes, modules and what Python cannot open are pictured by identity.

A model's code looks at attributes of modules, globals and closures in addition to its arguments. Attributes
are noted while the step runs. Global and closure variables are found by a static look at code objects,
starting from `forward` of every class in the model and following the functions and methods that code names.
It finds more than a step reads, and misses what a string names at run time.
"""

import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from hashlib import sha256
from itertools import chain
from operator import is_
from threading import RLock, get_ident
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from stowplan.capture.stand_ins import look_of

Frozen: TypeAlias = Hashable

_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum)
_MOST_PARTS = 20_000  # of one value; a larger one is pictured by identity
_CLOSED_PACKAGES = frozenset(
    (
        "torch",
        "numpy",
        "logging",
        "threading",
        "re",
        "weakref",
        "io",
        "concurrent",
        "multiprocessing",
        "_thread",
    )
)


class Owner(Protocol):
    """Holds values by key or number: a mapping or a sequence."""

    def __getitem__(self, key: Any, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Same:
    """Stands for one object: equal to nothing but itself."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(slots=True)
class Picture:
    """Facts by label, and where each was seen: `owners[i][keys[i]]` was `values[i]`.

    While all of these are the same objects, and the containers in `sized` as long as they were, the facts
    hold. `tensors` are the places of tensors that are neither parameters nor buffers. `states` are values
    that change without any place changing: random generators, arrays and sets.
    """

    facts: dict[str, Frozen] = field(default_factory=dict)
    owners: list[Owner] = field(default_factory=list)
    keys: list[object] = field(default_factory=list)
    values: list[object] = field(default_factory=list)
    sized: list[Any] = field(default_factory=list)
    tensors: dict[str, tuple[Owner, object]] = field(default_factory=dict)
    states: list[tuple[object, Frozen]] = field(default_factory=list)
    contents: list[tuple[Any, Any]] = field(default_factory=list)  # mutable containers, and copies of them
    absent: list[tuple[Mapping[str, Any], str]] = field(default_factory=list)  # names that are the class's
    _classes: dict[type, Mapping[str, Any]] = field(default_factory=dict)
    _seen: dict[int, tuple[object, Frozen]] = field(default_factory=dict)
    _watched: set[tuple[int, object]] = field(default_factory=set)
    _parts: int = 0

    def add(self, label: str, owner: Owner, key: object) -> None:
        """Picture what stands in one place."""
        value = owner[key]
        self._parts = 0
        frozen = self._frozen(value, label, owner, key)
        if not isinstance(value, Tensor):
            self._watch(owner, key, value)
        self.facts[label] = frozen

    def names_in(self, kind: type) -> Mapping[str, Any]:
        """The names that a class defines, as the same mapping on every call; `vars` makes a new one."""
        return self._classes.setdefault(kind, vars(kind))

    def _watch(self, owner: Owner, key: object, value: object) -> None:
        if (id(owner), key) in self._watched:  # what a class has for all its modules is watched once
            return
        self._watched.add((id(owner), key))
        self.owners.append(owner)
        self.keys.append(key)
        self.values.append(value)

    def _frozen(self, value: object, label: str, owner: Owner, key: object) -> Frozen:
        if isinstance(value, Tensor):
            self.tensors[label] = owner, key
            return look_of(value)
        if isinstance(value, (*_PLAIN, np.generic)):
            return look_of(value)
        if isinstance(value, (nn.Module, type, FunctionType, ModuleType)) or self._parts > _MOST_PARTS:
            return Same(value)
        if id(value) in self._seen:  # shared, or inside itself
            return self._seen[id(value)][1]
        self._seen[id(value)] = value, Same(value)
        frozen = type(value), self._opened(value, label)
        self._seen[id(value)] = value, frozen
        return frozen

    def _opened(self, value: object, label: str) -> Frozen:
        if isinstance(value, MethodType):
            return Same(value.__func__), Same(value.__self__)
        if isinstance(value, partial):
            return self._items(
                None, label, (("func", value.func), ("args", value.args), ("keywords", value.keywords))
            )
        if isinstance(value, (random.Random, np.random.Generator, np.random.RandomState, np.ndarray)):
            self.states.append((value, state_of(value)))
            return self.states[-1][1]
        if isinstance(value, (tuple, frozenset, set)):
            if isinstance(value, set):
                self.contents.append((value, set(value)))
                self.states.append((value, state_of(value)))
            listed = value if isinstance(value, tuple) else sorted(value, key=repr)
            return self._items(None, label, enumerate(listed))
        if isinstance(value, (list, deque)):
            self._keep(value, list(value))
            return self._items(value, label, enumerate(value))
        if isinstance(value, dict):
            items = _items_of(value)
            self._keep(value, items)
            if _looks_up_itself(value):
                self.states.append((value, state_of(value)))
                return self._items(None, label, items.items())
            return self._items(value, label, items.items())
        attributes = _attributes(value)
        if attributes is None:
            return Same(value)
        self._keep(attributes, dict(attributes))
        return self._items(attributes, label, attributes.items())

    def _keep(self, container: Any, copied: Any) -> None:
        self.sized.append(container)
        self.contents.append((container, copied))

    def _items(self, owner: Owner | None, label: str, items: Iterable[tuple[Any, Any]]) -> Frozen:
        """Picture the items of a container; those of one that cannot change (no owner) need no watching."""
        found, held = list[Frozen](), dict(items)
        for key, value in held.items():
            self._parts += 1
            inner = f"{label}.{key}" if isinstance(key, str) else f"{label}[{key!r}]"
            frozen = self._frozen(value, inner, owner if owner is not None else held, key)
            found.append((key if isinstance(key, (str, int)) else repr(key), frozen))
            if owner is not None and not isinstance(value, Tensor):
                self._watch(owner, key, value)
        return tuple(found)


def _looks_up_itself(value: dict[Any, Any]) -> bool:
    """Whether a dict gives something else than it holds, as one that makes an instance of each class."""
    return type(value).__getitem__ not in (dict.__getitem__, OrderedDict.__getitem__, defaultdict.__getitem__)


def _items_of(value: dict[Any, Any]) -> dict[Any, Any]:
    """What a dict itself holds, in its order."""
    return dict(OrderedDict.items(value) if isinstance(value, OrderedDict) else dict.items(value))


def state_of(value: object) -> str:
    """What a generator will draw next, what an array or a set holds: one digest, to be compared."""
    match value:
        case random.Random():
            state: object = value.getstate()
        case np.random.Generator():
            state = value.bit_generator.state
        case np.random.RandomState():
            state = value.get_state(legacy=False)
        case Tensor():
            return state_of(value.detach().numpy())
        case np.ndarray():
            state = value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes()
        case set():
            state = sorted(map(repr, value))
        case dict():
            state = [(id(key), id(item)) for key, item in _items_of(value).items()]
        case _:
            raise AssertionError(value)
    return sha256(repr(state).encode()).hexdigest()


def restore(contents: Iterable[tuple[Any, Any]]) -> None:
    """Put back what containers held."""
    for container, held in contents:
        if len(container) == len(held) and all(map(is_, _listed(container), _listed(held))):
            continue
        container.clear()
        (container.update if isinstance(container, (dict, set)) else container.extend)(held)


def _listed(container: Any) -> Iterable[object]:
    items = _items_of(container) if isinstance(container, dict) else {}
    return chain(items, items.values()) if items else container


def first_change(before: Mapping[str, Frozen], after: Mapping[str, Frozen]) -> str | None:
    """A sentence about the first fact that is not what it was; None if all are."""
    if before == after:
        return None
    for label in (*before, *after):
        if label not in after:
            return f"{label} is gone"
        if label not in before:
            return f"{label} is new"
        if before[label] != after[label]:
            return _told(label, before[label], after[label])
    return None


def _told(label: str, before: Frozen, after: Frozen) -> str:
    """Which part of a picture is not the same."""
    match before, after:
        case (type() as kind, tuple() as items), (type() as other, tuple() as others) if kind is other:
            for (key, was), (now_key, now) in zip(items, others, strict=False):
                if key != now_key:
                    break
                if was != now:
                    return _told(f"{label}.{key}" if isinstance(key, str) else f"{label}[{key}]", was, now)
            return f"{label} has other items"
        case (str(), (type() as kind, *was)), (str(), (type() as other, *now)) if issubclass(kind, Tensor):
            was, now = [kind.__name__, *was], [other.__name__, *now]
            names = ("class", "shape", "strides", "dtype", "device", "requires_grad", "is_leaf")
            changes = (f"{n} from {a} to {b}" for n, a, b in zip(names, was, now, strict=False) if a != b)
            return f"{label} changed: {', '.join(changes) or 'it is tied to other names'}"
    return f"{label} changed from {_short(before)} to {_short(after)}"


def _short(frozen: Frozen) -> str:
    match frozen:
        case Same(value):
            name = getattr(value, "__qualname__", None) or type(value).__qualname__
            return f"one {name}"
        case (Same(), *_) as several:
            return ", ".join(map(_short, several))
        case ():
            return "none"
        case (type() as kind, str(value)) if kind is float:
            return repr(float.fromhex(value))
        case (type() as kind, shape, _, dtype, *_) if issubclass(kind, Tensor):
            return f"{dtype} of shape {shape}"
        case (type(), value):
            return _cut(repr(value))
        case _:
            return _cut(repr(frozen))


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_plain(value: object, *, opened: bool, _within: tuple[object, ...] = ()) -> bool:
    """Whether a value is made of numbers, strings and the like.

    If `opened`, objects and containers of these count too.
    A picture of such an object shows every change of it. An object that Python alone has made has no tensors
    and no state but its attributes.
    """
    if isinstance(value, tuple):
        return all(is_plain(item, opened=opened, _within=_within) for item in value)
    if isinstance(value, (*_PLAIN, torch.dtype, torch.device)):
        return True
    if not opened or isinstance(value, nn.Module):
        return False
    if isinstance(value, (type, ModuleType)) or any(value is outer for outer in _within):
        return True
    parts = _parts_of(value)
    return parts is not None and all(is_plain(p, opened=True, _within=(*_within, value)) for p in parts)


def _parts_of(value: object) -> list[object] | None:
    """The items or attributes of a value that has no other state; None if it may have some."""
    if isinstance(value, (list, set, frozenset)) and type(value) in (list, set, frozenset):
        return list(value)
    if isinstance(value, dict):
        return [*value, *value.values()] if type(value) is dict else None
    attributes = _attributes(value) if type(value).__new__ is object.__new__ else None
    return None if attributes is None else [*attributes.values()]


def is_closed(value: object) -> bool:
    """Whether an object is a library's affair, such as a logger or a lock, and not opened."""
    return type(value).__module__.partition(".")[0] in _CLOSED_PACKAGES


def _attributes(value: object) -> dict[str, Any] | None:
    """The attributes of a plain object; None where Python cannot list them."""
    return None if is_closed(value) else getattr(value, "__dict__", None)


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
