"""Gradients may come in laid out otherwise than captured; eager's results are then laid out otherwise too.

An op that writes over an operand gives its result the layout of that operand, and a sum over the result adds
up in that order. So it has the bits of eager only where eager's result would be laid out like the operand.
Which ops lose that by the layouts of incoming gradients follows from running the backward calls without data.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from stowplan.capture.cells import contiguous_stride
from stowplan.capture.looks import same_strides, stride_of, torch_dtype
from stowplan.capture.program import Argument, Call, Program, Ref
from stowplan.ir import Graph, Op

SWAYED = "swayed"  # the attribute of ops that may not write over an operand
Strides = Mapping[str, tuple[int, ...]]

_AS_STRIDED = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default)


def with_swayed_ops_marked(graph: Graph, program: Program) -> Graph:
    """Marks ops that do not overwrite, so that gradients may come in by rows or expanded from one number."""
    swayed = {op for strides in _usual(graph, program) for op in swayed_ops(graph, program, strides) or ()}
    ops = (
        replace(op, attributes={**op.attributes, SWAYED: True}) if op.id in swayed else op for op in graph.ops
    )
    return replace(graph, ops=tuple(ops)) if swayed else graph


def swayed_ops(graph: Graph, program: Program, strides: Strides) -> frozenset[str] | None:
    """The ops whose result is laid out like an operand as captured, but not if gradients with these strides
    come in; None if the captured calls cannot run on such gradients."""
    layouts = _Layouts(graph, strides)
    try:
        return frozenset(op.id for op in graph.ops if layouts.sways(op, program.calls[op.id]))
    except (RuntimeError, ValueError, NotImplementedError, _Unknown):
        return None


def _usual(graph: Graph, program: Program) -> Iterator[Strides]:
    """What losses outside of the step send in, other than what was captured."""
    tangents = [name for name in program.tangents if name is not None and graph.tensors[name].shape]
    shapes = {name: graph.tensors[name].shape or () for name in tangents}
    if tangents:
        yield {name: contiguous_stride(shape) for name, shape in shapes.items()}
        yield {name: (0,) * len(shape) for name, shape in shapes.items()}


class _Unknown(Exception):
    """A call goes by offsets in a storage that is laid out otherwise."""


class _Layouts:
    """Strides of the tensors of a graph, as they come to be while its calls run without data."""

    def __init__(self, graph: Graph, strides: Strides) -> None:
        self._graph, self._fakes = graph, FakeTensorMode()
        self._made = {name for op in graph.ops for name in op.writes()}
        self._other = {
            name: stride for name, stride in strides.items() if not self._is_captured(name, stride)
        }

    def sways(self, op: Op, call: Call) -> bool:
        """Follow one op; whether a result that was laid out like an operand no longer is."""
        reads = list(dict.fromkeys(op.reads()))
        if self._other.keys().isdisjoint(reads):
            return False
        if call.target in _AS_STRIDED:
            raise _Unknown
        self._run(call)
        results = [name for name in op.writes() if self._graph.tensors[name].alias_of is None]
        victims = [name for name in reads if name in self._made]  # what comes from outside is not overwritten
        return any(self._parted(result, victim) for result in results for victim in victims)

    def _run(self, call: Call) -> None:
        with self._fakes, torch.no_grad():
            args = [self._filled(value) for value in call.args]
            made = call.target(*args, **{name: self._filled(value) for name, value in call.kwargs.items()})
        for name, result in zip(call.outputs, (made,) if call.single else made, strict=False):
            if (
                name is not None
                and isinstance(result, Tensor)
                and not self._is_captured(name, result.stride())
            ):
                self._other[name] = result.stride()

    def _parted(self, result: str, victim: str) -> bool:
        one, other = self._graph.tensors[result], self._graph.tensors[victim]
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        shape = one.shape or ()
        alike = same_strides(shape, stride_of(one), stride_of(other))
        return alike and not same_strides(shape, self._stride(result), self._stride(victim))

    def _stride(self, name: str) -> tuple[int, ...]:
        return self._other.get(name) or stride_of(self._graph.tensors[name])

    def _is_captured(self, name: str, stride: tuple[int, ...]) -> bool:
        tensor = self._graph.tensors[name]
        return same_strides(tensor.shape or (), stride, stride_of(tensor))

    def _filled(self, value: Argument) -> object:
        match value:
            case Ref(name):
                tensor = self._graph.tensors[name]
                dtype, device = torch_dtype(tensor.dtype), tensor.device
                return torch.empty_strided(tensor.shape or (), self._stride(name), dtype=dtype, device=device)
            case tuple():
                return [self._filled(item) for item in value]
            case _:
                return value
