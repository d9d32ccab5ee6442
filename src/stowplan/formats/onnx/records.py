"""The messages of an ONNX model that describe the computation: nodes, tensors, types.

Field numbers are those of onnx.proto. Weights are not read, and no other file is opened for them; only small
integers and scales are read, because shapes depend on them.

Protocol buffers on the wire: the fields of one message as (number, value) pairs.

A value is an integer or bytes; the reader of the message knows its meaning. Nothing is nested here, so
nothing can nest too deeply.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from stowplan.errors import BadInput
from stowplan.ir import Attribute

Value: TypeAlias = int | memoryview
_MOST_VARINT_BYTES = 10


def fields_of(message: memoryview, where: str) -> Iterator[tuple[int, Value]]:
    """The fields of a message in their order."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at, where)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(message, at, where)
            yield number, value
        elif kind in (1, 2, 5):
            start, at = _span(message, at, kind, where)
            yield number, message[start:at]
        else:
            raise BadInput(f"field {number} has wire type {kind}, which ONNX does not use", where=where)


def _span(message: memoryview, at: int, kind: int, where: str) -> tuple[int, int]:
    """The position of a field's bytes: eight, four, or a stated number."""
    size = {1: 8, 5: 4}.get(kind)
    if size is None:
        size, at = _varint(message, at, where)
    if at + size > len(message):
        raise BadInput(f"a field of {size} bytes where {len(message) - at} are left", where=where)
    return at, at + size


def _varint(message: memoryview, at: int, where: str) -> tuple[int, int]:
    value = 0
    for count in range(_MOST_VARINT_BYTES):
        if at + count >= len(message):
            break
        byte = message[at + count]
        value |= (byte & 0x7F) << 7 * count
        if byte < 0x80:
            return value & (2**64 - 1), at + count + 1
    raise BadInput("ends inside a number", where=where)


def signed(value: Value, where: str) -> int:
    """A varint as the int64 or int32 it stands for."""
    if isinstance(value, memoryview):
        raise BadInput("bytes where a number should be", where=where)
    return value - 2**64 if value >= 2**63 else value


def packed_integers(value: Value, where: str) -> tuple[int, ...]:
    """The elements of a repeated int64, one by one or packed."""
    if isinstance(value, int):
        return (signed(value, where),)
    numbers, at = [], 0
    while at < len(value):
        number, at = _varint(value, at, where)
        numbers.append(signed(number, where))
    return tuple(numbers)


def packed_floats(value: Value, where: str) -> tuple[float, ...]:
    """The elements of a repeated float, one by one or packed."""
    if isinstance(value, int) or len(value) % 4:
        raise BadInput("floats of another width", where=where)
    return struct.unpack(f"<{len(value) // 4}f", value)


def text(value: Value, where: str) -> str:
    """A string in UTF-8 without control characters."""
    try:
        decoded = str(message(value, where), "utf-8")
    except UnicodeDecodeError:
        raise BadInput("a string that is not UTF-8", where=where) from None
    if not decoded.isprintable():
        raise BadInput(f"a name with control characters: {decoded[:40]!r}", where=where)
    return decoded


def message(value: Value, where: str) -> memoryview:
    """The bytes of a message inside."""
    if isinstance(value, int):
        raise BadInput("a number where a message should be", where=where)
    return value


MOST_NODES = 1_000_000
_MOST_VALUES = 64  # of a constant that shapes may depend on
_FLOAT, _INT64 = 1, 7
_MOST_DIMS = 16

Dim: TypeAlias = int | str  # a size, or the name of one; "" for an unknown size


@dataclass(frozen=True, slots=True)
class TypedName:
    """A value with its element type and dims; None where the file omits them."""

    name: str
    element: int | None = None
    dims: tuple[Dim, ...] | None = None


@dataclass(frozen=True, slots=True)
class Initializer:
    """A weight or constant. `values` are its numbers, if they are few and integers or scales."""

    name: str
    element: int
    dims: tuple[int, ...]
    values: tuple[float, ...] | tuple[int, ...] | None = None
    location: str = ""  # another file that has the data


@dataclass(frozen=True, slots=True)
class Node:
    """One op. An empty name in `inputs` or `outputs` is an omitted one."""

    where: str
    name: str
    type: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Attribute]
    constant: Initializer | None = None  # what a Constant holds


@dataclass(slots=True)
class Model:
    """The main graph of a file."""

    producer: str = ""
    name: str = ""
    nodes: list[Node] = field(default_factory=list)
    initializers: list[Initializer] = field(default_factory=list)
    inputs: list[TypedName] = field(default_factory=list)
    outputs: list[TypedName] = field(default_factory=list)
    values: list[TypedName] = field(default_factory=list)


def parse(data: bytes) -> Model:
    """The model in a file; BadInput at the first malformed message."""
    model, has_graph = Model(), False
    for number, value in fields_of(memoryview(data), "model"):
        if number == 2:
            model.producer = text(value, "model.producer_name")
        elif number == 7:
            has_graph = True
            _read_graph(message(value, "model.graph"), model)
        elif number == 25:
            raise BadInput("model-local functions: export with them inlined", where="model.functions")
    if not has_graph:
        raise BadInput("no graph", where="model")
    return model


def _read_graph(data: memoryview, model: Model) -> None:
    named = {11: ("input", model.inputs), 12: ("output", model.outputs), 13: ("value_info", model.values)}
    for number, value in fields_of(data, "graph"):
        if number == 1:
            model.nodes.append(_node(message(value, "graph.node"), f"graph.node[{len(model.nodes)}]"))
        elif number == 2:
            model.name = text(value, "graph.name")
        elif number == 5:
            where = f"graph.initializer[{len(model.initializers)}]"
            model.initializers.append(_initializer(message(value, where), where))
        elif number in named:
            key, found = named[number]
            where = f"graph.{key}[{len(found)}]"
            found.append(_typed_name(message(value, where), where))
        elif number == 15:
            raise BadInput("sparse initializers", where="graph.sparse_initializer")
    if len(model.nodes) > MOST_NODES:
        raise BadInput(f"more than {MOST_NODES:,} nodes", where="graph.node")


def _node(data: memoryview, where: str) -> Node:
    inputs, outputs, words, constant = [], [], {3: "", 4: "", 7: ""}, None
    attributes: dict[str, Attribute] = {}
    for number, value in fields_of(data, where):
        if number == 1:
            inputs.append(text(value, f"{where}.input"))
        elif number == 2:
            outputs.append(text(value, f"{where}.output"))
        elif number in words:
            words[number] = text(value, where)
        elif number == 5:
            name, found = _attribute(message(value, where), where)
            if isinstance(found, Initializer):
                constant = found
            else:
                attributes[name] = found
    return Node(where, words[3], words[4], words[7], tuple(inputs), tuple(outputs), attributes, constant)


Held: TypeAlias = "Attribute | Initializer"  # what an attribute holds


def _attribute(data: memoryview, where: str) -> tuple[str, Held]:
    name = ""
    many: list[Attribute] = []
    found: Held = None
    is_list = False
    for number, value in fields_of(data, where):
        if number == 1:
            name = text(value, where)
        elif number in _SINGLE:
            found = _SINGLE[number](value, where)
        elif number in _REPEATED:
            many.extend(_REPEATED[number](value, where))
            is_list = True
        elif number in (6, 11):
            raise BadInput("holds a subgraph: a loop or a branch has no fixed order", where=where)
    return name, tuple(many) if is_list else found


def _float(value: Value, where: str) -> float:
    (number,) = packed_floats(value, where)[:1] or (0.0,)
    return number


def _word(value: Value, where: str) -> str:
    return str(message(value, where)[:1000], "utf-8", errors="replace")


def _words(value: Value, where: str) -> tuple[str, ...]:
    return (_word(value, where),)


def _tensor(value: Value, where: str) -> Initializer:
    return _initializer(message(value, where), where)


_SINGLE: dict[int, Callable[[Value, str], Held]] = {2: _float, 3: signed, 4: _word, 5: _tensor}
_REPEATED: dict[int, Callable[[Value, str], tuple[Attribute, ...]]] = {
    7: packed_floats,
    8: packed_integers,
    9: _words,
}


def _initializer(data: memoryview, where: str) -> Initializer:
    element, name, location, raw = 0, "", "", memoryview(b"")
    dims: tuple[int, ...] = ()
    listed: tuple[float, ...] | tuple[int, ...] = ()
    for number, value in fields_of(data, where):
        if number == 1:
            dims = (*dims, *packed_integers(value, where))
            _check_dims(dims, where)
        elif number == 2:
            element = signed(value, where)
        elif number == 7 and len(listed) <= _MOST_VALUES:
            listed = (*listed, *packed_integers(value, where)[: _MOST_VALUES + 1])
        elif number == 4 and len(listed) <= _MOST_VALUES:
            listed = (*listed, *packed_floats(value, where)[: _MOST_VALUES + 1])
        elif number == 8:
            name = text(value, where)
        elif number == 9:
            raw = message(value, where)
        elif number == 13:
            location = location or _location(message(value, where), where)
    return Initializer(name, element, dims, listed or _unpacked(raw, element), location)


def _check_dims(dims: tuple[Dim, ...], where: str) -> None:
    if len(dims) > _MOST_DIMS or any(isinstance(dim, int) and not 0 <= dim < 2**40 for dim in dims):
        raise BadInput(f"no tensor has the dims {dims[:8]}", where=where)


def _unpacked(raw: memoryview, element: int) -> tuple[float, ...] | tuple[int, ...] | None:
    code, width = {_FLOAT: ("f", 4), _INT64: ("q", 8)}.get(element, ("", 1))
    if not code or not raw or len(raw) > _MOST_VALUES * width or len(raw) % width:
        return None
    return struct.unpack(f"<{len(raw) // width}{code}", raw)


def _location(data: memoryview, where: str) -> str:
    entry = {number: text(value, where) for number, value in fields_of(data, where)}
    return entry.get(2, "") if entry.get(1) == "location" else ""


def _typed_name(data: memoryview, where: str) -> TypedName:
    name, element, dims = "", None, None
    for number, value in fields_of(data, where):
        if number == 1:
            name = text(value, where)
        elif number == 2:
            element, dims = _tensor_type(message(value, where), where)
    return TypedName(name, element, dims)


def _tensor_type(data: memoryview, where: str) -> tuple[int | None, tuple[Dim, ...] | None]:
    element, dims = None, None
    for number, value in fields_of(data, where):
        if number != 1:
            continue  # sequences, maps and optionals have no bytes of their own to count
        for inner, part in fields_of(message(value, where), where):
            if inner == 1:
                element = signed(part, where)
            elif inner == 2:
                entries = fields_of(message(part, where), where)
                dims = tuple(_dim(message(dim, where), where) for key, dim in entries if key == 1)
                _check_dims(dims, where)
    return element, dims


def _dim(data: memoryview, where: str) -> Dim:
    for number, value in fields_of(data, where):
        if number == 1:
            return signed(value, where)
        if number == 2:
            return text(value, where)
    return ""
