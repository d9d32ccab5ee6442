"""Frozen: a picture of a Python value to compare with later.

A value is opened wherever Python keeps a part of it:

| value | what is looked at |
|---|---|
| tuple, list, dict, set, deque | items |
| object of the user's | `__dict__`, slots, and data of its class and bases |
| class of the user's | data of the class and its bases |
| function of the user's | itself, closure, defaults, attributes |
| bound method, partial, weak reference | the function, what it is bound to, what it refers to |
| context variable, thread-local object | the value in this context or thread |
| iterator over a sequence, counter, generator | how far it is |
| random generator, NumPy array | its state or contents |
| tensor | its look; the contents are read anew at each call |
| anything else: libraries, objects of C extensions | identity |

`functions` and `kinds` are the code that a picture came across; `reach` follows it to globals.
"""

import random
import sys
import threading
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, partial
from hashlib import sha256
from itertools import chain, count
from operator import is_, length_hint
from types import (
    BuiltinMethodType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from stowplan.capture.composite import PartsIn, is_wrapper, parts_of
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


_LIBRARIES = frozenset(sys.stdlib_module_names) | {
    *("torch", "torchgen", "numpy", "stowplan", "triton"),
    *("pytest", "_pytest", "pluggy"),  # pytest writes itself into the assertions of a test's model
}
_SHARED = tuple(getattr(draw, "__self__", None) for draw in (random.random, np.random.rand))
# Iterators that tell how much is left.
_COUNTED = (*(type(iter(kind(()))) for kind in (list, tuple, dict, set)), type(iter(range(0))))


def is_library(module: str | None) -> bool:
    """Whether a module is no code of the user's: its variables are not watched."""
    return module is None or module.partition(".")[0] in _LIBRARIES


class Owner(Protocol):
    """Holds values by key or number: a mapping or a sequence."""

    def __getitem__(self, key: Any, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class OutsidePlaces:
    """Where a step finds what is no argument, parameter or buffer.

    `tensors` that it reads are given by their identity at capture, `containers` that it leaves tensors in by
    their label then.
    """

    tensors: Mapping[int, tuple[Owner, Any]] = field(default_factory=dict)
    containers: Mapping[str, Any] = field(default_factory=dict)


NOWHERE = OutsidePlaces()


@dataclass(frozen=True, slots=True)
class Same:
    """Stands for one object: equal to nothing but itself."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class Attributes(MutableMapping[str, Any]):
    """Attributes that are in no `__dict__`, as a mapping: slots, a closure's cell, defaults of a function."""

    def __init__(self, of: object, *names: str) -> None:
        self.of, self.names = of, names

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self.of, name)
        except (AttributeError, ValueError):  # a slot or a cell that is empty
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self.of, name, value)

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self.of, name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.names if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _InContext(MutableMapping[str, Any]):
    """The value of a context variable, as a mapping."""

    def __init__(self, variable: ContextVar[Any]) -> None:
        self._variable = variable

    def __getitem__(self, name: str) -> Any:
        try:
            return self._variable.get()
        except LookupError:
            raise KeyError(name) from None

    def __setitem__(self, _: str, value: Any) -> None:
        self._variable.set(value)

    def __delitem__(self, _: str) -> None:
        """A context variable cannot be unset; what is put back after this sets it."""

    def clear(self) -> None:
        """The same."""

    def __iter__(self) -> Iterator[str]:
        return (name for name in ("value",) if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(slots=True)
class Picture:
    """Facts by label, and where each was seen: `owners[i][keys[i]]` was `values[i]`.

    While all of these are the same objects, and the containers in `sized` as long as they were, the facts
    hold. `tensors` are the places of tensors that are neither parameters nor buffers. `states` are values
    that change without any place changing: random generators, arrays, sets and iterators.
    """

    facts: dict[str, Frozen] = field(default_factory=dict)
    owners: list[Owner] = field(default_factory=list)
    keys: list[object] = field(default_factory=list)
    values: list[object] = field(default_factory=list)
    sized: list[Any] = field(default_factory=list)
    tensors: dict[str, tuple[Owner, object]] = field(default_factory=dict)
    states: list[tuple[object, Frozen]] = field(default_factory=list)
    contents: list[tuple[Any, Any]] = field(default_factory=list)  # mutable containers, and copies of them
    containers: dict[str, Any] = field(default_factory=dict)  # the same by label, where items have keys
    absent: list[tuple[Mapping[str, Any], str]] = field(default_factory=list)  # names that are the class's
    functions: list[FunctionType] = field(default_factory=list)
    kinds: dict[type, None] = field(default_factory=dict)
    _classes: dict[type, Mapping[str, Any]] = field(default_factory=dict)
    _seen: dict[int, tuple[object, Frozen]] = field(default_factory=dict)
    _watched: set[tuple[int, object]] = field(default_factory=set)
    _parts: int = 0

    def add(self, label: str, owner: Owner, key: object) -> None:
        """Picture what stands in one place."""
        parts, self._parts = self._parts, 0
        self.facts[label] = self._part(owner, key, owner[key], label)
        self._parts = parts

    def add_variables(self, variables: Mapping[str, tuple[Mapping[str, Any], str]]) -> None:
        """Picture what stands in these places, and which of them are empty."""
        for label, (owner, name) in variables.items():
            if name in owner:
                self.add(label, owner, name)
            else:
                self.facts[label] = None
                self.absent.append((owner, name))

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

    def _part(self, owner: Owner, key: object, value: object, label: str) -> Frozen:
        frozen = self._frozen(value, label, owner, key)
        if not isinstance(value, Tensor):
            self._watch(owner, key, value)
        return frozen

    def _frozen(self, value: object, label: str, owner: Owner, key: object) -> Frozen:
        if isinstance(value, Tensor):
            self.tensors[label] = owner, key
            if is_wrapper(type(value)):
                return look_of(value), self._inside(value, label, owner, key)
            return look_of(value)
        if isinstance(value, (*_PLAIN, np.generic)):
            return look_of(value)
        if isinstance(value, (nn.Module, ModuleType)) or self._parts > _MOST_PARTS:
            return Same(value)
        if isinstance(value, type):
            self._add_class(value)
            return Same(value)
        if id(value) in self._seen:  # shared, or inside itself
            return self._seen[id(value)][1]
        self._seen[id(value)] = value, ("what stands at", label)
        return type(value), self._opened(value, label)

    def _inside(self, wrapper: Tensor, label: str, owner: Owner, key: object) -> Frozen:
        """Of a tensor made of others: the places of these, and what else it holds."""
        parts = parts_of(wrapper)
        for name in parts:
            self._frozen(parts[name], f"{label}.{name}", PartsIn(owner, key), name)
        self._keep(vars(wrapper), dict(vars(wrapper)), label)
        others = [item for item in vars(wrapper).items() if not isinstance(item[1], Tensor)]
        return self._items(vars(wrapper), label, others)

    def _opened(self, value: object, label: str) -> Frozen:
        match value:
            case FunctionType():
                return self._function(value, label)
            case MethodType():
                bound = ("__func__", value.__func__), ("__self__", value.__self__)
                return self._items(None, label, bound)
            case BuiltinMethodType() | MethodWrapperType() if not isinstance(value.__self__, ModuleType):
                return self._items(None, label, (("__name__", value.__name__), ("__self__", value.__self__)))
            case partial():
                parts = ("func", value.func), ("args", value.args), ("keywords", value.keywords)
                return self._items(None, label, parts)
            case weakref.ref():
                return self._items(None, label, (("referent", value()),))
            case ContextVar():
                return self._held_by(_InContext(value), label)
            case threading.local():
                return self._held_by(Attributes(value, "__dict__"), label)
            case random.Random() | np.random.RandomState() if value in _SHARED:
                return Same(value)  # other threads draw from it too; `Draws` tells who did
            case random.Random() | np.random.Generator() | np.random.RandomState() | np.ndarray():
                self.states.append((value, state_of(value)))
                return self.states[-1][1]
            case _ if isinstance(value, (GeneratorType, count, *_COUNTED)):
                self.states.append((value, state_of(value)))
                return ("iterator", Same(value)), ("how far it is", self.states[-1][1])
        own = self._attributes(value, label)
        items = self._contents(value, label)
        if own is None and items is None:
            return Same(value)
        return (*(items or ()), *(own or ()))

    def _contents(self, value: object, label: str) -> tuple[Frozen, ...] | None:
        """The items of a container; None if it is none."""
        if isinstance(value, (tuple, frozenset, set)):
            if isinstance(value, set):
                self.contents.append((value, set(value)))
                self.states.append((value, state_of(value)))
            listed = value if isinstance(value, tuple) else sorted(value, key=repr)
            return self._items(None, label, enumerate(listed))
        if isinstance(value, (list, deque)):
            self._keep(value, list(value), label)
            return self._items(value, label, enumerate(value))
        if isinstance(value, dict):
            items = _items_of(value)
            self._keep(value, items, label)
            if _looks_up_itself(value):
                self.states.append((value, state_of(value)))
                return self._items(None, label, items.items())
            return self._items(value, label, items.items())
        return None

    def _attributes(self, value: object, label: str) -> tuple[Frozen, ...] | None:
        """What an object holds in its `__dict__` and slots; None where Python cannot list them."""
        attributes, is_listed = _attributes(value), isinstance(value, (list, deque, dict))
        slots = () if is_closed(value) else _slots_of(value)
        if attributes is None and not slots:
            return None
        self._add_class(type(value))
        found: tuple[Frozen, ...] = ()
        if attributes is not None:
            self._keep(attributes, dict(attributes), f"attributes of {label}" if is_listed else label)
            found = self._items(attributes, label, attributes.items())
        return (*found, *self._held_by(Attributes(value, *slots), f"slots of {label}")) if slots else found

    def _held_by(self, owner: "Attributes | _InContext", label: str) -> tuple[Frozen, ...]:
        held = dict(owner)
        self._keep(owner, held, label)
        return self._items(owner, label, held.items())

    def _function(self, function: FunctionType, label: str) -> Frozen:
        """What a function of the user's carries with it. Globals are found by what its code names."""
        if is_library(function.__module__):
            return Same(function)
        self.functions.append(function)
        found: list[Frozen] = [("function", Same(function))]
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":
                owner = Attributes(cell, "cell_contents")
                self.contents.append((owner, dict(owner)))
                self.containers[f"variable {name!r} of {label}"] = owner
                for key, value in owner.items():
                    found.append((name, self._part(owner, key, value, f"{label}.{name}")))
        if function.__defaults__ or function.__kwdefaults__:
            defaults = Attributes(function, "__defaults__", "__kwdefaults__")
            found.extend(self._items(defaults, label, defaults.items()))
        if vars(function):
            self._keep(vars(function), dict(vars(function)), label)
            found.extend(self._items(vars(function), label, vars(function).items()))
        return tuple(found)

    def _add_class(self, kind: type) -> None:
        """Data that a class of the user's and its bases hold; its functions are followed by name."""
        if kind in self.kinds or is_library(kind.__module__) or issubclass(kind, (nn.Module, Enum)):
            return
        self.kinds[kind] = None
        for base in kind.__mro__:
            if is_library(base.__module__):
                continue
            for name, value in vars(base).items():
                if not name.startswith("__") and is_data(value):
                    self.add(f"{base.__module__}.{base.__qualname__}.{name}", self.names_in(base), name)

    def _keep(self, container: Any, copied: Any, label: str) -> None:
        self.sized.append(container)
        self.containers[label] = container
        self.contents.append((container, copied))

    def _items(self, owner: Owner | None, label: str, items: Iterable[tuple[Any, Any]]) -> tuple[Frozen, ...]:
        """Picture the items of a container; those of one that cannot change (no owner) need no watching."""
        found, held = list[Frozen](), dict(items)
        for key, value in held.items():
            self._parts += 1
            inner = f"{label}.{key}" if isinstance(key, str) else f"{label}[{key!r}]"
            if owner is None:
                frozen = self._frozen(value, inner, held, key)
            else:
                frozen = self._part(owner, key, value, inner)
            found.append((key if isinstance(key, (str, int)) else repr(key), frozen))
        return tuple(found)


def is_data(value: object) -> bool:
    """Whether a class holds this as data: numbers, strings, containers of these, tensors."""
    return isinstance(value, (*_PLAIN, list, tuple, dict, set, frozenset, Tensor))


def _slots_of(value: object) -> tuple[str, ...]:
    kind: Any = type(value)
    return slots_of(kind)


@cache
def slots_of(kind: type) -> tuple[str, ...]:
    """The slots that the user's classes among a class and its bases define, as attributes are called."""
    found = dict[str, None]()
    for base in kind.__mro__:
        named = () if is_library(base.__module__) else vars(base).get("__slots__", ())
        for name in (named,) if isinstance(named, str) else named:
            private = name.startswith("__") and not name.endswith("__")
            found[f"_{base.__name__.lstrip('_')}{name}" if private else name] = None
    return tuple(name for name in found if isinstance(getattr(kind, name, None), MemberDescriptorType))


def _looks_up_itself(value: dict[Any, Any]) -> bool:
    """Whether a dict gives something else than it holds, as one that makes an instance of each class."""
    return type(value).__getitem__ not in (dict.__getitem__, OrderedDict.__getitem__, defaultdict.__getitem__)


def held_by(container: Any) -> dict[Any, Any]:
    """What a container holds, by key or position."""
    if isinstance(container, dict):
        return _items_of(container)
    return dict(container) if isinstance(container, Mapping) else dict(enumerate(container))


def _items_of(value: dict[Any, Any]) -> dict[Any, Any]:
    """What a dict itself holds, in its order."""
    return dict(OrderedDict.items(value) if isinstance(value, OrderedDict) else dict.items(value))


def state_of(value: object) -> str:
    """What a generator will draw next, how far an iterator is, what an array holds: one digest to compare."""
    match value:
        case random.Random():
            state: object = value.getstate()
        case np.random.Generator():
            state = value.bit_generator.state
        case np.random.RandomState():
            state = value.get_state(legacy=False)
        case Tensor():
            return state_of(value.detach().clone().numpy())  # NumPy's view would fix the size of a storage
        case np.ndarray():
            state = value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes()
        case set():
            state = sorted(map(repr, value))
        case dict():
            state = [(id(key), id(item)) for key, item in _items_of(value).items()]
        case GeneratorType():
            frame = value.gi_frame
            state = frame and (frame.f_lasti, [(name, id(item)) for name, item in frame.f_locals.items()])
        case count():
            state = repr(value)
        case _ if isinstance(value, _COUNTED):
            state = length_hint(value)
        case _:
            raise AssertionError(value)
    return sha256(repr(state).encode()).hexdigest()


def identity_of(container: Any) -> Hashable:
    """The same for two containers if what is put into one is in the other."""
    return (id(container.of), *container.names) if isinstance(container, Attributes) else id(container)


def module_of(function: Any) -> str | None:
    """The name of the module that a function, what is made of one, or the class of an object is from."""
    while isinstance(function, partial):
        function = function.func
    named: str | None = getattr(function, "__module__", None)
    return named


def restore(contents: Iterable[tuple[Any, Any]]) -> None:
    """Put back what containers held."""
    for container, held in contents:
        if len(container) == len(held) and all(map(is_, _listed(container), _listed(held))):
            continue
        container.clear()
        (container.extend if isinstance(container, (list, deque)) else container.update)(held)


def _listed(container: Any) -> Iterable[object]:
    items = held_by(container) if isinstance(container, Mapping) else {}
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
    if isinstance(value, (threading.local, weakref.ref)):
        return False
    return type(value).__module__.partition(".")[0] in _CLOSED_PACKAGES


def _attributes(value: object) -> dict[str, Any] | None:
    """The attributes of a plain object; None where Python cannot list them."""
    return None if is_closed(value) else getattr(value, "__dict__", None)
