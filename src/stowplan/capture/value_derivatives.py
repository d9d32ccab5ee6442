"""Functions whose derivative asks for values, planned as eager differentiates them.

Autograd has two formulas for the derivative of a product: one divides the result by each factor, the other is
for factors among which are zeros. In eager it looks at the factors and chooses. On tensors without data it
cannot look, takes the second, and the bits are others. The same is true of `x.max()`, whose formula on
tensors without data multiplies gradients by zeros, so that an infinite gradient becomes NaN, and of the value
of `x.masked_fill(mask, value)`, whose gradient is then added in another order.

While a step is captured, these functions are therefore differentiated by one op. When the plan runs,
`eager_derivative` calls the function once more and asks autograd for the derivative, with all values there.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from stowplan.torch_private import FakeTensor

_REDUCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "prod": torch.prod,
    "max": torch.max,
    "min": torch.min,
    "median": torch.median,
    "nanmedian": torch.nanmedian,
}
_NAMES = {
    function: name
    for name, reduction in _REDUCTIONS.items()
    for function in (reduction, getattr(Tensor, name))
}

torch.library.define(
    "stowplan::eager_derivative",
    "(Tensor gradient, Tensor input, str name, int? dim, bool keepdim, ScalarType? dtype) -> Tensor",
)


@torch.library.impl("stowplan::eager_derivative", "CompositeExplicitAutograd")
def _eager_derivative(
    gradient: Tensor, operand: Tensor, name: str, dim: int | None, keepdim: bool, dtype: torch.dtype | None
) -> Tensor:
    """The gradient of the input, by eager's own formula, laid out like the input."""
    with torch.enable_grad():
        leaf = operand.detach().requires_grad_()
        (found,) = torch.autograd.grad(_reduced(leaf, name, dim, keepdim, dtype), leaf, gradient)
    made = torch.empty_like(operand)
    return found if found.stride() == made.stride() else made.copy_(found)


@torch.library.register_fake("stowplan::eager_derivative")  # type: ignore[untyped-decorator]
def _like_input(
    _gradient: Tensor, operand: Tensor, _name: str, _dim: object, _keepdim: bool, _dtype: object
) -> Tensor:
    return torch.empty_like(operand)


torch.library.define("stowplan::masked_total", "(Tensor gradient, Tensor mask) -> Tensor")


@torch.library.impl("stowplan::masked_total", "CompositeExplicitAutograd")
def _masked_total(gradient: Tensor, mask: Tensor) -> Tensor:
    """The gradient of the value that a mask fills in."""
    return gradient.masked_select(mask).sum()


@torch.library.register_fake("stowplan::masked_total")  # type: ignore[untyped-decorator]
def _like_a_number(gradient: Tensor, _mask: Tensor) -> Tensor:
    return gradient.new_empty(())


EAGER_DERIVATIVE = torch.ops.stowplan.eager_derivative.default
MASKED_TOTAL = torch.ops.stowplan.masked_total.default


def _reduced(tensor: Tensor, name: str, dim: int | None, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    over = () if dim is None else (dim, keepdim)
    return _REDUCTIONS[name](tensor, *over, **({} if dtype is None else {"dtype": dtype}))


class _Reduction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *how: Any) -> Tensor:
        ctx.save_for_backward(tensor)
        ctx.how = how
        return _reduced(tensor, *how)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (tensor,) = ctx.saved_tensors
        return (EAGER_DERIVATIVE(*gradients, tensor, *ctx.how), *(None for _ in ctx.how))


class _Fill(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mask: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return tensor.masked_fill(mask, value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (mask,), (gradient,) = ctx.saved_tensors, gradients
        filled = gradient.masked_fill(mask, 0) if ctx.needs_input_grad[0] else None
        return filled, None, MASKED_TOTAL(gradient, mask)


def differentiated_as_eager(
    function: Callable[..., object], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """The result of a call whose derivative would ask for values; None if this is no such call."""
    if function in (torch.masked_fill, Tensor.masked_fill) and torch.is_grad_enabled():
        return _filled(**{**dict(zip(("input", "mask", "value"), args, strict=False)), **kwargs})
    name = _NAMES.get(function)
    if name is None:
        return None
    given = {**dict(zip(("input", "dim", "keepdim"), args, strict=False)), **kwargs}
    tensor, dim = given.pop("input", None), given.pop("dim", None)
    how = name, dim, given.pop("keepdim", False), given.pop("dtype", None)
    is_one = isinstance(tensor, FakeTensor) and tensor.requires_grad and torch.is_grad_enabled()
    if given or not is_one or not (dim is None or (name == "prod" and isinstance(dim, int))):
        return None
    made: Tensor = _Reduction.apply(tensor, *how)  # type: ignore[no-untyped-call]
    return made


def _filled(mask: Tensor, value: object, **named: Tensor) -> Tensor | None:
    if not isinstance(value, FakeTensor) or not value.requires_grad:
        return None
    made: Tensor = _Fill.apply(named["input"], mask, value)  # type: ignore[no-untyped-call]
    return made
