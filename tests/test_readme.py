"""The README is short, shows a real command with its real output, and leads to answers."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stowplan.cli.main import VERBS, main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FILES = (ROOT / "docs" / "files.md").read_text(encoding="utf-8")
ACTION = (ROOT / "examples" / "github_action.yml").read_text(encoding="utf-8")
COMMANDS = (
    *(
        line
        for name in ("README.md", "docs/reference.md", "docs/tutorial.md")
        for line in re.findall(r"^\$ stowplan (.*)$", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
    ),
    *re.findall(r"\bstowplan ((?:plan|compare) [^;\n]*)", ACTION),
)


@pytest.fixture
def example(dump: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The file that docs/files.md reads, in the current folder and where a clone has it."""
    monkeypatch.chdir(tmp_path)
    Path("examples/data").mkdir(parents=True)
    shutil.copy(dump("chainer"), "unet_step.txt")
    shutil.copy(dump("chainer"), "examples/data/unet_step.txt")
    return "unet_step.txt"


@pytest.mark.slow
def test_the_output_is_what_the_command_prints(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    block = re.search(r"```console\n\$ stowplan (inspect \S*unet_step.txt)\n([^`]*)\n```", FILES)
    assert block is not None
    assert main(block[1].split()) == 0
    assert example in block[1]
    assert capsys.readouterr().out.startswith(block[2])


def test_the_readme_is_short() -> None:
    lines = README.splitlines()
    assert len(lines) <= 100
    assert len(README.split()) <= 800
    matrix = re.search(r"^\| technique \|.*\n\|[-|]*\n((?:\|.*\n)*)", README, re.MULTILINE)
    assert matrix is not None
    cells = {cell.strip() for row in matrix[1].splitlines() for cell in row.split("|")[2:-1]}
    assert len(matrix[1].splitlines()) <= 8
    assert cells == {"measured", "simulated", "not tried"}


QUESTIONS = re.findall(r"^- \[(.*\?)\]\((\S+)#(\S+)\)$", README, re.MULTILINE)
SCREEN = 350  # words


@pytest.mark.parametrize("question", QUESTIONS, ids=[anchor for *_, anchor in QUESTIONS])
def test_a_question_is_answered_on_the_screen_behind_its_link(question: tuple[str, str, str]) -> None:
    words, page, _ = question
    text = (ROOT / page).read_text(encoding="utf-8")
    answer = re.search(rf"^## {re.escape(words)}\n\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert answer is not None
    assert re.match(r"\*\*", answer[1]), "the answer comes first"
    assert len(answer[1].split()) <= SCREEN


def test_the_contributor_finds_the_ten_questions_with_their_paths() -> None:
    """CONTRIBUTING lists what a newcomer asks, and where the README leads them."""
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Ten questions")[2]
    listed = re.findall(r"^\| (.*) \| \[.*\]\((\S+)#(\S+)\) \|$", section.partition("\n## ")[0], re.MULTILINE)
    assert listed == QUESTIONS
    assert len(QUESTIONS) == 10


@pytest.mark.torch
@pytest.mark.slow
def test_the_page_of_watch_is_what_the_command_prints(tmp_path: Path) -> None:
    """But for the memory of the process, which Python and the libraries have a part in."""
    block = re.search(r"^\$ stowplan (watch \S+)\n([^`]*)\n```", README, re.MULTILINE)
    assert block is not None
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    command = [sys.executable, "-m", "stowplan", *block[1].split()]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    printed, shown = (re.sub(r"(?m)^  process .*$", "  process", text) for text in (done.stderr, block[2]))
    assert printed.startswith(shown)


@pytest.mark.torch
@pytest.mark.slow
def test_a_script_runs_within_the_budget_as_shown(tmp_path: Path) -> None:
    """But for the seconds of planning, and the time of the plan, which differ from machine to machine."""
    block = re.search(r"^\$ stowplan (run \S+ \S+ \S+)\n([^`]*)\n```", README, re.MULTILINE)
    assert block is not None
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    command = [sys.executable, "-m", "stowplan", *block[1].split()]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert _without_figures(block[2]) in _without_figures(done.stderr)
    assert done.stdout.count("loss") == 4


@pytest.mark.torch
@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_is_one(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With a word too many it is refused for that word alone."""
    words = shlex.split(line, comments=True)
    assert words[0] in VERBS
    assert main([words[0], "--no-such-option", *words[1:]]) == 2
    assert "unrecognized arguments: --no-such-option" in capsys.readouterr().err


_BEFORE = """
import torch
from examples.train import LanguageModel

torch.manual_seed(0)
model = LanguageModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.randint(0, 8192, (8, 129))
"""
_LOOP = """
for _ in range(2):
    loss = model(tokens)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item()}")
"""


@pytest.mark.torch
@pytest.mark.slow
def test_three_lines_before_the_loop_leave_the_loss_as_it_was(tmp_path: Path) -> None:
    lines = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert lines is not None
    assert len(lines[1].split("\n")) == 5, "three lines, a blank one, and the end"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    eager, planned = (
        subprocess.check_output(
            [sys.executable, "-c", _BEFORE + added + _LOOP], cwd=ROOT, env=environment, text=True
        )
        for added in ("", lines[1])
    )
    assert planned.endswith(eager)
    assert re.fullmatch(r"<Plan for 110 MiB: peak 110 MiB, .*, bitwise>\n", planned.removesuffix(eager))


@pytest.mark.slow
@pytest.mark.torch
def test_the_notebook_says_what_its_lines_print(tmp_path: Path) -> None:
    """Its lines run without IPython, and print what the notebook shows, but for figures."""
    cells = json.loads((ROOT / "examples" / "first_plan.ipynb").read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] for cell in code)
    plain = [
        cell for cell in code if "IPython" not in "".join(cell["source"]) and cell["source"][0][0] != "!"
    ]
    program = "\n".join("".join(cell["source"]) for cell in plain)
    printed = subprocess.check_output([sys.executable, "-c", program], cwd=tmp_path, text=True)
    shown = "".join(line for cell in plain for made in cell["outputs"] for line in made.get("text", ()))
    assert "same gradients: True" in printed
    assert _without_figures(printed) == _without_figures(shown)


def _without_figures(text: str) -> str:
    return re.sub(r"\d[\d.,]*", "#", text)


@pytest.mark.torch
@pytest.mark.slow
def test_the_example_of_a_memory_test_needs_no_other_plugin() -> None:
    """Those who copy the line have pytest and stowplan; the project's own tests have more."""
    tutorial = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    line = re.search(r"^\$ pytest (examples/test_memory.py) ", tutorial, re.MULTILINE)
    assert line is not None
    bare = [sys.executable, "-m", "pytest", "-p", "no:timeout", "-p", "no:xdist", "--collect-only", line[1]]
    run = subprocess.run(bare, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
