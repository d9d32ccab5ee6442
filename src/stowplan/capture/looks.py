"""How a tensor of a graph looks to PyTorch: its strides and its dtype."""

import ast

import torch

from stowplan.capture.cells import contiguous_stride
from stowplan.ir import DType, Tensor


def stride_of(tensor: Tensor) -> tuple[int, ...]:
    """Strides that are not written down are those of rows."""
    found: tuple[int, ...] = (
        ast.literal_eval(tensor.layout) if tensor.layout else contiguous_stride(tensor.shape or ())
    )
    return found


def torch_dtype(dtype: DType | None) -> torch.dtype:
    """PyTorch's own."""
    name = "float8_e4m3fn" if dtype is DType.FLOAT8 else str(dtype)
    found: torch.dtype = getattr(torch, name)
    return found


def same_strides(shape: tuple[int, ...], one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether elements lie alike; a dim of one element has any stride."""
    return all(a == b for size, a, b in zip(shape, one, other, strict=True) if size > 1)
