"""Provoking errors: what is done, as a line that a reader could type, and what it ends in."""

import linecache
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from stowplan.errors import StowplanError

INTERNAL = "INTERNAL"
"""What an error begins with that is no refusal: an exit code of 3, or an exception that is not stowplan's."""

_TRACES = (  # what differs from run to run
    (re.compile(r"0x[0-9a-f]{6,}"), "0x..."),
    (re.compile(r"\b\d+\.\d+(\.\d+)?\S* s\b"), "N s"),
    (re.compile(re.escape(sys.executable)), "PYTHON"),
    (re.compile(re.escape(f"{Path(__file__).parents[2]}{os.sep}")), ""),
    (re.compile(r"/\S*/(site-packages|lib/python3\.\d+)/"), "LIBRARY/"),
)


@dataclass(frozen=True, slots=True)
class Provoked:
    """One error: what was done, and the sentence."""

    done: str
    said: str

    def __str__(self) -> str:
        return f"{self.done}\n    {self.said}\n"


@contextmanager
def in_new_folder(prepare: Callable[[Path], None]) -> Iterator[Path]:
    """Within, the working directory is a new folder with files that `prepare` writes."""
    before, path = Path.cwd(), list(sys.path)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        prepare(folder)
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        try:
            yield folder
        finally:
            os.chdir(before)
            sys.path[:] = path


def by_command(lines: Sequence[str], folder: Path) -> Iterator[Provoked]:
    """What commands end in. A command that is done has provoked nothing."""
    from stowplan.cli.main import main

    for line in lines:
        out, err = StringIO(), StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = main([word.replace("+", " ") for word in line.split()])
        said = err.getvalue().strip() or out.getvalue().strip()
        said = (
            f"{code}: {said.removeprefix('stowplan: ')}" if code in (1, 2) else f"{INTERNAL} {code}: {said}"
        )
        yield Provoked(f"$ stowplan {line}", _steady(said, folder))


def by_program(lines: Sequence[str], names: Mapping[str, object], folder: Path) -> Iterator[Provoked]:
    """What lines of Python end in, each with the same names and its own variables."""
    program = folder / "program.py"  # a file: refusals look at the user's line
    for line in lines:
        program.write_text(line)
        linecache.checkcache(str(program))
        found = {"__name__": "program", **names}
        try:
            exec(compile(line, str(program), "exec"), found)  # noqa: S102  # a catalogue of lines of Python
            said = f"{INTERNAL}: nothing was raised"
        except StowplanError as error:
            said = "\n".join((f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())))
        except BaseException as error:
            said = f"{INTERNAL}: {type(error).__name__}: {error}"
        yield Provoked(f">>> {line}", _steady(said, folder))


def _steady(said: str, folder: Path) -> str:
    """A sentence without what differs from run to run, on one or more lines of their own."""
    said = said.replace(f"{folder}{os.sep}", "").replace(str(folder), "FOLDER")
    for trace, name in _TRACES:
        said = trace.sub(name, said)
    return "\n    ".join(said.splitlines())
