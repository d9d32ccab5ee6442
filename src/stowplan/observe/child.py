"""The beginning of an observed process: the environment as the user has it, and a wait for torch.

Nothing is imported here that the script may not have imported itself, for a script sets threads and
allocators in its environment before it imports torch.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from stowplan.observe.launch import VARIABLE, Settings
from stowplan.observe.record import Record

_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_LAUNCHING = ("torchrun", "accelerate")


def begin() -> None:
    """Observe this process, unless it only starts others that are to be observed."""
    text = os.environ.get(VARIABLE)
    if text is None or is_launcher(sys.orig_argv):
        return
    settings = Settings(**json.loads(text))
    del os.environ[VARIABLE]  # what the script starts is not observed
    if settings.path is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = settings.path

    def observe() -> None:
        try:
            from stowplan.observe import observer

            observer.begin(settings)
        except Exception as error:
            Record(script=sys.argv[0], told=f"observing could not begin: {error!r}").write(settings.folder)

    after_import("torch", observe)


def is_launcher(command: Sequence[str]) -> bool:
    """Whether this command line of Python starts the workers of a training run."""
    words = list(command[1:])
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1] in _LAUNCHERS
    script = next((word for word in words if not word.startswith("-")), "")
    return Path(script).name in _LAUNCHING


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
