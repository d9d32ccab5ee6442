"""The edges of the table: for every input of every op, transpose and read, the row whose output it is.

An op reads a logical value: the value's own row or one of its transposes, whichever has the shape that the
op's row shows. A transpose to NHWC is named after the op whose output it turns; one to NCHW after the input
it serves, and other readers of the same value share it.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from stowplan.formats.tensorflow.backward import Adjoint, adjoints_of
from stowplan.formats.tensorflow.forward import Slot, forward_operands
from stowplan.formats.tensorflow.rows import Listing, Row, RowKind
from stowplan.ir import Role, Shape

_OF_OUTPUT = re.compile(r"(.+)-[0-9]+-[0-9]+-Transpose(\w+)To(\w+)-LayoutOptimizer")
_OF_INPUT = re.compile(r"(.+)-([0-9]{1,9})-Transpose(\w+)To(\w+)-LayoutOptimizer")


@dataclass(frozen=True, slots=True)
class Edge:
    """One input: the row it reads, or None where that is unclear, and how it is used."""

    source: str | None
    role: Role = Role.DATA


@dataclass(frozen=True, slots=True)
class Wiring:
    """The edges into every row, the gradient ops, and the logical value that each transpose carries."""

    edges: dict[str, tuple[Edge, ...]]
    adjoints: Mapping[str, Adjoint]
    forward: Mapping[Slot, str]
    transposed: Mapping[str, str]


def wire(listing: Listing) -> Wiring:
    """Rebuild every edge."""
    forward = forward_operands(listing)
    adjoints = adjoints_of(listing, forward)
    values = _logical_values(listing, forward, adjoints)
    transposed = _transposed_values(listing, values)
    versions: defaultdict[str, list[str]] = defaultdict(list)
    for name, value in transposed.items():
        versions[value].append(name)
    edges: dict[str, tuple[Edge, ...]] = {}
    for row in listing.of_kind(RowKind.READ):
        edges[row.name] = (Edge(_variable_of(listing, row)),)
    for row in listing.of_kind(RowKind.TRANSPOSE):
        edges[row.name] = (Edge(transposed.get(row.name)), Edge(_permutation_of(listing, row)))
    for row in listing.of_kind(RowKind.OP):
        edges[row.name] = _op_edges(listing, row, values[row.name], versions, adjoints.get(row.name))
    return Wiring(edges, adjoints, forward, transposed)


def layouts_of(transpose: str) -> tuple[str, str]:
    """The layouts a transpose turns from and to: its name tells."""
    match = _OF_OUTPUT.fullmatch(transpose) or _OF_INPUT.fullmatch(transpose)
    return (match[match.re.groups - 1], match[match.re.groups]) if match else ("", "")


def _logical_values(
    listing: Listing, forward: Mapping[Slot, str], adjoints: Mapping[str, Adjoint]
) -> dict[str, tuple[str | None, ...]]:
    """By op, the value each input reads in whichever layout."""
    return {
        row.name: adjoints[row.name].values
        if row.name in adjoints
        else tuple(forward.get((row.name, position)) for position in range(len(row.inputs)))
        for row in listing.of_kind(RowKind.OP)
    }


def _transposed_values(listing: Listing, values: Mapping[str, tuple[str | None, ...]]) -> dict[str, str]:
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


def _variable_of(listing: Listing, row: Row) -> str:
    name = row.name.removesuffix("/read")
    if listing.kinds.get(name) is not RowKind.VARIABLE or len(row.inputs) != 1:
        raise row.fault(f"{row.name!r} reads no variable of this table")
    return name


def _permutation_of(listing: Listing, row: Row) -> str | None:
    source, target = layouts_of(row.name)
    name = f"PermConst{source}To{target}-LayoutOptimizer"
    return name if name in listing.rows else None


def _op_edges(
    listing: Listing,
    row: Row,
    values: tuple[str | None, ...],
    versions: Mapping[str, list[str]],
    adjoint: Adjoint | None,
) -> tuple[Edge, ...]:
    roles = [operand.role for operand in adjoint.rule.operands] if adjoint else [Role.DATA] * len(values)
    return tuple(
        Edge(value and _version(listing, value, versions.get(value, []), wanted.shape), role)
        for value, wanted, role in zip(values, row.inputs, roles, strict=True)
    )


def _version(listing: Listing, value: str, transposes: list[str], shape: Shape) -> str:
    """The row that holds a value in this shape; its own row if none does."""
    for name in (value, *transposes):
        output = listing.rows[name].output
        if output is not None and output.shape == shape:
            return name
    return value
