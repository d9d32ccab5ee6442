"""Building the library: `python -m stowplan.plan.native.build`, and the hook of the wheel (`hatch_build.py`).

One command of any C compiler makes it. Its name holds a digest of its source, so a library that was built
from another source is never loaded. Nothing but the standard library is imported: the hook runs before
stowplan is installed.
"""

import os
import shlex
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from shutil import which

SWITCH = "STOWPLAN_NATIVE"
"""The environment variable that, set to 0, builds and loads no library."""

HERE = Path(__file__).parent
_SOURCES = ("ledger.c", "search.c")
_FLAGS = (
    "-std=c99",
    "-O2",
    "-ffp-contract=off",  # a fused multiply-add rounds once where Python rounds twice
    "-fvisibility=hidden",
    "-shared",
    *(() if sys.platform == "win32" else ("-fPIC",)),
)
_SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
_SECONDS = 120  # far more than any compiler needs


def library_path(folder: Path = HERE) -> Path:
    """Where the library of this source is, or would be, in a folder."""
    digest = sha256(" ".join(_FLAGS).encode())
    for name in ("core.h", *_SOURCES):
        digest.update((HERE / name).read_bytes().replace(b"\r\n", b"\n"))
    return folder / f"core-{digest.hexdigest()[:16]}{_SUFFIX}"


def is_switched_off() -> bool:
    """Whether the environment asks for Python alone."""
    return os.environ.get(SWITCH, "") == "0"


def compiler() -> tuple[str, ...] | None:
    """The command that compiles C: `$CC`, or the first that is installed."""
    if named := shlex.split(os.environ.get("CC", ""), posix=os.name == "posix"):
        return tuple(named)
    found = next(filter(None, map(which, ("cc", "gcc", "clang"))), None)
    return (found,) if found else None


def build(folder: Path = HERE) -> str:
    """Build the library in a folder and remove those of other sources; why that was not possible, or "".

    The library appears in one piece, so that processes may build at once.
    """
    command = compiler()
    if command is None:
        return "no C compiler was found"
    target = library_path(folder)
    partial = target.with_suffix(f".{os.getpid()}.partial")
    sources = [str(HERE / name) for name in _SOURCES]
    try:
        done = subprocess.run(
            [*command, *_FLAGS, "-o", str(partial), *sources, "-lm"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
        if done.returncode:
            return f"{shlex.join(command)} failed: {done.stderr.strip()[-500:]}"
        partial.replace(target)
    except (OSError, subprocess.SubprocessError) as fault:
        return f"{shlex.join(command)} failed: {fault}"
    finally:
        partial.unlink(missing_ok=True)
    for other in folder.glob(f"core-*{_SUFFIX}"):
        if other != target:
            other.unlink(missing_ok=True)
    return ""


if __name__ == "__main__":
    why = build()
    print(why or f"built {library_path()}")
    sys.exit(bool(why))
