"""Sockets: what techniques plug into.

Each technique lives in a folder of `techniques/`, and the general road imports none by name. Its planning,
`plan/`, knows nothing of PyTorch; its running is in `run/`. The `plugin` module of either registers in
sockets what the technique offers, and is imported when a socket is first asked for that technique. Without
the folder the technique is not there, and everything else works.
"""

from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Generic, TypeVar

from stowplan.errors import BadUse

_FOLDERS = {
    "tile": "tiles",
    "offload": "offload",
    "offload-gradients": "offload",
    "mesh": "shards",
    "compiled": "kernels",
    "arena": "arena",
    "held blocks": "held_blocks",
    "devices": "devices",
    "optimizer": "iteration",
}

T = TypeVar("T")


def is_installed(technique: str) -> bool:
    """Whether the folder of a technique is there; some need none."""
    folder = _FOLDERS.get(technique)
    return folder is None or find_spec(f"stowplan.techniques.{folder}") is not None


class Socket(Generic[T]):
    """The entries that techniques register for one purpose. `layer` is the part of them that does."""

    def __init__(self, layer: str, *techniques: str) -> None:
        self._layer, self._techniques = layer, techniques
        self._offered: dict[str, T] = {}

    def register(self, *techniques: str) -> Callable[[T], T]:
        """A decorator for what these techniques offer."""

        def add(offered: T) -> T:
            for technique in techniques:
                assert technique not in self._offered, f"{technique} is registered already"
                self._offered[technique] = offered
            return offered

        return add

    def of(self, technique: str) -> T:
        """The entry of one technique; BadUse if it is not installed."""
        if technique not in self._offered:
            if not is_installed(technique):
                raise BadUse(f"the technique {technique!r} is not installed")
            import_module(f"stowplan.techniques.{_FOLDERS[technique]}.{self._layer}.plugin")
        return self._offered[technique]

    def offered(self, allowed: Iterable[str]) -> list[T]:
        """The entries of the allowed techniques, each entry once."""
        return list(dict.fromkeys(self.of(name) for name in self._techniques if name in set(allowed)))
