"""Whether two graphs are the same step, and if not, where they first differ: what a saved plan is held to."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest

from stowplan.ir import Graph, Op, Tensor


def first_difference(planned: Graph, given: Graph, *, with_attributes: bool = True) -> str | None:
    """The first op that differs, in words; None if there is none. Names of modules and lines do not count.

    `with_attributes` is for steps of one worker. Workers that are alike run the same ops on tensors of the
    same sizes, but attributes may tell of a worker's own samples.
    """
    for position, (ours, theirs) in enumerate(zip_longest(planned.ops, given.ops)):
        if ours and theirs and not with_attributes:
            theirs = replace(theirs, attributes=ours.attributes)
        for what in _differences(planned, ours, given, theirs):
            return f"op {position + 1}: {what}"
    if left := planned.held ^ given.held:
        return f"{min(left)!r} is held to the end in only one of them"
    ours, theirs = _beside(planned), _beside(given)
    other = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if not other:
        return None
    where = "plan" if other[0] not in theirs else "step" if other[0] not in ours else ""
    return f"{other[0]!r} is in the {where} alone" if where else f"{other[0]!r} has other sizes in the two"


def _beside(graph: Graph) -> "dict[str, _Look]":
    """Tensors that take memory all along, though no op reads or writes them."""
    used = {use.tensor for op in graph.ops for use in (*op.inputs, *op.outputs)}
    return {name: _look(tensor) for name, tensor in graph.tensors.items() if name not in used}


def other_ops(planned: Graph, given: Graph) -> str:
    """The op types that one of the graphs runs more often, in words."""
    ours, theirs = (Counter(op.type for op in graph.ops) for graph in (planned, given))
    return ", ".join(
        f"{kind} ({ours[kind]} in the plan, {theirs[kind]} in the step)"
        for kind in sorted(ours | theirs)
        if ours[kind] != theirs[kind]
    )


def _differences(planned: Graph, ours: Op | None, given: Graph, theirs: Op | None) -> Iterator[str]:
    if ours is None or theirs is None:
        there, where = (theirs, "step") if ours is None else (ours, "plan")
        if there is not None:
            yield f"{there.id!r} ({there.type}) is in the {where} alone"
        return
    if ours.type != theirs.type:
        yield f"{ours.id!r} is {ours.type} in the plan and {theirs.type} in the step"
    for one, other in zip_longest(_tensors(planned, ours), _tensors(given, theirs)):
        if one != other:
            yield f"{ours.id!r} ({ours.type}) has {_told(one)} in the plan and {_told(other)} in the step"
    if _essence(ours) != _essence(theirs):
        yield f"{ours.id!r} ({ours.type}) has other attributes or operands"


def _essence(op: Op) -> tuple[object, ...]:
    return op.id, op.phase, op.inputs, op.outputs, op.attributes, op.device, op.adjoint_of


_Look = tuple[str, object, object, object, object]


def _tensors(graph: Graph, op: Op) -> list[_Look]:
    return [_look(graph.tensors[use.tensor]) for use in (*op.inputs, *op.outputs)]


def _look(tensor: Tensor) -> _Look:
    return tensor.id, tensor.shape, tensor.dtype, tensor.layout, tensor.alias_of


def _told(look: _Look | None) -> str:
    if look is None:
        return "no operand there"
    name, shape, dtype, *_ = look
    sizes = "x".join(map(str, shape)) if isinstance(shape, tuple) else "?"
    return f"{name} as {dtype} {sizes or 'scalar'}"
