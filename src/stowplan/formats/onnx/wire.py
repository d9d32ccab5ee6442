"""Protocol buffers on the wire: the fields of one message as (number, value) pairs.

A value is an integer or bytes; the reader of the message knows its meaning. Nothing is nested here, so
nothing can nest too deeply.
"""

import struct
from collections.abc import Iterator
from typing import TypeAlias

from stowplan.errors import BadInput

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
