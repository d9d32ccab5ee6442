"""Program: a captured step as calls that PyTorch can run, next to the Graph that plans are made on.

A Handle is an object that an op of stowplan needs, such as a sweep; the op receives a string for it. Only the
call holds the handle: two steps never share one, and it dies with its step. Graphs, plans and prices know the
handle by its name, which does not depend on the process.

An op's schema names its arguments, their types and those that are written. It omits running statistics that
batch norm updates, the functional variant of an in-place op, and results in storages that are larger than the
result: some ops allocate as much as their operands take and shrink the result without freeing memory, so that
in eager a loss of one number holds a megabyte. A plan copies such a result out at once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from math import prod
from typing import TypeAlias
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from stowplan.capture.stand_ins import Spec, StorageView
from stowplan.errors import BadUse
from stowplan.ir import Attribute
from stowplan.ops.aten import RANDOM
from stowplan.torch_private import OpOverload, OpOverloadPacket, TreeSpec, below_autograd, schema_of

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
    for position, (name, default) in enumerate(_named_defaults(target)):
        bound[name] = args[position] if position < len(args) else kwargs.get(name, default)
    return bound


@cache
def _named_defaults(target: OpOverload) -> tuple[tuple[str, object], ...]:
    return tuple((argument.name, argument.default_value) for argument in schema_of(target).arguments)


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
    if (
        target is aten.mul_.Scalar
    ):  # rounds the number to a tensor's 16 bits first, which `mul.Scalar` does not
        return None
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


_numbers = count(1)


class Handle:
    """`name` tells what is computed; `key`, which ops receive, is unique in this process.

    The key is part of generated code: it begins with a `title` that contains no name of the user's. Handles
    with the same `likeness` cost the same on operands of the same shape, dtype and layout; prices are kept by
    it. `added_seconds` are those that eager does not take for the same.
    """

    name: str
    key: str
    likeness: str
    added_seconds: float = 0.0

    def __init__(self, name: str, title: str, likeness: str = "") -> None:
        self._title = title
        self.identify(name, likeness)

    def identify(self, name: str, likeness: str = "") -> None:
        """Take a name and a new key: a copy that computes something else is another handle."""
        self.name, self.likeness = name, likeness or name
        self.key = f"{self._title} #{next(_numbers)}"
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

    @property
    def is_differentiated(self) -> bool:
        """Whether a gradient comes in; if not, the step is forward alone."""
        return any(tangent is not None for tangent in self.tangents)


def inputs_of(call: Call) -> Iterator[str]:
    """The ids of the tensors a call reads, in the order of its schema; lists are flattened."""
    values = call.arguments().values() if call.kwargs else call.args  # defaults are no tensors
    for value in values:
        if isinstance(value, Ref):
            yield value.tensor
        elif isinstance(value, tuple | list):
            yield from (leaf.tensor for leaf in leaves(value) if isinstance(leaf, Ref))


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
