"""What an op's schema says of its arguments: which are tensors, which are written to, which were left out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

import torch
from torch._ops import OpOverload, OpOverloadPacket

aten = torch.ops.aten

# Ops that update running statistics without their schema saying so, and only while training.
_SILENTLY_WRITTEN = {
    aten.native_batch_norm.default: ("running_mean", "running_var"),
    aten.cudnn_batch_norm.default: ("running_mean", "running_var"),
    aten.miopen_batch_norm.default: ("running_mean", "running_var"),
}


def bound_arguments(
    target: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """Every argument of the schema by name, with the schema's default where it was not given."""
    bound: dict[str, object] = {}
    for position, argument in enumerate(target._schema.arguments):
        if position < len(args):
            bound[argument.name] = args[position]
        else:
            bound[argument.name] = kwargs.get(argument.name, argument.default_value)
    return bound


@cache
def written_names(target: OpOverload) -> tuple[str, ...]:
    """The arguments that the schema marks as written to."""
    return tuple(
        argument.name
        for argument in target._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def written_arguments(
    target: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """The arguments that this call writes to, by name."""
    names = written_names(target) or _SILENTLY_WRITTEN.get(target, ())
    if not names:
        return {}
    bound = bound_arguments(target, args, kwargs)
    if target in _SILENTLY_WRITTEN and not bound["training"]:
        return {}
    return {name: bound[name] for name in names if bound[name] is not None}


def overloads_of(packet: OpOverloadPacket) -> Iterator[OpOverload]:
    """The ops that share a name."""
    names: Callable[[], list[str]] = packet.overloads
    return (getattr(packet, name) for name in names())


def signature_of(target: OpOverload) -> list[tuple[str, str]]:
    """Names and types of the arguments."""
    return [(argument.name, str(argument.type)) for argument in target._schema.arguments]


@cache
def tensor_names(target: OpOverload) -> frozenset[str]:
    """The arguments that are tensors, optional tensors or lists of them."""
    return frozenset(argument.name for argument in target._schema.arguments if "Tensor" in str(argument.type))


def returns_tensors(target: OpOverload) -> bool:
    """Whether the op returns tensors, not numbers or nothing."""
    return any("Tensor" in str(returned.type) for returned in target._schema.returns)


def leaves(value: object) -> Iterator[object]:
    """The values in a nest of tuples and lists, left to right."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves(item)
    else:
        yield value
