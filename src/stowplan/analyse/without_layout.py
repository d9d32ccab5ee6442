"""A step as it would run in one layout: transposes between layouts are bypassed."""

from dataclasses import replace

from stowplan.ir import Graph, Op, Phase, Role, Tensor, Use


def without_layout(graph: Graph) -> Graph:
    """`graph` without its LAYOUT ops. Readers of such an op's output read what the op turned.

    One stays where its output has a life of its own: another op adds into it.
    """
    added_into = {use.tensor for op in graph.ops for use in op.outputs if use.role is Role.ACCUMULATE}
    bypassed = [op for op in graph.ops if _is_turn(op) and op.outputs[0].tensor not in added_into]
    source: dict[str, str] = {}
    for op in bypassed:
        turned = op.inputs[0].tensor
        source[op.outputs[0].tensor] = source.get(turned, turned)
    gone = {op.id for op in bypassed}
    ops = tuple(_rerouted(op, source) for op in graph.ops if op.id not in gone)
    held = frozenset(source.get(name, name) for name in graph.held)
    used = {use.tensor for op in ops for use in (*op.inputs, *op.outputs)} | held
    linked = {link for tensor in graph.tensors.values() for link in (tensor.alias_of, tensor.gradient_of)}
    idle = {use.tensor for op in bypassed for use in op.inputs[1:]} - used - linked
    tensors = {
        name: _relinked(tensor, source)
        for name, tensor in graph.tensors.items()
        if name not in source and name not in idle
    }
    return replace(graph, tensors=tensors, ops=ops, held=held)


def _relinked(tensor: Tensor, source: dict[str, str]) -> Tensor:
    alias_of, gradient_of = (source.get(link or "", link) for link in (tensor.alias_of, tensor.gradient_of))
    return replace(tensor, alias_of=alias_of, gradient_of=gradient_of)


def _is_turn(op: Op) -> bool:
    """Whether an op does nothing but turn its first input; further inputs say how."""
    return op.phase is Phase.LAYOUT and len(op.inputs) > 0 and len(op.outputs) == 1


def _rerouted(op: Op, source: dict[str, str]) -> Op:
    return replace(op, inputs=tuple(Use(source.get(use.tensor, use.tensor), use.role) for use in op.inputs))
