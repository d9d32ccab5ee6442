"""From a dump's records to a Graph: the executed ops in their order, every var with its kind and bytes.

What comes from outside (constants, the input) is listed by MegEngine as the output of an op that hands it
over; here that op reads it, because no op makes it. Vars of static inference are known before the run:
constants without device memory, of which an op needs only what they say about shapes.
"""

from collections.abc import Iterator

from stowplan.errors import BadInput
from stowplan.formats.megengine.records import Dump, Operator
from stowplan.formats.megengine.tensors import tensors_of
from stowplan.ir import Attributes, Graph, Kind, Note, NoteKind, Op, Phase, Role, Use

_HANDED_OVER = {
    "ImmutableTensor": Kind.CONSTANT,
    "SharedDeviceTensor": Kind.PARAMETER,
    "Host2DeviceCopy": Kind.INPUT,
    "InputCallback": Kind.INPUT,
}


def graph_of(dump: Dump) -> tuple[Graph, tuple[Note, ...]]:
    """The graph of the run, and what had to be inferred for it."""
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
