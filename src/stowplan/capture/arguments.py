"""The tensors inside the arguments of a call, and a form that is equal for calls that one capture serves.

Tuples, lists, dicts and other pytrees are opened, and so are mappings, dataclasses and plain objects whose
attributes Python can list. Their tensors are read again at each call. Everything else is a constant of the
captured step and belongs to the form, with its type: `True`, `1` and `1.0` are three different calls.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from stowplan.errors import CaptureError
from stowplan.torch_private import pytree

_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    slice,
    type(Ellipsis),
    Enum,
    np.generic,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    torch.Generator,
    type,
    FunctionType,
    BuiltinFunctionType,
    MethodType,
)


@dataclass(frozen=True, slots=True)
class Spec:
    """The structure of arguments: a pytree whose leaves may be objects with leaves of their own."""

    tree: pytree.TreeSpec
    objects: tuple[tuple[int, type, "Spec"], ...] = ()  # by position among the leaves of `tree`

    def unflatten(self, leaves: list[object]) -> Any:
        """The arguments with these leaves; objects are shallow copies of the original kind."""
        found, taken = list[object](), iter(leaves)
        objects = {position: (kind, inner) for position, kind, inner in self.objects}
        for position in range(self.tree.num_leaves):
            if position in objects:
                kind, inner = objects[position]
                found.append(_rebuilt(kind, inner.unflatten([next(taken) for _ in range(inner.count)])))
            else:
                found.append(next(taken))
        return pytree.tree_unflatten(found, self.tree)

    @property
    def count(self) -> int:
        """The number of leaves, including those inside objects."""
        return self.tree.num_leaves - len(self.objects) + sum(inner.count for _, _, inner in self.objects)

    def __str__(self) -> str:
        inner = ", ".join(f"{position}: {kind.__qualname__} {spec}" for position, kind, spec in self.objects)
        return f"{self.tree}{' with ' + inner if inner else ''}"


def flatten(args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[list[object], Spec]:
    """The leaves of the arguments, and their structure."""
    return _flattened((args, dict(kwargs)))


def leaf_names(args: tuple[object, ...], kwargs: Mapping[str, object], positional: list[str]) -> list[str]:
    """A name per leaf: the parameter of `forward` it belongs to, and the path inside it."""
    return [".".join(path) for path in _paths((args, dict(kwargs)), positional)]


class TensorLook(NamedTuple):
    """What a captured step takes for granted of a tensor that it reads at each call."""

    kind: type[Tensor]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_leaf: bool


def look_of(leaf: object) -> object:
    """Equal for leaves that one captured step serves."""
    if isinstance(leaf, Tensor):
        shape, stride = tuple(leaf.shape), leaf.stride()
        wants = leaf.requires_grad, leaf.is_leaf
        return TensorLook(type(leaf), shape, stride, leaf.dtype, leaf.device, *wants)
    if isinstance(leaf, float):  # a NaN is like itself, and -0.0 unlike 0.0
        return type(leaf), leaf.hex()
    if isinstance(leaf, complex):
        return type(leaf), leaf.real.hex(), leaf.imag.hex()
    if isinstance(leaf, slice):
        return slice, look_of(leaf.start), look_of(leaf.stop), look_of(leaf.step)
    if isinstance(leaf, (set, frozenset)):
        return type(leaf), frozenset(map(look_of, leaf))
    return type(leaf), leaf


def refuse_opaque(leaves: list[object], names: list[str]) -> None:
    """Raise CaptureError for the first leaf that may hide tensors or change unnoticed."""
    for leaf, name in zip(leaves, names, strict=True):
        inside = leaf if isinstance(leaf, (set, frozenset)) else (leaf,)
        if not isinstance(leaf, Tensor) and not all(isinstance(item, _PLAIN) for item in inside):
            raise CaptureError(
                f"argument {name!r} is a {_kind_name(leaf)}, whose contents cannot be read at each call",
                advice=f"pass {'a tensor made of it' if isinstance(leaf, np.ndarray) else 'its tensors'};"
                " tuples, lists, dicts, dataclasses and objects with plain attributes are opened",
            )


def _flattened(value: object) -> tuple[list[object], Spec]:
    outer, tree = pytree.tree_flatten(value)
    leaves, objects = list[object](), list[tuple[int, type, Spec]]()
    for position, leaf in enumerate(outer):
        contents = _contents(leaf)
        if contents is None:
            leaves.append(leaf)
            continue
        inside, spec = _flattened(contents)
        leaves += inside
        objects.append((position, type(leaf), spec))
    return leaves, Spec(tree, tuple(objects))


def _contents(leaf: object) -> dict[Any, object] | None:
    """The contents of an object by name; None for a leaf."""
    if isinstance(leaf, (Tensor, nn.Module, np.ndarray, *_PLAIN)):
        return None
    if isinstance(leaf, MutableMapping):
        return dict(leaf)
    if dataclasses.is_dataclass(leaf):
        return {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
    is_plain = type(leaf).__reduce_ex__ is object.__reduce_ex__ and not any(map(_slots, type(leaf).__mro__))
    return dict(vars(leaf)) if is_plain and hasattr(leaf, "__dict__") else None


def _slots(kind: type) -> bool:
    return bool(vars(kind).get("__slots__"))


def _rebuilt(kind: type, contents: dict[Any, object]) -> object:
    """An object of this kind with these contents. No code of a plain class runs, as a copy would."""
    if issubclass(kind, MutableMapping):
        made_of: Callable[..., object] = kind
        return made_of(contents)
    made: object = object.__new__(kind)
    for name, value in contents.items():
        object.__setattr__(made, name, value)
    return made


def _paths(value: object, positional: list[str]) -> Iterator[list[str]]:
    for path, leaf in pytree.tree_flatten_with_path(value)[0]:
        side, key, *inner = (str(key).strip("[].'") for key in path)
        outer = [positional[int(key)] if side == "0" else key, *inner]
        contents = _contents(leaf)
        if contents is None:
            yield outer
        else:  # as keyword arguments, whose names are their own
            yield from ([*outer, *found] for found in _paths(((), contents), []))


def _kind_name(leaf: object) -> str:
    kind = type(leaf)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
