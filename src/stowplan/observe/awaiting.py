"""Awaiting a module: what is to be done once a script has imported it, without importing it for that."""

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class _Awaiting(MetaPathFinder):
    """Finds one module as all others would, and calls back when it has been executed."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then, self._is_looking = name, then, False

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:  # noqa: ARG002
        """The module's own spec, whose loader calls back at its end."""
        if fullname != self._name or self._is_looking:
            return None
        self._is_looking = True
        try:
            spec = find_spec(fullname)
        finally:
            self._is_looking = False
        if spec is None or spec.loader is None:
            return spec
        loader: Loader = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            sys.meta_path.remove(self)
            execute(module)
            self._then()

        vars(loader)["exec_module"] = exec_module
        return spec


def after_import(name: str, then: Callable[[], None]) -> None:
    """Call `then` once the module has been imported; nothing is imported for that."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Awaiting(name, then))
