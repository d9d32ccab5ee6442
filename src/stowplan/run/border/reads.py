"""Reads: which attributes of which modules a step looks at while it runs."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import RLock, get_ident

from torch import nn

_ONE_AT_A_TIME = RLock()
MODULE_STATE = frozenset(vars(nn.Module())) - {"training"}


class Reads:
    """The names that were read, by module. Parameters, buffers and children are among them."""

    def __init__(self) -> None:
        self._names: dict[nn.Module, dict[str, None]] = {}

    def by_path(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        """The names that were read of each module of `model`, by its first path."""
        return {path: tuple(self._names[m]) for path, m in model.named_modules() if m in self._names}

    def outside(self, model: nn.Module) -> Mapping[nn.Module, tuple[str, ...]]:
        """Modules that are read and are not part of the model, such as those in a list."""
        inside = set(model.modules())
        return {module: tuple(names) for module, names in self._names.items() if module not in inside}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within, every attribute that this thread reads of any module is noted.

        Python has no other way to see a read than the class's own `__getattribute__`; it is set on
        `nn.Module`, which has none, and removed again, one recording at a time.
        """
        with _ONE_AT_A_TIME:
            thread, names, plain = get_ident(), self._names, object.__getattribute__

            def noting(module: nn.Module, name: str) -> object:
                if get_ident() == thread and name not in MODULE_STATE and name[:2] != "__":
                    names.setdefault(module, {})[name] = None
                return plain(module, name)

            nn.Module.__getattribute__ = noting  # type: ignore[method-assign,assignment]
            try:
                yield
            finally:
                del nn.Module.__getattribute__
