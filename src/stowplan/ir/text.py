"""A graph as text that a person can read, edit and diff: one line per tensor, one per op.

    stowplan graph 1 "two ops"
    parameter W: float32[4,4] bytes=64
    input x: float32[1,4] bytes=16
    held activation y: float32[1,4] bytes=16
    forward fc: MatMul(x, W) -> (y) device=gpu:0 {"transpose": false}

A word that could be mistaken for syntax is quoted as in JSON; attributes are a JSON object at the line's end.
Lines that are empty or begin with # say nothing.
"""

import json
import re
from collections.abc import Iterator
from enum import StrEnum
from typing import TypeVar

from stowplan.errors import BadInput
from stowplan.ir.graph import (
    Attributes,
    DType,
    Graph,
    Kind,
    Op,
    Phase,
    Role,
    Shape,
    Tensor,
    Use,
    attribute_of,
    object_without_repeats,
)

BARE_WORD = re.compile(r"[\w./$%@~+-]+(?::+[\w./$%@~+-]+)*", re.ASCII)
_WORD = re.compile(rf'"(?:[^"\\]|\\.)*"|{BARE_WORD.pattern}', re.ASCII)
_INTEGER = re.compile(r"-?[0-9]{1,40}")
_SPACE = re.compile(r"[ \t\r]*")

_Choice = TypeVar("_Choice", bound=StrEnum)


class Scanner:
    """A position in a line. Every method skips blanks, then takes what it names or raises."""

    __slots__ = ("_line", "_number", "_position")

    def __init__(self, line: str, number: int) -> None:
        self._line, self._number, self._position = line, number, 0

    def fault(self, what: str) -> BadInput:
        """The error to raise about this line."""
        return BadInput(what, where=f"line {self._number}")

    def word(self, what: str) -> str:
        """The next word without its quotes; `what` describes the word for the error."""
        self._skip_blanks()
        match = _WORD.match(self._line, self._position)
        if match is None:
            raise self.fault(f"expected {what} {self._here()}")
        self._position = match.end()
        return self._unquoted(match[0]) if match[0].startswith('"') else match[0]

    def integer(self, what: str) -> int:
        """The next word, which must be a whole number."""
        word = self.word(what)
        if not _INTEGER.fullmatch(word):
            raise self.fault(f"expected {what}, found {_shortened(word)}")
        return int(word)

    def choice(self, choices: type[_Choice], word: str) -> _Choice:
        """`word` as a member of a closed list."""
        for member in choices:
            if member == word:
                return member
        raise self.fault(f"{_shortened(word)} is not a {choices.__name__.lower()}: {', '.join(choices)}")

    def take(self, mark: str) -> bool:
        """Whether `mark` comes next; if so, skip it."""
        self._skip_blanks()
        found = self._line.startswith(mark, self._position)
        self._position += len(mark) * found
        return found

    def sees(self, *marks: str) -> bool:
        """Whether one of the marks comes next."""
        self._skip_blanks()
        return self._line.startswith(marks, self._position)

    def expect(self, mark: str) -> None:
        """Skip `mark`, or raise."""
        if not self.take(mark):
            raise self.fault(f"expected {mark!r} {self._here()}")

    def at_end(self) -> bool:
        """Whether nothing but blanks is left."""
        self._skip_blanks()
        return self._position == len(self._line)

    def finish(self) -> None:
        """Raise if anything is left of the line."""
        if not self.at_end():
            raise self.fault(f"expected the end of the line {self._here()}")

    def rest(self) -> str:
        """The rest of the line."""
        rest, self._position = self._line[self._position :], len(self._line)
        return rest

    def _skip_blanks(self) -> None:
        match = _SPACE.match(self._line, self._position)
        self._position = match.end() if match else self._position

    def _unquoted(self, word: str) -> str:
        try:
            return str(json.loads(word))
        except ValueError as fault:
            raise self.fault(f"{_shortened(word)} is not a quoted word: {fault}") from fault

    def _here(self) -> str:
        rest = self._line[self._position :]
        return f"before {_shortened(rest)}" if rest else "at the end of the line"


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


HEADER = "stowplan graph"
VERSION = 1

_PHASES = {str(phase): phase for phase in Phase}
_TENSOR_FIELDS = ("name", "layout", "device", "gradient_of", "alias_of")
_OP_FIELDS = ("device", "adjoint_of", "scope", "source")


def format_graph(graph: Graph) -> str:
    """The text of a legal graph; `parse_graph` gives the same graph back."""
    lines = [f"{HEADER} {VERSION} {_quoted(graph.name)}" if graph.name else f"{HEADER} {VERSION}"]
    lines += (_tensor_line(tensor, tensor.id in graph.held) for tensor in graph.tensors.values())
    lines += map(_op_line, graph.ops)
    return "\n".join(lines) + "\n"


def _tensor_line(tensor: Tensor, is_held: bool) -> str:
    start = f"{'held ' if is_held else ''}{tensor.kind} {_quoted(tensor.id)}: {tensor.dtype or '?'}"
    shape = "" if tensor.shape is None else f"[{','.join(map(str, tensor.shape))}]"
    size = "" if tensor.nbytes is None else f" bytes={tensor.nbytes}"
    return start + shape + size + _fields(tensor, _TENSOR_FIELDS)


def _op_line(op: Op) -> str:
    inputs, outputs = (", ".join(map(_use, uses)) for uses in (op.inputs, op.outputs))
    start = f"{op.phase} {_quoted(op.id)}: {_quoted(op.type)}({inputs}) -> ({outputs})"
    return start + _fields(op, _OP_FIELDS) + (f" {_json(op.attributes)}" if op.attributes else "")


def _use(use: Use) -> str:
    return _quoted(use.tensor) if use.role is Role.DATA else f"{_quoted(use.tensor)} {use.role}"


def _fields(thing: Tensor | Op, names: tuple[str, ...]) -> str:
    values = ((name, getattr(thing, name)) for name in names)
    return "".join(f" {name}={_quoted(value)}" for name, value in values if value)


def _quoted(word: str) -> str:
    return word if BARE_WORD.fullmatch(word) else _json(word)


def _json(value: Attributes | str) -> str:
    readable = json.dumps(value, ensure_ascii=False, default=dict)
    return readable if readable.isprintable() else json.dumps(value, default=dict)


def parse_graph(text: str) -> Graph:
    """The graph a text describes, not yet validated. BadInput names the line that cannot be read."""
    lines = _lines(text)
    name = _parse_header(next(lines, Scanner("", 1)))
    tensors: dict[str, Tensor] = {}
    ops: list[Op] = []
    held: set[str] = set()
    for line in lines:
        keyword = line.word("a phase, a kind or held")
        if keyword in _PHASES:
            ops.append(_parse_op(line, _PHASES[keyword]))
            continue
        tensor = _parse_tensor(line, line.word("a kind") if keyword == "held" else keyword)
        line.finish()
        if tensor.id in tensors:
            raise line.fault(f"tensor {tensor.id!r} has a line already")
        tensors[tensor.id] = tensor
        held |= {tensor.id} if keyword == "held" else set()
    return Graph(tensors, tuple(ops), frozenset(held), name)


def _lines(text: str) -> Iterator[Scanner]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            yield Scanner(line, number)


def _parse_header(line: Scanner) -> str:
    line.expect(HEADER)
    version = line.integer("the version of the text form")
    if version != VERSION:
        raise line.fault(f"version {version} of the text form; this stowplan reads version {VERSION}")
    name = "" if line.at_end() else line.word("the graph's name")
    line.finish()
    return name


def _parse_tensor(line: Scanner, kind: str) -> Tensor:
    return Tensor(
        kind=line.choice(Kind, kind),
        id=_id(line),
        dtype=None if line.take("?") else line.choice(DType, line.word("an element type")),
        shape=_shape(line) if line.take("[") else None,
        nbytes=line.integer("a number of bytes") if line.take("bytes=") else None,
        **_parse_fields(line, _TENSOR_FIELDS),
    )


def _parse_op(line: Scanner, phase: Phase) -> Op:
    return Op(
        phase=phase,
        id=_id(line),
        type=line.word("an op type"),
        inputs=_uses(line),
        outputs=_results(line),
        **_parse_fields(line, _OP_FIELDS),
        attributes=_attributes(line),
    )


def _id(line: Scanner) -> str:
    word = line.word("an id")
    line.expect(":")
    return word


def _shape(line: Scanner) -> Shape:
    sizes: list[int] = []
    while not line.take("]"):
        if sizes:
            line.expect(",")
        sizes.append(line.integer("a size"))
    return tuple(sizes)


def _results(line: Scanner) -> tuple[Use, ...]:
    line.expect("->")
    return _uses(line)


def _uses(line: Scanner) -> tuple[Use, ...]:
    uses: list[Use] = []
    line.expect("(")
    while not line.take(")"):
        if uses:
            line.expect(",")
        uses.append(_parse_use(line))
    return tuple(uses)


def _parse_use(line: Scanner) -> Use:
    tensor = line.word("a tensor")
    return (
        Use(tensor)
        if line.sees(",", ")")
        else Use(tensor, line.choice(Role, line.word("a role, ',' or ')'")))
    )


def _parse_fields(line: Scanner, names: tuple[str, ...]) -> dict[str, str]:
    fields: dict[str, str] = {}
    while not (line.at_end() or line.sees("{")):
        name = line.word("a field")
        if name not in names or name in fields:
            raise line.fault(f"{name!r} comes twice or is not one of {', '.join(names)}")
        line.expect("=")
        fields[name] = line.word(f"the {name}")
    return fields


def _attributes(line: Scanner) -> Attributes:
    if line.at_end():
        return {}
    try:
        found = json.loads(line.rest(), object_pairs_hook=object_without_repeats)
        return {key: attribute_of(value) for key, value in found.items()}
    except (ValueError, RecursionError) as fault:
        raise line.fault(f"the attributes are not a JSON object: {fault}") from fault
