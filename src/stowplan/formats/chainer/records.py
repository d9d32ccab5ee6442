"""The variables and records of a Chainer file, each with its line number, before they become a graph.

A GetItem's index is Python source in the file. It is parsed by its grammar and never evaluated. The attribute
is a tuple with one entry per index: (start, stop, step) for a slice, an integer, None for a new dim, "..."
for the ellipsis.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

import msgspec

from stowplan.errors import BadInput
from stowplan.ir import Attribute, Attributes, Phase
from stowplan.ir.graph import attribute_of

GRADIENT = ".grad"
MASK = ".mask"
BACKWARD = ".backward"
"""Ends the id and the type of an adjoint, so that one type has one meaning in every table."""


def gradient_id(value: str) -> str:
    """The tensor that is the gradient of `value`."""
    return value + GRADIENT


def mask_id(value: str) -> str:
    """The tensor that says which elements of `value` a dropout kept."""
    return value + MASK


def link_of(parameter_name: str) -> str:
    """The link a parameter belongs to: "block/conv" of "/block/conv/W"."""
    return parameter_name.strip("/").rpartition("/")[0]


_SHOWN = 60


class Lines:
    """A cursor over the lines of a text. `number` is that of the last line read, from 1."""

    def __init__(self, text: str) -> None:
        self._lines = text.split("\n")
        self.number = 0

    def next(self, wanted: str) -> str:
        """The next line; `wanted` describes it for the message if the file ends here."""
        if self.number == len(self._lines) or self.is_at_end():
            self.number = min(self.number + 1, len(self._lines))
            raise self.fault(f"the file ends where {wanted} should be")
        self.number += 1
        return self._lines[self.number - 1].rstrip("\r")

    def match(self, pattern: re.Pattern[str], wanted: str) -> re.Match[str]:
        """The next line, which must be of this form."""
        line = self.next(wanted)
        found = pattern.fullmatch(line)
        if found is None:
            shown = line if len(line) <= _SHOWN else line[:_SHOWN] + "..."
            raise self.fault(f"{shown!r} is not {wanted}")
        return found

    def is_at_end(self) -> bool:
        """Whether only the file's last line break is left."""
        return self.number == len(self._lines) - 1 and not self._lines[-1].strip()

    def fault(self, what: str) -> BadInput:
        """The error to raise about the line last read."""
        return BadInput(what, where=f"line {self.number}")


_NUMBER = r"-?[0-9]{1,18}"
_BOUND = rf"(?:None|{_NUMBER})"
_INDEX = rf"slice\({_BOUND}, {_BOUND}, {_BOUND}\)|Ellipsis|{_BOUND}"
_INDICES = re.compile(rf"\((?:(?:{_INDEX})(?:, (?:{_INDEX}))*,?)?\)")


def parse_slices(text: str) -> Attribute:
    """The indices, or `text` itself where it is more than slices and integers (an index array, say)."""
    if _INDICES.fullmatch(text) is None:
        return text
    return tuple(_parsed(index) for index in re.findall(_INDEX, text))


def format_slices(indices: Attribute) -> Attribute:
    """The inverse of `parse_slices`."""
    if not isinstance(indices, tuple):
        return indices
    written = [_written(index) for index in indices]
    return f"({written[0]},)" if len(written) == 1 else f"({', '.join(written)})"


def _parsed(index: str) -> Attribute:
    if index.startswith("slice"):
        return tuple(_bound(bound) for bound in index[len("slice(") : -1].split(", "))
    return "..." if index == "Ellipsis" else _bound(index)


def _bound(text: str) -> int | None:
    return None if text == "None" else int(text)


def _written(index: Attribute) -> str:
    if isinstance(index, tuple):
        return f"slice({', '.join(map(str, index))})"
    return "Ellipsis" if index == "..." else str(index)


_COUNTS = re.compile(r"([0-9]{1,9}) ([0-9]{1,9})")
_VARIABLE = re.compile(r"(\S+) ([0-9]{1,18}) (_|/\S+|[0-9]+)")
_PHASE = re.compile(r"forward|backward")
_USE = re.compile(r"(\S+) (_|gradient|input|output)")
_NAME = re.compile(r"\S+")
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?')
_BRACKET = re.compile(r"[\[\]{}]")
_LARGEST_TOTAL_BYTES = 2**62
_DEEPEST_NESTING = 32


class Tag(StrEnum):
    """How a record uses an input: as data (forward), or as one of three things that a backward reads."""

    DATA = "_"
    GRADIENT = "gradient"
    INPUT = "input"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class Variable:
    """A value and, with the same bytes, its gradient."""

    line: int
    id: str
    nbytes: int
    name: str


@dataclass(frozen=True, slots=True)
class ChainerRecord:
    """One call of a function, or of its backward."""

    line: int
    phase: Phase
    inputs: tuple[tuple[str, Tag], ...]
    outputs: tuple[str, ...]
    type: str
    attributes: Attributes
    rank: int


@dataclass(frozen=True, slots=True)
class Listing:
    """The whole file, in its own order; `backward` is empty or as long as `forward`."""

    variables: dict[str, Variable]
    forward: tuple[ChainerRecord, ...]
    backward: tuple[ChainerRecord, ...]


def parse(text: str) -> Listing:
    """Split a file into its variables and records."""
    lines = Lines(text)
    header = lines.match(_COUNTS, "the header: how many variables and records follow")
    variables = _variables(lines, int(header[1]))
    records = [_record(lines, variables) for _ in range(int(header[2]))]
    if not lines.is_at_end():
        lines.next("the end of the file")
        raise lines.fault(f"something follows the {len(records)} records that the header announces")
    return Listing(
        variables,
        tuple(record for record in records if record.phase is Phase.FORWARD),
        tuple(record for record in records if record.phase is Phase.BACKWARD),
    )


def _variables(lines: Lines, count: int) -> dict[str, Variable]:
    variables: dict[str, Variable] = {}
    total = 0
    for _ in range(count):
        match = lines.match(_VARIABLE, 'a variable: id, bytes, and "_", "/link/parameter" or digits')
        variable = Variable(lines.number, match[1], int(match[2]), match[3])
        total += variable.nbytes
        if variable.id in variables:
            raise lines.fault(f"variable {variable.id!r} is listed twice")
        if variable.id.endswith((GRADIENT, MASK)):
            raise lines.fault(f"variable {variable.id!r} ends like the name of a gradient or mask")
        if total >= _LARGEST_TOTAL_BYTES:
            raise lines.fault(f"the variables so far take {total} bytes, more than any machine has")
        variables[variable.id] = variable
    return variables


def _record(lines: Lines, variables: dict[str, Variable]) -> ChainerRecord:
    phase = Phase(lines.match(_PHASE, '"forward" or "backward"')[0])
    line = lines.number
    counts = lines.match(_COUNTS, "the numbers of inputs and outputs")
    inputs = tuple(_input(lines, variables, phase) for _ in range(int(counts[1])))
    outputs = tuple(
        _known(lines, variables, lines.match(_NAME, "an output")[0]) for _ in range(int(counts[2]))
    )
    function = lines.match(_NAME, "the function's name")[0]
    if function.endswith(BACKWARD):
        raise lines.fault(f"function {function!r} ends like the name of an adjoint")
    attributes = _attributes(lines)
    rank = attributes.get("rank")
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise lines.fault(f"the function's rank is {rank!r}, not an integer")
    return ChainerRecord(line, phase, inputs, outputs, function, attributes, rank)


def _input(lines: Lines, variables: dict[str, Variable], phase: Phase) -> tuple[str, Tag]:
    match = lines.match(_USE, 'an input: id and "_", "gradient", "input" or "output"')
    tag = Tag(match[2])
    if (tag is Tag.DATA) != (phase is Phase.FORWARD):
        raise lines.fault(f"an input of a {phase} record cannot be tagged {tag.value!r}")
    return _known(lines, variables, match[1]), tag


def _known(lines: Lines, variables: dict[str, Variable], name: str) -> str:
    if name not in variables:
        raise lines.fault(f"no variable has the id {name!r}")
    return name


def _attributes(lines: Lines) -> Attributes:
    text = lines.next("the function's attributes")
    if _nesting(text) > _DEEPEST_NESTING:
        raise lines.fault(f"attributes are nested more than {_DEEPEST_NESTING} deep")
    try:
        decoded = msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeError) as error:
        raise lines.fault(f"the attributes are not a JSON object: {error}") from error
    attributes = {key: attribute_of(value) for key, value in decoded.items()}
    slices = attributes.get("slices")
    return attributes | {"slices": parse_slices(slices)} if isinstance(slices, str) else attributes


def _nesting(text: str) -> int:
    steps = (1 if bracket in "[{" else -1 for bracket in _BRACKET.findall(_STRING.sub("", text)))
    return max(accumulate(steps), default=0)
