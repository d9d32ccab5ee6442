"""A hollow card: PyTorch's CUDA build on a machine without a card.

PyTorch's own host code, kernel selection, streams, generators and caching allocator run on small libraries of
`stubs/` in place of the vendor's. README.md says what is truth in it and what is not.

    libraries = built(torch_folder)     # once for each PyTorch
    run([sys.executable, "train.py"], Card(capability="8.6", memory="24GiB"), libraries)
"""

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from stowplan.units import parse_bytes
from tests.hollow_card import libraries
from tests.hollow_card.libraries import CannotBuild

__all__ = ["CannotBuild", "Card", "built", "installed_torch", "run"]

LIBRARIES = "HOLLOW_LIBRARIES"  # the folder that `boot/sitecustomize.py` loads them from
VALUES = "HOLLOW_VALUES"
_BOOT = Path(__file__).parent / "boot"
_REAL = Path("/dev/nvidiactl")  # there if a driver of the vendor's runs


@dataclass(frozen=True, slots=True)
class Card:
    """A card to run on. CUDA itself takes `context` of its memory; 0 multiprocessors: by capability.

    With `untouched`, copies, fills and ops on tensors of at least so many bytes are left out: the card may
    then be larger than this machine's memory, and such values are garbage. Without `values`, ops compute
    nothing.
    """

    capability: str = "8.0"
    memory: int | str = "79.15GiB"
    context: int | str = 0
    multiprocessors: int = 0
    cards: int = 1
    untouched: int | str = 0
    values: bool = True

    def settings(self) -> dict[str, str]:
        """As environment variables, which the libraries read."""
        sizes = {"MEMORY": self.memory, "CONTEXT": self.context, "UNTOUCHED": self.untouched}
        found = {
            f"HOLLOW_{name}": str(parse_bytes(size, name.lower())) for name, size in sizes.items() if size
        }
        if self.multiprocessors:
            found["HOLLOW_MULTIPROCESSORS"] = str(self.multiprocessors)
        found |= {"HOLLOW_CAPABILITY": self.capability, "HOLLOW_CARDS": str(self.cards)}
        return found | ({VALUES: "1"} if self.values else {})


def installed_torch() -> Path:
    """The folder of the PyTorch that this interpreter would import."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        raise CannotBuild("PyTorch is not installed here")
    return Path(found.origin).parent


def built(torch: Path) -> Path:
    """The folder of the libraries for a PyTorch; compiled if no process has done it before."""
    folder = Path(tempfile.gettempdir()) / f"stowplan-hollow-{os.getuid()}-{libraries.fingerprint(torch)}"
    folder.mkdir(mode=0o700, exist_ok=True)
    done = folder / "done"
    with (folder / "building").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be compiling: then they are there after it
        if not done.exists():
            print("hollow card: compiling its libraries, under a minute", file=sys.stderr, flush=True)
            libraries.build(torch, folder)
            done.touch()
    return folder


def run(
    command: Sequence[str | Path],
    card: Card,
    folder: Path,
    environment: Mapping[str, str] = os.environ,
    *,
    beside_a_real_card: bool = False,
) -> int:
    """Run a command whose PyTorch sees this card; returns its exit code."""
    if _REAL.exists() and not beside_a_real_card:
        raise CannotBuild("this machine has a card: the hollow one stays away from it unless asked")
    return subprocess.run([*map(str, command)], env=settings_for(card, folder, environment)).returncode


def settings_for(card: Card, folder: Path, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a process whose PyTorch sees this card."""
    paths = [str(_BOOT), *filter(None, [environment.get("PYTHONPATH", "")])]
    own = {name: value for name, value in environment.items() if not name.startswith("HOLLOW_")}
    return {
        **own,
        **card.settings(),
        LIBRARIES: str(folder),
        "PYTHONPATH": os.pathsep.join(paths),
        "TORCH_CUDNN_V8_API_DISABLED": "1",  # of cuDNN, only the older interface is written
    }
