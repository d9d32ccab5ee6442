"""Loads the libraries of the hollow card before anything imports PyTorch, and gives its ops right values.

Python imports a module of this name when it starts. A library that is loaded already is taken in place of the
vendor's, wherever that is installed.
"""

import ctypes
import os
import warnings
from pathlib import Path


def _load(folder: Path) -> None:
    everything = sorted(folder.glob("lib*.so*"), key=lambda path: not path.name.startswith("libcudart"))
    for library in everything:
        if not library.name.startswith("libhollow"):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _give_values(folder: Path) -> None:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch tells of each kernel that is registered a second time
        torch.ops.load_library(folder / "libhollow_values.so")  # type: ignore[no-untyped-call]
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.ops.hollow_card.give_values()


if _folder := os.environ.get("HOLLOW_LIBRARIES"):
    _load(Path(_folder))
    if os.environ.get("HOLLOW_VALUES"):
        _give_values(Path(_folder))
