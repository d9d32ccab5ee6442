"""The README shows a real command with its real output."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stowplan import api
from stowplan.cli.main import main

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def example(seeds: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The file that the README speaks of, in the current folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(seeds("000"), "unet_step.txt")
    return "unet_step.txt"


def test_the_output_is_what_the_command_prints(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    block = re.search(r"```console\n\$ stowplan (.*)\n([^`]*)\n```", README)
    assert block is not None
    assert main(block[1].split()) == 0
    assert example in block[1]
    assert capsys.readouterr().out.startswith(block[2])


def test_the_python_lines_run(example: str) -> None:
    inspection = api.inspect(example, saved="retain")
    lines = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert lines is not None
    done = subprocess.run([sys.executable, "-c", lines[1]], capture_output=True, text=True, check=True)
    assert done.stdout == f"{inspection.facts.peak.bytes} {inspection.facts.lower_bound_bytes}\n"
