"""StorageWatch: how many bytes live, and how many are moved, while code runs on stand-ins."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stowplan.capture.stand_ins import StorageBook
from stowplan.torch_private import FakeTensorMode, TorchDispatchMode, pytree, schema_of

aten = torch.ops.aten
_ANY_NUMBER = 1000.0  # what a stand-in answers if its value is asked for: an optimizer counts its steps


class StorageWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves __init_subclass__ untyped
    """Within, ops run without data, and each storage that comes and goes is noted.

    On an accelerator, what is on the host takes nothing: an optimizer counts its steps there.
    """

    def __init__(self, fakes: FakeTensorMode, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # so is this
        self._fakes, self._on_accelerator = fakes, device.type != "cpu"
        self._events = 0
        self.launches = 0  # kernels that were run
        self.traffic_bytes = 0  # that they read and wrote
        self._book = StorageBook(lambda: self._events)

    def enter(self, tensors: Iterable[Tensor]) -> int:
        """Note tensors that are there before; returns the bytes of all that is there by now."""
        for tensor in tensors:
            if self._counts(tensor):
                self._book.view_of(tensor)
        return self.living_bytes()

    def _counts(self, tensor: Tensor) -> bool:
        return not (self._on_accelerator and tensor.device.type == "cpu")

    def living_bytes(self) -> int:
        """Bytes of the storages that are there now."""
        return self._book.living_bytes()

    def peak_bytes(self) -> int:
        """The most that was there during an op, its operands and results included."""
        change = np.zeros(self._events + 2, dtype=np.int64)
        for life in self._book.lifetimes:
            change[life.born + 1] += life.nbytes
            if life.died is not None:
                change[life.died + 2] -= life.nbytes
        return int(np.cumsum(change).max())

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is aten._local_scalar_dense.default:
            return _ANY_NUMBER
        with self._fakes:
            result = func(*args, **(kwargs or {}))
        for made in pytree.tree_leaves(result):
            if isinstance(made, Tensor) and self._counts(made):
                self._book.view_of(made, born=self._events)
        self._events += 1
        self._count_traffic(func, (args, kwargs), result)
        return result

    def _count_traffic(self, func: Any, given: object, result: object) -> None:
        """Each operand is read, and each result or operand that the op changes is written.

        Numbers are not counted: an optimizer counts its steps on the CPU, wherever its parameters are.
        """
        operands = _tensors_in(given)
        if func.namespace == "prim" or func.is_view or not operands:
            return
        schema = schema_of(func)
        if schema.is_mutable:
            args, kwargs = given if isinstance(given, tuple) else ((), {})
            named = dict(zip((argument.name for argument in schema.arguments), args, strict=False))
            named |= kwargs or {}
            if named.get("grad_scale") is None:  # else a fused optimizer unscales its gradients in place
                named.pop("grads", None)
            changed = (a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write)
            written = _tensors_in([named.get(name) for name in changed])
        else:
            written = _tensors_in(result)
        self.launches += 1
        self.traffic_bytes += sum(tensor.nbytes for tensor in (*operands, *written))


def _tensors_in(values: object) -> list[Tensor]:
    """All tensors that have dims."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor) and leaf.ndim]
