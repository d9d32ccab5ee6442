"""Shapes of results: of calls seen before, and where PyTorch's own shape functions refuse."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

import numpy as np
import torch
from torch import Tensor

from stowplan.capture.layouts import call_like
from stowplan.capture.schema import as_in_forward, bound_arguments, leaves, written_arguments
from stowplan.capture.storage_views import extent_of
from stowplan.torch_private import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    dispatched_without_data,
    storage_id,
)

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


class Shapes:
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
    if not positions and target not in _SHAPES:
        return dispatched_without_data(fakes, target, args, kwargs)
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


def _layer_of_lstm(args: tuple[object, ...]) -> tuple[Tensor, ...]:
    """What a layer of oneDNN returns. Only its kernel tells how long its workspace is: it runs on zeros."""
    zeros = (torch.zeros(v.shape, dtype=v.dtype) if isinstance(v, Tensor) else v for v in args)
    return cast(tuple[Tensor, ...], as_in_forward(aten.mkldnn_rnn_layer.default, *zeros))


_SHAPES: dict[OpOverload, Callable[..., Tensor]] = {}
if hasattr(aten, "_grouped_mm"):  # since PyTorch 2.8
    _SHAPES[aten._grouped_mm.default] = _grouped_mm
