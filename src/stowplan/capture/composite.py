"""Composite tensors: sparse ones and wrapper subclasses, opened into the plain tensors that they are made of.

A quantised weight is an object with scales and packed numbers inside: a wrapper subclass. Its class says by
`__tensor_flatten__` which tensors are inside, and by `__tensor_unflatten__` how they make another one. A plan
counts these inner tensors, tells where their bytes lie, and reads them anew at each call. What else
`__tensor_flatten__` gives belongs to the form of the call, as do size, strides and dtype.

While a step is captured, a wrapper is an object of the same class around stand-ins. Its class then does what
it does in eager: it runs ops on the inner tensors, and these are the ops of the captured step. So the copy
that it unpacks is a tensor like any other, which a plan may free and compute again.
"""

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from functools import cache
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from stowplan.capture.sparse import contents_of_sparse, is_sparse, sparse_with
from stowplan.torch_private import FakeTensor, OpOverload, below, mark_parameter

_NAMES = "_stowplan_names"  # of a stand-in's attributes that are the user's
_FORM = "(form)"  # among the contents of a wrapper, beside the names of its inner tensors


@dataclass(frozen=True, slots=True)
class _Shell:
    """What a wrapper is beside its inner tensors. `metadata` is what its class gives with their names."""

    kind: type[Any]
    metadata: object
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    is_parameter: bool
    requires_grad: bool


def is_wrapper(kind: type) -> bool:
    """Whether tensors of a class are made of others, and the class says how."""
    return callable(getattr(kind, "__tensor_flatten__", None)) and hasattr(kind, "__tensor_unflatten__")


def is_divided(kind: type) -> bool:
    """Whether tensors of a class are in parts on several workers."""
    return kind.__module__.startswith("torch.distributed.")


def is_composite(tensor: Tensor) -> bool:
    """Whether a tensor is opened into others."""
    return is_sparse(tensor) or is_wrapper(type(tensor))


def has_attachments(kind: type) -> bool:
    """Whether parameters of a class may hold tensors in attributes: packages keep scales of weights there."""
    own = issubclass(kind, nn.Parameter) and kind is not nn.Parameter
    return own and not kind.__module__.startswith("torch.")


def attributes_of(tensor: Tensor) -> dict[str, object]:
    """What a class of the user's keeps in attributes of a parameter; the same for a stand-in."""
    held = vars(tensor)
    return {name: held[name] for name in held.get(_NAMES, held)}


def stand_in_with(made: FakeTensor, kind: type, attributes: Mapping[str, object]) -> Tensor:
    """A stand-in that is of the user's class too, with these attributes."""
    fake: Any = FakeTensor
    seen: Tensor = fake.__new__(_stand_in_class(kind), made.fake_mode, below(made), made.device)
    for name, value in (*attributes.items(), (_NAMES, tuple(attributes))):
        vars(seen)[name] = value
    return seen


@cache
def _stand_in_class(kind: type) -> type:
    return type(kind.__name__, (kind, FakeTensor), {"__module__": kind.__module__})


def attached_to(holder: object, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in attributes of a parameter and of plain objects there, each with its path."""
    held = attributes_of(holder) if isinstance(holder, Tensor) else vars(holder)
    for name, value in held.items():
        if isinstance(value, Tensor):
            yield f"{path}{name}", value
        elif hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type, Enum)):
            yield from attached_to(value, f"{path}{name}.")


def contents_of(tensor: Tensor) -> dict[str, object]:
    """The form and the parts of a composite tensor, by name; the parts of a stand-in are stand-ins."""
    if is_sparse(tensor):
        return contents_of_sparse(tensor)
    wrapper: Any = tensor
    names, metadata = wrapper.__tensor_flatten__()
    look = tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
    form = _Shell(type(tensor), metadata, *look, isinstance(tensor, nn.Parameter), tensor.requires_grad)
    return {_FORM: form} | {name: getattr(wrapper, name) for name in names}


def composite_with(contents: Mapping[str, Any]) -> Tensor:
    """The composite tensor of this form with these parts; without data if they are."""
    form = contents.get(_FORM)
    if form is None:
        return sparse_with(contents)
    parts = {name: part for name, part in contents.items() if name != _FORM}
    with torch.no_grad():
        made: Tensor = form.kind.__tensor_unflatten__(parts, form.metadata, form.size, form.stride)
    return mark_parameter(made) if form.is_parameter else made


def parts_of(tensor: Tensor) -> dict[str, Tensor]:
    """The tensors that a composite one is made of, by name."""
    return {name: part for name, part in contents_of(tensor).items() if isinstance(part, Tensor)}


def opened(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The tensors, with the parts of composite ones in their place."""
    for tensor in tensors:
        if is_composite(tensor):
            yield from opened(parts_of(tensor).values())
        else:
            yield tensor
        if has_attachments(type(tensor)):
            yield from opened(held for _, held in attached_to(tensor))


def opened_by_name(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same for tensors by name: `adjacency.indices` and `adjacency.values` for a sparse `adjacency`."""
    found = dict[str, Tensor]()
    for name, tensor in named.items():
        if is_composite(tensor):
            found.update(opened_by_name({f"{name}.{part}": held for part, held in parts_of(tensor).items()}))
        else:
            found[name] = tensor
        if has_attachments(type(tensor)):
            found.update(opened_by_name({f"{name}.{path}": held for path, held in attached_to(tensor)}))
    return found


def buffer_named(model: nn.Module, name: str) -> Tensor:
    """A buffer of a model, or a part of a composite one."""
    path, _, last = name.rpartition(".")
    held: Any = attrgetter(path)(model) if path else model
    found: Tensor = parts_of(held)[last] if isinstance(held, Tensor) else held._buffers[last]
    return found


def in_charge(types: Iterable[type[Any]]) -> list[type[Any]]:
    """The classes, among those of an op's operands, that do ops in their own way: none of them a stand-in."""
    return [kind for kind in types if not issubclass(kind, FakeTensor)]


def dispatched_by_class(
    func: OpOverload, types: Iterable[type], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> object:
    """What the classes of the operands make of an op, as PyTorch would ask them."""
    for kind in in_charge(types):
        result: object = kind.__torch_dispatch__(func, types, args, kwargs)
        if result is not NotImplemented:
            return result
    raise TypeError(f"no class among {', '.join(kind.__name__ for kind in types)} does {func}")


class SameWrapper:
    """A wrapper as it is now, to ask later whether it has the same form and the same tensors inside."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self.parts = tensor, parts_of(tensor)
        self._form = deepcopy(contents_of(tensor)[_FORM])
        self._inside = [SameWrapper(part) for part in self.parts.values() if is_wrapper(type(part))]

    def holds(self) -> bool:
        """Whether nothing about it is another; its class may keep lists that others change."""
        contents = contents_of(self._tensor)
        same = contents.pop(_FORM) == self._form and contents.keys() == self.parts.keys()
        same = same and all(map(is_, contents.values(), self.parts.values()))
        return same and all(wrapper.holds() for wrapper in self._inside)


@dataclass(frozen=True, slots=True)
class PartsIn(Mapping[str, Tensor]):
    """The parts of the composite tensor that a table has under a name, looked up each time."""

    table: Any  # a mapping or a sequence
    name: Any

    def __getitem__(self, part: str) -> Tensor:
        whole = self.table[self.name]
        is_layout = isinstance(whole, Tensor) and is_sparse(whole)
        found: Tensor = parts_of(whole)[part] if is_layout else getattr(whole, part)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(parts_of(self.table[self.name]))

    def __len__(self) -> int:
        return len(parts_of(self.table[self.name]))
