"""From a MegEngine dump to a graph with times and addresses.

MegEngine lists an external tensor (a constant, the input) as the output of an op that passes it in. Here that
op reads the tensor, because no op makes it. Static inference computes some vars before the run: they are
constants without device memory, and ops read only their shapes. Shapes, element types and bytes are inferred
where the dump does not give them.
"""

from collections.abc import Iterator, Mapping, Set
from itertools import chain

from stowplan.errors import BadInput
from stowplan.formats.megengine.records import Dump, Operator, Times, Var
from stowplan.ir import (
    Allocation,
    Attributes,
    DType,
    Graph,
    Interval,
    Kind,
    Note,
    NoteKind,
    Op,
    Phase,
    Profile,
    Role,
    Shape,
    Tensor,
    Use,
    bytes_of_shape,
)


def profile_of(dump: Dump) -> Profile:
    """Times by clock. The host's and the device's clock are not aligned."""
    return Profile(
        {
            clock: {op: _interval(nodes, f"profiler.{clock}.{op}") for op, nodes in ops.items()}
            for clock, ops in dump.clocks.items()
        }
    )


def _interval(nodes: Mapping[str, Times], where: str) -> Interval:
    """From the first start to the last end over the compute nodes an op ran on."""
    if not nodes:
        raise BadInput("no compute node has a time", where=where)
    spans = nodes.values()
    first, last = min(t.start for t in spans), max(t.end for t in spans)
    if last < first:
        raise BadInput(f"ends at {last} s, before it starts at {first} s", where=where)
    return Interval(first, min(t.kern for t in spans), last)


def allocation_of(dump: Dump) -> Allocation:
    """Address and bytes of every var of the run; a var that took no memory sits at address 0."""
    executed = [dump.operators[op] for op in dump.comp_seq if op in dump.operators]
    made = {var for operator in executed for var in operator.output}
    return Allocation({name: place_of(var) for name, var in dump.vars.items() if name in made})


def place_of(var: Var) -> tuple[int, int]:
    """The address and bytes of the var; (0, 0) where the dump has none."""
    if not var.prev_dev_ptr or var.prev_dev_ptr_end is None:
        return (0, 0)
    start = var.prev_dev_ptr if var.dev_ptr is None else var.dev_ptr
    return (start, max(0, var.prev_dev_ptr_end - var.prev_dev_ptr))


def counts_of(dump: Dump) -> dict[str, int]:
    """The figures of the file itself."""
    footprints = dump.footprints.values()
    return {
        "operators": len(dump.operators),
        "executed_operators": len(dump.comp_seq),
        "static_inference_operators": len(dump.operators.keys() - set(dump.comp_seq)),
        "vars": len(dump.vars),
        "input_edges": sum(len(operator.input) for operator in dump.operators.values()),
        "chunks": len(dump.chunks),
        "chunk_bytes": sum(chunk.size for chunk in dump.chunks.values()),
        "footprint_flops": sum(footprint.computation or 0 for footprint in footprints),
        "footprint_bytes": sum(footprint.memory for footprint in footprints),
    }


_DTYPES = {
    "Float32": DType.FLOAT32,
    "Float16": DType.FLOAT16,
    "BFloat16": DType.BFLOAT16,
    "Int32": DType.INT32,
    "Int16": DType.INT16,
    "Int8": DType.INT8,
    "Uint8": DType.UINT8,
    "Bool": DType.BOOL,
}


def tensors_of(
    dump: Dump, kinds: Mapping[str, Kind], known: Set[str]
) -> tuple[dict[str, Tensor], tuple[Note, ...]]:
    """Every var as a tensor, with notes on inferred fields; vars in `known` take no device memory."""
    seen, element = _shapes_in_footprints(dump), _element_type(dump)
    tensors, notes = {}, []
    for name, var in dump.vars.items():
        shape = var.static_infer_tags.SHAPE.inferred_result
        if shape is None:
            shape, source = seen.get(name, ((0,), "nothing: a placeholder without elements"))
            notes.append(_inferred(name, f"the shape {shape} of {var.name!r} comes from {source}"))
        tensors[name] = _tensor(name, var, kinds[name], shape, element, takes_memory=name not in known)
    return tensors, (*notes, *_note_on_types(dump, tensors, element))


def _tensor(
    name: str, var: Var, kind: Kind, shape: Shape, element: DType | None, *, takes_memory: bool
) -> Tensor:
    dtype = _dtype(var, kind, element)
    by_shape = None if dtype is None else bytes_of_shape(shape, dtype)
    address, measured = place_of(var)
    nbytes = (measured if address else by_shape) if takes_memory else 0
    return Tensor(
        name,
        kind,
        shape,
        dtype if nbytes == by_shape else None,
        nbytes,
        name=var.name,
        device=var.comp_node,
        alias_of=var.mem_readonly_fwd_src,
    )


def _shapes_in_footprints(dump: Dump) -> dict[str, tuple[Shape, str]]:
    """The shapes that executed ops saw, each with the footprint it stands in; not those of workspaces."""
    seen: dict[str, tuple[Shape, str]] = {}
    for name, footprint in dump.footprints.items():
        operator = dump.operators.get(name)
        if operator is not None:
            reads = zip(operator.input, footprint.in_shapes, strict=False)
            writes = zip(operator.output, footprint.out_shapes, strict=False)
            seen |= {var: (shape, f"the footprint of {name}") for var, shape in chain(reads, writes) if shape}
    return seen


def _element_type(dump: Dump) -> DType | None:
    """The single element type of the persistent vars; the dump omits it for others."""
    types = {var.mem_plan.layout.dtype for var in dump.vars.values() if var.mem_plan is not None}
    return _DTYPES.get(types.pop()) if len(types) == 1 else None


def _dtype(var: Var, kind: Kind, element: DType | None) -> DType | None:
    if kind is Kind.WORKSPACE:
        return DType.UINT8  # a workspace's shape is its size in bytes
    return element if var.mem_plan is None else _DTYPES.get(var.mem_plan.layout.dtype)


def _note_on_types(dump: Dump, tensors: Mapping[str, Tensor], element: DType | None) -> Iterator[Note]:
    guessed = [name for name, var in dump.vars.items() if var.mem_plan is None and tensors[name].nbytes]
    fitting = sum(tensors[name].dtype == element for name in guessed)
    if element is not None and fitting:
        what = f"{fitting} vars are taken to be {element} like the constants: their bytes fit their shapes"
        yield Note(NoteKind.INFERRED, "graph_exec.var", what)


def _inferred(var: str, what: str) -> Note:
    return Note(NoteKind.INFERRED, f"graph_exec.var.{var}", what)


_HANDED_OVER = {
    "ImmutableTensor": Kind.CONSTANT,
    "SharedDeviceTensor": Kind.PARAMETER,
    "Host2DeviceCopy": Kind.INPUT,
    "InputCallback": Kind.INPUT,
}


def graph_of(dump: Dump) -> tuple[Graph, tuple[Note, ...]]:
    """The graph of the run, and notes on inferred fields."""
    executed = set(dump.comp_seq)
    static = {name: operator for name, operator in dump.operators.items() if name not in executed}
    known = {var for operator in static.values() for var in operator.output}
    tensors, notes = tensors_of(dump, _kinds(dump, known), known)
    ops = tuple(_op(dump, name, known) for name in dump.comp_seq)
    results = (use.tensor for op in ops if op.type == "OutputCallback" for use in op.inputs)
    return Graph(tensors, ops, held=frozenset(results)), (*notes, *_left_out(static))


def _left_out(static: dict[str, Operator]) -> Iterator[Note]:
    for name, operator in static.items():
        yield Note(
            NoteKind.INFERRED,
            f"graph_exec.operator.{name}",
            f"{operator.type} is not in comp_seq: static inference, not an op of the run",
        )


def _kinds(dump: Dump, known: set[str]) -> dict[str, Kind]:
    kinds = {name: _kind_by_name(var.name) for name, var in dump.vars.items()}
    made = {var for operator in dump.operators.values() for var in operator.output}
    kinds |= dict.fromkeys(kinds.keys() - made, Kind.INPUT)
    for operator in dump.operators.values():
        if operator.type in _HANDED_OVER:
            kinds |= dict.fromkeys(operator.output, _HANDED_OVER[operator.type])
    return kinds | dict.fromkeys(known, Kind.CONSTANT)


def _kind_by_name(name: str) -> Kind:
    return Kind.WORKSPACE if name.endswith(":workspace") else Kind.ACTIVATION


def _op(dump: Dump, name: str, known: set[str]) -> Op:
    operator = dump.operators.get(name)
    if operator is None:
        raise BadInput(f"operator {name!r} is executed but not described", where="graph_exec.comp_seq")
    reads, writes = operator.input, operator.output
    if operator.type in _HANDED_OVER:
        reads, writes = (*reads, *writes), ()
    return Op(
        name,
        operator.type,
        Phase.FORWARD,
        inputs=tuple(Use(var, Role.SHAPE if var in known else Role.DATA) for var in reads),
        outputs=tuple(Use(var) for var in writes),
        attributes={"name": operator.name, **_footprint(dump, name)},
        device=next((dump.vars[var].comp_node for var in operator.output if var in dump.vars), ""),
    )


def _footprint(dump: Dump, name: str) -> Attributes:
    """The op's parameters, and its bytes and FLOPs under the dump's own names: `memory` and `computation`."""
    footprint = dump.footprints.get(name)
    if footprint is None:
        return {}
    return {**footprint.param, "memory": footprint.memory, "computation": footprint.computation}
