"""The file as it is written: variables and records, each with its line, before they mean a graph."""

import re
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

import msgspec

from stowplan.formats.chainer.lines import Lines
from stowplan.formats.chainer.slices import parse_slices
from stowplan.formats.chainer.spelling import BACKWARD, GRADIENT, MASK
from stowplan.ir import Attributes, Phase
from stowplan.ir.attributes import attribute_of

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
    """How a record's input is used: plainly (forward), or as one of three things a backward reads."""

    PLAIN = "_"
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
class Record:
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
    forward: tuple[Record, ...]
    backward: tuple[Record, ...]


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


def _record(lines: Lines, variables: dict[str, Variable]) -> Record:
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
    return Record(line, phase, inputs, outputs, function, attributes, rank)


def _input(lines: Lines, variables: dict[str, Variable], phase: Phase) -> tuple[str, Tag]:
    match = lines.match(_USE, 'an input: id and "_", "gradient", "input" or "output"')
    tag = Tag(match[2])
    if (tag is Tag.PLAIN) != (phase is Phase.FORWARD):
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
