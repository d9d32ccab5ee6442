"""Whoever waits at a terminal is shown how far it is and how long it may take; elsewhere it is logged."""

import io
import logging
import os
import pty
import re
import sys
from select import select
from time import sleep
from unicodedata import east_asian_width

import pytest

from stowplan.plan.progress import Waiting, showing_progress
from stowplan.watch import PlanningPhase, Searching, tell, tell_phase
from tests.support.timing import timed


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


class Screen:
    """A real terminal that nobody sits at."""

    def __init__(self) -> None:
        self._inner, outer = pty.openpty()
        self.stream = os.fdopen(outer, "w", encoding="utf-8")

    def shown(self) -> list[str]:
        """All lines that were shown, one over the other."""
        written = select([self._inner], [], [], 0)[0]
        text = os.read(self._inner, 1 << 16).decode() if written else ""
        self.stream.close()
        os.close(self._inner)
        return [line.strip() for line in text.split("\r")]


def search(share: float) -> Searching:
    return Searching(share, 10.0, points=((100, 4.0), (200, 1.0)), bounds=((180, 0.5), (120, 9.0)))


@timed
def test_a_terminal_is_told_the_best_plan_its_gap_and_the_time_left() -> None:
    screen = Screen()
    with showing_progress("planning", allowed_bytes=150, stream=screen.stream, silent=0.0):
        tell(lambda: search(0.5))
        sleep(0.4)
    lines = screen.shown()
    pattern = r"planning: searching 50% ━━━━━─────, about \d+ s left, best 1\.400 x baseline, gap 33\.3%"
    assert [line for line in lines if re.fullmatch(pattern, line)]
    assert lines[-1] == ""


@timed
def test_a_budget_that_nothing_fits_yet_is_said_to_be_one() -> None:
    screen = Screen()
    with showing_progress("planning", allowed_bytes=50, stream=screen.stream, silent=0.0):
        tell(lambda: search(0.01))
        sleep(0.4)
    assert "planning: searching 1%, 0 s, nothing fits yet" in screen.shown()


@timed
def test_ops_that_are_tried_are_counted() -> None:
    screen = Screen()
    with showing_progress("checking", stream=screen.stream, silent=0.0):
        tell_phase("probing ops", 30, 120)
        sleep(0.4)
    pattern = r"checking: probing ops 30 of 120 ━━────────, about \d+ s left"
    assert any(re.fullmatch(pattern, line) for line in screen.shown())


@timed
def test_a_long_name_leaves_room_for_what_is_known() -> None:
    screen = Screen()
    name = f"planning /{'folder/' * 20}step.txt"
    with showing_progress(name, allowed_bytes=150, stream=screen.stream, silent=0.0):
        tell(lambda: search(0.5))
        sleep(0.4)
    assert any(line.startswith("plan") and line.endswith("gap 33.3%") for line in screen.shown())


def test_quick_work_is_silent() -> None:
    screen = Screen()
    with showing_progress("planning", stream=screen.stream):
        tell_phase("probing ops", 1, 2)
    assert screen.shown() == [""]


@timed
def test_a_pipe_is_shown_nothing_and_the_log_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    pipe = io.StringIO()
    with (
        caplog.at_level("INFO", "stowplan"),
        showing_progress("planning", allowed_bytes=150, stream=pipe, silent=0.1),
    ):
        tell(lambda: search(0.5))
        sleep(0.3)
    assert pipe.getvalue() == ""
    (line,) = caplog.messages
    assert re.fullmatch(
        r"planning: searching 50%, about \d+ s left, best 1\.400 x baseline, gap 33\.3%", line
    )


def test_nobody_watches_after_the_work_is_done() -> None:
    with showing_progress("planning", stream=io.StringIO()):
        pass

    def never() -> Searching:
        raise AssertionError("asked without anyone to tell")

    tell(never)


@pytest.mark.parametrize("name", ["planning GPT", f"planning /{'folder/' * 20}step.txt", "planning 訓練" * 9])
def test_a_line_fits_any_width_and_has_the_best_plan_from_forty_columns_on(name: str) -> None:
    waiting = Waiting(name, allowed_bytes=150)
    waiting.told(search(0.5))
    for width in range(10, 140):
        line = waiting.line(width, "=-")
        assert sum(2 if east_asian_width(char) in "WF" else 1 for char in line) <= width
        assert "searching 50%, " in line or "searching 50% =====-----, " in line or width < 39
        assert "best 1.400 x baseline" in line or width < 39


def test_a_plan_that_was_found_is_the_best_while_it_is_compared() -> None:
    waiting = Waiting("planning", allowed_bytes=50)
    waiting.told(search(0.5))
    waiting.told(PlanningPhase("comparing"))
    assert waiting.line() == "planning: comparing, 0 s"
    waiting = Waiting("planning", allowed_bytes=150)
    waiting.told(search(0.5))
    waiting.told(PlanningPhase("comparing"))
    assert waiting.line() == "planning: comparing, 0 s, best 1.400 x baseline, gap 33.3%"


@timed
def test_a_part_of_the_work_is_shown_on_the_same_line() -> None:
    screen = Screen()
    with showing_progress("checking", stream=screen.stream, silent=0.0):
        with showing_progress("planning GPT", allowed_bytes=150, stream=screen.stream, silent=0.0) as waiting:
            tell(lambda: search(0.5))
            sleep(0.3)
        assert waiting.has_plan
        tell_phase("timing steps", 1, 5)
        sleep(0.3)
    lines = [line for line in screen.shown() if line]
    assert any(line.startswith("planning GPT: searching 50%") for line in lines)
    assert lines[-1].startswith("checking: timing steps 1 of 5 ")


@timed
def test_a_record_has_the_line_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, logger = Screen(), logging.getLogger("stowplan")
    handler = logging.StreamHandler(screen.stream)
    monkeypatch.setattr(logger, "handlers", [handler])
    with showing_progress("planning", stream=screen.stream, silent=0.0):
        sleep(0.1)
        logger.warning("slow")
        sleep(0.4)
    assert not logger.filters
    assert [line for line in screen.shown() if "slow" in line] == ["slow"]


def test_work_goes_on_without_its_terminal() -> None:
    inner, outer = pty.openpty()
    with os.fdopen(outer, "w", encoding="utf-8") as stream:
        os.close(inner)
        with showing_progress("planning", stream=stream, silent=0.0):
            sleep(0.1)


@pytest.mark.parametrize("is_closed", [True, False])
def test_work_goes_on_without_standard_error(is_closed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream if is_closed else None)
    with showing_progress("planning", silent=0.0):
        tell_phase("probing ops", 1, 2)
