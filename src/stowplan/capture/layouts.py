"""Layouts: the strides that kernels give their results, where PyTorch's shape functions say otherwise.

A captured step takes views and writes into parts of tensors by their strides, so that wrong ones are wrong
results. They were seen where operands do not lie by rows. The kernels of a few suspects are run once for it,
on operands without contents; in forward, all are compared with eager (`run/measure/agreement.py`). What is
otherwise is noted here, and the step is captured once more.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from stowplan.capture.cells import Cell
from stowplan.capture.schema import leaves, returns_tensors, written_names

if TYPE_CHECKING:
    from stowplan.capture.watching import Event

aten = torch.ops.aten
_MOST_BYTES = 1 << 28  # of the operands of a kernel that is run for its layout
# Ops seen to lay out results otherwise, whose kernels take any contents. Others may crash on those.
_SUSPECTS = (
    aten.roll.default,
    aten.flip.default,
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.soft_margin_loss_backward.default,
    aten.binary_cross_entropy_backward.default,
)
_seen: set[object] = set()  # kernels that were run

_LEARNED: dict[
    object, tuple[tuple[int, ...] | None, ...]
] = {}  # facts about PyTorch: they hold for all steps


def learn(
    target: OpOverload, args: object, kwargs: Mapping[str, object], results: tuple[Tensor | None, ...]
) -> None:
    """Note the strides of what a kernel has made of operands like these."""
    strides = tuple(None if result is None else result.stride() for result in results)
    _LEARNED[_call_like(target, args, kwargs)] = strides


def as_made(target: OpOverload, args: object, kwargs: Mapping[str, object], result: object) -> object:
    """A result without data, in the layout that the kernel is known to give it."""
    strides = _LEARNED.get(_call_like(target, args, kwargs)) if _LEARNED else None
    if strides is None:
        return result
    if isinstance(result, Tensor):
        return _laid_out(result, strides[0])
    assert isinstance(result, (tuple, list))
    return type(result)(_laid_out(item, stride) for item, stride in zip(result, strides, strict=True))


def learn_from_kernels(events: "Iterable[Event]") -> bool:
    """Run each kernel that makes new tensors once; whether a result is laid out otherwise than captured."""
    found = False
    state = torch.get_rng_state()
    suspects = {_call_like(e.target, e.args, e.kwargs): e for e in events if _may_differ(e)}
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
    """Whether the op is a suspect and an operand does not lie by rows, gaps aside."""
    if event.target not in _SUSPECTS:
        return False
    given = (leaf for leaf in leaves((event.args, tuple(event.kwargs.values()))) if isinstance(leaf, Cell))
    return any(map(_is_permuted, given))


def _is_permuted(cell: Cell) -> bool:
    strides = [stride for stride, size in zip(cell.stride, cell.shape, strict=True) if size > 1 and stride]
    return strides != sorted(strides, reverse=True)


def _made(event: "Event") -> tuple[Tensor | None, ...]:
    """What the kernel of an event makes; nothing if it writes, hands on what it is given, or is too large."""
    given = [leaf for leaf in leaves((event.args, tuple(event.kwargs.values()))) if isinstance(leaf, Cell)]
    storages = {cell.storage for cell in given}
    is_view = any(cell is not None and cell.storage in storages for cell in event.results)
    skipped = is_view or not returns_tensors(event.target) or bool(written_names(event.target))
    if skipped or sum(cell.extent_bytes() for cell in given) > _MOST_BYTES:
        return ()
    try:
        with torch.no_grad():
            result = event.target(*_filled(event.args), **{n: _filled(v) for n, v in event.kwargs.items()})
    except (RuntimeError, IndexError, ValueError):  # it wants other contents than zeros
        return ()
    returned = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    return tuple(value if isinstance(value, Tensor) else None for value in returned)


def _filled(value: object) -> Any:
    if isinstance(value, (tuple, list)):
        return [_filled(item) for item in value] if isinstance(value, list) else tuple(map(_filled, value))
    if not isinstance(value, Cell):
        return value
    return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=value.device).zero_()


def _laid_out(result: object, stride: tuple[int, ...] | None) -> object:
    if stride is None or not isinstance(result, Tensor) or result.stride() == stride:
        return result
    return torch.empty_strided(result.shape, stride, dtype=result.dtype, device=result.device)


def _call_like(target: OpOverload, args: object, kwargs: Mapping[str, object]) -> object:
    return target, _look(args), tuple((name, _look(kwargs[name])) for name in sorted(kwargs))


def _look(value: object) -> object:
    if isinstance(value, (tuple, list)):
        return tuple(map(_look, value))
    if isinstance(value, Cell):
        return value.shape, value.stride, value.dtype, value.device
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    return type(value), repr(value)
