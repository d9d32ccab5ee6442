"""From a dump's vars to Tensors: shape, element type and bytes, inferred where the dump is silent."""

from collections.abc import Iterator, Mapping, Set
from itertools import chain

from stowplan.formats.megengine.facets import place_of
from stowplan.formats.megengine.records import Dump, Var
from stowplan.ir import DType, Kind, Note, NoteKind, Shape, Tensor, bytes_of_shape

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
    """Every var as a tensor, with notes on what was inferred; those in `known` take no device memory."""
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
    """The one element type of the persistent vars; the dump does not say it for others."""
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
