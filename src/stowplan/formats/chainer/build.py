"""From a Chainer file's records to a graph: two tensors per variable, an executable order, saved tensors.

The order of the file is not executable. `rank` is the longest path from the inputs: ascending ranks order the
forward half, descending ranks the backward half.

There are two views of what a backward op saves. `LISTED` believes the tags of the record, which are
conservative: a convolution lists its bias, GetItem and Concat list inputs of which they need only the shapes,
Dropout lists its input though it needs its mask. `RETAIN` believes the attributes `_input_indexes_to_retain`
and `_output_indexes_to_retain`, which say what Chainer kept. Dropout's mask is in neither list; it has the
bytes of the output.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum

from stowplan.errors import BadInput
from stowplan.formats.chainer.records import (
    BACKWARD,
    ChainerRecord,
    Listing,
    Tag,
    Variable,
    gradient_id,
    link_of,
    mask_id,
)
from stowplan.ir import Graph, Kind, Op, Phase, Role, Tensor, Use

_RANDOM = frozenset({"Dropout"})


class SavedView(StrEnum):
    """The source of the saved tensors."""

    LISTED = "listed"
    RETAIN = "retain"


def masks_of(forward: ChainerRecord, view: SavedView) -> tuple[str, ...]:
    """The masks a random op makes for its backward, one per output; the listed view has none."""
    if view is SavedView.LISTED or forward.type not in _RANDOM:
        return ()
    return tuple(mask_id(output) for output in forward.outputs)


def saved_uses(forward: ChainerRecord, backward: ChainerRecord, view: SavedView) -> Iterator[Use]:
    """The tensors that backward saves, in the order of its record, then those the record omits."""
    listed = [(name, tag) for name, tag in backward.inputs if tag is not Tag.GRADIENT]
    if view is SavedView.LISTED:
        yield from (Use(name, Role.SAVED) for name, _ in listed)
        return
    retained = _retained(forward)
    unlisted = retained.keys() - set(listed)
    for name, tag in listed:
        yield Use(name, Role.SAVED if (name, tag) in retained else Role.SHAPE)
    yield from (Use(name, Role.SAVED) for name, tag in retained if (name, tag) in unlisted)
    yield from (Use(mask, Role.SAVED) for mask in masks_of(forward, view))


def _retained(forward: ChainerRecord) -> dict[tuple[str, Tag], None]:
    """The values that Chainer kept, in order and without repeats."""
    inputs = [name for name, _ in forward.inputs]
    return dict.fromkeys(
        [(name, Tag.INPUT) for name in _chosen(forward, "_input_indexes_to_retain", inputs)]
        + [(name, Tag.OUTPUT) for name in _chosen(forward, "_output_indexes_to_retain", forward.outputs)]
    )


def _chosen(record: ChainerRecord, attribute: str, names: Sequence[str]) -> list[str]:
    indexes = record.attributes.get(attribute)
    if indexes is None:
        return []
    chosen = [index for index in indexes if isinstance(index, int)] if isinstance(indexes, tuple) else []
    if tuple(chosen) != indexes or any(not 0 <= index < len(names) for index in chosen):
        raise BadInput(
            f"{attribute} of {record.type} is {indexes!r}, not a list of positions below {len(names)}",
            where=f"line {record.line}",
        )
    return [names[index] for index in chosen]


_MANY = 10**9
_INPUTS = {
    "Convolution2DFunction": (2, 3),
    "Deconvolution2DFunction": (2, 3),
    "SoftmaxCrossEntropy": (2, 2),
    "ReLU": (1, 1),
    "Dropout": (1, 1),
    "MaxPooling2D": (1, 1),
    "GetItem": (1, 1),
    "Concat": (1, _MANY),
}
"""How many inputs a function takes, at least and at most."""


def values_of(listing: Listing) -> dict[str, Tensor]:
    """One tensor per variable, with the bytes the file gives and no shape yet."""
    return {
        variable.id: Tensor(variable.id, _kind_of(variable), nbytes=variable.nbytes, name=_name_of(variable))
        for variable in listing.variables.values()
    }


def _kind_of(variable: Variable) -> Kind:
    if variable.name == "_":
        return Kind.ACTIVATION
    return Kind.PARAMETER if variable.name.startswith("/") else Kind.INPUT


def _name_of(variable: Variable) -> str:
    return "" if variable.name == "_" else variable.name


def forward_ops(listing: Listing) -> list[tuple[Op, ChainerRecord]]:
    """The forward half in an executable order, before tensors are saved for backward."""
    ranked = sorted(listing.forward, key=lambda record: record.rank)
    return [(_forward_op(record, listing), record) for record in ranked]


def _forward_op(record: ChainerRecord, listing: Listing) -> Op:
    _check_arity(record)
    names = (listing.variables[name].name for name, _ in record.inputs)
    scope = next((link_of(name) for name in names if name.startswith("/")), "")
    return Op(
        id=f"{scope or record.type}.{record.outputs[0]}",
        type=record.type,
        phase=Phase.FORWARD,
        inputs=tuple(Use(name) for name, _ in record.inputs),
        outputs=tuple(Use(name) for name in record.outputs),
        attributes=record.attributes,
        scope=scope,
    )


def _check_arity(record: ChainerRecord) -> None:
    least, most = _INPUTS.get(record.type, (0, len(record.inputs)))
    if not record.outputs or not least <= len(record.inputs) <= most:
        raise BadInput(
            f"{record.type} has {len(record.inputs)} inputs and {len(record.outputs)} outputs; "
            f"it needs {least} to {most} and at least one",
            where=f"line {record.line}",
        )


def step_graph(
    listing: Listing, forward: list[tuple[Op, ChainerRecord]], values: Mapping[str, Tensor], view: SavedView
) -> tuple[Graph, dict[str, str]]:
    """The whole step, and by op id its line in the file."""
    adjoint_of = {record.line: adjoint for record, adjoint in pairs_of(listing)}
    ops = [_with_masks(op, record, view) if adjoint_of else op for op, record in forward]
    where = {op.id: f"line {record.line}" for op, record in forward}
    made: set[str] = set()
    for op, record in sorted(forward, key=lambda pair: -pair[1].rank) if adjoint_of else ():
        backward = adjoint_of[record.line]
        ops.append(_backward_op(op, record, backward, view, values, made))
        where[ops[-1].id] = f"line {backward.line}"
    tensors = dict(values) | {tensor.id: tensor for tensor in _derived(ops, values)}
    held = frozenset(
        tensor.id
        for tensor in tensors.values()
        if tensor.gradient_of is not None and values[tensor.gradient_of].kind is Kind.PARAMETER
    )
    return Graph(tensors, tuple(ops), held), where


def _with_masks(op: Op, record: ChainerRecord, view: SavedView) -> Op:
    return replace(op, outputs=op.outputs + tuple(Use(mask) for mask in masks_of(record, view)))


def _backward_op(
    op: Op,
    forward: ChainerRecord,
    backward: ChainerRecord,
    view: SavedView,
    values: Mapping[str, Tensor],
    made: set[str],
) -> Op:
    """The adjoint of `op`. Graph inputs get no gradient; `made` are the gradients that already exist."""
    incoming = [Use(gradient_id(name)) for name, tag in backward.inputs if tag is Tag.GRADIENT]
    wanted = [gradient_id(name) for name in backward.outputs if values[name].kind is not Kind.INPUT]
    return Op(
        id=op.id + BACKWARD,
        type=op.type + BACKWARD,
        phase=Phase.BACKWARD,
        inputs=(*incoming, *saved_uses(forward, backward, view)),
        outputs=tuple(_contribution(name, made) for name in wanted),
        attributes=backward.attributes,
        adjoint_of=op.id,
        scope=op.scope,
    )


def _contribution(gradient: str, made: set[str]) -> Use:
    role = Role.ACCUMULATE if gradient in made else Role.DATA
    made.add(gradient)
    return Use(gradient, role)


def _derived(ops: list[Op], values: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """The gradients and masks that the ops use, each with the bytes and shape of its value."""
    used = dict.fromkeys(use.tensor for op in ops for use in (*op.inputs, *op.outputs))
    for name in used:
        if name not in values:
            value = values[name.rpartition(".")[0]]
            is_gradient = name == gradient_id(value.id)
            yield replace(
                value,
                id=name,
                kind=Kind.GRADIENT if is_gradient else Kind.MASK,
                gradient_of=value.id if is_gradient else None,
                name="",
            )


def pairs_of(listing: Listing) -> list[tuple[ChainerRecord, ChainerRecord]]:
    """Each forward record with its adjoint: the i-th with the i-th, if the file has a backward half."""
    if not listing.backward:
        return []
    if len(listing.backward) != len(listing.forward):
        raise BadInput(
            f"{len(listing.forward)} forward records but {len(listing.backward)} backward ones: "
            "the i-th backward must be the adjoint of the i-th forward",
            where=f"line {listing.backward[0].line}",
        )
    pairs = list(zip(listing.forward, listing.backward, strict=True))
    for forward, backward in pairs:
        _check_pair(forward, backward)
    return pairs


def _check_pair(forward: ChainerRecord, backward: ChainerRecord) -> None:
    inputs, outputs = {name for name, _ in forward.inputs}, set(forward.outputs)
    sources = {Tag.INPUT: inputs, Tag.OUTPUT: outputs, Tag.GRADIENT: outputs}
    strange = [name for name, tag in backward.inputs if name not in sources[tag]]
    strange += [name for name in backward.outputs if name not in inputs]
    if strange or forward.type != backward.type:
        what = f"uses {strange[0]!r} otherwise" if strange else f"is a {forward.type}"
        raise BadInput(
            f"this {backward.type} is not the adjoint of the record on line {forward.line}, which {what}",
            where=f"line {backward.line}",
        )
