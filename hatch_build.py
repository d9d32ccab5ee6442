"""The hook of the wheel: it builds the library of the search where there is a C compiler.

A wheel with the library is for one platform. Without a compiler, or with `STOWPLAN_NATIVE=0`, the wheel is
for all platforms, and plans are searched in Python. An editable install builds the library beside its source.
"""

import runpy
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

_NATIVE = "src/stowplan/plan/native"


class LibraryHook(BuildHookInterface[Any]):
    """Adds the library to a wheel, and names the wheel's platform."""

    PLUGIN_NAME = "custom"
    _folder: str | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the library before the wheel is packed."""
        native = runpy.run_path(str(Path(self.root, _NATIVE, "build.py")))
        if native["is_switched_off"]():
            return
        is_editable = version == "editable"
        self._folder = None if is_editable else mkdtemp()
        folder = Path(self._folder or Path(self.root, _NATIVE))
        if why := native["build"](folder):
            self.app.display_warning(f"stowplan plans with Python alone, which is slower: {why}")
            return
        if not is_editable:
            library = native["library_path"](folder)
            build_data["force_include"][str(library)] = f"stowplan/plan/native/{library.name}"
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{_platform()}"

    def finalize(self, *_: Any) -> None:
        """Remove what the wheel has been packed from."""
        if self._folder is not None:
            rmtree(self._folder, ignore_errors=True)


def _platform() -> str:
    """This machine and its own C library, as tags of wheels name them."""
    general = ("manylinux", "musllinux")  # what only a check of the library's symbols may promise
    return next(tag for tag in platform_tags() if not tag.startswith(general))
