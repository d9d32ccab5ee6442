"""Capturing a step a second time: in another order, with calls replaced, or with insertions for some ops.

What comes out is the graph of a step like any other: it is priced, planned and run as if the user had written
it so.
"""

from ast import literal_eval
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from stowplan.capture import Call, Captured, Ref, capture
from stowplan.capture.generators import moves_generator
from stowplan.capture.program import copies_of_written, filled, outputs_by_name
from stowplan.capture.stand_ins import contiguous_stride
from stowplan.errors import CaptureError, NotTileable
from stowplan.ir import Graph, Op, Phase
from stowplan.ir import Tensor as Described
from stowplan.ops.table import shape_of, site_of
from stowplan.run.step.straight import Binding
from stowplan.run.wrappers import with_forward
from stowplan.torch_private import OpOverload, pytree

aten = torch.ops.aten
Replacement: TypeAlias = Callable[[Call, Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Does what a call stands for: from all values so far, by name, those that it makes or changes."""

DIFFERENTIABLE: dict[OpOverload, Replacement] = {}
"""For ops of a captured step that autograd cannot differentiate as they are, how autograd is given them."""

_PURE_BATCH_NORM = aten._native_batch_norm_legit_functional.default
_WITHOUT_DERIVATIVE = {  # PyTorch differentiates the form that writes in place alone
    aten.copy.default: aten.copy_.default,
    aten.bernoulli.p: aten.bernoulli_.float,
    aten.normal_functional.default: aten.normal_.default,
}


@dataclass(frozen=True, slots=True)
class Trace:
    """Which ops of the new graph take the module and line of `source`; `repeats` if several in a row do."""

    source: Op
    matches: Callable[[Op], bool]
    repeats: bool = False


class Insertion(Protocol):
    """A replacement for some ops of the step."""

    def run(self, captured: Captured, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """From all values before it, by name, those that it makes."""

    def traces(self) -> Iterable[Trace]:
        """The ops that it adds to the new graph, in order."""


def recapture(
    captured: Captured,
    model: nn.Module,
    args: tuple[object, ...],
    kwargs: Mapping[str, object] | None,
    order: Sequence[Op | Insertion],
    replacements: Mapping[OpOverload, Replacement] = MappingProxyType({}),
) -> Captured:
    """The step with its forward half run in this order; like the step itself, bound to `model`."""

    @wraps(type(model).forward)
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        return _run(captured, Binding(captured, self).tensors(args, kwargs), order, replacements)

    tangents = enumerate(captured.program.tangents)
    differentiated = tuple(position for position, tangent in tangents if tangent is not None)
    again = with_forward(model, forward)
    records = captured.records and captured.program.is_differentiated
    found = capture(again, args, kwargs, differentiated=differentiated, know_values=True, records=records)
    found = replace(found, records=captured.records)
    return replace(found, graph=_with_origins(found.graph, order))


def forward_ops(graph: Graph) -> tuple[Op, ...]:
    """The ops of the forward half, in the graph's order."""
    return tuple(op for op in graph.ops if op.phase is Phase.FORWARD)


def check_differentiable(
    captured: Captured, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object] | None = None
) -> None:
    """NotTileable if autograd, given the calls of the forward half alone, would not do what the step does.

    Tiles are differentiated by autograd. A step that hides something from it, or tells it a gradient of its
    own, has another backward half than its calls would have. A step that reads what it wrote into a buffer
    or an argument is refused as well: its calls are made in their pure form, which writes at the end alone.
    """
    if any(moves_generator(call.target) for call in captured.program.calls.values()):
        raise NotTileable("forward seeds PyTorch's generator or sets its state, and tiles draw one by one")
    if reader := _reader_of_updates(captured.graph):
        op, name = reader
        raise NotTileable(f"{op.id} reads {name}, which the step overwrites before it ends")
    try:
        again = recapture(captured, model, args, kwargs, forward_ops(captured.graph))
    except CaptureError as fault:
        if isinstance(fault.__cause__, RuntimeError):  # of PyTorch: one of the calls has no derivative
            raise NotTileable(f"autograd cannot differentiate what the step calls: {fault.what}") from fault
        raise
    expected, found = _backward_types(captured.graph), _backward_types(again.graph)
    if expected != found:
        first = next(iter((expected - found) | (found - expected)))
        raise NotTileable(f"the step differentiates in its own way, as {first} shows")


def _run(
    captured: Captured,
    values: dict[str, Tensor],
    order: Sequence[Op | Insertion],
    replacements: Mapping[OpOverload, Replacement],
) -> object:
    program, replacements = captured.program, {**DIFFERENTIABLE, **replacements}
    for name in {*program.parameters, *filter(None, program.inputs)} - set(program.gradients):
        values[name] = values[name].detach()  # a sweep would give it a gradient of zeros
    for item in order:
        if not isinstance(item, Op):
            values.update(item.run(captured, values))
        elif replacement := replacements.get(program.calls[item.id].target):
            values.update(replacement(program.calls[item.id], values))
        else:
            values.update(run_call(captured.graph, item, program.calls[item.id], values))
    with torch.no_grad():
        for buffer, value in program.updates.items():
            if values[value] is not values[buffer]:
                values[buffer].copy_(values[value])
    pairs = zip(program.outputs, program.attached, strict=True)
    leaves = [_result(values, leaf, is_attached=is_attached) for leaf, is_attached in pairs]
    return pytree.tree_unflatten(leaves, program.output_spec)


def _result(values: Mapping[str, Tensor], leaf: object, *, is_attached: bool) -> object:
    """An output of the step, detached where the captured one is: a sweep differentiates all that it makes."""
    if not isinstance(leaf, Ref):
        return leaf
    return values[leaf.tensor] if is_attached else values[leaf.tensor].detach()


def _with_origins(graph: Graph, order: Sequence[Op | Insertion]) -> Graph:
    """The graph with the user's modules and lines, which forward ops have in the order they were run."""
    waiting = [trace for item in order for trace in _traces_of(item)]
    told: dict[str, Op] = {}
    for op in graph.ops:
        place = next((n for n, trace in enumerate(waiting) if trace.matches(op)), None)
        if op.phase is Phase.FORWARD and place is not None:
            told[op.id] = waiting[place].source
            del waiting[: place if waiting[place].repeats else place + 1]
    sources = (told.get(op.adjoint_of or op.id) for op in graph.ops)
    ops = (
        replace(op, scope=source.scope if source else "", source=source.source if source else "")
        for op, source in zip(graph.ops, sources, strict=True)
    )
    return replace(graph, ops=tuple(ops))


def _traces_of(item: Op | Insertion) -> Iterable[Trace]:
    return (trace_of(item),) if isinstance(item, Op) else item.traces()


def trace_of(op: Op) -> Trace:
    """Of an op that runs as it is."""
    return Trace(op, lambda found: found.type == op.type)


def _backward_types(graph: Graph) -> Counter[str]:
    return Counter(op.type for op in graph.ops if op.phase is Phase.BACKWARD)


def run_call(graph: Graph, op: Op, call: Call, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    given = _without_shape_givers(graph, op, values)
    args: list[Any] = [filled(value, given) for value in call.args]
    kwargs = {name: filled(value, given) for name, value in call.kwargs.items()}
    written = copies_of_written(call, args, kwargs)
    if call.target is _PURE_BATCH_NORM:  # its own form updates the buffers where they are, as eager does
        return outputs_by_name(call, aten.native_batch_norm.default(*args), args[3:5])
    target = call.target
    if target in _WITHOUT_DERIVATIVE:
        args[0], target = args[0].clone(), _WITHOUT_DERIVATIVE[target]
    return outputs_by_name(call, target(*args, **kwargs), written)


def _without_shape_givers(graph: Graph, op: Op, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """An input inside a segment that only tells its shape is replaced by one without contents."""
    missing = [use.tensor for use in op.inputs if use.tensor not in values]
    if not missing:
        return values
    read = next(_contents_read(graph, op, missing), None)
    assert read is None, f"{op.id} reads {read!r}, which is inside a segment"
    like = (graph.tensors[name] for name in missing)
    return {**values, **{tensor.id: _shape_giver(tensor) for tensor in like}}


def _contents_read(graph: Graph, op: Op, names: Container[str]) -> Iterator[str]:
    """Those of the names of which the op reads more than the shape."""
    from stowplan.ops.regions import regions_of  # only segments in tiles have such inputs

    relations = regions_of(site_of(graph, op)).outputs
    for position, use in enumerate(op.inputs):
        if use.tensor in names and any(relation.needs[position] for relation in relations):
            yield use.tensor


def _reader_of_updates(graph: Graph) -> tuple[Op, str] | None:
    """The first forward op that reads the new contents of what the step overwrites, and their name."""
    updated = {name for op in graph.ops if op.phase is Phase.UPDATE for name in op.writes()}
    forward = (op for op in graph.ops if op.phase is Phase.FORWARD and not updated.isdisjoint(op.reads()))
    return next(((op, name) for op in forward for name in _contents_read(graph, op, updated)), None)


def _shape_giver(tensor: Described) -> Tensor:
    """Laid out as what it stands for: random numbers are drawn in the order of a tensor's memory."""
    shape, dtype = shape_of(tensor), getattr(torch, str(tensor.dtype))
    stride = literal_eval(tensor.layout) if tensor.layout else contiguous_stride(shape)
    return torch.empty_strided(shape, stride, dtype=dtype, device=tensor.device)
