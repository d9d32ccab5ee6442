"""The library is built where there is a C compiler, and stowplan plans without it where there is none."""

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stowplan.cli import doctor
from stowplan.cli.main import main
from stowplan.plan.annealing import Annealer
from stowplan.plan.native import annealer, build
from stowplan.plan.native.annealer import annealer_of, loaded
from stowplan.plan.problem import problem_of
from tests.support.steps import random_step

NATIVE = Path(build.__file__).parent
LONG = os.environ.get("NATIVE") == "long"
"""With `NATIVE=long` the fuzzer runs for ten minutes."""


@pytest.fixture
def absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library was not built."""
    monkeypatch.setattr(annealer, "library_path", lambda: tmp_path / "nothing")
    for cached in (annealer._loaded, annealer._say_once):
        monkeypatch.setattr(annealer, cached.__name__, cached.__wrapped__)


needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


@needs_gcc
@pytest.mark.slow
def test_it_is_built_in_a_folder_in_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "gcc -Werror -Wall -Wextra -Wpedantic")
    old = tmp_path / f"core-of-another-source{build._SUFFIX}"
    old.touch()
    assert build.build(tmp_path) == ""
    assert list(tmp_path.iterdir()) == [build.library_path(tmp_path)]


@pytest.mark.parametrize("compiler", ["false", "there-is-no-such-compiler"])
def test_a_compiler_that_fails_is_a_reason(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler)
    assert build.build(tmp_path).startswith(f"{compiler} failed")
    assert not list(tmp_path.iterdir())


def test_without_a_compiler_nothing_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.build(tmp_path) == "no C compiler was found"


def test_its_name_follows_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.library_path(tmp_path).name
    shutil.copytree(NATIVE, tmp_path / "source")
    monkeypatch.setattr(build, "HERE", tmp_path / "source")
    assert build.library_path(tmp_path).name == before
    with (tmp_path / "source" / "core.h").open("a") as header:
        header.write("/* changed */\n")
    assert build.library_path(tmp_path).name != before


@pytest.mark.usefixtures("absent")
def test_without_the_library_python_searches_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    graph = random_step(3, layers=8)
    problem = problem_of(graph, [1.0] * len(graph.ops))
    assert loaded() == (None, "it was not built")
    with caplog.at_level(logging.INFO, "stowplan"):
        assert isinstance(annealer_of(problem, []), Annealer)
    assert "planning is slower without its library in C: it was not built" in caplog.text


def test_it_is_said_once(tmp_path: Path) -> None:
    """For two plans of one process, and not at all if the user asked for Python."""
    code = (
        "import sys; from pathlib import Path; from stowplan.plan.native import annealer\n"
        "from stowplan.plan.frontier import frontier_of\n"
        "from stowplan.plan.problem import problem_of\n"
        "from tests.support.steps import random_step\n"
        "annealer.library_path = lambda: Path(sys.argv[1], 'nothing')\n"
        "graph = random_step(3, layers=8)\n"
        "for _ in range(2): frontier_of(problem_of(graph, [1.0] * len(graph.ops)), 10)\n"
    )

    def said(switch: str) -> str:
        words, told = [sys.executable, "-c", code, str(tmp_path)], {**os.environ, build.SWITCH: switch}
        root = Path(__file__).parents[3]
        return subprocess.run(words, cwd=root, env=told, capture_output=True, text=True, check=True).stderr

    assert said("").count("planning is slower") == 1
    assert said("0") == ""


@pytest.mark.usefixtures("absent")
def test_a_library_that_cannot_be_loaded_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torn").write_bytes(b"no library")
    monkeypatch.setattr(annealer, "library_path", lambda: tmp_path / "torn")
    library, why_not = loaded()
    assert library is None
    assert why_not.startswith("it cannot be loaded")


def test_the_doctor_says_which_search_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, nothing in (("_devices", dict), ("_disk", lambda: "not asked")):
        monkeypatch.setattr(doctor, name, nothing)
    monkeypatch.setenv(build.SWITCH, "0")
    main(["doctor", "--json"])
    assert json.loads(capsys.readouterr().out)["usable"]["planning in C"] == f"{build.SWITCH}=0 is set"
    monkeypatch.setenv(build.SWITCH, "1")
    main(["doctor", "--json"])
    told = json.loads(capsys.readouterr().out)["usable"]["planning in C"]
    assert told is True or "python -m stowplan.plan.native.build" in told


@needs_gcc
@pytest.mark.slow
def test_no_call_leaves_its_bounds(tmp_path: Path) -> None:
    """Random problems, damaged ones, calls in any order and failing allocations, under sanitizers."""
    fuzzer = tmp_path / "fuzz"
    flags = ["-std=c99", "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    words = ["gcc", *flags, f"-I{NATIVE}", "-o", str(fuzzer), str(Path(__file__).with_name("fuzz.c")), "-lm"]
    made = subprocess.run(words, capture_output=True, text=True, check=False)
    if "cannot find -lasan" in made.stderr or "cannot find -lubsan" in made.stderr:
        pytest.skip("gcc has no sanitizers here")
    assert made.returncode == 0, made.stderr
    seeds = ("0", "600", "0") if LONG else ("0", "0", "1500")
    done = subprocess.run([str(fuzzer), *seeds], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"seed {done.stdout.split()[-1:]}: {done.stderr[-3000:]}"
