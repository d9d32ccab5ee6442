"""Iterations that end at random places: parameters and state are known, or further steps are refused."""

from pathlib import Path
from random import Random

import pytest
import torch

from stowplan.errors import BadUse
from stowplan.techniques.iteration.run.iteration import RunningIteration
from tests.support.torn import LOOPS, Outcome, TornLoop

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("name", ["clipped in two backwards", "state on disk"])
def test_iterations_that_end_anywhere_leave_what_is_known_or_are_refused(name: str, tmp_path: Path) -> None:
    loop, random = TornLoop.of(tmp_path, **LOOPS[name]), Random(0)
    kinds = ("interrupt", "op", *(["transfer"] if loop.tier else []))
    found = [loop.ended_at(random, kind) for kind in kinds for _ in range(5)]
    loop.close()
    assert Outcome.WRONG not in found
    assert {Outcome.BEFORE, Outcome.REFUSED} <= set(found)


def test_an_interrupt_that_nobody_notes_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunningIteration, "refuse_between", lambda _: None)
    monkeypatch.setattr(RunningIteration, "_refuse_broken", lambda _: None)
    loop, random = TornLoop.of(tmp_path), Random(0)
    assert Outcome.WRONG in [loop.ended_at(random, "interrupt") for _ in range(6)]


def test_loading_the_optimizer_alone_is_not_enough(tmp_path: Path) -> None:
    loop, batch = TornLoop.of(tmp_path), torch.ones(2, 64)
    loop.optimizer.zero_grad()
    torch.autograd.backward(loop.fitted(batch))  # updates
    with pytest.raises(BadUse, match=r"optimizer\.step\(\) was not called"):
        loop.optimizer.state_dict()
    loop.optimizer.load_state_dict(loop.saved[1])
    with pytest.raises(BadUse, match=r"parameters that it had updated were not.*load_state_dict of both"):
        loop.fitted(batch)
    loop.resume()
    loop.iterate()
    assert all(map(torch.equal, loop.contents(), loop.after))
