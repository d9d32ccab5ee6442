"""A dispatch mode that raises in the place of chosen ops."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode


class Failing(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves __init_subclass__ untyped
    """Raises `fault` in the place of the first op that `chosen` is true of."""

    def __init__(self, fault: BaseException, chosen: Callable[[OpOverload], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # so is this
        self.fault, self.chosen = fault, chosen

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if self.chosen(func):
            raise self.fault
        return func(*args, **(kwargs or {}))
