"""Training starts with a first plan; a better one of a child process is taken over between iterations."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor, nn

import stowplan
from stowplan import BadUse, Plan, Search
from stowplan.capture import capture
from stowplan.plan import frontier
from stowplan.plan.files import plan_file
from stowplan.plan.improving import BETTER, FIRST, Improvement, improved
from stowplan.run.cost.machine import Cost
from stowplan.run.cost.probe import Signature, cost_of_call
from stowplan.run.fit import plans_of
from stowplan.run.planning import improver
from stowplan.run.planning.improver import Improver

pytestmark = [pytest.mark.torch, pytest.mark.slow]
_SOON = Search(wait=False, gap=0.0001)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = (
            (nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 16), nn.GELU()) for _ in range(8)
        )
        self.layers = nn.Sequential(*(layer for block in blocks for layer in block))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers(x).square().mean()
        return loss


def _model() -> tuple[_Net, Tensor]:
    torch.manual_seed(0)
    return _Net(), torch.randn(256, 16)


def _budget(model: nn.Module, x: Tensor) -> int:
    return capture(model, (x,)).eager.peak_bytes() * 6 // 10


def _fitted(search: Search = _SOON) -> tuple[_Net, Tensor]:
    model, x = _model()
    return stowplan.fit(model, (x,), budget=_budget(model, x), search=search), x


def _improver_of(fitted: nn.Module) -> Improver:
    (planned,) = fitted.__dict__["_fitting"].planned
    assert isinstance(planned.improver, Improver)
    return planned.improver


def _wait_for(search: Improver) -> None:
    until = time.monotonic() + 200
    while not search.is_done and time.monotonic() < until:
        time.sleep(0.05)
    assert search.is_done


def _drawn_cost(signature: Signature, device: torch.device, **_: object) -> Cost | None:
    measured = cost_of_call(signature, device, repeats=1)
    price = 1e-6 * (1 + sha256(signature.text.encode()).digest()[0])
    return Cost(price, measured.rise_bytes) if measured else None


def _make_hasty(patch: pytest.MonkeyPatch) -> None:
    """Prices are the same each time, and a first plan is far from the best that there is."""
    patch.setattr("stowplan.run.cost.probe.cost_of_call", _drawn_cost)
    patch.setattr(frontier, "_DESCENTS", ())


@pytest.fixture(autouse=True)
def _first_plans_are_poor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _make_hasty(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


_DESCENTS = frontier._DESCENTS


class _Child:
    """A child that has done its work, and seems to have ended when it is let."""

    def __init__(self) -> None:
        self.has_ended, self.stdin = False, None

    def poll(self) -> int | None:
        return 0 if self.has_ended else None

    def kill(self) -> None:
        self.has_ended = True

    def wait(self) -> int:
        return 0


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> _Child:
    """The search is done here at once; its result is there when the child is let end."""
    standing = _Child()

    def started(folder: Path, asked: Improvement) -> _Child:
        monkeypatch.setattr(frontier, "_DESCENTS", _DESCENTS)
        better = improved(plan_file.read((folder / FIRST).read_text(encoding="utf-8")), asked)
        assert better is not None
        (folder / BETTER).write_text(plan_file.write(better), encoding="utf-8")
        return standing

    monkeypatch.setattr(improver, "_started", started)
    return standing


def _plain(model: nn.Module, x: Tensor, before: Callable[[int], None]) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for number in range(6):
        before(number)
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def _clipped(model: nn.Module, x: Tensor, before: Callable[[int], None]) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    losses = []
    for number in range(6):
        before(number)
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        losses.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        schedule.step()
    return losses


def _accumulated(model: nn.Module, x: Tensor, before: Callable[[int], None]) -> list[Tensor]:
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    for number in range(6):
        before(number)
        loss = model(x + number)
        (loss / 3).backward()
        losses.append(loss.detach())
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("loop", [_plain, _clipped, _accumulated])
@pytest.mark.parametrize("seed", range(2))
def test_taking_a_plan_over_changes_no_bit(
    loop: Callable[..., list[Tensor]], seed: int, child: _Child, caplog: pytest.LogCaptureFixture
) -> None:
    """At random iterations, with dropout, whose draws are recomputed by one plan and not by the other."""
    at = Random(f"{loop.__name__} {seed}").randrange(1, 6)
    fitted, x = _fitted()
    first = plans_of(fitted)[0]

    def before(number: int) -> None:
        child.has_ended = number >= at

    eager, x = _model()
    torch.manual_seed(1)
    expected = loop(eager, x, lambda _: None)
    torch.manual_seed(1)
    with caplog.at_level(logging.INFO, "stowplan"):
        losses = loop(fitted, x, before)
    assert all(map(torch.equal, losses, expected))
    assert all(map(torch.equal, fitted.parameters(), eager.parameters()))
    better = plans_of(fitted)[0]
    assert better.projected_seconds < first.projected_seconds
    assert better.projected_peak_bytes <= better.allowed_bytes == first.allowed_bytes
    assert f"iteration {at + 1}: a plan at {better.time_ratio:.2f} in place of" in caplog.text


def test_nothing_is_taken_over_inside_a_pair(child: _Child) -> None:
    fitted, x = _fitted()
    first = plans_of(fitted)[0]
    waits = fitted(x)
    child.has_ended = True
    second = fitted(x)
    assert plans_of(fitted)[0] is first, "an earlier forward waits for its backward"
    seen: list[Plan] = []

    def look(_: Tensor) -> None:
        if not seen:
            seen.append(plans_of(fitted)[0])
            fitted(x)  # a forward while backward runs, whose loss nobody keeps
            seen.append(plans_of(fitted)[0])

    handle = next(fitted.parameters()).register_hook(look)  # type: ignore[no-untyped-call]
    second.backward()
    waits.backward()
    handle.remove()
    assert seen == [first, first]
    del waits, second
    fitted(x).backward()
    assert plans_of(fitted)[0].projected_seconds < first.projected_seconds


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: "",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"allowed_bytes":', '"allowed_bytes":1'),
    ],
)
def test_a_damaged_answer_is_not_taken(damage: Callable[[str], str], child: _Child) -> None:
    fitted, x = _fitted()
    first, answer = plans_of(fitted)[0], _improver_of(fitted)._folder / BETTER
    answer.write_text(damage(answer.read_text(encoding="utf-8")), encoding="utf-8")
    child.has_ended = True
    fitted(x).backward()
    assert plans_of(fitted)[0] is first
    assert fitted.__dict__["_fitting"].planned[0].improver is None
    assert not answer.exists()


def test_a_plan_of_another_budget_is_not_taken(child: _Child) -> None:
    fitted, x = _fitted()
    first, answer = plans_of(fitted)[0], _improver_of(fitted)._folder / BETTER
    larger, _ = _model()
    other = stowplan.fit(larger, (x,), budget=first.allowed_bytes * 5 // 4, search=Search(gap=0.0))
    answer.write_text(plan_file.write(plans_of(other)[0].draft()), encoding="utf-8")
    child.has_ended = True
    fitted(x).backward()
    assert plans_of(fitted)[0] is first


def test_a_process_finds_a_better_plan_and_the_cache_keeps_it() -> None:
    fitted, x = _fitted()
    first, search = plans_of(fitted)[0], _improver_of(fitted)
    _wait_for(search)
    fitted(x).backward()
    better = plans_of(fitted)[0]
    assert better.projected_seconds < first.projected_seconds
    assert not search._folder.exists()
    again, _ = _fitted()
    assert plans_of(again)[0].steps == better.steps
    assert again.__dict__["_fitting"].planned[0].improver is None


def test_training_goes_on_when_the_child_is_killed() -> None:
    fitted, x = _fitted()
    first, search = plans_of(fitted)[0], _improver_of(fitted)
    fitted(x).backward()
    search._process.kill()
    _wait_for(search)
    for _ in range(2):
        fitted(x).backward()
    assert plans_of(fitted)[0] is first
    assert fitted.__dict__["_fitting"].planned[0].improver is None


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="signals of POSIX")
def test_an_interrupt_of_the_terminal_does_not_end_the_child() -> None:
    fitted, x = _fitted()
    first, search = plans_of(fitted)[0], _improver_of(fitted)
    search._process.send_signal(signal.SIGINT)
    _wait_for(search)
    assert search._process.returncode == 0
    fitted(x).backward()
    assert plans_of(fitted)[0] is not first
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, set())


_SCRIPT = """
import os, signal, sys
import torch
import pytest
from tests.run.test_improving import _fitted, _improver_of, _make_hasty
_make_hasty(pytest.MonkeyPatch())
fitted, x = _fitted()
search = _improver_of(fitted)
print(search._process.pid, search._folder, flush=True)
fitted(x).backward()
{end}
"""


def _is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")
@pytest.mark.parametrize(
    "end",
    [
        "os.kill(search._process.pid, signal.SIGSTOP)",  # so that it runs to the end of the interpreter
        "os.kill(search._process.pid, signal.SIGSTOP); raise KeyboardInterrupt",
        "os.kill(os.getpid(), signal.SIGKILL)",
    ],
)
def test_no_process_is_left_behind(end: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(end=end)],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    process, folder = done.stdout.split()
    until = time.monotonic() + 60
    while _is_running(int(process)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _is_running(int(process)), done.stderr
    if "SIGKILL" not in end:
        assert not Path(folder).exists()


def test_workers_and_daemons_wait_for_their_plan(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    fitted, _ = _fitted()
    assert fitted.__dict__["_fitting"].planned[0].improver is None
    assert "fit waits for the plan" in caplog.text
    monkeypatch.delenv("WORLD_SIZE")
    patient, _ = _fitted(Search(gap=_SOON.gap))
    assert plans_of(fitted)[0].steps == plans_of(patient)[0].steps
    monkeypatch.setattr("multiprocessing.process.BaseProcess.daemon", property(lambda _: True))
    assert not improver.may_have_children()


def test_a_plan_near_its_bound_has_no_child() -> None:
    fitted, _ = _fitted(Search(wait=False, gap=1.0))
    assert fitted.__dict__["_fitting"].planned[0].improver is None


def test_wait_is_a_flag() -> None:
    with pytest.raises(BadUse, match="wait is 'soon'"):
        Search(wait="soon")  # type: ignore[arg-type]
