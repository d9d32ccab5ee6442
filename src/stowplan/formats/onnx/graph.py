"""From an ONNX model's messages to a graph: kinds, shapes, element types, views."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeAlias

from stowplan.errors import BadInput, BadUse, MissingRule
from stowplan.formats.onnx.records import Dim, Initializer, Model, Node, TypedName
from stowplan.ir import (
    Attribute,
    DType,
    Graph,
    Kind,
    Note,
    NoteKind,
    Op,
    Phase,
    Role,
    Shape,
    Tensor,
    Use,
    bytes_of_shape,
)
from stowplan.ops.effects import aliasing_of
from stowplan.ops.onnx_shapes import RESIZES, STATISTICS, constant_key, onnx_shapes_of
from stowplan.ops.table import Site

_DTYPES = {
    1: DType.FLOAT32,
    2: DType.UINT8,
    3: DType.INT8,
    4: DType.UINT16,
    5: DType.INT16,
    6: DType.INT32,
    7: DType.INT64,
    9: DType.BOOL,
    10: DType.FLOAT16,
    11: DType.FLOAT64,
    12: DType.UINT32,
    13: DType.UINT64,
    14: DType.COMPLEX64,
    15: DType.COMPLEX128,
    16: DType.BFLOAT16,
    17: DType.FLOAT8,
    18: DType.FLOAT8,
    19: DType.FLOAT8,
    20: DType.FLOAT8,
}
FLOATS = frozenset({DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})
_TO_BOOL = frozenset(
    f"onnx.{name}"
    for name in (
        *("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"),
        *("Not", "And", "Or", "Xor", "IsNaN", "IsInf"),
    )
)
_TO_INDICES = frozenset(f"onnx.{name}" for name in ("Shape", "Size", "ArgMax", "ArgMin", "NonZero"))


def dtype_of(element: int, where: str) -> DType:
    """The element type of a number."""
    if element not in _DTYPES:
        raise BadInput(f"element type {element} has no size in bytes here", where=where)
    return _DTYPES[element]


def made_by(op_type: str, cast_to: Attribute, operands: list[DType], output: int, where: str) -> DType:
    """The element type of an op's output: that of its first float operand, with few exceptions."""
    if op_type in _TO_BOOL or (op_type == "onnx.Dropout" and output == 1):
        return DType.BOOL
    if op_type in _TO_INDICES or (op_type in ("onnx.MaxPool", "onnx.TopK") and output == 1):
        return DType.INT64
    if isinstance(cast_to, int) and op_type in ("onnx.Cast", "onnx.ConstantOfShape"):
        return dtype_of(cast_to, where)
    if op_type == "onnx.Where":
        operands = operands[1:]
    return operands[0] if operands else DType.FLOAT32


Found: TypeAlias = tuple[Graph, tuple[Note, ...], dict[str, str]]

_TAKEN_AS = 1  # for a size that has but a name
_ADVICE = "write the shapes into the file: onnx.shape_inference.infer_shapes, or export it again"


def graph_of(model: Model) -> Found:
    """The graph, notes on assumptions, and by op id the place in the file."""
    return _Builder(model).run()


def _named(uses: tuple[Use, ...]) -> str:
    return ", ".join(repr(use.tensor) for use in uses[:4]) or "an op without outputs"


class _Builder:
    """Tensors by name, as they become known node by node."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._given = {value.name: value for value in (*model.values, *model.outputs)}
        self._tensors: dict[str, Tensor] = {}
        self._constants: dict[str, Attribute] = {}
        self._symbols: dict[str, int] = {}
        self._inferred = 0

    def run(self) -> Found:
        """Weights and inputs first, then node by node."""
        model = self._model
        for initializer in model.initializers:
            self._add_weight(initializer, initializer.name)
        for value in model.inputs:
            if value.name not in self._tensors:
                self._add_input(value)
        ops = [self._op(node, at) for at, node in enumerate(model.nodes) if not self._is_constant(node)]
        self._mark_no_parameters(ops)
        held = {value.name for value in (*model.inputs, *model.outputs)} & self._tensors.keys()
        graph = Graph(self._tensors, tuple(ops), held=frozenset(held), name=model.name)
        return graph, tuple(self._notes()), {op.id: op.source for op in ops}

    def _add(self, tensor: Tensor) -> None:
        if tensor.shape is not None and tensor.dtype is not None:
            tensor = replace(tensor, nbytes=bytes_of_shape(tensor.shape, tensor.dtype))
        self._tensors[tensor.id] = tensor

    def _add_weight(self, weight: Initializer, name: str) -> None:
        where = f"initializer {name!r}"
        dtype = dtype_of(weight.element, where)
        kind = Kind.PARAMETER if dtype in FLOATS and weight.dims else Kind.CONSTANT
        self._add(Tensor(name, kind, weight.dims, dtype))
        if weight.values is not None:
            self._constants[name] = weight.values

    def _add_input(self, value: TypedName) -> None:
        where = f"input {value.name!r}"
        if value.element is None or value.dims is None:
            raise BadInput("is no tensor with an element type and dims", where=where)
        shape = tuple(self._size(dim) for dim in value.dims)
        self._add(Tensor(value.name, Kind.INPUT, shape, dtype_of(value.element, where)))

    def _size(self, dim: Dim) -> int:
        return dim if isinstance(dim, int) else self._symbols.setdefault(dim or "?", _TAKEN_AS)

    def _is_constant(self, node: Node) -> bool:
        """Whether a node only holds a value, which is then a tensor and no op."""
        if node.type != "Constant" or node.domain or len(node.outputs) != 1:
            return False
        values = node.attributes.get("value_ints", node.attributes.get("value_floats"))
        scalar = node.attributes.get("value_int", node.attributes.get("value_float"))
        numbers = values if isinstance(values, tuple) else () if scalar is None else (scalar,)
        weight = node.constant or Initializer(
            "",
            1 if any(isinstance(n, float) for n in numbers) else 7,
            (len(numbers),) if values else (),
            None,
        )
        self._add_weight(weight, node.outputs[0])
        self._tensors[node.outputs[0]] = replace(self._tensors[node.outputs[0]], kind=Kind.CONSTANT)
        if numbers:
            self._constants[node.outputs[0]] = numbers
        return True

    def _op(self, node: Node, position: int) -> Op:
        """The op of a node, its outputs filed with their shapes."""
        inputs = tuple(name for name in node.inputs if name)
        for name in inputs:
            if name not in self._tensors:
                raise BadInput(f"reads {name!r}, which nothing before it makes", where=node.where)
        domain = "onnx" if node.domain in ("", "ai.onnx") else node.domain
        op = Op(
            f"{node.name or node.type}.{position}",
            f"{domain}.{node.type}",
            Phase.FORWARD,
            inputs=tuple(Use(name, self._role(name, f"{domain}.{node.type}")) for name in inputs),
            outputs=tuple(Use(name) for name in node.outputs if name),
            attributes={**node.attributes, **self._known_operands(inputs, f"{domain}.{node.type}")},
            source=node.where,
        )
        self._add_outputs(op, node)
        return op

    def _role(self, name: str, op_type: str) -> Role:
        """Numbers that only determine shapes stay on the host."""
        return Role.SHAPE if self._is_about_shapes(name, op_type) else Role.DATA

    def _is_about_shapes(self, name: str, op_type: str) -> bool:
        whole = self._tensors[name].dtype not in FLOATS
        return name in self._constants and (whole or op_type in RESIZES)

    def _known_operands(self, inputs: tuple[str, ...], op_type: str) -> dict[str, Attribute]:
        return {
            constant_key(at): self._constants[name]
            for at, name in enumerate(inputs)
            if self._is_about_shapes(name, op_type)
        }

    def _add_outputs(self, op: Op, node: Node) -> None:
        inputs = tuple(self._tensors[use.tensor] for use in op.inputs)
        operands = [tensor.dtype for tensor in inputs if tensor.dtype is not None]
        shapes = self._shapes(op, inputs)
        for at, (use, shape) in enumerate(zip(op.outputs, shapes, strict=True)):
            given = self._given.get(use.tensor)
            known = given.element if given and given.element else None
            dtype = (
                dtype_of(known, node.where)
                if known is not None
                else made_by(op.type, node.attributes.get("to"), operands, at, node.where)
            )
            if use.tensor in self._tensors:
                raise BadInput(f"makes {use.tensor!r}, which is there already", where=node.where)
            kind = Kind.MASK if op.type == "onnx.Dropout" and at == 1 else Kind.ACTIVATION
            self._add(Tensor(use.tensor, kind, shape, dtype))
        self._mark_views(op, inputs)

    def _shapes(self, op: Op, inputs: tuple[Tensor, ...]) -> list[Shape]:
        """From the file where it has them, otherwise by the rules."""
        given = [self._given_shape(use.tensor) for use in op.outputs]
        if all(shape is not None for shape in given):
            return [shape for shape in given if shape is not None]
        outputs = tuple(Tensor(use.tensor, Kind.ACTIVATION) for use in op.outputs)
        try:
            shapes = onnx_shapes_of(Site(op, inputs, outputs))[: len(outputs)]
        except (MissingRule, BadUse) as reason:
            what = f"no shape for {_named(op.outputs)}: {reason}; {_ADVICE}"
            raise BadInput(what, where=op.source) from None
        except (IndexError, ValueError):
            dims = [tensor.shape for tensor in inputs[:4]]
            raise BadInput(f"{op.type} cannot read operands of {dims}", where=op.source) from None
        if len(shapes) < len(outputs):
            raise BadInput(f"{op.type} makes {len(shapes)} outputs, not {len(outputs)}", where=op.source)
        self._inferred += len(shapes)
        return list(shapes)

    def _given_shape(self, name: str) -> Shape | None:
        """The file's shape of a value, if all of its dims are sizes or names of sizes."""
        given = self._given.get(name)
        if given is None or given.dims is None:
            return None
        if any(isinstance(dim, str) and dim not in self._symbols for dim in given.dims):
            return None
        return tuple(dim if isinstance(dim, int) else self._symbols[dim] for dim in given.dims)

    def _mark_views(self, op: Op, inputs: tuple[Tensor, ...]) -> None:
        outputs = tuple(self._tensors[use.tensor] for use in op.outputs)
        for at, source in aliasing_of(Site(op, inputs, outputs)).view_of.items():
            if outputs[at].nbytes == inputs[source].nbytes:
                self._tensors[outputs[at].id] = replace(outputs[at], alias_of=inputs[source].id)

    def _mark_no_parameters(self, ops: list[Op]) -> None:
        """Running statistics and scales are not parameters, though the file stores them as weights."""
        for op in ops:
            for use in op.inputs[1:] if op.type in RESIZES else ():
                self._tensors[use.tensor] = replace(self._tensors[use.tensor], kind=Kind.CONSTANT)
            for at in STATISTICS.get(op.type, ()):
                tensor = self._tensors[op.inputs[at].tensor] if at < len(op.inputs) else None
                if tensor is not None and tensor.kind is Kind.PARAMETER:
                    self._tensors[tensor.id] = replace(tensor, kind=Kind.BUFFER)

    def _notes(self) -> Iterator[Note]:
        for symbol in self._symbols:
            yield Note(NoteKind.INFERRED, "graph.input", f"the size {symbol!r} is taken to be {_TAKEN_AS}")
        if self._inferred:
            what = f"{self._inferred} shapes that the file omits, by the rules of their ops"
            yield Note(NoteKind.INFERRED, "graph", what)
        elsewhere = {weight.location for weight in self._model.initializers if weight.location}
        for location in sorted(elsewhere):
            what = f"weights are in {location!r}, which is not opened: their dims are in this file"
            yield Note(NoteKind.ODD, "graph.initializer", what)
