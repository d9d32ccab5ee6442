"""From rows and edges to a graph: one tensor per output, one op per node, copy and read.

The rows are sorted by name, so the order is rebuilt. The forward half follows its data. The backward half
visits the forward ops from last to first, for each the gradients of its parameters before that of its data.
Reads and transposes run just before their first reader. A transpose's name gives the layouts of images; other
ops keep the layout of their input.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from stowplan.formats.tensorflow.forward import is_backward
from stowplan.formats.tensorflow.rows import RowKind, RowListing, RowValue, TableRow, copied_by
from stowplan.formats.tensorflow.wiring import RowInput, Wiring, layouts_of
from stowplan.ir import Graph, Kind, Op, Phase, Tensor, Use


def execution_order(listing: RowListing, wiring: Wiring) -> list[str]:
    """The names of ops, transposes and reads in the order they run."""
    needs = {
        name: [edge.source for edge in edges if edge.source in wiring.edges]
        for name, edges in wiring.edges.items()
    }
    order: dict[str, None] = {}
    ops = [row.name for row in listing.of_kind(RowKind.OP)]
    _emit(listing, needs, (name for name in ops if not is_backward(name)), order)
    _emit(listing, needs, _backward_targets(wiring, list(order)), order)
    _emit(listing, needs, wiring.edges, order)
    return list(order)


def _backward_targets(wiring: Wiring, forward: list[str]) -> list[str]:
    by_forward: defaultdict[str, list[str]] = defaultdict(list)
    for adjoint in sorted(wiring.adjoints.values(), key=lambda adjoint: -adjoint.rule.makes):
        by_forward[adjoint.forward].append(adjoint.name)
    return [name for target in reversed(forward) for name in by_forward[target]]


def _emit(
    listing: RowListing, needs: Mapping[str, list[str]], targets: Iterable[str], order: dict[str, None]
) -> None:
    """Append each target to `order`, after what it still needs."""
    for target in targets:
        waiting = [target]
        open_: set[str] = set()
        while waiting:
            name = waiting[-1]
            missing = [need for need in needs[name] if need not in order]
            if not missing or name in order:
                waiting.pop()
                order.setdefault(name)
            elif name in open_:
                raise listing.rows[name].fault(f"{name!r} waits for its own output")
            else:
                open_.add(name)
                waiting += reversed(missing)


_PHASES = {RowKind.READ: Phase.FORWARD, RowKind.TRANSPOSE: Phase.LAYOUT}
_CONSTANTS = (RowKind.SHAPE_CONSTANT, RowKind.PERMUTATION_CONSTANT)


def graph_of(listing: RowListing, wiring: Wiring) -> Graph:
    """The step, without layouts. Variables and results stay until its end."""
    order = [listing.rows[name] for name in execution_order(listing, wiring)]
    copies = listing.of_kind(RowKind.MEMCPY)
    ops = [_op(listing, wiring, row) for row in order] + [_copy(listing, row) for row in copies]
    tensors = {tensor.id: tensor for tensor in _tensors(listing, wiring, copies)}
    return Graph(tensors, tuple(ops), frozenset(_held(listing, tensors)))


def _op(listing: RowListing, wiring: Wiring, row: TableRow) -> Op:
    kind = listing.kinds[row.name]
    adjoint = wiring.adjoints.get(row.name)
    return Op(
        id=row.name,
        type="Identity" if kind is RowKind.READ else listing.op_types[row.name],
        phase=_PHASES.get(kind, Phase.BACKWARD if is_backward(row.name) else Phase.FORWARD),
        inputs=tuple(
            Use(edge.source or unknown_input(row, position), edge.role)
            for position, edge in enumerate(wiring.edges[row.name])
        ),
        outputs=(Use(row.name),),
        device=row.device,
        adjoint_of=adjoint.forward if adjoint else None,
    )


def unknown_input(row: TableRow, position: int) -> str:
    """The tensor that stands for an input whose producer the table does not reveal."""
    return f"{row.name}:input{position}"


def _copy(listing: RowListing, row: TableRow) -> Op:
    if copied_by(row) not in listing.rows or listing.rows[copied_by(row)].output is None:
        raise row.fault(f"{row.name!r} copies {copied_by(row)!r}, which is no value of this table")
    return Op(
        id=row.name,
        type=row.name.rpartition(":")[2],
        phase=Phase.TRANSFER,
        inputs=(Use(copied_by(row)),),
        outputs=(Use(row.name),),
        device=row.device,
    )


def _tensors(listing: RowListing, wiring: Wiring, copies: list[TableRow]) -> Iterator[Tensor]:
    parameters = _parameters(wiring)
    for row in listing.of_kind(RowKind.VARIABLE):
        yield _tensor(row, Kind.PARAMETER if row.name in parameters else Kind.INPUT)
    for row in listing.of_kind(RowKind.READ):
        variable = _owner(listing, row.name)
        kind = Kind.PARAMETER if variable in parameters else Kind.INPUT
        yield _tensor(row, kind, alias_of=variable)
    for row in listing.of_kind(*_CONSTANTS):
        yield _tensor(row, Kind.CONSTANT)
    for row in listing.of_kind(RowKind.OP, RowKind.TRANSPOSE):
        kind, target = _meaning(listing, wiring, row.name)
        yield _tensor(row, kind, gradient_of=target)
    for row in copies:
        yield _copied_tensor(listing, wiring, row)
    yield from _unknown_tensors(listing, wiring)


def _parameters(wiring: Wiring) -> set[str]:
    """The variables that a forward op reads in addition to its data."""
    reads = {value for (_, position), value in wiring.forward.items() if position > 0}
    return {edge.source for name in reads for edge in wiring.edges[name] if edge.source}


def _owner(listing: RowListing, name: str) -> str:
    """The variable of a read; any other value is its own."""
    return name.removesuffix("/read") if listing.kinds[name] is RowKind.READ else name


def _meaning(listing: RowListing, wiring: Wiring, name: str) -> tuple[Kind, str | None]:
    """Whether a row makes an activation or a gradient, and of what. A transpose makes what it turns."""
    value = wiring.transposed.get(name, name)
    if not is_backward(value) or listing.kinds[value] is not RowKind.OP:
        return Kind.ACTIVATION, None
    adjoint = wiring.adjoints.get(value)
    target = wiring.forward.get((adjoint.forward, adjoint.rule.makes)) if adjoint else None
    return Kind.GRADIENT, target and _owner(listing, target)


def _tensor(row: TableRow, kind: Kind, alias_of: str | None = None, gradient_of: str | None = None) -> Tensor:
    value = row.output
    if value is None:
        raise row.fault(f"{row.name!r} has no output")
    return Tensor(
        id=row.name,
        kind=kind,
        shape=value.shape,
        dtype=value.dtype,
        nbytes=value.nbytes,
        device=row.device,
        gradient_of=gradient_of,
        alias_of=alias_of,
    )


def _copied_tensor(listing: RowListing, wiring: Wiring, row: TableRow) -> Tensor:
    """The host tensor that a device-to-host copy makes."""
    source = copied_by(row)
    kind, target = _meaning(listing, wiring, source)
    value = listing.rows[source].output
    is_whole = value is not None and value.nbytes == row.copied_bytes
    return Tensor(
        id=row.name,
        kind=kind,
        shape=value.shape if value and is_whole else None,
        dtype=value.dtype if value and is_whole else None,
        nbytes=row.copied_bytes,
        device="CPU",
        gradient_of=target,
    )


def _unknown_tensors(listing: RowListing, wiring: Wiring) -> Iterator[Tensor]:
    for row, position, wanted in unresolved(listing, wiring):
        name = unknown_input(row, position)
        yield Tensor(name, Kind.INPUT, wanted.shape, wanted.dtype, wanted.nbytes, device=row.device)


def unresolved(listing: RowListing, wiring: Wiring) -> Iterator[tuple[TableRow, int, RowValue]]:
    """The inputs whose producer is unknown."""
    for name, edges in wiring.edges.items():
        for position, edge in enumerate(edges):
            if edge.source is None:
                yield listing.rows[name], position, listing.rows[name].inputs[position]


def is_consistent(listing: RowListing, edge: RowInput, wanted: RowValue) -> bool:
    """Whether an edge's source has the type and shape that its reader shows."""
    return edge.source is not None and listing.rows[edge.source].output == wanted


def _held(listing: RowListing, tensors: dict[str, Tensor]) -> Iterator[str]:
    for tensor in tensors.values():
        target = tensors.get(tensor.gradient_of or "")
        if target is not None and target.kind is Kind.PARAMETER:
            yield tensor.id
    for row in listing.of_kind(RowKind.VARIABLE, RowKind.MEMCPY):
        if tensors[row.name].kind is not Kind.PARAMETER:
            yield row.name
    for row in listing.of_kind(RowKind.RETVAL):
        if copied_by(row) in tensors:
            yield copied_by(row)


_FILTER = "HWIO"


def with_layouts(graph: Graph) -> Graph:
    """`graph` with the layout of every 4-d tensor that is known."""
    layouts: dict[str, str] = {}
    for op in graph.ops:
        if op.phase is Phase.LAYOUT:
            layouts.setdefault(graph.storage_of(op.inputs[0].tensor), layouts_of(op.id)[0])
    for tensor in graph.tensors.values():
        if tensor.kind is Kind.PARAMETER:
            layouts[tensor.id] = _FILTER
    for op in graph.ops:
        for name in op.writes():
            layouts.setdefault(name, _layout_made(graph, op, graph.tensors[name], layouts))
    return replace(
        graph,
        tensors={
            name: replace(tensor, layout=layouts.get(graph.storage_of(name), ""))
            if _is_image(tensor)
            else tensor
            for name, tensor in graph.tensors.items()
        },
    )


def _layout_made(graph: Graph, op: Op, made: Tensor, layouts: Mapping[str, str]) -> str:
    target = graph.tensors.get(made.gradient_of or "")
    if target is not None and target.kind is Kind.PARAMETER:
        return _FILTER
    if op.phase is Phase.LAYOUT:
        return layouts_of(op.id)[1]
    read = (layouts.get(graph.storage_of(name), "") for name in op.reads() if _is_image(graph.tensors[name]))
    return next((layout for layout in read if layout not in ("", _FILTER)), "")


def _is_image(tensor: Tensor) -> bool:
    return tensor.shape is not None and len(tensor.shape) == 4
