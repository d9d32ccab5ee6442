"""A graph as text that a person can read, edit and diff; and labels, the names by which its author knows it.

    stowplan graph 1 "two ops"
    parameter W: float32[4,4] bytes=64
    input x: float32[1,4] bytes=16
    held activation y: float32[1,4] bytes=16
    forward fc: MatMul(x, W) -> (y) device=gpu:0 {"transpose": false}

There is one line per tensor and one per op. A word that could be mistaken for syntax is quoted as in JSON;
attributes are a JSON object at the line's end. Lines that are empty or begin with # say nothing.

A captured graph names tensors after the ATen ops that make them (`addmm_2`). People look for the module that
ran the op and for its line, and labels say these. Graphs of other sources keep the names of their files.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePath
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
from stowplan.units import format_bytes

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


_KINDS = frozenset(map(str, Kind))
_NAMED = (Kind.PARAMETER, Kind.BUFFER, Kind.INPUT, Kind.CONSTANT)


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors of one shape that the same op makes in repeated blocks; or a single tensor."""

    names: tuple[str, ...]
    nbytes: int  # of all of them
    module: str  # that makes them, such as layers.0..11.mlp.act; or the name of a parameter
    what: str  # the ATen op that makes them, or the kind of tensor
    shape: str
    line: str  # empty if it is not known, or no op of the step makes them

    @property
    def details(self) -> str:
        """The op, the shape and the line; a single tensor has its id, by which `explain` finds it."""
        made = self.names[0] if len(self.names) == 1 and self.what not in _KINDS else self.what
        return ", ".join(filter(None, (made, self.shape, self.line)))


@dataclass(frozen=True, slots=True)
class OpGroup:
    """Ops of one type and line in repeated blocks, and what they take."""

    count: int
    seconds: float
    module: str
    what: str
    line: str


class Labels:
    """Names for the tensors and ops of one graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._ops = {op.id: op for op in graph.ops}
        self._makers = {name: op for op in reversed(graph.ops) for name in op.writes()}
        self.captured = any(op.type.startswith("aten.") and (op.scope or op.source) for op in graph.ops)

    def op(self, name: str, *, with_source: bool = False) -> str:
        """An op with its module and line; in a graph that was not captured, its id alone.

        `with_source` gives the whole path of the file, and the place in a file of another format too.
        """
        told = self.place(name, with_source=with_source)
        return f"{name} ({told})" if told else name

    def place(self, name: str, *, with_source: bool = False) -> str:
        """The module and line of an op, as in `op`."""
        op = self._ops.get(name)
        if op is None:
            return ""
        if op.phase is Phase.UPDATE and "when" in op.attributes:
            return f"{str(op.attributes.get('update')).partition('(')[0]}, {op.attributes['when']}"
        module, _, line = self._place(op) if self.captured else ("", "", "")
        of = "backward of " if op.phase is Phase.BACKWARD and module else ""
        return ", ".join(filter(None, (of + module, self._source(op) if with_source else line)))

    def tensor(self, name: str) -> str:
        """A tensor with its module and line; in a graph that was not captured, its id alone."""
        module, what, line = self._home(self._graph.tensors[name])
        told = ", ".join(filter(None, (module, what, line)))
        return f"{name} ({told})" if self.captured and module != name else name

    def module_of(self, name: str) -> str:
        """The module that makes a tensor of a captured step, or the parameter that it is the gradient of."""
        return self._home(self._graph.tensors[name])[0] if self.captured and name in self._makers else ""

    def line_of(self, name: str) -> str:
        """The line of the user's code that makes a tensor of a captured step, with the whole path."""
        return self._source(self._makers[name]) if self.captured and name in self._makers else ""

    def groups(self, names: Iterable[str]) -> list[TensorGroup]:
        """The tensors, those of repeated blocks together; the groups with the most bytes first."""
        found: dict[tuple[object, ...], list[str]] = {}
        for name in names:
            tensor = self._graph.tensors[name]
            module, *rest = self._home(tensor)
            key = (_pattern(module), *rest, shape_text(tensor)) if self.captured else (name,)
            found.setdefault(key, []).append(name)
        return sorted(map(self._group, found.values()), key=lambda group: -group.nbytes)

    def op_groups(self, seconds: Mapping[str, float]) -> list[OpGroup]:
        """Ops by module, those of repeated blocks together; the groups that take the longest first."""
        found: dict[tuple[object, ...], list[str]] = {}
        for name in seconds:
            module, *rest = self._place(self._ops[name])
            found.setdefault((_pattern(module), *rest), []).append(name)
        groups = []
        for names in found.values():
            module = _merged([self._place(self._ops[name])[0] for name in names])
            total = sum(seconds[name] for name in names)
            groups.append(OpGroup(len(names), total, module, *self._place(self._ops[names[0]])[1:]))
        return sorted(groups, key=lambda group: -group.seconds)

    def largest(self, names: Iterable[str], most: int = 4) -> str:
        """The largest groups of some tensors with their bytes, as a refusal names them."""
        return ", ".join(map(_with_bytes, self.groups(names)[:most]))

    def made_in(self, module: str) -> list[str]:
        """The forward tensors with a storage of their own that a module makes, or modules inside it."""
        return [
            name
            for name, op in self._makers.items()
            if (op.scope == module or op.scope.startswith(f"{module}."))
            and op.phase is Phase.FORWARD
            and self._graph.tensors[name].alias_of is None
        ]

    def modules(self) -> list[str]:
        """The paths of all modules that run ops."""
        return list(dict.fromkeys(op.scope for op in self._graph.ops if op.scope))

    def _group(self, names: list[str]) -> TensorGroup:
        tensors = [self._graph.tensors[name] for name in names]
        _, what, line = self._home(tensors[0])
        module = _merged([self._home(tensor)[0] for tensor in tensors])
        nbytes = sum(tensor.nbytes or 0 for tensor in tensors)
        return TensorGroup(tuple(names), nbytes, module, what, shape_text(tensors[0]), line)

    def _home(self, tensor: Tensor) -> tuple[str, str, str]:
        """The module or name of a tensor; the op that makes its storage, or its kind; the line."""
        if not self.captured:
            return tensor.id, str(tensor.kind), ""
        if tensor.gradient_of and self._graph.tensors[tensor.gradient_of].kind in _NAMED:
            target = self._graph.tensors[tensor.gradient_of]
            return target.name or target.id, str(Kind.GRADIENT), ""
        owner = self._graph.tensors[self._graph.storage_of(tensor.id)]
        maker = self._makers.get(owner.id)
        if maker is None or owner.kind in _NAMED:
            return owner.name or owner.id, str(owner.kind), ""
        return self._place(maker)

    def _place(self, op: Op) -> tuple[str, str, str]:
        """The module that ran an op, or that ran what it differentiates; its ATen name; the line."""
        forward = self._ops.get(op.adjoint_of or op.id, op)
        module = op.scope or forward.scope or f"{self._graph.name}.forward".lstrip(".")
        name = op.type.split(".")[1] if "." in op.type else op.type
        in_backward = op.phase is Phase.BACKWARD and not name.endswith("_backward")
        return module, f"{name} in backward" if in_backward else name, PurePath(self._source(op)).name

    def _source(self, op: Op) -> str:
        return op.source or self._ops.get(op.adjoint_of or op.id, op).source


def _with_bytes(group: TensorGroup) -> str:
    size = format_bytes(group.nbytes)
    if len(group.names) > 1:
        return f"{group.module} {group.what} ({len(group.names)} tensors, {size})"
    return f"{group.names[0]}{f' of {group.module}' if group.module != group.names[0] else ''} ({size})"


def shape_text(tensor: Tensor) -> str:
    """The dtype and the sizes of a tensor."""
    sizes = "?" if tensor.shape is None else "x".join(map(str, tensor.shape)) or "scalar"
    return f"{tensor.dtype or '?'} {sizes}"


def _pattern(path: str) -> tuple[str, ...]:
    """Equal for paths that differ only in the numbers of repeated blocks."""
    return tuple("#" if part.isdecimal() else part for part in path.split("."))


def _merged(paths: list[str]) -> str:
    """Paths of one pattern as one: layers.0..11.mlp."""
    columns = zip(*(path.split(".") for path in paths), strict=True)
    return ".".join(",".join(_runs(dict.fromkeys(column))) for column in columns)


def _runs(parts: Iterable[str]) -> Iterator[str]:
    """Numbers that follow each other as a range; anything else as it is."""
    different = list(parts)
    if len(different) == 1:
        yield different[0]
        return
    numbers = sorted(map(int, different))
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            first, last = numbers[start], numbers[end - 1]
            yield str(first) if first == last else f"{first}..{last}"
            start = end
