"""Damage that knows a file's structure: JSON values, protocol buffers, pickles, and contents under a digest.

Byte by byte, most damage dies at the first bracket or digest. These mutations get behind both.
"""

import json
import pickle
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cache
from hashlib import sha256
from math import prod
from random import Random
from typing import Any, TypeAlias

import msgspec

from stowplan.errors import BadInput
from stowplan.formats.onnx.records import fields_of
from stowplan.formats.stow import DocumentRecord
from stowplan.formats.torch_snapshot.plain_pickle import decode
from stowplan.ir import Kind, Op, Phase, Role, Tensor, Use
from stowplan.ir.text import format_graph, parse_graph
from stowplan.ops.adjoints import adjoint_of
from stowplan.ops.effects import aliasing_of, effect_of, macs_of
from stowplan.ops.onnx_shapes import onnx_shapes_of
from stowplan.ops.regions.rules import rules
from stowplan.ops.shapes import output_shapes_of

Json: TypeAlias = Any  # whatever json.loads gives: mutations look at nothing else
_NUMBERS = (0, -1, 1, 2, 2**31, 2**53, 2**62, 2**63, -(2**63), 2**64, 10**30, -(10**30), 10**400, 1.5, -0.5)
_VALUES: tuple[Json, ...] = (
    *(None, True, False, *_NUMBERS, 1e308, 1e-300, "", "x", "0", "-1", "\u2028", "\x00", "\x1b[31m", "=1+1"),
    *("</script>", "a" * 2000, [], {}, [[]], [0], {"": 0}, [1] * 17, [1] * 70, list(range(100))),
)
_OPCODES = (
    *(bytes([code]) for code in b"(012ciobRN}])taesu.\x81\x85\x86\x87\x93\x94"),
    *(
        b"q\x00",
        b"h\x00",
        b"h\x01",
        b"h\x05",
        b"K\x00",
        b"\x8a\x00",
        b"X\xff\xff\xff\xff",
        b"J\xff\xff\xff\xff",
    ),
    *(b"j\xff\xff\xff\xff", b"r\xff\xff\xff\x7f", b"\x8d" + b"\xff" * 8, b"\x95" + b"\xff" * 8),
    *(b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f", b"X\xff\xff\xff\xff"),
)
_OP_TYPES = [name.removeprefix("onnx.").encode() for name in onnx_shapes_of]
_TYPES = sorted(
    {*macs_of, *aliasing_of, *adjoint_of, *effect_of, *rules, *output_shapes_of, "stowplan.sweep"}
)
_ATTRIBUTES = ("axis", "dim", "transposed", "stride", "padding", "slices", "over", "groups", "arg1", "reduce")


def damaged_value(value: Json, random: Random) -> Json:
    """The value with up to four of its parts replaced, moved, repeated or lost; itself is changed too."""
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        places = list(_places(value))
        if not places:
            return value
        _damage_place(*random.choice(places), places, random)
    return value


def _places(value: Json) -> Iterator[tuple[Json, Json]]:
    """Every container with each of its keys."""
    waiting = [value]
    while waiting:
        container = waiting.pop()
        for key in container if isinstance(container, dict) else range(len(container)):
            yield container, key
            if isinstance(container[key], dict | list):
                waiting.append(container[key])


def _damage_place(container: Json, key: Json, places: list[tuple[Json, Json]], random: Random) -> None:
    there = container[key]
    other, at = random.choice(places)
    match random.randrange(9):
        case 0 | 1:
            container[key] = deepcopy(random.choice(_VALUES))
        case 2:
            container[key] = deepcopy(other[at])
        case 3 if isinstance(container, list):
            container.insert(random.randrange(len(container) + 1), deepcopy(there))
        case 3:
            container[random.choice(("x", "id", "name", "shape", ""))] = deepcopy(there)
        case 4:
            del container[key]
        case 5 if isinstance(container, list):
            random.shuffle(container)
        case 6 if isinstance(container, list):
            container.extend([there] * random.choice((1, 5, 50)))
        case 7:
            for _ in range(random.choice((1, 5, 40))):
                there = [there] if random.random() < 0.5 else {"a": there}
            container[key] = there
        case _ if isinstance(there, int):
            container[key] = random.choice((there + 1, there - 1, -there, 2 * there, there << 40, str(there)))
        case _ if isinstance(there, str):
            words = [c[k] for c, k in places if isinstance(c[k], str)]
            container[key] = random.choice((random.choice(words), there + "\x1b", there.upper(), there[:-1]))
        case _:
            container[key] = None


def damaged_json(text: str, random: Random) -> str:
    """A JSON text, damaged by its structure."""
    return json.dumps(damaged_value(json.loads(text), random), ensure_ascii=random.random() < 0.5)


def damaged_lines(text: str, random: Random) -> str:
    """A text of which some lines are JSON objects: one of these damaged."""
    lines = text.split("\n")
    objects = [at for at, line in enumerate(lines) if line.startswith("{")]
    if objects:
        at = random.choice(objects)
        lines[at] = damaged_json(lines[at], random)
    return "\n".join(lines)


def damaged_graph(text: str, random: Random) -> str:
    """A graph in the text form with other types, operands, roles, shapes or links: mostly still legal."""
    graph = parse_graph(text)
    ops, tensors = list(graph.ops), dict(graph.tensors)
    for _ in range(random.choice((1, 1, 2, 4))):
        at, name = random.randrange(len(ops)), random.choice(sorted(tensors))
        if random.random() < 0.7:
            ops[at] = _another_op(ops[at], sorted(tensors), random)
        else:
            tensors[name] = _another_tensor(tensors[name], sorted(tensors), random)
    held = graph.held if random.random() < 0.8 else frozenset(random.sample(sorted(tensors), 2))
    return format_graph(replace(graph, ops=tuple(ops), tensors=tensors, held=held))


def _another_op(op: Op, names: list[str], random: Random) -> Op:
    inputs, outputs = list(op.inputs), list(op.outputs)
    match random.randrange(7):
        case 0 | 1:
            return replace(op, type=random.choice(_TYPES))
        case 2 if inputs:
            del inputs[random.randrange(len(inputs))]
        case 3:
            use = Use(random.choice(names), random.choice((Role.DATA, Role.SAVED, Role.SHAPE)))
            inputs.insert(random.randrange(len(inputs) + 1), use)
        case 4 if outputs:
            del outputs[random.randrange(len(outputs))]
        case 5:
            return replace(op, phase=random.choice(tuple(Phase)))
        case _:
            key, value = (
                random.choice(_ATTRIBUTES),
                random.choice((*_VALUES[:15], (1,), (0, -1), (2, 2), "x")),
            )
            return replace(op, attributes={**op.attributes, key: value})
    return replace(op, inputs=tuple(inputs), outputs=tuple(outputs))


def _another_tensor(tensor: Tensor, names: list[str], random: Random) -> Tensor:
    match random.randrange(4):
        case 0 | 1:
            shape = tuple(random.choice((0, 1, 2, 3, 4, 7, 64)) for _ in range(random.randrange(6)))
            return replace(tensor, shape=shape, nbytes=4 * prod(shape))
        case 2:
            return replace(tensor, kind=random.choice(tuple(Kind)))
        case _:
            return replace(tensor, alias_of=random.choice((None, *names)))


def damaged_stow(text: str, random: Random) -> str:
    """A `.stow.json` file with a damaged document under a digest that fits, where it has one."""
    frame = json.loads(text)
    body = json.dumps(damaged_value(frame["document"], random)).encode()
    digest = frame["digest"]
    try:  # the digest is taken over the document's own spelling
        body = msgspec.json.encode(msgspec.json.decode(body, type=DocumentRecord))
        digest = _digest(body)
    except (msgspec.MsgspecError, UnicodeEncodeError):
        pass
    return f'{{"format":"stow","version":1,"digest":"{digest}","document":{body.decode()}}}'


def damaged_sealed(text: str, random: Random, content: str = "content") -> str:
    """A file of our own with a damaged content under a digest that fits, and so the files inside of it."""
    frame = json.loads(text)
    inside = frame[content]
    inner = [key for key in ("graph", "plan") if isinstance(inside.get(key), str)]
    if inner and random.random() < 0.5:
        key = random.choice(inner)
        inside[key] = (damaged_stow if key == "graph" else damaged_sealed)(inside[key], random)
    else:
        damaged_value(inside, random)
    body = json.dumps(inside, separators=(",", ":"))
    return json.dumps({**frame, "digest": _digest(body.encode()), content: None})[:-5] + body + "}"


def _digest(body: bytes) -> str:
    return f"sha256:{sha256(body).hexdigest()}"


def damaged_pickle(data: bytes, random: Random) -> bytes:
    """A pickle of a damaged value, or one with opcodes put in."""
    if random.random() < 0.5:
        return pickle.dumps(
            damaged_value(deepcopy(decode(data)), random), protocol=random.choice((2, 3, 4, 5))
        )
    damaged = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 5))):
        at, opcode = random.randrange(len(damaged) + 1), random.choice(_OPCODES)
        damaged[at : at + random.choice((0, len(opcode)))] = opcode
    return bytes(damaged)


Field: TypeAlias = "list[Any]"  # number, and an integer, bytes or a list of fields


def damaged_protobuf(data: bytes, random: Random) -> bytes:
    """A message with fields replaced, moved, repeated, nested or lost."""
    message = _copied(_sample(data))
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        places = list(_fields(message))
        if places:
            _damage_field(*random.choice(places), random)
    return _spelled(message)


@cache
def _sample(data: bytes) -> list[Field]:
    return _parsed(data)


def _copied(message: list[Field]) -> list[Field]:
    return [[number, _copied(value) if isinstance(value, list) else value] for number, value in message]


def _parsed(data: bytes, depth: int = 0) -> list[Field]:
    return [[number, _inside(value, depth)] for number, value in fields_of(memoryview(data), "sample")]


def _inside(value: int | memoryview, depth: int) -> object:
    """Bytes that can be read as a message may be one."""
    if isinstance(value, int):
        return value
    data = bytes(value)
    if depth > 5 or len(data) < 2 or data.isalnum():
        return data
    try:
        return _parsed(data, depth + 1)
    except BadInput:
        return data


def _fields(message: list[Field]) -> Iterator[tuple[list[Field], int]]:
    for at, (_, value) in enumerate(message):
        yield message, at
        if isinstance(value, list):
            yield from _fields(value)


def _damage_field(message: list[Field], at: int, random: Random) -> None:
    field = message[at]
    match random.randrange(7):
        case 0:
            del message[at]
        case 1:
            message.insert(random.randrange(len(message) + 1), deepcopy(field))
        case 2:
            random.shuffle(message)
        case 3:
            field[0] = max(1, random.choice((field[0] + 1, field[0] - 1, random.randrange(1, 30))))
        case 4:
            message.extend(deepcopy(field) for _ in range(random.choice((2, 20, 100))))
        case 5 if isinstance(field[1], list):
            for _ in range(random.choice((1, 10, 60))):
                field[1] = [[field[0], field[1]]]
        case _ if isinstance(field[1], int):
            strange = (0, 1, 2, 3, 7, 16, 255, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1, field[1] + 1)
            field[1] = random.choice(strange)
        case _:
            field[1] = random.choice((b"", b"\xff", b"/etc/passwd", b"A" * 2000, random.choice(_OP_TYPES)))


def _spelled(message: list[Field]) -> bytes:
    spelled = bytearray()
    for number, value in message:
        if isinstance(value, int):
            spelled += _varint(number << 3) + _varint(value)
        else:
            data = _spelled(value) if isinstance(value, list) else value
            spelled += _varint(number << 3 | 2) + _varint(len(data)) + data
    return bytes(spelled)


def _varint(value: int) -> bytes:
    spelled = bytearray()
    value &= 2**64 - 1
    while value > 127:
        spelled.append(value & 127 | 128)
        value >>= 7
    return bytes((*spelled, value))
