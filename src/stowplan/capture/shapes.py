"""Shapes of results where PyTorch's own shape functions refuse: other dtypes, and masks that are known."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import cast

import numpy as np
import torch
from torch import Tensor

from stowplan.capture.schema import bound_arguments
from stowplan.errors import CaptureError
from stowplan.torch_private import OpOverload

aten = torch.ops.aten
_ALIGNMENT = 16  # bytes to which rows of a grouped product are padded


def made_without_data(
    target: OpOverload,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    positions: Mapping[int, Sequence[Tensor]],
) -> object:
    """The result of an op on stand-ins. `positions` has what each known mask selects, by identity."""
    if target is aten.index.Tensor and positions:
        chosen = list[object]()
        for item in cast(Sequence[object], args[1]):
            chosen += positions.get(id(item), (item,))
        return target(args[0], chosen)
    if target is aten.masked_select.default and positions:
        source, mask = cast(tuple[Tensor, Tensor], args)
        repeats = prod(np.broadcast_shapes(source.shape, mask.shape)) // max(1, mask.numel())
        return source.new_empty(len(positions[id(mask)][0]) * repeats)
    if target is aten.mkldnn_rnn_layer.default:
        raise CaptureError(
            "an LSTM on the CPU is one kernel of oneDNN, and PyTorch does not tell the size of its workspace",
            advice="set torch.backends.mkldnn.enabled = False around fit and training: it is then planned op"
            " by op",
        )
    if shape := _SHAPES.get(target):
        return shape(**bound_arguments(target, args, kwargs))
    return target(*args, **kwargs)


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


_SHAPES: dict[OpOverload, Callable[..., Tensor]] = {}
if hasattr(aten, "_grouped_mm"):  # since PyTorch 2.8
    _SHAPES[aten._grouped_mm.default] = _grouped_mm
