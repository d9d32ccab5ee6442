"""Tensor, Op, Graph: what a training step reads, writes and runs, in an executable order.

`validate` holds a graph to the rules of a legal one. It names the first broken rule and shows the ops around
it.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import TypeAlias

from stowplan.errors import InvalidGraph

Shape: TypeAlias = tuple[int, ...]
Attribute: TypeAlias = "bool | int | float | str | tuple[Attribute, ...] | Mapping[str, Attribute] | None"
Attributes: TypeAlias = Mapping[str, Attribute]


class Kind(StrEnum):
    """The part that a tensor has in the training step."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    CONSTANT = "constant"
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    MASK = "mask"
    WORKSPACE = "workspace"


class Phase(StrEnum):
    """Which part of the training step an op belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"
    TRANSFER = "transfer"
    LAYOUT = "layout"


class Role(StrEnum):
    """How an op uses a tensor.

    Inputs: DATA is read; SAVED is read and was kept from the forward half for it; SHAPE needs only the
    shape, CONTROL only the order: neither keeps the tensor alive.
    Outputs: DATA is made by the op; ACCUMULATE is added into a tensor that an earlier op made.
    """

    DATA = "data"
    SAVED = "saved"
    SHAPE = "shape"
    CONTROL = "control"
    ACCUMULATE = "accumulate"


class DType(StrEnum):
    """Element types, by PyTorch's names."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8 = "float8"
    COMPLEX128 = "complex128"
    COMPLEX64 = "complex64"
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    UINT64 = "uint64"
    UINT32 = "uint32"
    UINT16 = "uint16"
    UINT8 = "uint8"
    BOOL = "bool"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]

    @property
    def is_complex(self) -> bool:
        """Whether elements have an imaginary part."""
        return self in (DType.COMPLEX64, DType.COMPLEX128)

    @property
    def is_inexact(self) -> bool:
        """Whether elements are rounded, so that they may have a gradient."""
        return self.is_complex or self.startswith(("float", "bfloat"))


_ITEMSIZE = {
    DType.FLOAT64: 8,
    DType.FLOAT32: 4,
    DType.FLOAT16: 2,
    DType.BFLOAT16: 2,
    DType.FLOAT8: 1,
    DType.COMPLEX128: 16,
    DType.COMPLEX64: 8,
    DType.INT64: 8,
    DType.INT32: 4,
    DType.INT16: 2,
    DType.INT8: 1,
    DType.UINT64: 8,
    DType.UINT32: 4,
    DType.UINT16: 2,
    DType.UINT8: 1,
    DType.BOOL: 1,
}


def bytes_of_shape(shape: Shape, dtype: DType) -> int:
    """Bytes of a dense tensor."""
    return prod(shape) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Tensor:
    """One value or gradient. A reader may not know `shape` and `nbytes`; inference fills them in.

    `gradient_of` names the tensor whose gradient this is; `alias_of` the tensor whose storage it shares.
    """

    id: str
    kind: Kind
    shape: Shape | None = None
    dtype: DType | None = None
    nbytes: int | None = None
    name: str = ""
    layout: str = ""
    device: str = ""
    gradient_of: str | None = None
    alias_of: str | None = None


@dataclass(frozen=True, slots=True)
class Use:
    """One tensor in one op's list of inputs or outputs."""

    tensor: str
    role: Role = Role.DATA


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. `adjoint_of` names the forward op that a backward op differentiates.

    `scope` is the path of the module it came from and `source` the user's "file:line", where known.
    """

    id: str
    type: str
    phase: Phase
    inputs: tuple[Use, ...] = ()
    outputs: tuple[Use, ...] = ()
    attributes: Attributes = field(default_factory=dict)
    device: str = ""
    adjoint_of: str | None = None
    scope: str = ""
    source: str = ""

    def reads(self) -> Iterator[str]:
        """The tensors whose values the op needs while it runs."""
        return (use.tensor for use in self.inputs if use.role in (Role.DATA, Role.SAVED))

    def writes(self) -> Iterator[str]:
        """The tensors the op makes or adds into."""
        return (use.tensor for use in self.outputs)


@dataclass(frozen=True, slots=True)
class Graph:
    """Tensors by id and ops in an executable order.

    `held` are the tensors that are held outside when the step ends: results, parameter gradients, and inputs
    that the caller keeps. Parameters, buffers and constants are held without being named.
    """

    tensors: Mapping[str, Tensor]
    ops: tuple[Op, ...]
    held: frozenset[str] = frozenset()
    name: str = ""
    _storages: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def has_backward(self) -> bool:
        """Whether there is a backward half."""
        return any(op.phase is Phase.BACKWARD for op in self.ops)

    def storage_of(self, name: str) -> str:
        """The tensor that owns the storage of tensor `name`: the end of its chain of `alias_of`."""
        owner = self._storages.get(name)
        if owner is None:
            base = self.tensors[name].alias_of
            owner = self._storages[name] = name if base is None else self.storage_of(base)
        return owner


def attribute_of(value: object) -> Attribute:
    """A decoded JSON value as an attribute: lists become tuples, at every depth."""
    if isinstance(value, list | tuple):
        return tuple(attribute_of(item) for item in value)
    if isinstance(value, dict):
        return {str(key): attribute_of(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} is not an attribute")


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector while a graph is built: all of its many objects stay alive."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def object_without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object from its members (`object_pairs_hook`); a repeated key is a ValueError."""
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} comes twice")
        found[key] = value
    return found


_RESIDENT = (Kind.PARAMETER, Kind.BUFFER, Kind.INPUT, Kind.CONSTANT)
_INPUT_ROLES = (Role.DATA, Role.SAVED, Role.SHAPE, Role.CONTROL)
_OUTPUT_ROLES = (Role.DATA, Role.ACCUMULATE)
_MOST_DIMS = 64
_DEEPEST_ATTRIBUTE = 32
_LONGEST_ALIAS = 256
_LARGEST_INTEGER = 2**128


@dataclass(frozen=True, slots=True)
class Fault:
    """A broken rule: what is wrong, and at which op or tensor."""

    what: str
    op: int | None = None


def validate(graph: Graph) -> Graph:
    """`graph` itself if it is legal; raises InvalidGraph otherwise."""
    for rule in RULES:
        for fault in rule(graph):
            raise InvalidGraph(f"{rule.__name__}: {fault.what}{_neighbourhood(graph, fault.op)}")
    return graph


def _neighbourhood(graph: Graph, position: int | None) -> str:
    if position is None:
        return ""
    lines = []
    for index in range(max(0, position - 2), min(len(graph.ops), position + 3)):
        op = graph.ops[index]
        reads, writes = (_shortened([use.tensor for use in uses]) for uses in (op.inputs, op.outputs))
        lines.append(f"{'>' if index == position else ' '} {index}: {writes} = {op.type}({reads})  # {op.id}")
    return "\n" + "\n".join(lines)


def _shortened(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f", ... {len(names) - 6} more" if len(names) > 6 else "")


def ids_match_keys(graph: Graph) -> Iterator[Fault]:
    """Every tensor is filed under its own id, op ids are unique, and no id is empty."""
    for key, tensor in graph.tensors.items():
        if key != tensor.id or not key:
            yield Fault(f"tensor {tensor.id!r} is filed under {key!r}")
    seen: set[str] = set()
    for position, op in enumerate(graph.ops):
        if op.id in seen or not op.id:
            yield Fault(f"op id {op.id!r} is used twice or empty", position)
        seen.add(op.id)


def sizes_are_possible(graph: Graph) -> Iterator[Fault]:
    """Shapes are short, shapes and bytes are not negative, and elements and all bytes fit 62 bits."""
    total = 0
    for tensor in graph.tensors.values():
        if tensor.shape and len(tensor.shape) > _MOST_DIMS:
            yield Fault(f"tensor {tensor.id!r} has {len(tensor.shape)} dims, more than {_MOST_DIMS}")
            return  # what follows would multiply and print them all
        if tensor.shape and min(tensor.shape) < 0:
            yield Fault(f"tensor {tensor.id!r} has a negative size in {tensor.shape}")
        if tensor.shape and prod(tensor.shape) >= 2**62:
            yield Fault(f"tensor {tensor.id!r} cannot have the elements of {tensor.shape}")
        if tensor.nbytes is not None and not 0 <= tensor.nbytes < 2**62:
            yield Fault(f"tensor {tensor.id!r} has {tensor.nbytes} bytes")
        total += (tensor.nbytes or 0) if tensor.alias_of is None else 0
    if total >= 2**62:
        yield Fault(f"its tensors have {total} bytes together, more than any machine has")


def attributes_are_modest(graph: Graph) -> Iterator[Fault]:
    """Attributes nest a few levels deep, and their integers have no thousands of digits."""
    for position, op in enumerate(graph.ops):
        level, depth = list(op.attributes.values()), 0
        while level:
            if any(isinstance(value, int) and abs(value) > _LARGEST_INTEGER for value in level):
                yield Fault(f"op {op.id!r} has an attribute with an integer of more than 128 bits", position)
            if depth > _DEEPEST_ATTRIBUTE:
                yield Fault(
                    f"op {op.id!r} has an attribute nested deeper than {_DEEPEST_ATTRIBUTE}", position
                )
                break
            level, depth = [inner for value in level for inner in _inside(value)], depth + 1


def _inside(value: Attribute) -> Iterable[Attribute]:
    return value if isinstance(value, tuple) else value.values() if isinstance(value, Mapping) else ()


def uses_name_tensors(graph: Graph) -> Iterator[Fault]:
    """Every use names a tensor of the graph in a role of its side."""
    tensors = graph.tensors
    for position, op in enumerate(graph.ops):
        for use in op.inputs:
            if use.tensor not in tensors:
                yield Fault(f"op {op.id!r} reads unknown tensor {use.tensor!r}", position)
            if use.role not in _INPUT_ROLES:
                yield Fault(f"op {op.id!r} cannot read {use.tensor!r} as {use.role}", position)
        for use in op.outputs:
            if use.tensor not in tensors:
                yield Fault(f"op {op.id!r} writes unknown tensor {use.tensor!r}", position)
            if use.role not in _OUTPUT_ROLES:
                yield Fault(f"op {op.id!r} cannot write {use.tensor!r} as {use.role}", position)


def order_is_executable(graph: Graph) -> Iterator[Fault]:
    """One op makes each tensor, before anything reads it or adds into it."""
    made: dict[str, str] = {}
    produced = {use.tensor for op in graph.ops for use in op.outputs if use.role is Role.DATA}
    for position, op in enumerate(graph.ops):
        for use in op.inputs:
            if use.role is not Role.SHAPE and use.tensor in produced and use.tensor not in made:
                yield Fault(f"op {op.id!r} reads {use.tensor!r} before it is made", position)
        for use in op.outputs:
            if use.role is Role.ACCUMULATE:
                if use.tensor not in made:
                    yield Fault(f"op {op.id!r} adds into {use.tensor!r} before it is made", position)
            elif use.tensor in made:
                yield Fault(f"{use.tensor!r} is made by {made[use.tensor]!r} and by {op.id!r}", position)
            else:
                made[use.tensor] = op.id


def makers_fit_kinds(graph: Graph) -> Iterator[Fault]:
    """Parameters, buffers, inputs and constants come from outside: no op makes them."""
    for position, op in enumerate(graph.ops):
        for use in op.outputs:
            tensor = graph.tensors[use.tensor]
            if tensor.kind in _RESIDENT and tensor.alias_of is None:
                yield Fault(f"op {op.id!r} makes {use.tensor!r}, a {tensor.kind}", position)


def links_name_things(graph: Graph) -> Iterator[Fault]:
    """gradient_of, alias_of, adjoint_of and held name things of the graph; aliases end at a storage."""
    tensors = graph.tensors
    for tensor in tensors.values():
        for link in (tensor.gradient_of, tensor.alias_of):
            if link is not None and link not in tensors:
                yield Fault(f"tensor {tensor.id!r} refers to unknown tensor {link!r}")
    yield from _alias_cycles(tensors)
    phases = {op.id: op.phase for op in graph.ops}
    for position, op in enumerate(graph.ops):
        if op.adjoint_of is not None and phases.get(op.adjoint_of) is not Phase.FORWARD:
            yield Fault(f"op {op.id!r} is adjoint of {op.adjoint_of!r}, not a forward op", position)
    for name in graph.held:
        if name not in tensors:
            yield Fault(f"held tensor {name!r} is unknown")


def _alias_cycles(tensors: Mapping[str, Tensor]) -> Iterator[Fault]:
    links: dict[str, int] = {}  # how far each tensor is from its storage
    for start in tensors:
        path: dict[str, None] = {}
        name: str | None = start
        while name is not None and name not in links:
            if name in path:
                yield Fault(f"alias_of of {start!r} runs in a circle")
                break
            path[name] = None
            name = tensors[name].alias_of if name in tensors else None
        for passed in reversed(path):
            links[passed] = links.get(tensors[passed].alias_of or "", 0) + 1 if passed in tensors else 0
        if links[start] > _LONGEST_ALIAS:
            yield Fault(f"{start!r} is more than {_LONGEST_ALIAS} views away from its storage")


RULES: tuple[Callable[[Graph], Iterator[Fault]], ...] = (
    ids_match_keys,
    sizes_are_possible,
    attributes_are_modest,
    uses_name_tensors,
    links_name_things,
    makers_fit_kinds,
    order_is_executable,
)
