"""What two records of the same loop differ in: nothing for a bitwise plan, rounding for tiles."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from .sides import Note

ASKED, HOOKED = "asked gradient", "hook of"  # begin the notes of gradients that nobody has accumulated
# Of the largest number of the tensor, and of the largest of all: sums that cancel leave rounding alone.
_OWN = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 2e-4, torch.complex64: 2e-4}
_OWN |= {torch.bfloat16: 0.05, torch.float16: 0.01}
_ALL = {torch.float64: 1e-12, torch.complex128: 1e-12, torch.float32: 2e-6, torch.complex64: 2e-6}
_ALL |= {torch.bfloat16: 1e-3, torch.float16: 1e-4}


def differences(
    expected: Sequence[Note],
    found: Sequence[Note],
    *,
    exact: bool,
    in_order: bool = True,
    tolerance: float = 1.0,
) -> Iterator[str]:
    """One line for each thing that a loop would see otherwise.

    Unless `in_order`, what concerns one parameter may come before or after what concerns another.
    Bounds on rounding are multiplied by `tolerance`.
    """
    if not in_order:
        expected, found = sorted(expected, key=_concerned), sorted(found, key=_concerned)
    names, others = [name for name, _ in expected], [name for name, _ in found]
    if names != others:
        yield _first_unlike(names, others)
        return
    scale = max((_largest(value) for _, value in expected if isinstance(value, Tensor)), default=1.0)
    allowed = None if exact else partial(_allowed, scale, tolerance)
    for (name, value), (_, other) in zip(expected, found, strict=True):
        if name.startswith((ASKED, HOOKED)) and (not exact or _is_by_rows(other)):
            value, other = _by_rows(value), _by_rows(other)  # laid out as the parameter is
        if unlike := _unlike(value, other, allowed):
            yield f"{name}: {unlike}"


def _concerned(note: Note) -> str:
    """The parameter, in notes of its hooks."""
    return note[0].rpartition(" of ")[2]


def _is_by_rows(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_contiguous()


def _by_rows(value: object) -> object:
    return value.contiguous() if isinstance(value, Tensor) else value


def _first_unlike(names: list[str], others: list[str]) -> str:
    """Where two loops stop seeing the same things."""
    for position, (name, other) in enumerate(zip(names, others, strict=False)):
        if name != other:
            return f"events: eager saw {name!r}, the fitted model {other!r} (event {position})"
    longer = names[len(others) :] or others[len(names) :]
    return f"events: eager saw {len(names)}, the fitted model {len(others)}; the first other is {longer[0]!r}"


def _unlike(value: object, other: object, allowed: Callable[[Tensor], float] | None) -> str:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return _unlike_tensors(value, other, allowed)
    same = type(value) is type(other) and value == other
    return "" if same else f"{_shown(value)} in eager, {_shown(other)} fitted"


def _unlike_tensors(value: Tensor, other: Tensor, allowed: Callable[[Tensor], float] | None) -> str:
    if (value.shape, value.dtype) != (other.shape, other.dtype):
        return f"{_shown(value)} in eager, {_shown(other)} fitted"
    if _layout(value) != _layout(other):
        return f"strides {value.stride()} in eager, {other.stride()} fitted"
    if not value.is_floating_point() and not value.is_complex():
        return "" if torch.equal(value, other) else "other numbers"
    bound = allowed(value) if allowed else 0.0
    if torch.allclose(value, other, rtol=0.0, atol=bound, equal_nan=True):
        return ""
    off = float((value - other).abs().nan_to_num(nan=float("inf")).max())
    return f"off by {off:.3g} where {bound:.3g} is allowed; the largest number is {_largest(value):.3g}"


def _allowed(scale: float, tolerance: float, value: Tensor) -> float:
    """The rounding that tiles may differ by in one tensor."""
    return tolerance * (_OWN[value.dtype] * _largest(value) + _ALL[value.dtype] * scale)


def _layout(value: Tensor) -> list[int]:
    """Strides, where there is more than one element to stride over."""
    return [
        step for size, step in zip(value.shape, value.stride(), strict=True) if size > 1 and value.numel()
    ]


def _largest(value: Tensor) -> float:
    if not value.numel() or not (value.is_floating_point() or value.is_complex()):
        return 0.0
    return float(value.abs().nan_to_num(0.0, 0.0, 0.0).max())


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {value.dtype} {tuple(value.shape)}"
    return repr(value)
