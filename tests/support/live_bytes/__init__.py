"""Live bytes: what PyTorch has allocated on the CPU, counted below it, by a library loaded before it.

It shares nothing with what plans are made of: it knows the sizes of blocks.
"""

import ctypes
import os
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("count.c")


def counting_library(folder: Path) -> Path:
    """The library, compiled into a folder."""
    library = folder / "count.so"
    try:
        flags = ("-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-pthread")
        subprocess.run(["gcc", *flags, "-o", str(library), str(_SOURCE)], check=True)
    except FileNotFoundError as fault:
        raise RuntimeError("live bytes are counted by a library in C: install gcc") from fault
    return library


def counted(library: Path) -> dict[str, str]:
    """The environment of a process that counts."""
    return {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}


class LiveBytes:
    """The counts of this process, which was started in the environment of `counted`."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        for name in ("live_bytes", "most_bytes"):
            getattr(self._library, name).restype = ctypes.c_size_t

    def now(self) -> int:
        """Bytes that are alive."""
        return int(self._library.live_bytes())

    def most(self) -> int:
        """The most that were alive at once since `forget_most`."""
        return int(self._library.most_bytes())

    def forget_most(self) -> None:
        """Begin to look for the most."""
        self._library.forget_most()
