"""Tensors and ops of a captured step are shown by module and line, those of repeated blocks together."""

import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from stowplan.cli.main import main

_STEP = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(16, 64)
        self.narrow = nn.Linear(64, 16)

    def forward(self, x):
        return x + self.narrow(torch.tanh(self.wide(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def step():
    torch.manual_seed(0)
    return Net(), (torch.randn(128, 16),)
"""
_LINE = "names_step.py:13"  # of the block's own forward

pytestmark = pytest.mark.torch


@pytest.fixture
def target(step_file: Callable[[str, str], str]) -> str:
    return step_file("names_step", _STEP)


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """What a command prints, with blanks and line ends as single blanks."""
    assert main(list(words)) == code
    captured = capsys.readouterr()
    return " ".join((captured.err if code else captured.out).split())


@pytest.mark.slow
def test_inspect_names_modules_and_lines(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "inspect", target, "--no-probe")
    assert f"128 KiB 4 blocks.0..3 tanh, float32 128x64, {_LINE}" in text
    assert "16.0 KiB 4 blocks.0..3.wide.weight parameter, float32 64x16" in text
    assert "(backward of " in text


@pytest.mark.slow
def test_a_refusal_names_modules_and_lines(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "plan", target, "--budget", "80KiB", "--allow", "recompute", code=1)
    place, _, binding = text.partition("it binds through ")
    assert "of blocks." in place
    assert "/names_step.py:13)" in place
    assert "blocks.0..3.wide.weight parameter (4 tensors, 16.0 KiB)" in binding


@pytest.mark.slow
def test_plans_explain_and_compare_by_module(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    from stowplan import load_plan
    from stowplan.report.page import subject_of
    from stowplan.report.page.columns import tensors_columns
    from stowplan.report.plan import show_plan

    said(capsys, "plan", target, "--budget", "1MiB", "--allow", "recompute", "-o", "roomy.json")
    text = said(capsys, "plan", target, "--budget", "220KiB", "--allow", "recompute", "-o", "tight.json")
    recomputed = text.partition("largest recomputed tensors")[2]  # which ones depends on the machine
    assert re.search(rf"float32 128x(16|64), {re.escape(_LINE)}", recomputed)

    narrow = StringIO()
    show_plan(load_plan("tight.json"), Console(width=80, file=narrow), title="tight")
    assert all(len(line) <= 80 for line in narrow.getvalue().splitlines())
    assert _LINE in " ".join(narrow.getvalue().split())

    by_module = said(capsys, "explain", "tight.json", "blocks.2.wide")
    assert f"made by addmm_4 (blocks.2.wide, {_LINE})" in by_module
    assert f"read by tanh_2 (blocks.2, {_LINE})" in by_module
    assert said(capsys, "explain", "tight.json", "addmm_4") == by_module

    several = said(capsys, "explain", "tight.json", "blocks.2", code=2)
    assert "'blocks.2' is 4 tensors" in several
    assert f"tanh_2 (blocks.2, tanh, {_LINE})" in several
    near = said(capsys, "explain", "tight.json", "blocks.2.wode", code=2)
    assert "it has blocks.2.wide" in near
    assert "tanh_3" in said(capsys, "explain", "tight.json", "tanh_33", code=2)

    changed = said(capsys, "compare", "roomy.json", "tight.json").partition("other decisions")[2]
    assert "keep recompute" in changed
    assert "keep keep" not in changed
    assert "blocks." in changed

    modules = tensors_columns(subject_of(load_plan("tight.json")))["module"]
    assert isinstance(modules, dict)
    assert {"", "blocks.2", "blocks.2.wide"} <= set(modules["texts"])
    assert main(["report", "tight.json", "-o", "tight.csv"]) == 0
    row = next(line for line in Path("tight.csv").read_text().splitlines() if line.startswith('"tanh_2"'))
    *_, module, line = row.split(",")
    assert module == '"blocks.2"'
    assert line.endswith('/names_step.py:13"')
