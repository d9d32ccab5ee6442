"""Facts about an op from its schema, and facts that the schema omits.

The schema names the arguments, their types and those that are written. It omits running statistics that batch
norm updates, the functional variant of an in-place op, and results in storages that are larger than the
result: some ops allocate as much as their operands take and shrink the result without freeing memory, so that
in eager a loss of one number holds a megabyte. A plan copies such a result out at once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from math import prod

import numpy as np
import torch
from torch import Tensor

from stowplan.capture.storage_views import StorageView
from stowplan.ops.aten import RANDOM
from stowplan.torch_private import OpOverload, OpOverloadPacket, below_autograd, schema_of

aten = torch.ops.aten

# Ops that update running statistics although their schema does not say so, and only while training.
_SILENTLY_WRITTEN = {
    aten.native_batch_norm.default: ("running_mean", "running_var"),
    aten.cudnn_batch_norm.default: ("running_mean", "running_var"),
    aten.miopen_batch_norm.default: ("running_mean", "running_var"),
}


def bound_arguments(
    target: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """Every argument of the schema by name, with the schema's default where it was omitted."""
    bound: dict[str, object] = {}
    for position, argument in enumerate(schema_of(target).arguments):
        if position < len(args):
            bound[argument.name] = args[position]
        else:
            bound[argument.name] = kwargs.get(argument.name, argument.default_value)
    return bound


def draws(target: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether a call may draw random numbers, by PyTorch's tag, which misses a few ops.

    The tag of attention does not tell that it draws only for dropout, and that its backward is given what was
    drawn.
    """
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return str(target) in RANDOM
    bound = bound_arguments(target, args, kwargs)
    return bound.get("dropout_p") != 0.0 and "philox_seed" not in bound


# They take no more of a tensor than its look: `ones_like(h, dtype=torch.long)` is known although h is not.
FILLING: Mapping[OpOverload, int] = {
    torch.ops.aten.ones_like.default: 1,
    torch.ops.aten.zeros_like.default: 0,
    torch.ops.aten.full_like.default: 0,
    torch.ops.aten.new_ones.default: 1,
    torch.ops.aten.new_zeros.default: 0,
    torch.ops.aten.new_full.default: 0,
}


def fill_value(target: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """The number that one of the ops above fills its result with."""
    return bound_arguments(target, args, kwargs).get("fill_value", FILLING[target])


ASKING_FOR_GRADIENTS = frozenset((torch.ops.aten.mkldnn_rnn_layer.default,))
"""Ops whose kernels return less when gradients are not enabled, as they are not in backward."""


def as_in_forward(target: OpOverload, *args: object, **kwargs: object) -> object:
    """The result of an op with gradients enabled, of which nothing is recorded."""
    with below_autograd(), torch.enable_grad():
        return target(*args, **kwargs)


@cache
def written_names(target: OpOverload) -> tuple[str, ...]:
    """The arguments that the schema marks as written to."""
    return tuple(
        argument.name
        for argument in schema_of(target).arguments
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
    return [(argument.name, str(argument.type)) for argument in schema_of(target).arguments]


@cache
def tensor_names(target: OpOverload) -> frozenset[str]:
    """The arguments that are tensors, optional tensors or lists of them."""
    return frozenset(
        argument.name for argument in schema_of(target).arguments if "Tensor" in str(argument.type)
    )


@cache
def returns_tensors(target: OpOverload) -> bool:
    """Whether the op returns tensors, not numbers or nothing."""
    return any("Tensor" in str(returned.type) for returned in schema_of(target).returns)


@cache
def returns_views(target: OpOverload) -> bool:
    """Whether the results share the memory of an argument that is not written."""
    returned = schema_of(target).returns
    return bool(returned) and all(r.alias_info is not None and not r.alias_info.is_write for r in returned)


def leaves(value: object) -> Iterator[object]:
    """The values in a nest of tuples and lists, left to right."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves(item)
    else:
        yield value


IRREGULAR: Mapping[OpOverload, OpOverload] = {aten.normal_.default: aten.normal_functional.default}


@cache
def functional_variant(target: OpOverload) -> OpOverload | None:
    """`relu` for `relu_`, `bernoulli.p` for `bernoulli_.float`; None where PyTorch has no such op."""
    if target in IRREGULAR:
        return IRREGULAR[target]
    namespace, _, name = schema_of(target).name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    if not name.endswith("_") or not isinstance(packet, OpOverloadPacket):
        return None
    wanted = signature_of(target)
    return next((candidate for candidate in overloads_of(packet) if signature_of(candidate) == wanted), None)


def result_stride(
    target: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[int, ...]:
    """The strides of the tensor that a functional op returns for arguments with these storage views."""
    given = {name: _on_meta(value) for name, value in kwargs.items()}
    with torch.no_grad():
        result: Tensor = target(*map(_on_meta, args), **given)
    return result.stride()


def _on_meta(value: object) -> object:
    if isinstance(value, StorageView):
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")
    if isinstance(value, tuple):
        return [_on_meta(item) for item in value]
    return value


# Their result is in a storage for the broadcast of their operands, unless the result itself is larger.
_LIKE_OPERANDS = frozenset(
    (
        aten.mse_loss.default,
        aten.smooth_l1_loss.default,
        aten.binary_cross_entropy.default,
        aten.soft_margin_loss.default,
        aten.im2col.default,
        aten.col2im.default,
    )
)


def is_copied_out(target: OpOverload, result: StorageView, storage_bytes: int) -> bool:
    """Whether the single result of an op is worth a copy, so that its storage can be freed."""
    return target in _LIKE_OPERANDS and storage_bytes > result.extent_bytes()


def extra_bytes(
    target: OpOverload,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    results: Sequence[StorageView | None],
) -> Iterator[tuple[StorageView, int]]:
    """Results in storages larger than they span, with the bytes by which these are larger."""
    for made in results if target in _LIKE_OPERANDS else ():
        operands = [leaf.shape for leaf in leaves(tuple(args)) if isinstance(leaf, StorageView)]
        if made is not None:
            nbytes = prod(np.broadcast_shapes(*operands)) * made.dtype.itemsize
            yield made, max(0, nbytes - made.extent_bytes())
    if target is aten._embedding_bag.default:  # positions of bags include the end of the last one
        _, positions, sizes, _ = results
        if positions is not None and 0 not in positions.shape:
            yield positions, positions.dtype.itemsize
        if sizes is not None and bound_arguments(target, args, kwargs)["include_last_offset"]:
            yield sizes, sizes.dtype.itemsize
