"""`python -m tests.hollow_card [ARGUMENTS OF PYTEST]`: make the environment, build the libraries, run the tests.

The environment is one of its own, with a CUDA build of PyTorch and without the vendor's packages. It is made
once, in `build/hollow-card`, and again when what it is made of changes.
"""

import hashlib
import subprocess
import sys
import venv
from pathlib import Path

from tests.hollow_card import CannotBuild, Card, run

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "hollow-card"
CONSTRAINTS = ROOT / ".ci" / "constraints.txt"
TORCH = "torch==2.14.1"  # the registry has it built for CUDA
_TORCH_NEEDS = ("typing_extensions", "sympy", "networkx", "jinja2", "fsspec", "filelock", "setuptools")
_STOWPLAN_NEEDS = ("numpy", "scipy", "msgspec", "rich")
_TESTS_NEED = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")


def environment() -> Path:
    """The interpreter of the environment; made if it is not there."""
    made_of = hashlib.sha256(b"".join((Path(__file__).read_bytes(), CONSTRAINTS.read_bytes()))).hexdigest()
    python, done = FOLDER / "bin" / "python", FOLDER / "made_of"
    if not done.exists() or done.read_text() != made_of:
        print(f"hollow card: an environment with {TORCH}, about two minutes", file=sys.stderr, flush=True)
        venv.create(FOLDER, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--no-compile"]
        subprocess.run([*pip, "--no-deps", TORCH], check=True)
        packages = (*_TORCH_NEEDS, *_STOWPLAN_NEEDS, *_TESTS_NEED)
        subprocess.run([*pip, "--constraint", str(CONSTRAINTS), *packages], check=True)
        subprocess.run([*pip, "--no-deps", "--no-build-isolation", "hatchling", "editables"], check=True)
        subprocess.run([*pip, "--no-deps", "-e", str(ROOT)], check=True)
        done.write_text(made_of)
    return python


def main(arguments: list[str]) -> int:
    """The exit code of pytest, or 2 with a sentence where nothing can be built."""
    try:
        python = environment()
        command = "from tests.hollow_card import built, installed_torch; print(built(installed_torch()))"
        told = subprocess.run(
            [python, "-c", command], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
        )
        tests = arguments or [str(Path(__file__).parent)]
        words = [python, "-m", "pytest", "-p", "no:cacheprovider", *tests]
        return run(words, Card(), Path(told.stdout.strip()))
    except (CannotBuild, subprocess.CalledProcessError) as fault:
        print(f"hollow card: {fault}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
