"""The README shows a real command with its real output."""

import json
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
ACTION = (ROOT / "examples" / "github_action.yml").read_text(encoding="utf-8")
COMMANDS = (
    *re.findall(r"^\$ stowplan (.*)$", README, re.MULTILINE),
    *re.findall(r"\bstowplan ((?:plan|compare) [^;\n]*)", ACTION),
)


@pytest.fixture
def example(dump: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The file that the README reads, in the current folder and where a clone has it."""
    monkeypatch.chdir(tmp_path)
    Path("examples/data").mkdir(parents=True)
    shutil.copy(dump("chainer"), "unet_step.txt")
    shutil.copy(dump("chainer"), "examples/data/unet_step.txt")
    return "unet_step.txt"


@pytest.mark.slow
def test_the_output_is_what_the_command_prints(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    block = re.search(r"```console\n\$ stowplan (inspect \S*unet_step.txt)\n([^`]*)\n```", README)
    assert block is not None
    assert main(block[1].split()) == 0
    assert example in block[1]
    assert capsys.readouterr().out.startswith(block[2])


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
from torch import nn


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, images, labels):
        return nn.functional.cross_entropy(self.network(images), labels)


model, images, labels = Classifier(), torch.randn(4, 8), torch.tensor([0, 1, 2, 0])
"""


@pytest.mark.torch
@pytest.mark.slow
def test_the_python_lines_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lines = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert lines is not None
    after = "assert all(parameter.grad is not None for parameter in model.parameters())"
    subprocess.run([sys.executable, "-c", f"{_BEFORE}\n{lines[1]}\n{after}"], check=True)


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
    line = re.search(r"^\$ pytest (examples/test_memory.py) ", README, re.MULTILINE)
    assert line is not None
    bare = [sys.executable, "-m", "pytest", "-p", "no:timeout", "-p", "no:xdist", "--collect-only", line[1]]
    run = subprocess.run(bare, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
