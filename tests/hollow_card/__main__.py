"""`python -m tests.hollow_card [ARGUMENTS OF PYTEST]`: make the environment and the libraries, run the tests.

The environment is one of its own, with a CUDA build of PyTorch and without the vendor's packages. It is made
once, in `build/hollow-card`, and again when what it is made of changes. Without arguments, all tests run on
one card, and a few of them on others and with other settings of PyTorch's allocator.
"""

import hashlib
import os
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.hollow_card import CannotBuild, Card, run

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER = ROOT / "build" / "hollow-card"
CONSTRAINTS = ROOT / ".ci" / "constraints.txt"
TORCH = "torch==2.14.1"  # the registry has it built for CUDA
_TORCH_NEEDS = ("typing_extensions", "sympy", "networkx", "jinja2", "fsspec", "filelock", "setuptools")
_STOWPLAN_NEEDS = ("numpy", "scipy", "msgspec", "rich")
_TESTS_NEED = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "transformers")
_BUILD_NEEDS = ("hatchling", "editables")
_ON_OTHERS = [str(HERE / name) for name in ("test_projection.py", "test_card.py")]
_SETTINGS = "PYTORCH_ALLOC_CONF"


def environment() -> Path:
    """The interpreter of the environment; made if it is not there."""
    packages = (*_TORCH_NEEDS, *_STOWPLAN_NEEDS, *_TESTS_NEED, *_BUILD_NEEDS)
    made_of = hashlib.sha256(repr((TORCH, packages, CONSTRAINTS.read_text())).encode()).hexdigest()
    python, done = FOLDER / "bin" / "python", FOLDER / "made_of"
    if not done.exists() or done.read_text() != made_of:
        print(f"hollow card: an environment with {TORCH}, about two minutes", file=sys.stderr, flush=True)
        venv.create(FOLDER, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--no-compile"]
        subprocess.run([*pip, "--no-deps", TORCH], check=True)
        subprocess.run([*pip, "--constraint", str(CONSTRAINTS), *packages], check=True)
        subprocess.run([*pip, "--no-deps", "--no-build-isolation", "-e", str(ROOT)], check=True)
        done.write_text(made_of)
    return python


def libraries_for(python: Path) -> Path:
    """The folder of the libraries for the PyTorch of an interpreter."""
    command = "from tests.hollow_card import built, installed_torch; print(built(installed_torch()))"
    told = subprocess.run(
        [str(python), "-c", command], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    return Path(told.stdout.strip())


def runs(arguments: Sequence[str]) -> Iterator[tuple[Card, str, Sequence[str]]]:
    """Cards, settings of PyTorch's allocator, and what pytest is given."""
    if arguments:
        yield Card(), "", arguments
        return
    yield Card(), "", [str(HERE)]
    for capability in ("7.5", "8.6", "9.0", "12.0"):
        yield Card(capability=capability), "", _ON_OTHERS
    for settings in ("expandable_segments:True", "max_split_size_mb:20", "roundup_power2_divisions:4"):
        yield Card(), settings, _ON_OTHERS


def main(arguments: list[str]) -> int:
    """The first exit code of pytest that is not 0, or 2 with a sentence where nothing can be built."""
    try:
        python = environment()
        libraries = libraries_for(python)
        for card, settings, given in runs(arguments):
            print(f"== capability {card.capability} {settings}", flush=True)
            around = {**os.environ, **({_SETTINGS: settings} if settings else {})}
            words = [str(python), "-m", "pytest", "-p", "no:cacheprovider", *given]
            if code := run(words, card, libraries, around):
                return code
    except (CannotBuild, subprocess.CalledProcessError) as fault:
        print(f"hollow card: {fault}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
