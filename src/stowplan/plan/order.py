"""Orders of the same ops that need less memory and cost no time. Each pass returns a new graph."""

from dataclasses import replace

from stowplan.ir import Graph, Op, Role, Use
from stowplan.ops.aliasing import aliasing_of
from stowplan.ops.table import site_of


def slices_last(graph: Graph) -> Graph:
    """If two ops contribute to a gradient, the one that adds in place comes after the one that does not.

    If the gradient of a slice comes first, it is a whole tensor with zeros around the slice, and the next
    contribution needs as much memory again. Added last, it needs none. The sum is the same to the bit.
    """
    ops = list(graph.ops)
    for name, contributors in _contributors(graph).items():
        if len(contributors) == 2:
            first, second = contributors
            if _adds_in_place(graph, first) and not _adds_in_place(graph, second):
                _swap(ops, first, second, name)
    return replace(graph, ops=tuple(ops))


def _contributors(graph: Graph) -> dict[str, list[Op]]:
    by_tensor: dict[str, list[Op]] = {}
    shared = {use.tensor for op in graph.ops for use in op.outputs if use.role is Role.ACCUMULATE}
    for op in graph.ops:
        for name in shared.intersection(op.writes()):
            by_tensor.setdefault(name, []).append(op)
    return by_tensor


def _adds_in_place(graph: Graph, op: Op) -> bool:
    return len(op.outputs) == 1 and aliasing_of(site_of(graph, op)).adds_in_place


def _swap(ops: list[Op], first: Op, second: Op, name: str) -> None:
    """Run `first` right after `second`, and let `second` make the tensor."""
    ids = [op.id for op in ops]
    ops.pop(ids.index(first.id))
    place = ids.index(second.id) - 1
    ops[place] = _contributing(second, name, Role.DATA)
    ops.insert(place + 1, _contributing(first, name, Role.ACCUMULATE))


def _contributing(op: Op, name: str, role: Role) -> Op:
    return replace(op, outputs=tuple(Use(name, role) if use.tensor == name else use for use in op.outputs))
