"""Commands and `fit` where people run them: terminals wide and narrow, notebooks, pipes, closed streams.

`TERMINALS=whole` runs every command in each place; otherwise a few stand for all. Progress must be seen while
something takes long, and be gone at the end.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.terminal import Run, Screen, Written, longest_pause, run_in_terminal
from tests.support.terminal_session import COMMANDS, FIT, TRAIN
from tests.support.timing import timed

pytestmark = [pytest.mark.torch, pytest.mark.slow]

ROOT = Path(__file__).parents[1]
WHOLE = os.environ.get("TERMINALS") == "whole"
STAGES = (
    r"\b(?:starting|loading|reading the file|analysing the graph|capturing ops|building the graph|probing ops"
    r"|searching|comparing with an eager forward|comparing steps|measuring memory|timing steps),? \d"
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a session runs: in a terminal of some columns, or in `sh` with these redirections."""

    columns: int = 0
    redirected: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    flags: Sequence[str] = ()
    sample: Sequence[str] = ()  # what stands for all commands; nothing runs if it is empty


PLACES = {
    "120 columns": Place(120),
    "80 columns": Place(80),
    "40 columns": Place(40, sample=(FIT, "inspect")),
    "TERM=dumb": Place(80, environment={"TERM": "dumb"}, sample=("long-search",)),
    "NO_COLOR": Place(80, environment={"NO_COLOR": "1"}),
    "piped": Place(redirected="</dev/null 2>&1 | cat", sample=("plan",)),
    "stdin closed": Place(redirected="<&-"),
    "all streams closed": Place(redirected="<&- >&- 2>&-", sample=(FIT, "inspect")),
    "log file": Place(redirected=">log.txt 2>&1", flags=("--log",), sample=(FIT,)),
    "notebook": Place(redirected="</dev/null", flags=("--notebook",), sample=(FIT,)),
}


def session(names: Sequence[str], place: Place, folder: Path) -> tuple[Run, dict[str, str]]:
    """Run commands by name; what they wrote, and what ended otherwise than it should."""
    (folder / "train.py").write_text(TRAIN)
    argv = [sys.executable, "-m", "tests.support.terminal_session", "found.json", *place.flags, *names]
    environment = {**os.environ, "TERM": "xterm", "XDG_CACHE_HOME": str(folder / "cache")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment.pop("NO_COLOR", None)
    environment |= place.environment
    if place.columns:
        run = run_in_terminal(argv, columns=place.columns, folder=folder, environment=environment)
    else:
        shell = ["sh", "-c", f'"$@" {place.redirected}', "sh", *argv]
        done = subprocess.run(shell, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        run = Run(done.returncode, [Written(0.0, done.stdout + done.stderr)])
    assert run.code == 0, run.text
    found: dict[str, str] = json.loads((folder / "found.json").read_text())
    return run, found


@pytest.mark.parametrize("name", [name for name, place in PLACES.items() if WHOLE or place.sample])
def test_commands_and_fit_work_and_leave_no_progress(name: str, tmp_path: Path) -> None:
    place = PLACES[name]
    run, found = session((FIT, *COMMANDS) if WHOLE else place.sample, place, tmp_path)
    assert found == {}
    if place.columns:
        (tmp_path.parent / f"{name}.txt").write_text("\n".join(Screen.after(run, place.columns).shown()))
        assert re.search(STAGES, run.text)
        assert not [line for line in Screen.after(run, place.columns).shown() if re.search(STAGES, line)]
    elif name == "log file":
        assert "planning Slow: capturing ops" in (tmp_path / "log.txt").read_text()
    else:
        assert not re.search(STAGES, run.text)
    if place.columns == 0 or "dumb" in name:
        assert "\x1b" not in run.text
    if name == "NO_COLOR":
        assert not re.search(r"\x1b\[[0-9;]*\b[349][0-7]\b", run.text)


@timed
@pytest.mark.parametrize(
    ("name", "stage", "columns"),
    [
        ("long-capture", "inspecting train:deep_step: capturing ops [0-9,]+", 120),
        ("long-search", r"searching \d+%, .*best 1\.\d+ x baseline", 80),
    ],
)
def test_what_takes_long_is_shown_every_second(name: str, stage: str, columns: int, tmp_path: Path) -> None:
    run, found = session((name,), Place(columns), tmp_path)
    assert found == {}
    seconds = run.seconds_of(STAGES)
    assert run.seconds_of(stage)
    assert seconds[-1] - seconds[0] > 1
    assert longest_pause(seconds) <= 1
    lines = [line for part in run.written for line in part.text.split("\r") if re.search(STAGES, line)]
    assert max(map(len, lines)) < columns


def test_a_reader_that_stops_is_no_fault() -> None:
    command = f"{shlex.quote(sys.executable)} -m stowplan {COMMANDS['inspect']} | true"
    run = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
