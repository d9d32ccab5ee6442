"""The catalogue: every error that is provoked, in three groups, as one text."""

import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

from tests.errors import commands
from tests.errors.provoking import Provoked, by_command, by_program, in_new_folder

GOLDEN = Path(__file__).parents[1] / "golden" / "errors.txt"
ROOT = Path(__file__).parents[2]

_HEADING = """\
What errors say: what is done, and the sentence that it ends in, after the exit code or the type of the error.
Written by `python -m tests.errors`; read what changes. PyTorch {torch}, Python {python}.
"""


def catalogue() -> str:
    """All groups, each under its name."""
    groups = {
        "Commands on files, without PyTorch": without_torch(),
        "Commands on steps": on_steps(),
        "fit and its neighbours": of_fit(),
    }
    parts = [_HEADING.format(**versions())]
    for name, errors in groups.items():
        parts += (f"\n## {name}\n", *(f"\n{error}" for error in errors))
    return "".join(parts)


def versions() -> dict[str, str]:
    """Those that the sentences of PyTorch and Python in the catalogue are of."""
    import torch

    numbers = str(torch.__version__).split(".")
    return {"torch": ".".join(numbers[:2]), "python": ".".join(map(str, sys.version_info[:2]))}


def without_torch() -> list[Provoked]:
    """What commands on files end in where PyTorch cannot be imported: in a process of its own."""
    code = (
        "import json, sys; sys.modules['torch'] = None\n"
        "from tests.errors.catalogue import on_files\n"
        "print(json.dumps([(error.done, error.said) for error in on_files()]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return [Provoked(*pair) for pair in json.loads(done.stdout)]


def on_files() -> list[Provoked]:
    """What commands on files end in, here."""
    with in_new_folder(commands.prepare) as folder:
        return list(by_command((*commands.ON_FILES, *commands.WITHOUT_TORCH), folder))


def on_steps() -> list[Provoked]:
    """What commands on steps end in."""
    with in_new_folder(commands.prepare) as folder:
        return list(by_command(commands.ON_STEPS, folder))


def of_fit() -> Iterable[Provoked]:
    """What lines of Python end in."""
    from tests.errors import programs

    logger = logging.getLogger("stowplan")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with in_new_folder(lambda _: None) as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return list(by_program(programs.LINES, programs.names(), folder))
    finally:
        logger.setLevel(level)
