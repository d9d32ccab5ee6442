"""Program: a captured step as calls that PyTorch can run, next to the Graph that plans are made on.

A Handle is an object that an op of stowplan needs, such as a sweep; the op receives a string for it. Only the
call holds the handle: two steps never share one, and it dies with its step. Graphs, plans and prices know the
handle by its name, which does not depend on the process.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from stowplan.capture.arguments import Spec
from stowplan.capture.schema import bound_arguments, leaves, tensor_names
from stowplan.errors import BadUse
from stowplan.ir import Attribute
from stowplan.torch_private import OpOverload, TreeSpec, schema_of

_numbers = count(1)


class Handle:
    """`name` tells what is computed; `key`, which ops receive, is unique in this process.

    The key is part of generated code: it begins with a `title` that contains no name of the user's.
    `added_seconds` are those that eager does not take for the same.
    """

    name: str
    key: str
    added_seconds: float = 0.0

    def __init__(self, name: str, title: str) -> None:
        self._title = title
        self.identify(name)

    def identify(self, name: str) -> None:
        """Take a name and a new key: a copy that computes something else is another handle."""
        self.name, self.key = name, f"{self._title} #{next(_numbers)}"
        _living[self.key] = self


_living: WeakValueDictionary[str, Handle] = WeakValueDictionary()


def handle_or_text(text: str) -> Handle | str:
    """The handle whose key this is, or the text itself."""
    return _living.get(text, text)


def handle_of(key: str) -> Handle:
    """The handle that an op received by its key; BadUse if its step no longer exists."""
    found = _living.get(key)
    if found is None:
        raise BadUse(f"{key!r} belongs to a step that no longer exists or to another process; call fit again")
    return found


def living_handles() -> int:
    """The number of handles in this process."""
    return len(_living)


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor of the graph, by id, in the arguments of a call."""

    tensor: str


Argument: TypeAlias = (
    "Ref | Handle | tuple[Argument, ...] | bool | int | float | complex | str"
    " | torch.dtype | torch.device | torch.layout | torch.memory_format | torch.Generator | None"
)


@dataclass(frozen=True, slots=True)
class Call:
    """One op of the graph as a call whose only effect is to make its outputs.

    `outputs` are tensor ids, None where the op makes no tensor. A `single` op returns the tensor itself, the
    others a tuple. `fresh` names arguments that the target overwrites, so the caller passes copies: some ops
    exist in PyTorch only in place. The result of a `copied` op is copied at once, because the op leaves it in
    a larger storage.
    """

    target: OpOverload
    args: tuple[Argument, ...]
    kwargs: Mapping[str, Argument]
    outputs: tuple[str | None, ...]
    single: bool
    fresh: tuple[str, ...] = ()
    copied: bool = False

    @staticmethod
    def by_name(
        target: OpOverload, given: Mapping[str, Argument], outputs: tuple[str | None, ...] = ()
    ) -> "Call":
        """A call with these arguments, in the order of the schema; its results are a list."""
        args = tuple(given[argument.name] for argument in schema_of(target).arguments)
        return Call(target, args, {}, outputs, single=False)

    def arguments(self) -> dict[str, object]:
        """Every argument of the schema by name, with the schema's default where it was omitted."""
        return bound_arguments(self.target, self.args, self.kwargs)

    def replacing(self, given: Mapping[str, Argument]) -> "Call":
        """The same call with other values of the arguments that `given` names."""
        names = [argument.name for argument in schema_of(self.target).arguments]
        args = tuple(given.get(name, value) for name, value in zip(names, self.args, strict=False))
        return replace(self, args=args, kwargs={name: given.get(name, v) for name, v in self.kwargs.items()})


@dataclass(frozen=True, slots=True)
class Program:
    """The calls of a graph by op id, and the bindings of its inputs and outputs.

    Tensors are named by their ids in the graph. `parameters` and `buffers` give every name that the model has
    for a tensor. `inputs` and `tangents` are by position among the leaves of the arguments and of the outputs
    (None: not a tensor, or no gradient comes in there). `outputs` are the leaves of the step's result: a Ref,
    or a value that is always the same; `attached` outputs take part in autograd. `gradients` maps each
    differentiated tensor to its gradient, `updates` each changed external tensor to its new contents.
    Constants are tensors that the step's code refers to; `literals` are those written as numbers. A program
    that `looks_at_values` of known integers has branched on them.
    """

    calls: Mapping[str, Call]
    parameters: Mapping[str, tuple[str, ...]]
    buffers: Mapping[str, tuple[str, ...]]
    constants: Mapping[str, Tensor]
    inputs: tuple[str | None, ...]
    input_spec: Spec
    outputs: tuple[object, ...]
    attached: tuple[bool, ...]
    output_spec: TreeSpec
    tangents: tuple[str | None, ...]
    gradients: Mapping[str, str]
    updates: Mapping[str, str] = field(default_factory=dict)
    literals: frozenset[str] = frozenset()
    looks_at_values: bool = False


def inputs_of(call: Call) -> Iterator[str]:
    """The ids of the tensors a call reads, in the order of its schema; lists are flattened."""
    for value in call.arguments().values():
        for leaf in leaves(value):
            if isinstance(leaf, Ref):
                yield leaf.tensor


def reading(call: Call, names: Mapping[str, str]) -> Call:
    """The call with other tensors in place of some that it reads."""
    if not names:
        return call
    args = tuple(_reading(value, names) for value in call.args)
    kwargs = {name: _reading(value, names) for name, value in call.kwargs.items()}
    return replace(call, args=args, kwargs=kwargs)


def _reading(value: Argument, names: Mapping[str, str]) -> Argument:
    if isinstance(value, Ref):
        return Ref(names.get(value.tensor, value.tensor))
    if isinstance(value, tuple):
        return tuple(_reading(item, names) for item in value)
    return value


def attributes_of(call: Call) -> dict[str, Attribute]:
    """The arguments that are not tensors, by the schema's names, with defaults filled in.

    A missing optional tensor is None. A list with gaps shows for each item its position among the op's
    inputs, or None.
    """
    attributes: dict[str, Attribute] = {}
    tensors = 0
    for name, value in call.arguments().items():
        found = [leaf for leaf in leaves(value) if isinstance(leaf, Ref)]
        if name not in tensor_names(call.target):
            attributes[name] = _attribute(value)
        elif not found:
            attributes[name] = None if value is None else ()
        elif isinstance(value, tuple) and None in value:
            places = iter(range(tensors, tensors + len(found)))
            attributes[name] = tuple(None if item is None else next(places) for item in value)
        tensors += len(found)
    return attributes


def _attribute(value: object) -> Attribute:
    if isinstance(value, (tuple, list)):
        return tuple(_attribute(item) for item in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Handle):
        return value.name
    return "generator" if isinstance(value, torch.Generator) else str(value)


def filled(value: Argument, values: Mapping[str, object]) -> object:
    """An argument of a call as its target takes it, with tensors in place of their names."""
    match value:
        case Ref(name):
            return values[name]
        case Handle():
            return value.key
        case tuple():
            return [filled(item, values) for item in value]
        case _:
            return value


def outputs_by_name(call: Call, made: object, written: Sequence[Tensor]) -> dict[str, Tensor]:
    """What a call gives, from the result of its target and the arguments that were written.

    A target that overwrites arguments may return them as well: they come once, among those written.
    """
    results = [made] if call.single else [*made] if isinstance(made, (tuple, list)) else []
    pairs = zip(call.outputs, (*results[: len(call.outputs) - len(written)], *written), strict=True)
    return {name: tensor for name, tensor in pairs if name is not None and isinstance(tensor, Tensor)}


def copies_of_written(call: Call, args: list[object], kwargs: dict[str, object]) -> list[Tensor]:
    """Copies in place of the arguments that the target overwrites; they are its last outputs."""
    order = [argument.name for argument in schema_of(call.target).arguments]
    copies = []
    for name in call.fresh:
        position = order.index(name)
        source = args[position] if position < len(args) else kwargs[name]
        assert isinstance(source, Tensor)
        copies.append(source.clone())
        if position < len(args):
            args[position] = copies[-1]
        else:
            kwargs[name] = copies[-1]
    return copies
