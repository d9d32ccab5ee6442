"""Between: parameters from the last backward to `optimizer.step()`, and who looks at their gradients there.

A gradient that backward has consumed is not there, and `if p.grad is not None` would pass over it silently.
Python finds `.grad` and `.data` in the class of a tensor. So for this time such a parameter is of a class
that is derived from its own and tells of both, as PyTorch changes the class of a lazy parameter. Autograd and
kernels do not ask for the class.
"""

import copy
import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from stowplan.torch_private import TensorBase, version_of

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Between:
    """Watches parameters. `asked` is called when code asks for a gradient, or sets one, and may raise."""

    def __init__(self, asked: Callable[[Tensor, bool], None]) -> None:
        self._asked = weakref.WeakMethod(asked)
        self._own_class: dict[Tensor, type] = {}
        self._classes: dict[type, type] = {}
        self._versions: dict[Tensor, int | None] = {}
        self._bits: dict[Tensor, tuple[Tensor, ...] | None] = {}  # when `.data` was asked for; None if set

    def open(self, parameters: Iterable[Tensor]) -> None:
        """Watch these from now on."""
        for parameter in parameters:
            kind = type(parameter)
            if kind not in self._classes:
                self._classes[kind] = _watched_class(kind, weakref.ref(self))
            self._own_class[parameter] = kind
            self._versions[parameter] = version_of(parameter)
            parameter.__class__ = self._classes[kind]

    def close(self) -> None:
        """Watch none of them any more."""
        while self._own_class:
            parameter, kind = self._own_class.popitem()
            parameter.__class__ = kind

    def forget(self) -> None:
        """Close, with another iteration to follow."""
        self.close()
        self._versions.clear()
        self._bits.clear()

    def is_changed(self) -> bool:
        """Whether a parameter was written to since it is watched, also through `.data`."""
        written = any(version_of(parameter) != version for parameter, version in self._versions.items())
        return written or any(
            bits is None or not all(map(torch.equal, bits, _bits_of(parameter)))
            for parameter, bits in self._bits.items()
        )

    def grad_asked(self, parameter: Tensor, *, is_set: bool) -> None:
        """Code asks for the gradient of a parameter, or sets it."""
        asked = self._asked()
        if parameter in self._own_class and asked is not None:
            asked(parameter, is_set)

    def data_asked(self, parameter: Tensor, *, is_set: bool) -> None:
        """Code asks for the data of a parameter, with which it may change the parameter, or sets it."""
        if parameter in self._own_class and is_set:
            self._bits[parameter] = None
        elif parameter in self._own_class and parameter not in self._bits:
            self._bits[parameter] = _bits_of(parameter)


def _bits_of(parameter: Tensor) -> tuple[Tensor, ...]:
    """Sums of the bits in rows and in columns: as good as a copy to see a change, and small."""
    data: Tensor = TensorBase.data.__get__(parameter)
    data = torch.view_as_real(data) if data.is_complex() else data
    bits = data.view(_INTEGERS[data.element_size()])
    rows = bits.reshape(1, -1) if bits.dim() < 2 else bits.flatten(1)
    if bits.dim() < 2:
        return bits.clone(), rows.sum(1, dtype=torch.int64)
    return rows.sum(0, dtype=torch.int64), rows.sum(1, dtype=torch.int64)


def _watched_class(kind: type, between: "weakref.ref[Between]") -> type:
    """A class like `kind` that tells of `.grad` and `.data`."""

    def told(name: str) -> property:
        attribute = getattr(TensorBase, name)

        def tell(parameter: Tensor, *, is_set: bool) -> None:
            found = between()
            if found is not None:
                getattr(found, f"{name}_asked")(parameter, is_set=is_set)

        def get(self: Tensor) -> object:
            tell(self, is_set=False)
            return attribute.__get__(self)

        def change(self: Tensor, value: object) -> None:
            tell(self, is_set=True)
            attribute.__set__(self, value)

        def delete(self: Tensor) -> None:
            tell(self, is_set=True)
            attribute.__delete__(self)

        return property(get, change, delete)

    def as_before(method: Callable[..., object]) -> Callable[..., object]:
        """The method of a parameter that is of its own class meanwhile."""

        def call(self: Tensor, *given: object) -> object:
            watched, self.__class__ = type(self), kind
            try:
                return method(self, *given)
            finally:
                self.__class__ = watched

        return call

    names: dict[str, object] = {"grad": told("grad"), "data": told("data")}
    names |= {"__deepcopy__": as_before(copy.deepcopy), "__repr__": as_before(repr)}
    names |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind)(kind.__name__, (kind,), names)
