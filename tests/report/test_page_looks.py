"""Pages as people see them, on three screens. Pictures of all are left in build/pictures."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from stowplan.report.files import opened
from stowplan.report.page import Subject, subject_of
from tests.support.browser import collisions, rows_in_sight, spilled
from tests.support.pages import browser, gpt_plan, plan_of, planner_of, tiled_plan_of, written

pytestmark = pytest.mark.browser

PICTURES = Path(__file__).parents[2] / "build" / "pictures"
SCREENS = {"1280": (1280, 800), "1920": (1920, 1080), "phone": (390, 844)}
GIB = 1 << 30

Dump = Callable[[str], Path]


def documents(name: str) -> Callable[[Dump], Subject]:
    return lambda dump: subject_of(opened(dump(name)), dump(name).name)


def plain(dump: Dump) -> Subject:
    planner = planner_of(dump("chainer"))
    return subject_of(planner.plan(planner.plain_peak_bytes), "U-Net, plain")


SHOWN: dict[str, Callable[[Dump], Subject]] = {
    **{name: documents(name) for name in ("chainer", "megengine", "regiongraph", "tensorflow", "tilelog")},
    "unet-plain": plain,
    "unet-recomputed": lambda dump: subject_of(plan_of(dump("chainer")), "U-Net, recomputed"),
    "unet-fifth": lambda dump: subject_of(
        tiled_plan_of(dump("chainer"), int(6.9 * GIB) // 5), "U-Net, a fifth"
    ),
    "unet-tiles": lambda dump: subject_of(tiled_plan_of(dump("chainer"), 400 << 20), "U-Net, 400 MiB"),
    "gpt": lambda _: subject_of(gpt_plan(), "GPT"),
}


@cache
def shown(name: str, dump: Dump) -> Path:
    """The page, made once for all screens."""
    return written(SHOWN[name](dump))


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("name", SHOWN)
def test_the_peak_is_explained_at_first_sight_and_nothing_collides(
    name: str, screen: str, dump: Dump
) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    width, height = SCREENS[screen]
    with browser().page(shown(name, dump), width, height) as page:
        page.screenshot(PICTURES / f"{name}-{screen}.png")
        page.screenshot(PICTURES / f"{name}-{screen}-whole.png", whole=True)
        assert "the peak" in page.run("document.querySelector('.where').textContent")
        rows = rows_in_sight(page, height)
        listed = page.run("document.querySelectorAll('.alive .row').length")
        assert len(rows) >= min(5, listed)
        assert all(tensor and why for tensor, why in rows)
        assert collisions(page) == []
        assert spilled(page) == []
        assert page.run("document.documentElement.scrollWidth") <= width
        assert page.errors == []
