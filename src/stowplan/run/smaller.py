"""Smaller calls: a step that fits the budget without a plan at one size fits it at smaller sizes.

Such a call is neither captured nor planned: the model runs as it is. The first time it is watched. Each op of
its forward must be the one that was captured at the larger size, and no result may be larger than there. At
the first difference the call ends, buffers and generators are put back as they were, and the call is captured
like any other. Workspace of kernels is taken to be no larger at smaller sizes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stowplan.capture.arguments import TensorLook
from stowplan.capture.storage_views import contiguous_stride
from stowplan.capture.watching import Event
from stowplan.run.cost.machine import rng_state, set_rng_state
from stowplan.run.measure.agreement import changes_nothing
from stowplan.run.step.function import Before
from stowplan.torch_private import OpOverload, TorchDispatchMode

if TYPE_CHECKING:
    from stowplan.run.call_planner import KindOfCall

Sizes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class CallSizes:
    """A kind of call as its family, which is equal for calls that differ in sizes alone, and its sizes."""

    family: object
    sizes: Sizes

    @staticmethod
    def of(kind: "KindOfCall") -> "CallSizes | None":
        """None where sizes alone do not say how the tensors of the call lie in memory."""
        sizes, family, places = list[tuple[int, ...]](), list[object](), iter(kind.shared)
        for look in kind.looks:
            if not isinstance(look, TensorLook):
                family.append(look)
                continue
            owner, nbytes, _ = next(places)
            dense = look.stride == contiguous_stride(look.shape)
            if not dense or owner != len(sizes) or nbytes != prod(look.shape) * look.dtype.itemsize:
                return None
            sizes.append(look.shape)
            family.append(look._replace(shape=(len(look.shape),), stride=()))
        return CallSizes((tuple(family), kind.spec, kind.casts), tuple(sizes))

    def is_within(self, larger: "CallSizes") -> bool:
        """Whether it is of the same family, and no dim of any tensor is longer."""
        pairs = zip(self.sizes, larger.sizes, strict=False)
        shorter = all(one <= other for shapes in pairs for one, other in zip(*shapes, strict=False))
        return self.family == larger.family and shorter


class Unlike(BaseException):
    """The call runs other ops, or larger ones. No Exception, which the user's code might take for its own."""


def watched(
    run: Callable[[], object],
    forward: Sequence[Event],
    written: Iterable[Tensor],
    devices: Iterable[torch.device],
) -> object:
    """Run a forward that is like this one and no larger; raises Unlike, with everything as it was before.

    `written` are the tensors that it changes.
    """
    states = [(device, rng_state(device)) for device in {torch.device("cpu"), *devices}]
    watch = _Watch(forward)
    try:
        with Before(written), watch:
            result = run()
            watch.finish()
            return result
    except BaseException:
        for device, state in states:
            set_rng_state(device, state)
        raise


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves __init_subclass__ untyped
    """Runs ops as long as they are the expected ones and make nothing larger."""

    supports_higher_order_operators = True  # so that they come here: none was captured

    def __init__(self, forward: Sequence[Event]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # so is this
        self._expected = iter([event for event in forward if not changes_nothing(event.target)])

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if isinstance(func, OpOverload) and changes_nothing(func):
            return func(*args, **(kwargs or {}))
        event = next(self._expected, None)
        if event is None or event.target is not func:
            raise Unlike
        result = func(*args, **(kwargs or {}))
        made = tuple(result) if isinstance(result, (tuple, list)) else (result,)
        for value, expected in zip(made, event.results, strict=True):
            if isinstance(value, Tensor) and (expected is None or not _is_within(value, expected.shape)):
                raise Unlike
        return result

    def finish(self) -> None:
        """At the end of forward nothing is left."""
        if next(self._expected, None) is not None:
            raise Unlike


def _is_within(tensor: Tensor, larger: Sequence[int]) -> bool:
    return tensor.dim() == len(larger) and all(map(int.__le__, tensor.shape, larger))
