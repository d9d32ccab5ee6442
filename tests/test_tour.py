"""The tour is short, is about the step that stowplan captures, and its questions have the answers it gives.

`tests/test_docs.py` runs its code.
"""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import stowplan
from stowplan.capture import capture
from stowplan.ir import Phase

SOURCE = Path(stowplan.__file__).parent
TOUR = (Path(__file__).parents[1] / "docs/tour.md").read_text(encoding="utf-8")
QUESTIONS = {int(number): line for number, line in re.findall(r"^(\d+)\. `(.+)`$", TOUR, re.MULTILINE)}
ANSWERS = {
    int(number): file for number, file in re.findall(r"(\d+) `([\w/]+\.py)`", TOUR.partition("Answers:")[2])
}


def test_it_has_at_most_300_lines() -> None:
    assert len(TOUR.splitlines()) <= 300


def test_it_asks_ten_questions_and_answers_them() -> None:
    assert list(QUESTIONS) == list(ANSWERS) == list(range(1, 11))
    assert len(set(ANSWERS.values())) == 10


@pytest.mark.parametrize("number", QUESTIONS)
def test_the_line_is_in_the_file_of_the_answer_and_in_no_other(number: int) -> None:
    having = [
        str(path.relative_to(SOURCE))
        for path in sorted(SOURCE.rglob("*.py"))
        if QUESTIONS[number] in {line.strip() for line in path.read_text(encoding="utf-8").splitlines()}
    ]
    assert having == [ANSWERS[number]]


def test_each_section_names_modules_and_each_answer_is_one_of_them() -> None:
    titles = re.findall(r"^## \d\. .+: (`.+`)$", TOUR, re.MULTILINE)
    assert len(titles) == 8
    named = {file for title in titles for file in re.findall(r"`([\w/]+\.py)`", title)}
    assert not [file for file in named if not (SOURCE / file).exists()]
    assert set(ANSWERS.values()) <= named


@pytest.mark.torch
def test_stowplan_captures_the_same_ten_ops() -> None:
    layers = [nn.Conv2d(3, 16, 3, bias=False), nn.GELU(), nn.Conv2d(16, 16, 3, bias=False), nn.GELU()]
    graph = capture(
        nn.Sequential(*layers, nn.Conv2d(16, 8, 3, bias=False)), (torch.randn(4, 3, 64, 64),)
    ).graph
    assert len(graph.ops) == 10
    assert [op.phase is Phase.BACKWARD for op in graph.ops] == [False] * 5 + [True] * 5
