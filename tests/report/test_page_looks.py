"""Pages as people see them, on three screens. Pictures of all are left in build/pictures."""

from pathlib import Path

import pytest

from tests.support.browser import collisions, rows_in_sight, spilled
from tests.support.pages import SUBJECTS, Dump, browser, page_of_subject

pytestmark = pytest.mark.browser

PICTURES = Path(__file__).parents[2] / "build" / "pictures"
SCREENS = {"1280": (1280, 800), "1920": (1920, 1080), "phone": (390, 844)}


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("name", SUBJECTS)
def test_the_peak_is_explained_at_first_sight_and_nothing_collides(
    name: str, screen: str, dump: Dump
) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    width, height = SCREENS[screen]
    with browser().page(page_of_subject(name, dump), width, height) as page:
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
