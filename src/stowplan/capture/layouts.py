"""Strides that PyTorch's shape functions get wrong, and strides of gradients that differ from captured ones.

A captured step takes views and writes parts of tensors by stride, so wrong strides give wrong results.
Kernels were seen to deviate where an operand is not row-major. The kernels of a few suspects run once, on
zeros, to learn the strides; `run/measure/agreement.py` compares the whole forward with eager. If a stride
differs, the step is captured again.

A gradient may come in with other strides than captured. An op that overwrites an operand gives its result the
strides of that operand, and a sum over the result adds up in that order: it has eager's bits only if eager's
result would have the same strides. Running the backward calls without data shows which ops this affects.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stowplan.capture.program import Argument, Call, Program, Ref
from stowplan.capture.schema import leaves, returns_tensors, written_names
from stowplan.capture.storage_views import (
    StorageView,
    contiguous_stride,
    same_strides,
    stride_of,
    torch_dtype,
)
from stowplan.ir import Graph, Op
from stowplan.torch_private import FakeTensorMode, OpOverload

if TYPE_CHECKING:
    from stowplan.capture.watching import Event


aten = torch.ops.aten
_MOST_BYTES = 1 << 28  # of the operands of a kernel that runs for its strides
# Ops whose kernels were seen to give other strides than their shape functions, and accept any contents. Other
# kernels may crash on zeros. A test compares kernels and shape functions of many ops with these.
SUSPECTS = frozenset(
    getattr(aten, name)
    for name in (
        *("roll", "flip", "channel_shuffle", "copysign", "xlogy", "special_xlog1py", "log_sigmoid_forward"),
        *("binary_cross_entropy", "binary_cross_entropy_backward", "mse_loss_backward"),
        *("smooth_l1_loss_backward", "huber_loss_backward", "soft_margin_loss_backward"),
        *("softplus_backward", "elu_backward", "hardswish_backward", "hardsigmoid_backward"),
        *("hardtanh_backward", "logit_backward", "rrelu_with_noise_backward", "glu_backward"),
        *("_softmax_backward_data", "_log_softmax_backward_data", "native_dropout_backward"),
        *("native_batch_norm", "native_batch_norm_backward", "native_group_norm_backward"),
        *("native_layer_norm_backward", "reflection_pad1d_backward", "reflection_pad2d_backward"),
        *("reflection_pad3d_backward", "replication_pad1d_backward", "replication_pad2d_backward"),
        *("replication_pad3d_backward",),
    )
)
_seen: set[object] = set()  # kernels that have run

_LEARNED: dict[
    object, tuple[tuple[int, ...] | None, ...]
] = {}  # facts about PyTorch: they hold for all steps


def learn(
    target: OpOverload, args: object, kwargs: Mapping[str, object], results: tuple[Tensor | None, ...]
) -> None:
    """Record the strides that a kernel gave its results for operands like these."""
    strides = tuple(None if result is None else result.stride() for result in results)
    _LEARNED[call_like(target, args, kwargs)] = strides


def has_learned(target: OpOverload) -> bool:
    """Whether the kernel of an op was seen, at some size, to give its results other strides than captured."""
    return any(isinstance(call, tuple) and call[0] is target for call in _LEARNED)


def as_made(
    fakes: FakeTensorMode, target: OpOverload, args: object, kwargs: Mapping[str, object], result: object
) -> object:
    """A result without data, with the strides that the kernel is known to give it."""
    strides = _LEARNED.get(call_like(target, args, kwargs)) if _LEARNED else None
    if strides is None:
        return result
    with fakes:
        if isinstance(result, Tensor):
            return _laid_out(result, strides[0])
        assert isinstance(result, (tuple, list))
        make = getattr(result, "_make", type(result))  # a named tuple does not take its items in one
        return make(_laid_out(item, stride) for item, stride in zip(result, strides, strict=True))


def learn_from_kernels(events: "Iterable[Event]") -> bool:
    """Run each suspect kernel once; whether a result has other strides than captured."""
    found = False
    state = torch.get_rng_state()
    suspects = {call_like(e.target, e.args, e.kwargs): e for e in events if _may_differ(e)}
    for call, event in suspects.items():
        if call in _seen:
            continue
        _seen.add(call)
        made = _made(event)
        looks = zip(event.results, made, strict=False)
        if any(c is not None and t is not None and c.stride != t.stride() for c, t in looks):
            learn(event.target, event.args, event.kwargs, made)
            found = True
    torch.set_rng_state(state)
    return found


def _may_differ(event: "Event") -> bool:
    """Whether the op is a suspect and an operand is not row-major, ignoring gaps."""
    if event.target.overloadpacket not in SUSPECTS:
        return False
    given = (
        leaf for leaf in leaves((event.args, tuple(event.kwargs.values()))) if isinstance(leaf, StorageView)
    )
    return any(map(_is_permuted, given))


def _is_permuted(view: StorageView) -> bool:
    strides = [stride for stride, size in zip(view.stride, view.shape, strict=True) if size > 1 and stride]
    return strides != sorted(strides, reverse=True)


def _made(event: "Event") -> tuple[Tensor | None, ...]:
    """The results of an event's kernel; none if it writes, returns a view, or is too large."""
    given = [
        leaf for leaf in leaves((event.args, tuple(event.kwargs.values()))) if isinstance(leaf, StorageView)
    ]
    storages = {view.storage for view in given}
    is_view = any(view is not None and view.storage in storages for view in event.results)
    skipped = is_view or not returns_tensors(event.target) or bool(written_names(event.target))
    if skipped or sum(view.extent_bytes() for view in given) > _MOST_BYTES:
        return ()
    try:
        with torch.no_grad():
            result = event.target(*_filled(event.args), **{n: _filled(v) for n, v in event.kwargs.items()})
    except (RuntimeError, IndexError, ValueError):  # it rejects zeros
        return ()
    returned = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    return tuple(value if isinstance(value, Tensor) else None for value in returned)


def _filled(value: object) -> Any:
    if isinstance(value, (tuple, list)):
        return [_filled(item) for item in value] if isinstance(value, list) else tuple(map(_filled, value))
    if not isinstance(value, StorageView):
        return value
    return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=value.device).zero_()


def _laid_out(result: object, stride: tuple[int, ...] | None) -> object:
    if stride is None or not isinstance(result, Tensor) or result.stride() == stride:
        return result
    return torch.empty_strided(result.shape, stride, dtype=result.dtype, device=result.device)


def call_like(target: OpOverload, args: object, kwargs: Mapping[str, object]) -> object:
    """Equal for calls whose operands look alike and whose other arguments are equal."""
    return target, _look(args), tuple((name, _look(kwargs[name])) for name in sorted(kwargs))


def _look(value: object) -> object:
    if isinstance(value, (tuple, list)):
        return tuple(map(_look, value))
    if isinstance(value, StorageView):
        return value.shape, value.stride, value.dtype, value.device
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    return type(value), repr(value)


SWAYED = "swayed"  # the attribute of ops that may not write over an operand
Strides = Mapping[str, tuple[int, ...]]

_AS_STRIDED = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default)


def with_swayed_ops_marked(graph: Graph, program: Program) -> Graph:
    """Mark ops that must not overwrite, so that gradients may come in row-major or expanded."""
    swayed = {op for strides in _usual(graph, program) for op in swayed_ops(graph, program, strides) or ()}
    ops = (
        replace(op, attributes={**op.attributes, SWAYED: True}) if op.id in swayed else op for op in graph.ops
    )
    return replace(graph, ops=tuple(ops)) if swayed else graph


def swayed_ops(graph: Graph, program: Program, strides: Strides) -> frozenset[str] | None:
    """The ops whose results change strides when gradients with these strides come in.

    As captured, such a result has the strides of an operand. None if the captured calls cannot run on such
    gradients.
    """
    layouts = _IncomingLayouts(graph, strides)
    try:
        return frozenset(op.id for op in graph.ops if layouts.sways(op, program.calls[op.id]))
    except (RuntimeError, ValueError, NotImplementedError, _Unknown):
        return None


def _usual(graph: Graph, program: Program) -> Iterator[Strides]:
    """Strides of gradients that losses outside the step often send, other than the captured ones."""
    tangents = [name for name in program.tangents if name is not None and graph.tensors[name].shape]
    shapes = {name: graph.tensors[name].shape or () for name in tangents}
    if tangents:
        yield {name: contiguous_stride(shape) for name, shape in shapes.items()}
        yield {name: (0,) * len(shape) for name, shape in shapes.items()}


class _Unknown(Exception):
    """A call uses offsets into a storage whose strides differ."""


class _IncomingLayouts:
    """The strides of a graph's tensors while its calls run without data."""

    def __init__(self, graph: Graph, strides: Strides) -> None:
        self._graph, self._fakes = graph, FakeTensorMode()
        self._made = {name for op in graph.ops for name in op.writes()}
        self._other = {
            name: stride for name, stride in strides.items() if not self._is_captured(name, stride)
        }

    def sways(self, op: Op, call: Call) -> bool:
        """Follow one op; whether a result no longer has the strides of an operand it had as captured."""
        reads = list(dict.fromkeys(op.reads()))
        if self._other.keys().isdisjoint(reads):
            return False
        if call.target in _AS_STRIDED:
            raise _Unknown
        self._run(call)
        results = [name for name in op.writes() if self._graph.tensors[name].alias_of is None]
        victims = [name for name in reads if name in self._made]  # external tensors are not overwritten
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
