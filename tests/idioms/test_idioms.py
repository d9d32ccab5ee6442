"""Every idiom equals eager over its iterations, or is refused by name before it runs."""

import logging
from pathlib import Path

import pytest

pytest.importorskip("torch")

from stowplan.errors import StowplanError
from tests.idioms import forward, gradients, language, loops, losses, parts
from tests.idioms.side import IDIOMS, Side, differing

assert all((forward, gradients, language, losses, loops, parts))  # they fill the table


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caplog.set_level(logging.ERROR, "stowplan")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", sorted(IDIOMS))
def test_an_idiom_trains_as_in_eager_or_is_refused(name: str) -> None:
    found, side = IDIOMS[name], Side(by_plans=True)
    expected = Side(by_plans=False).run(found.program)
    if found.refused:
        with pytest.raises(StowplanError, match=found.refused):
            side.run(found.program)
        assert not side.seen, "a refusal comes before anything is trained"
    else:
        assert differing(expected, side.run(found.program)) == []
        assert all(side.plans), "a model never ran by a plan"


def test_there_are_many_and_most_are_planned() -> None:
    assert len(IDIOMS) >= 150
    assert sum(not each.refused for each in IDIOMS.values()) >= 135
    assert all(each.source for each in IDIOMS.values())
