"""An op's inputs and attributes as the Graph wants them: tensors in schema order, the rest by name."""

from collections.abc import Iterator

import torch

from stowplan.capture.handles import Handle
from stowplan.capture.program import Call, Ref
from stowplan.capture.schema import bound_arguments, leaves, tensor_names
from stowplan.ir import Attribute


def inputs_of(call: Call) -> Iterator[str]:
    """The ids of the tensors a call reads, in the order of its schema; lists are laid out flat."""
    for value in bound_arguments(call.target, call.args, call.kwargs).values():
        for leaf in leaves(value):
            if isinstance(leaf, Ref):
                yield leaf.tensor


def attributes_of(call: Call) -> dict[str, Attribute]:
    """What is not a tensor, by the schema's names, with defaults filled in.

    An optional tensor that is missing is None; a list with gaps shows for each item its position among the
    op's inputs, or None.
    """
    attributes: dict[str, Attribute] = {}
    tensors = 0
    for name, value in bound_arguments(call.target, call.args, call.kwargs).items():
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
