"""Crops right after the tensor that they crop: a segment then outputs only the needed part of a skip."""

from dataclasses import replace

from stowplan.ir import Graph, Op, Phase

_CROPS = frozenset({"aten.slice.Tensor", "aten.select.int", "GetItem"})


def crops_early(graph: Graph) -> Graph:
    """The same graph with every forward crop run as soon as it can be."""
    crops = [op for op in graph.ops if op.phase is Phase.FORWARD and op.type in _CROPS and op.inputs]
    followers: dict[str, list[Op]] = {}
    for op in crops:
        followers.setdefault(op.inputs[0].tensor, []).append(op)
    made = {name for op in graph.ops for name in op.writes()}
    moved = {op.id for op in crops if op.inputs[0].tensor in made}
    ops: list[Op] = []
    for op in graph.ops:
        if op.id not in moved:
            _append(ops, op, followers)
    return replace(graph, ops=tuple(ops))


def _append(ops: list[Op], op: Op, followers: dict[str, list[Op]]) -> None:
    """An op, the crops of its outputs, and the crops of those, each right after its input."""
    waiting = [op]
    while waiting:
        ops.append(waiting.pop())
        crops = [crop for name in ops[-1].writes() for crop in followers.get(name, ())]
        waiting += reversed(crops)
