"""The op table as it is written: one row per node, kernel or copy, and what each row is."""

import re
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from stowplan.errors import BadInput
from stowplan.ir import DType, Shape, bytes_of_shape

_SHAPE = re.compile(r"\((?:([a-z0-9]+) )?([0-9]{1,18}(?:x[0-9]{1,18}){0,31})\)")
_COPY = re.compile(r"\(output ([0-9]{1,18}) bytes\)")
_NAME = re.compile(r"[^\s,()^]{1,1000}")
_KERNEL = re.compile(r"(.+):(\w+)")
_COPIED = re.compile(r"edge_[0-9]+_(.+):MEMCPY\w+")
_RETURNED = re.compile(r"_retval_(.+)_[0-9]+_[0-9]+")
_TRANSPOSE = re.compile(r".+-Transpose\w+To\w+-LayoutOptimizer")
_PERMUTATION = re.compile(r"PermConst\w+-LayoutOptimizer")
_LARGEST_TOTAL_BYTES = 2**62

_INPUTS = {
    "Conv2D": 2,
    "BiasAdd": 2,
    "Relu": 1,
    "LRN": 1,
    "MaxPool": 1,
    "Transpose": 2,
    "ReluGrad": 2,
    "BiasAddGrad": 1,
    "Conv2DBackpropFilter": 3,
    "Conv2DBackpropInput": 3,
    "LRNGrad": 3,
    "MaxPoolGrad": 3,
}
"""How many inputs an op of this type has."""


class RowKind(StrEnum):
    """The kind of a row; the values name the document's counts."""

    OP = "ops"
    TRANSPOSE = "transposes"
    KERNEL = "kernels"
    VARIABLE = "variables"
    READ = "reads"
    RETVAL = "retvals"
    MEMCPY = "memcpys"
    SHAPE_CONSTANT = "shape_constants"
    PERMUTATION_CONSTANT = "permutation_constants"
    SOURCE = "sources"


@dataclass(frozen=True, slots=True)
class RowValue:
    """The type and shape of one input or output. Tables write a vector of n as "n x 1"."""

    shape: Shape
    dtype: DType

    @property
    def nbytes(self) -> int:
        return bytes_of_shape(self.shape, self.dtype)


@dataclass(frozen=True, slots=True)
class TableRow:
    """One line: `inputs` are the data it reads, in order, and `controls` what only has to come before."""

    line: int
    name: str
    inputs: tuple[RowValue, ...]
    controls: tuple[str, ...]
    output: RowValue | None
    copied_bytes: int | None
    device: str

    def fault(self, what: str) -> BadInput:
        """The error to raise about this row."""
        return BadInput(what, where=f"line {self.line}")


@dataclass(frozen=True, slots=True)
class RowListing:
    """The whole table: rows by name in the file's order, what each is, and the type of each op."""

    rows: dict[str, TableRow]
    kinds: dict[str, RowKind]
    op_types: dict[str, str]

    def of_kind(self, *kinds: RowKind) -> list[TableRow]:
        """The rows of these kinds, in the file's order."""
        return [row for name, row in self.rows.items() if self.kinds[name] in kinds]

    def counts(self) -> dict[str, int]:
        """How many rows there are of each kind."""
        found = Counter(self.kinds.values())
        return {"rows": len(self.rows), **{kind.value: found[kind] for kind in RowKind}}


def parse(text: str) -> RowListing:
    """Split a table into rows and tell what each row is."""
    rows: dict[str, TableRow] = {}
    total = 0
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        row = _row(number, line.rstrip("\r"))
        total += sum(value.nbytes for value in (*row.inputs, row.output) if value) + (row.copied_bytes or 0)
        if row.name in rows:
            raise row.fault(f"{row.name!r} has a row already, on line {rows[row.name].line}")
        if total >= _LARGEST_TOTAL_BYTES:
            raise row.fault(f"the values so far take {total} bytes, more than any machine has")
        rows[row.name] = row
    kinds = {name: _kind_of(row, rows) for name, row in rows.items()}
    return RowListing(rows, kinds, _op_types(rows, kinds))


def _row(line: int, text: str) -> TableRow:
    fields = text.split(", ")
    if len(fields) < 5 or not _NAME.fullmatch(fields[0]):
        raise BadInput("a row is: name, inputs, output, device, number", where=f"line {line}")
    name, *inputs, output, device, number = fields
    if not re.fullmatch(r"\S+", device) or not re.fullmatch(r"[0-9]{1,18}", number):
        raise BadInput(f"{device!r}, {number!r} is not a device and a number", where=f"line {line}")
    copy = _COPY.fullmatch(output)
    return TableRow(
        line,
        name,
        tuple(_value(line, field) for field in inputs if not _is_no_data(field)),
        tuple(field[1:] for field in inputs if field.startswith("^")),
        None if copy or output == "(no output)" else _value(line, output),
        int(copy[1]) if copy else None,
        device,
    )


def _is_no_data(field: str) -> bool:
    """Whether an input field is a control edge, or the "(1)" of a node that reads nothing."""
    return field.startswith("^") or field in ("(1)", "(no input)")


def _value(line: int, field: str) -> RowValue:
    match = _SHAPE.fullmatch(field)
    if match is None:
        raise BadInput(f"{field[:60]!r} is not a shape like (128x64x56x56)", where=f"line {line}")
    if match[1] is not None and match[1] not in set(DType):
        raise BadInput(f"{match[1]!r} is not an element type", where=f"line {line}")
    sizes = tuple(int(size) for size in match[2].split("x"))
    shape = sizes[:1] if len(sizes) == 2 and sizes[1] == 1 else sizes
    return RowValue(shape, DType(match[1] or DType.FLOAT32))


def _kind_of(row: TableRow, rows: dict[str, TableRow]) -> RowKind:
    name = row.name
    if name == "_SOURCE":
        return RowKind.SOURCE
    if _RETURNED.fullmatch(name):
        return RowKind.RETVAL
    if _COPIED.fullmatch(name):
        return RowKind.MEMCPY
    if kernel_of(name, rows):
        return RowKind.KERNEL
    if row.output is None:
        raise row.fault(f"{name!r} has no output, and is no kernel, copy or returned value")
    if _PERMUTATION.fullmatch(name):
        return RowKind.PERMUTATION_CONSTANT
    if _TRANSPOSE.fullmatch(name):
        return RowKind.TRANSPOSE
    if name.endswith("/read"):
        return RowKind.READ
    if row.inputs:
        return RowKind.OP
    return RowKind.SHAPE_CONSTANT if row.controls else RowKind.VARIABLE


def kernel_of(name: str, rows: dict[str, TableRow]) -> tuple[str, str] | None:
    """The node and the op type that a kernel's row names: ("conv1", "Relu") of "conv1:Relu"."""
    match = _KERNEL.fullmatch(name)
    return (match[1], match[2]) if match and match[1] in rows else None


def copied_by(row: TableRow) -> str:
    """The node whose output a copy or returned value is."""
    match = _COPIED.fullmatch(row.name) or _RETURNED.fullmatch(row.name)
    return match[1] if match else ""


def _op_types(rows: dict[str, TableRow], kinds: dict[str, RowKind]) -> dict[str, str]:
    types = dict(filter(None, (kernel_of(name, rows) for name in rows)))
    for name, kind in kinds.items():
        if kind in (RowKind.OP, RowKind.TRANSPOSE):
            _check_op(rows[name], types.get(name))
    return types


def _check_op(row: TableRow, op_type: str | None) -> None:
    if op_type is None:
        raise row.fault(f"{row.name!r} has no row {row.name + ':...'!r} to tell which kernel it ran")
    if _INPUTS.get(op_type, len(row.inputs)) != len(row.inputs):
        raise row.fault(f"a {op_type} has {_INPUTS[op_type]} inputs, not {len(row.inputs)}")
