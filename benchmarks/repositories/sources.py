"""Where the snapshots are, and how their code is imported.

A snapshot of OWNER/NAME is a git checkout in FOLDER/OWNER+NAME, at the commit that its entry names. Packages
of the registry that their code imports are in FOLDER/pip. Nothing of either belongs to stowplan.
"""

import ast
import subprocess
import sys
import types
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

PACKAGES = "pip"


def folder_of(folder: Path, repository: str) -> Path:
    """The checkout of OWNER/NAME."""
    return folder / repository.replace("/", "+")


def commit_of(checkout: Path) -> str:
    """The commit that is checked out, or nothing."""
    command = ("git", "-C", str(checkout), "rev-parse", "HEAD")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 and (checkout / ".git").exists() else ""


def prepare(folder: Path, checkout: Path, parts: Sequence[str], absent: Iterable[str]) -> None:
    """Let imports find the checkout, folders in it and the packages; `absent` ones are stood in for."""
    places = [checkout / part for part in parts] or [checkout]
    sys.path[:0] = [str(place) for place in places]
    sys.path.append(str(folder / PACKAGES))
    sys.meta_path.insert(0, _Absent(frozenset(absent)))


def source(name: str) -> Any:
    """A module of a snapshot."""
    return import_module(name)


def definitions(path: Path, **names: object) -> Any:
    """The imports, classes and functions of a script, without what it runs; `names` are globals of it."""
    module = types.ModuleType(f"definitions_{path.stem}")
    vars(module).update(names, __file__=str(path))
    sys.modules[module.__name__] = module
    kept = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    body = ast.Module([node for node in tree.body if isinstance(node, kept)], [])
    exec(compile(body, str(path), "exec"), vars(module))  # noqa: S102
    return module


class _Anything(type):
    """A class that does nothing and has every attribute: decorates, is a base class, and is called."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)


def _anything(name: str) -> Any:
    return _Anything(name, (), {"__init__": lambda *_, **__: None, "__call__": lambda _, made: made})


class _Placeholder(types.ModuleType):
    """A package that is not here."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__, self.__version__ = list[str](), "99.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)


class _Absent(MetaPathFinder, Loader):
    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        is_absent = any(f"{name}.".startswith(f"{absent}.") for absent in self.names)
        return ModuleSpec(name, self, is_package=True) if is_absent else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Placeholder(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""
