"""Outermost calls: the modules that a script itself calls with gradients, each before its forward begins.

`nn.Module.__call__` is replaced, for PyTorch looks forward up before it calls any hook: what shall take its
place at this very call has to be there before. A call inside another one costs a look at one flag.
"""

import os
from collections.abc import Callable, Mapping
from functools import wraps
from threading import get_ident
from typing import Any, TypeAlias

import torch
from torch import nn

from stowplan.torch_private import running_backward

Before: TypeAlias = Callable[[nn.Module, tuple[object, ...], Mapping[str, object]], bool]
"""Learns of a call, and says whether it is one; if not, the modules inside it are looked at."""


class OutermostCalls:
    """Tells `before` of each outermost call of this thread, until `end`."""

    def __init__(self, before: Before) -> None:
        self._before = before
        self._thread, self._is_inside = get_ident(), False
        self._own: Callable[..., Any] | None = None

    def begin(self) -> None:
        """Look at calls from now on, but not in forked processes."""
        own = self._own = nn.Module.__call__

        @wraps(own)
        def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if self._is_inside or torch.compiler.is_compiling() or not self._is_looked_at():
                return own(module, *args, **kwargs)
            self._is_inside = True
            try:
                self._is_inside = self._before(module, args, kwargs)
                return own(module, *args, **kwargs)
            finally:
                self._is_inside = False

        self._call = call
        nn.Module.__call__ = call  # type: ignore[method-assign]
        os.register_at_fork(after_in_child=self.end)

    def _is_looked_at(self) -> bool:
        """A backward calls modules too, where it recomputes."""
        return torch.is_grad_enabled() and running_backward() < 0 and get_ident() == self._thread

    def end(self) -> None:
        """Look at no more calls."""
        if self._own is not None and nn.Module.__call__ is self._call:
            nn.Module.__call__ = self._own  # type: ignore[method-assign]
        self._is_inside = True  # also for whoever has kept the replacement
