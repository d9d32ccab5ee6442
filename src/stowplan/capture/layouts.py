"""Shapes and strides of results: of calls seen before, and where PyTorch's own shape functions are wrong.

A captured step takes views and writes parts of tensors by stride, so wrong strides give wrong results.
Kernels were seen to deviate where an operand is not row-major. The kernels of a few suspects run once, on
zeros, to learn the strides; `run/measure/agreement.py` compares the whole forward with eager. If a stride
differs, the step is captured again.

A gradient may come in with other strides than captured. An op that overwrites an operand gives its result the
strides of that operand, and a sum over the result adds up in that order: it has eager's bits only if eager's
result would have the same strides. Running the backward calls without data shows which ops this affects.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from stowplan.capture.program import (
    Argument,
    Call,
    Program,
    Ref,
    as_in_forward,
    bound_arguments,
    leaves,
    returns_tensors,
    written_arguments,
    written_names,
)
from stowplan.capture.stand_ins import (
    StorageView,
    contiguous_stride,
    extent_of,
    is_permuted,
    same_strides,
    stride_of,
    torch_dtype,
)
from stowplan.errors import CaptureError
from stowplan.ir import Graph, Op
from stowplan.torch_private import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    dispatched_without_data,
    shaped_by_kernel,
    storage_id,
)

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
    return found


def _may_differ(event: "Event") -> bool:
    """Whether the op is a suspect and an operand is not row-major, ignoring gaps."""
    if event.target.overloadpacket not in SUSPECTS:
        return False
    given = (
        leaf for leaf in leaves((event.args, tuple(event.kwargs.values()))) if isinstance(leaf, StorageView)
    )
    return any(is_permuted(view.shape, view.stride) for view in given)


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
        result = run_on_zeros(event.target, event.args, event.kwargs)
    except (RuntimeError, IndexError, ValueError):  # it rejects zeros
        return ()
    returned = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    return tuple(value if isinstance(value, Tensor) else None for value in returned)


def run_on_zeros(target: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
    """The result of an op on zeros in place of tensors that are given by their views."""
    with torch.no_grad():
        return target(*_filled(args), **{name: _filled(value) for name, value in kwargs.items()})


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


aten = torch.ops.aten
# Offsets into the whole storage, and values that stand-ins may carry.
_UNLIKE = (aten.as_strided.default, aten.lift_fresh.default, aten.lift_fresh_copy.default)
_ALIGNMENT = 16  # bytes to which rows of a grouped product are padded


@dataclass(frozen=True, slots=True)
class _Look:
    """A result: how it looks and, if it is a view of the operand, how far behind its first element."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    further: int | None


class ShapeFunctions:
    """Runs ops on stand-ins, except calls that look like an earlier one, as those of repeated layers do."""

    def __init__(self, fakes: FakeTensorMode) -> None:
        self._fakes = fakes
        self._known: dict[object, tuple[bool, tuple[_Look | None, ...]] | None] = {}

    def result_of(
        self,
        target: OpOverload,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        positions: Mapping[int, Sequence[Tensor]],
    ) -> object:
        """The result of an op on stand-ins. `positions` has what each known mask selects, by identity."""
        given = [leaf for leaf in leaves((args, tuple(kwargs.values()))) if isinstance(leaf, Tensor)]
        can_be_known = not positions and target not in _UNLIKE and target.namespace == "aten"
        if not can_be_known or not all(map(_is_stand_in, given)) or written_arguments(target, args, kwargs):
            return made_without_data(self._fakes, target, args, kwargs, positions)
        call = torch.get_default_dtype(), call_like(target, args, kwargs)
        if known := self._known.get(call):
            is_single, looks = known
            made = tuple(None if look is None else self._again(look, given) for look in looks)
            return made[0] if is_single else made
        result = made_without_data(self._fakes, target, args, kwargs, positions)
        if call not in self._known:
            self._known[call] = _looks_of(result, given)
        return result

    def _again(self, look: _Look, given: Sequence[Tensor]) -> Tensor:
        if look.further is None:
            meta = torch.empty_strided(look.shape, look.stride, dtype=look.dtype, device="meta")
        else:
            source = given[0]
            meta = torch.empty(0, dtype=look.dtype, device="meta")
            offset = int(source.storage_offset()) + look.further
            meta.set_(source.untyped_storage(), offset, look.shape, look.stride)
        return FakeTensor(self._fakes, meta, look.device)


def _is_stand_in(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.constant is None


def _looks_of(result: object, given: Sequence[Tensor]) -> tuple[bool, tuple[_Look | None, ...]] | None:
    """None if there is more to the result than new tensors, or a view of the only operand."""
    made = (result,) if isinstance(result, Tensor) else result
    if not given or not isinstance(made, (tuple, list)):
        return None
    looks = list[_Look | None]()
    operands = {storage_id(tensor.untyped_storage()): tensor for tensor in reversed(given)}
    seen = set[int]()
    for each in made:
        if each is None:
            looks.append(None)
            continue
        if not isinstance(each, FakeTensor) or not _is_stand_in(each) or each.is_conj() or each.is_neg():
            return None
        storage = each.untyped_storage()
        source = operands.get(storage_id(storage))
        offset, extent = (
            int(each.storage_offset()),
            extent_of(each.shape, each.stride()) * each.element_size(),
        )
        is_alone = offset == 0 and storage.nbytes() == extent and storage_id(storage) not in seen
        is_plain_view = len(given) == 1 and each.dtype == given[0].dtype  # offsets count elements
        if not (is_alone if source is None else is_plain_view):
            return None
        seen.add(storage_id(storage))
        further = None if source is None else offset - int(source.storage_offset())
        looks.append(_Look(tuple(each.shape), each.stride(), each.dtype, each.device, further))
    return isinstance(result, Tensor), tuple(looks)


def made_without_data(
    fakes: FakeTensorMode,
    target: OpOverload,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    positions: Mapping[int, Sequence[Tensor]],
) -> object:
    """The result of an op on stand-ins. `positions` has what each known mask selects, by identity."""
    if target is aten.mkldnn_rnn_layer.default:
        made = _layer_of_lstm(args)
        with fakes:
            return tuple(torch.empty_strided(m.shape, m.stride(), dtype=m.dtype) for m in made)
    if target is aten._pack_padded_sequence.default:
        return _packed(fakes, *cast(tuple[Tensor, Tensor, bool], args))
    if not positions and target not in _SHAPES:
        if (plain := _made_row_major(fakes, target, args, kwargs)) is not None:
            return plain
        device = _only_device(args, kwargs) if target in SHAPED_BY_KERNELS else None
        if device is not None:
            return shaped_by_kernel(fakes, target, args, kwargs, device)
        result = dispatched_without_data(fakes, target, args, kwargs)
        return result if target not in _NARROWED else _widened(fakes, target, args, kwargs, result)
    with fakes:
        if shape := _SHAPES.get(target):
            return shape(**bound_arguments(target, args, kwargs))
        if target is aten.masked_select.default:
            source, mask = cast(tuple[Tensor, Tensor], args)
            repeats = prod(np.broadcast_shapes(source.shape, mask.shape)) // max(1, mask.numel())
            return source.new_empty(len(positions[id(mask)][0]) * repeats)
        chosen = list[object]()
        for item in cast(Sequence[object], args[1]):
            chosen += positions.get(id(item), (item,))
        return target(args[0], chosen)


def _widened(
    fakes: FakeTensorMode,
    target: OpOverload,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    made: object,
) -> object:
    """The results of a norm on the CPU whose input is narrower than its weights, as under autocast.

    The first result has the input's dtype. Statistics and gradients of weights have the weights' dtype, where
    PyTorch's shape functions give them another.
    """
    assert isinstance(made, tuple)
    given = bound_arguments(target, args, kwargs)
    x = cast(Tensor, given.get("input", given.get("self")))
    beside = (given.get(name) for name in ("weight", "bias", "running_mean", "running_var"))
    wide = {tensor.dtype for tensor in beside if isinstance(tensor, Tensor)} - {x.dtype}
    if x.device.type != "cpu" or len(wide) != 1:
        return made
    dtypes = x.dtype, *[*wide] * (len(made) - 1)
    with fakes:
        return tuple(
            None if each is None else torch.empty_strided(each.shape, each.stride(), dtype=dtype)
            for each, dtype in zip(made, dtypes, strict=True)
        )


def _only_device(args: tuple[object, ...], kwargs: Mapping[str, object]) -> torch.device | None:
    """The device of the tensors among arguments, if they are stand-ins of one and nothing else is special."""
    given = [leaf for leaf in leaves((args, tuple(kwargs.values()))) if isinstance(leaf, Tensor)]
    devices = {tensor.device for tensor in given}
    plain = all(_is_stand_in(t) and not t.is_conj() and not t.is_neg() for t in given)
    return devices.pop() if plain and len(devices) == 1 else None


def _grouped_mm(
    self: Tensor, mat2: Tensor, offs: Tensor | None, out_dtype: torch.dtype | None, **_: object
) -> Tensor:
    """A product for each group; PyTorch's shape function accepts bfloat16 alone, its kernel also float32."""
    rows, columns, dtype = self.shape[-2], mat2.shape[-1], out_dtype or self.dtype
    groups: tuple[int, ...] = ()
    if self.dim() == mat2.dim():
        groups = (len(self) if self.dim() == 3 or offs is None else len(offs),)
    together = _ALIGNMENT // dtype.itemsize
    width = -(-columns // together) * together
    stride = (rows * width, width, 1)[-2 - len(groups) :]
    return self.new_empty_strided((*groups, rows, columns), stride, dtype=dtype)


def _packed(fakes: FakeTensorMode, x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Sequences without their padding, and how many have each position. The kernel refuses bad lengths."""
    if isinstance(lengths, FakeTensor):
        raise CaptureError(
            "forward packs sequences whose lengths it computes of values that do not exist before it runs",
            advice="pass the lengths in as a list or an integer tensor on the CPU, or compute them from"
            " integer or boolean arguments",
        )
    positions, counts = aten._pack_padded_sequence(torch.empty(x.shape[:2]), lengths, batch_first)
    with fakes:
        return x.new_empty((len(positions), *x.shape[2:])), counts


def _layer_of_lstm(args: tuple[object, ...]) -> tuple[Tensor, ...]:
    """What a layer of oneDNN returns. Only its kernel tells how long its workspace is: it runs on zeros."""
    zeros = (torch.zeros(v.shape, dtype=v.dtype) if isinstance(v, Tensor) else v for v in args)
    return cast(tuple[Tensor, ...], as_in_forward(aten.mkldnn_rnn_layer.default, *zeros))


def _ctc_loss(log_probs: Tensor, target_lengths: Sequence[int], **_: object) -> tuple[Tensor, Tensor]:
    """The losses, and a table over time and targets with a blank around each."""
    time, count = log_probs.shape[:2]
    table = log_probs.new_empty((count, time, 2 * max(target_lengths, default=0) + 1))
    return log_probs.new_empty(count), table


def _ctc_loss_backward(log_probs: Tensor, **_: object) -> Tensor:
    return log_probs.new_empty(log_probs.shape)


def _made_row_major(
    fakes: FakeTensorMode, target: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> object:
    """The results of a call on row-major operands of the CPU that is surely legal; None for other calls.

    PyTorch's shape functions of these ops are written in Python and take milliseconds.
    """
    if target in _OVER_ITSELF and isinstance(args[0], Tensor) and _is_stand_in(args[0]):
        return args[0]
    given = [leaf for leaf in leaves((args, tuple(kwargs.values()))) if isinstance(leaf, Tensor)]
    known = all(_is_stand_in(t) or (type(t) is Tensor and not t.dtype.is_floating_point) for t in given)
    sizes = row_major_sizes(target, args, kwargs) if known else None
    if sizes is None:
        return None
    (dtype,) = {*_float_dtypes(given)}
    made = tuple(
        FakeTensor(fakes, torch.empty(size, dtype=dtype, device="meta"), torch.device("cpu"))
        for size in sizes
    )
    return made[0] if len(made) == 1 else made


def row_major_sizes(
    target: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Sequence[Sequence[int]] | None:
    """The shapes of the results of a call if these are surely row-major and of the operands' only dtype."""
    if target not in ROW_MAJOR:
        return None
    given = [leaf for leaf in leaves((args, tuple(kwargs.values()))) if isinstance(leaf, Tensor)]
    if not all(map(_is_plain_operand, given)) or len({*_float_dtypes(given)}) != 1:
        return None
    return ROW_MAJOR[target](**bound_arguments(target, args, kwargs))


def _float_dtypes(tensors: Iterable[Tensor]) -> Iterator[torch.dtype]:
    return (tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point)


def _is_plain_operand(tensor: Tensor) -> bool:
    """Whether only its shape matters: row-major, on the CPU, of a usual dtype, not empty."""
    return (
        tensor.dtype in (torch.float32, torch.float64, torch.int64, torch.bool)
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and tensor.numel() > 0
    )


_Sizes: TypeAlias = Sequence[Sequence[int]] | None  # of row-major results; None if the call is not plain


def _pointwise(**given: object) -> _Sizes:
    """Operands of one shape, and numbers. With a tensor without dims, PyTorch may permute dims of size 1."""
    shapes = {tuple(value.shape) for value in given.values() if isinstance(value, Tensor)}
    numbers = (v for v in given.values() if not isinstance(v, Tensor))
    floats = all(type(v) in (int, float, str) for v in numbers)
    full = max(shapes, key=len)
    is_plain = shapes == {full} or (shapes == {full, ()} and 1 not in full)
    return (full,) if floats and is_plain else None


def _where(condition: Tensor, **chosen: Tensor) -> _Sizes:
    are_floats = all(each.dtype.is_floating_point for each in chosen.values())
    return _pointwise(condition=condition, **chosen) if condition.dtype is torch.bool and are_floats else None


def _along(self: Tensor, dim: int, half_to_float: bool = False, dtype: object = None) -> _Sizes:
    is_plain = not half_to_float and dtype is None and -self.dim() <= dim < self.dim()
    return (self.shape,) if is_plain else None


def _along_backward(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> _Sizes:
    is_plain = grad_output.shape == output.shape and input_dtype is output.dtype
    return (output.shape,) if is_plain and -output.dim() <= dim < output.dim() else None


def _layer_norm(**given: Any) -> _Sizes:
    x, inner = given["input"], tuple(given["normalized_shape"])
    scales = (each for each in (given["weight"], given["bias"]) if each is not None)
    is_last = 0 < len(inner) < x.dim() and tuple(x.shape[-len(inner) :]) == inner
    if not is_last or any(tuple(each.shape) != inner for each in scales):
        return None
    rows = (*x.shape[: x.dim() - len(inner)], *(1 for _ in inner))
    return x.shape, rows, rows


def _layer_norm_backward(**given: Any) -> _Sizes:
    sizes, made = _layer_norm(**given), [given["input"], given["weight"], given["bias"]]
    shapes = tuple(tuple(given[name].shape) for name in ("grad_out", "mean", "rstd"))
    is_plain = sizes is not None and shapes == tuple(map(tuple, sizes)) and all(given["output_mask"])
    return [each.shape for each in made] if is_plain and None not in made[1:] else None


def _nll_loss(**given: Any) -> _Sizes:
    x, target = given["self"], given["target"]
    fitting = x.dim() == 2 and target.shape == x.shape[:1] and target.dtype is torch.int64
    return (
        (target.shape if given["reduction"] == 0 else (), ()) if fitting and given["weight"] is None else None
    )


def _nll_loss_backward(**given: Any) -> _Sizes:
    sizes, shapes = _nll_loss(**given), [tuple(given[n].shape) for n in ("grad_output", "total_weight")]
    return (given["self"].shape,) if sizes is not None and shapes == [*map(tuple, sizes)] else None


def _embedding(weight: Tensor, indices: Tensor, **_: object) -> _Sizes:
    is_plain = weight.dim() == 2 and indices.dtype is torch.int64
    return ((*indices.shape, weight.shape[1]),) if is_plain else None


def _embedding_backward(grad_output: Tensor, indices: Tensor, num_weights: int, **_: object) -> _Sizes:
    is_plain = grad_output.shape[:-1] == indices.shape and indices.dtype is torch.int64
    return ((num_weights, grad_output.shape[-1]),) if is_plain else None


# Ops that write over their first operand, whatever it looks like, and read no other tensor.
_OVER_ITSELF = (aten.bernoulli_.float, aten.div_.Scalar, aten.mul_.Scalar)
# Ops that give row-major results for row-major operands; a test compares them with kernels.
ROW_MAJOR: Mapping[OpOverload, Callable[..., _Sizes]] = {
    **dict.fromkeys(
        (
            *(aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar),
            *(aten.tanh.default, aten.pow.Tensor_Scalar, aten.tanh_backward.default, aten.gelu.default),
            aten.gelu_backward.default,
        ),
        _pointwise,
    ),
    aten.where.self: _where,
    **dict.fromkeys((aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default), _along),
    aten._softmax_backward_data.default: _along_backward,
    aten._log_softmax_backward_data.default: _along_backward,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss_backward.default: _nll_loss_backward,
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
}

# Ops whose kernels have a shape function in C++ that is exact; a test compares them with kernels. Ops that
# choose a layout by device, such as convolutions, are not among them.
SHAPED_BY_KERNELS = frozenset(
    (
        *(
            aten.view.default,
            aten._unsafe_view.default,
            aten.t.default,
            aten.transpose.int,
            aten.detach.default,
        ),
        *(aten.permute.default, aten.expand.default, aten.slice.Tensor, aten.select.int),
        *(aten.unsqueeze.default, aten.squeeze.dim, aten.split.Tensor, aten.unbind.int),
        *(aten.mm.default, aten.addmm.default, aten.bmm.default),
        *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor),
        *(aten.pow.Tensor_Scalar, aten.neg.default, aten.rsqrt.default, aten.tanh.default),
        *(aten.sigmoid.default, aten.silu.default, aten.gelu.default, aten.relu.default),
        *(aten.tanh_backward.default, aten.gelu_backward.default, aten.threshold_backward.default),
        *(aten.sum.dim_IntList, aten.mean.dim),
    )
)


def _batch_norm_backward(**given: Any) -> tuple[Tensor | None, ...]:
    """The gradients that are wanted; PyTorch's shape function returns that of the input in any case."""
    of_input, *others = aten.native_batch_norm_backward.default(**given)
    return of_input if given["output_mask"][0] else None, *others


# Their shape functions give wrong dtypes if the input is narrower than the weights.
_NARROWED = frozenset(
    (
        aten.native_batch_norm.default,
        aten._native_batch_norm_legit.default,
        aten._native_batch_norm_legit_functional.default,
        aten.native_group_norm.default,
        aten.native_group_norm_backward.default,
        aten.native_layer_norm.default,
    )
)

_SHAPES: dict[OpOverload, Callable[..., object]] = {
    aten._ctc_loss.default: _ctc_loss,
    aten._ctc_loss_backward.default: _ctc_loss_backward,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
}
if hasattr(aten, "_grouped_mm"):  # since PyTorch 2.8
    _SHAPES[aten._grouped_mm.default] = _grouped_mm
