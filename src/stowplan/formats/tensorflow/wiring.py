"""The edges of a TensorFlow table: for every input of every op, transpose and read, the row it reads.

A gradient op is named "gradients/" + its forward op + "_grad/" + its own type. The gradient it starts from is
made by the gradient op of the op that reads the forward op's output.

An op reads a logical value: the value's own row or one of its transposes, whichever has the shape in the op's
row. A transpose to NHWC is named after the op whose output it transposes; a transpose to NCHW after the input
it feeds, and other readers of the value share it.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

from stowplan.formats.tensorflow.forward import Slot, forward_operands
from stowplan.formats.tensorflow.rows import RowKind, RowListing, TableRow
from stowplan.ir import Role, Shape

_GRADIENT_OP = re.compile(r"gradients/(.+)_grad/\w+")


class ForwardPart(Enum):
    """The part of its forward op that a gradient op reads."""

    INPUT = auto()
    OUTPUT = auto()
    GRADIENT = auto()  # of the output
    SIZES = auto()  # the shape of an input, as a constant


@dataclass(frozen=True, slots=True)
class RowOperand:
    """One input of a gradient op; `index` counts the forward op's inputs."""

    part: ForwardPart
    index: int = 0

    @property
    def role(self) -> Role:
        """Values of the forward half were saved for this; the gradient and constants were not."""
        return Role.SAVED if self.part in (ForwardPart.INPUT, ForwardPart.OUTPUT) else Role.DATA


@dataclass(frozen=True, slots=True)
class GradientRule:
    """The inputs of a gradient op, in order, and the forward input whose gradient it makes."""

    operands: tuple[RowOperand, ...]
    makes: int


_IMAGE, _FILTER = RowOperand(ForwardPart.INPUT, 0), RowOperand(ForwardPart.INPUT, 1)
_OUTPUT, _GRADIENT = RowOperand(ForwardPart.OUTPUT), RowOperand(ForwardPart.GRADIENT)

GRADIENT_RULES: Mapping[str, GradientRule] = {
    "ReluGrad": GradientRule((_GRADIENT, _OUTPUT), makes=0),
    "BiasAddGrad": GradientRule((_GRADIENT,), makes=1),
    "Conv2DBackpropFilter": GradientRule((_IMAGE, RowOperand(ForwardPart.SIZES, 1), _GRADIENT), makes=1),
    "Conv2DBackpropInput": GradientRule((RowOperand(ForwardPart.SIZES, 0), _FILTER, _GRADIENT), makes=0),
    "LRNGrad": GradientRule((_GRADIENT, _IMAGE, _OUTPUT), makes=0),
    "MaxPoolGrad": GradientRule((_IMAGE, _OUTPUT, _GRADIENT), makes=0),
}

_PASSED_ON = {("BiasAdd", 0)}
"""Inputs whose gradient is the gradient of the output, unchanged: no op makes it."""


@dataclass(frozen=True, slots=True)
class GradientOp:
    """A gradient op: its forward op, its rule, and the value each input reads (None where unknown)."""

    name: str
    forward: str
    rule: GradientRule
    values: tuple[str | None, ...] = ()


def adjoints_of(listing: RowListing, forward: Mapping[Slot, str]) -> dict[str, GradientOp]:
    """The gradient ops by name."""
    search = _Search(listing, forward, {}, defaultdict(list))
    adjoints = [found for row in listing.of_kind(RowKind.OP) if (found := _adjoint(listing, row.name))]
    for adjoint in adjoints:
        search.makers[adjoint.forward, adjoint.rule.makes] = adjoint.name
    for slot, value in forward.items():
        search.readers[value].append(slot)
    return {adjoint.name: replace(adjoint, values=tuple(search.values_of(adjoint))) for adjoint in adjoints}


def _adjoint(listing: RowListing, name: str) -> GradientOp | None:
    match = _GRADIENT_OP.fullmatch(name)
    rule = GRADIENT_RULES.get(listing.op_types[name])
    if match is None or rule is None or listing.kinds.get(match[1]) is not RowKind.OP:
        return None
    return GradientOp(name, match[1], rule)


@dataclass(frozen=True, slots=True)
class _Search:
    """Both halves, indexed: which gradient op belongs to an input, and which inputs read a value."""

    listing: RowListing
    forward: Mapping[Slot, str]
    makers: dict[Slot, str]
    readers: defaultdict[str, list[Slot]]

    def values_of(self, adjoint: GradientOp) -> Iterator[str | None]:
        """The values that a gradient op's inputs read, in order."""
        for position, operand in enumerate(adjoint.rule.operands):
            if operand.part is ForwardPart.INPUT:
                yield self.forward.get((adjoint.forward, operand.index))
            elif operand.part is ForwardPart.OUTPUT:
                yield adjoint.forward
            elif operand.part is ForwardPart.GRADIENT:
                yield self.gradient_at(adjoint.forward)
            else:
                yield self.sizes_constant(adjoint, position, operand.index)

    def gradient_at(self, value: str) -> str | None:
        """The gradient op that makes a value's gradient.

        At the end of the forward half that is the value itself: the derivative of a loss of half its square,
        whose product with one TensorFlow's optimizer has folded away.
        """
        passed: set[str] = set()
        while value not in passed:
            passed.add(value)
            readers = self.readers.get(value, [])
            if len(readers) != 1:
                return None if readers else value
            reader, position = readers[0]
            if (self.listing.op_types[reader], position) not in _PASSED_ON:
                return self.makers.get((reader, position))
            value = reader
        return None

    def sizes_constant(self, adjoint: GradientOp, position: int, index: int) -> str | None:
        """The shape of a forward input, folded to a constant or rewritten for this input of the op."""
        names = (
            f"{adjoint.name}-{position}-LayoutOptimizer",
            f"ConstantFolding/gradients/{adjoint.forward}_grad/ShapeN-matshapes-{index}",
        )
        return next((name for name in names if name in self.listing.rows), None)


_OF_OUTPUT = re.compile(r"(.+)-[0-9]+-[0-9]+-Transpose(\w+)To(\w+)-LayoutOptimizer")
_OF_INPUT = re.compile(r"(.+)-([0-9]{1,9})-Transpose(\w+)To(\w+)-LayoutOptimizer")


@dataclass(frozen=True, slots=True)
class RowInput:
    """One input: the row it reads, or None where unknown, and its role."""

    source: str | None
    role: Role = Role.DATA


@dataclass(frozen=True, slots=True)
class Wiring:
    """The edges into every row, the gradient ops, and the logical value that each transpose carries."""

    edges: dict[str, tuple[RowInput, ...]]
    adjoints: Mapping[str, GradientOp]
    forward: Mapping[Slot, str]
    transposed: Mapping[str, str]


def wire(listing: RowListing) -> Wiring:
    """Rebuild every edge."""
    forward = forward_operands(listing)
    adjoints = adjoints_of(listing, forward)
    values = _logical_values(listing, forward, adjoints)
    transposed = _transposed_values(listing, values)
    versions: defaultdict[str, list[str]] = defaultdict(list)
    for name, value in transposed.items():
        versions[value].append(name)
    edges: dict[str, tuple[RowInput, ...]] = {}
    for row in listing.of_kind(RowKind.READ):
        edges[row.name] = (RowInput(_variable_of(listing, row)),)
    for row in listing.of_kind(RowKind.TRANSPOSE):
        edges[row.name] = (RowInput(transposed.get(row.name)), RowInput(_permutation_of(listing, row)))
    for row in listing.of_kind(RowKind.OP):
        edges[row.name] = _op_edges(listing, row, values[row.name], versions, adjoints.get(row.name))
    return Wiring(edges, adjoints, forward, transposed)


def layouts_of(transpose: str) -> tuple[str, str]:
    """The layouts a transpose converts from and to, by its name."""
    match = _OF_OUTPUT.fullmatch(transpose) or _OF_INPUT.fullmatch(transpose)
    return (match[match.re.groups - 1], match[match.re.groups]) if match else ("", "")


def _logical_values(
    listing: RowListing, forward: Mapping[Slot, str], adjoints: Mapping[str, GradientOp]
) -> dict[str, tuple[str | None, ...]]:
    """By op, the value each input reads in whichever layout."""
    return {
        row.name: adjoints[row.name].values
        if row.name in adjoints
        else tuple(forward.get((row.name, position)) for position in range(len(row.inputs)))
        for row in listing.of_kind(RowKind.OP)
    }


def _transposed_values(listing: RowListing, values: Mapping[str, tuple[str | None, ...]]) -> dict[str, str]:
    """By transpose, the value it carries in another layout."""
    found = {}
    for row in listing.of_kind(RowKind.TRANSPOSE):
        of_output, of_input = _OF_OUTPUT.fullmatch(row.name), _OF_INPUT.fullmatch(row.name)
        value: str | None = None
        if of_output:
            value = of_output[1]
        elif of_input and int(of_input[2]) < len(values.get(of_input[1], ())):
            value = values[of_input[1]][int(of_input[2])]
        if value in values or listing.kinds.get(value or "") is RowKind.READ:
            found[row.name] = value or ""
    return found


def _variable_of(listing: RowListing, row: TableRow) -> str:
    name = row.name.removesuffix("/read")
    if listing.kinds.get(name) is not RowKind.VARIABLE or len(row.inputs) != 1:
        raise row.fault(f"{row.name!r} reads no variable of this table")
    return name


def _permutation_of(listing: RowListing, row: TableRow) -> str | None:
    source, target = layouts_of(row.name)
    name = f"PermConst{source}To{target}-LayoutOptimizer"
    return name if name in listing.rows else None


def _op_edges(
    listing: RowListing,
    row: TableRow,
    values: tuple[str | None, ...],
    versions: Mapping[str, list[str]],
    adjoint: GradientOp | None,
) -> tuple[RowInput, ...]:
    roles = [operand.role for operand in adjoint.rule.operands] if adjoint else [Role.DATA] * len(values)
    return tuple(
        RowInput(value and _version(listing, value, versions.get(value, []), wanted.shape), role)
        for value, wanted, role in zip(values, row.inputs, roles, strict=True)
    )


def _version(listing: RowListing, value: str, transposes: list[str], shape: Shape) -> str:
    """The row that holds a value in this shape; its own row if none does."""
    for name in (value, *transposes):
        output = listing.rows[name].output
        if output is not None and output.shape == shape:
            return name
    return value
