"""In which order images store their dims. Transposes say so in their names; ops keep what they read."""

from collections.abc import Mapping
from dataclasses import replace

from stowplan.formats.tensorflow.wiring import layouts_of
from stowplan.ir import Graph, Kind, Op, Phase, Tensor

_FILTER = "HWIO"


def with_layouts(graph: Graph) -> Graph:
    """`graph` with the layout of every 4-d tensor that can be told."""
    layouts: dict[str, str] = {}
    for op in graph.ops:
        if op.phase is Phase.LAYOUT:
            layouts.setdefault(_storage(graph, op.inputs[0].tensor), layouts_of(op.id)[0])
    for tensor in graph.tensors.values():
        if tensor.kind is Kind.PARAMETER:
            layouts[tensor.id] = _FILTER
    for op in graph.ops:
        for name in op.writes():
            layouts.setdefault(name, _layout_made(graph, op, graph.tensors[name], layouts))
    return replace(
        graph,
        tensors={
            name: replace(tensor, layout=layouts.get(_storage(graph, name), ""))
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
    read = (layouts.get(_storage(graph, name), "") for name in op.reads() if _is_image(graph.tensors[name]))
    return next((layout for layout in read if layout not in ("", _FILTER)), "")


def _storage(graph: Graph, name: str) -> str:
    return graph.tensors[name].alias_of or name


def _is_image(tensor: Tensor) -> bool:
    return tensor.shape is not None and len(tensor.shape) == 4
