"""A script runs as the interpreter alone would run it; nothing here imports torch."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from stowplan.errors import BadUse
from stowplan.observe.child import is_launcher
from stowplan.observe.launch import BOOT, VARIABLE, LaunchSettings, command_line, run_observed

TELLING = """
import inspect, json, os, pickle, sys, __main__

class Inside:
    pass

print(json.dumps({
    "argv": sys.argv, "path": sys.path, "name": __name__, "file": __main__.__file__,
    "spec": __spec__ and __spec__.origin,
    "source": inspect.getsource(Inside), "pickled": type(pickle.loads(pickle.dumps(Inside()))).__name__,
    "environment": {n: v for n, v in os.environ.items() if n.startswith(("PYTHON", "STOWPLAN"))},
    "flags": str(sys.flags), "standard input": sys.stdin.read(),
}))
"""

RUN = """
import os, sys
from stowplan.observe.launch import *
settings = LaunchSettings(sys.argv[1], path=os.environ.get("PYTHONPATH"))
sys.exit(end_as(run_observed(command_line(sys.argv[2:]), settings)))
"""


def both(
    folder: Path, words: Sequence[str], environment: dict[str, str] | None = None, text: str = ""
) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    """What the interpreter alone does with these words, and what the launcher does."""
    around = {**os.environ, **(environment or {})}
    (folder / "records").mkdir(exist_ok=True)
    found = []
    for begin in ([], ["-c", RUN, str(folder / "records")]):
        command = [sys.executable, *begin, *words]
        found.append(
            subprocess.run(
                command, cwd=folder, env=around, input=text, capture_output=True, text=True, check=False
            )
        )
    return found[0], found[1]


@pytest.mark.parametrize(
    ("words", "path"),
    [
        (["tell.py", "--lr", "3", "--", "-m"], "elsewhere"),
        (["-m", "package.tell", "x"], None),
        (["-", "a"], "elsewhere"),
        (["folder"], None),
    ],
)
def test_a_script_sees_what_it_would_see(tmp_path: Path, words: list[str], path: str | None) -> None:
    for name in ("tell.py", "package/tell.py", "folder/__main__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(TELLING if words[0] != "-" else "")
    text = TELLING.replace("inspect.getsource(Inside)", "''").replace("__main__.__file__", "''")
    alone, observed = both(
        tmp_path, words, {} if path is None else {"PYTHONPATH": path}, text if words[0] == "-" else "typed"
    )
    assert alone.returncode == 0, alone.stderr
    assert json.loads(observed.stdout) == json.loads(alone.stdout)
    assert (observed.stderr, observed.returncode) == (alone.stderr, alone.returncode)


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(7)",
        "import sys; sys.exit('bye')",
        "def f(): raise ValueError('no')\nf()",
        "import os; os._exit(3)",
        "import atexit; atexit.register(print, 'late'); raise KeyError('x')",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "raise KeyboardInterrupt",
        "import warnings; warnings.warn('beware')",
        "syntax error",
    ],
)
def test_it_ends_as_it_would_end(tmp_path: Path, code: str) -> None:
    (tmp_path / "ends.py").write_text(code)
    alone, observed = both(tmp_path, ["ends.py"])
    assert (observed.stdout, observed.stderr) == (alone.stdout, alone.stderr)
    assert observed.returncode == alone.returncode


def test_another_sitecustomize_is_run_once(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text("print('customised')")
    (tmp_path / "run.py").write_text("import sitecustomize; print(sitecustomize.__file__)")
    alone, observed = both(tmp_path, ["run.py"], {"PYTHONPATH": str(tmp_path / "site")})
    assert alone.stdout.splitlines()[0] == "customised"
    assert observed.stdout == "customised\n" + alone.stdout  # the launcher has one, too


def test_what_the_script_starts_is_not_observed(tmp_path: Path) -> None:
    (tmp_path / "starts.py").write_text(
        "import multiprocessing, os, subprocess, sys\n"
        f"def told(): print({BOOT!r} in sys.path, {VARIABLE!r} in os.environ, flush=True)\n"
        "if __name__ == '__main__':\n"
        "    told()\n"
        "    worker = multiprocessing.get_context('spawn').Process(target=told)\n"
        "    worker.start(); worker.join()\n"
        "    subprocess.run([sys.executable, '-c', 'from starts import told; told()'])\n"
    )
    _, observed = both(tmp_path, ["starts.py"])
    assert observed.stdout.splitlines() == ["False False"] * 3, observed.stderr


@pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="signals are not told apart here")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_launcher_reaches_the_script_once(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "waits.py").write_text(
        "import signal, time\n"
        f"signal.signal({int(number)}, lambda *_: print('caught', flush=True))\n"
        "print('ready', flush=True)\n"
        "time.sleep(0.3); time.sleep(0.1)\n"
    )
    command = [sys.executable, "-c", RUN, str(tmp_path), "waits.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        time.sleep(0.01)
        assert process.stdout.read() == "caught\n"
        assert process.wait() == 0


def test_what_cannot_be_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tool").write_text("#!/bin/sh\n")
    (tmp_path / "tool").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for words, told in (([], "name a script"), (["-m"], "needs a module"), (["no.py"], "there is no script")):
        with pytest.raises(BadUse, match=told):
            command_line(words)
    Path("bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path / "bin")
    with pytest.raises(BadUse, match="no Python program"):
        command_line(["tool"])
    (tmp_path / "tool").write_text("#!/usr/bin/env python3\n")
    assert command_line(["tool", "x"])[-2:] == [str(tmp_path / "tool"), "x"]


def test_launchers_of_workers_are_known() -> None:
    assert is_launcher(["python", "-m", "torch.distributed.run", "train.py"])
    assert is_launcher(["python", "-u", "/usr/bin/torchrun", "--nproc-per-node", "2", "train.py"])
    assert is_launcher(["python", "/usr/bin/accelerate", "launch", "train.py"])
    assert not is_launcher(["python", "train.py", "-m", "torchrun"])
    assert not is_launcher(["python", "-c", "pass"])


def test_a_killed_script_leaves_its_records(tmp_path: Path) -> None:
    settings = LaunchSettings(str(tmp_path))
    command = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    assert run_observed(command, settings) == -signal.SIGKILL
