"""A page of a hundred thousand rectangles opens and follows the pointer; the page itself is small.

Times are those that the page's own thread spends, so that a busy machine does not make them longer.
"""

import pytest

from stowplan.ir import Document, Graph
from stowplan.report.page import page_of, subject_of
from tests.support.browser import Page
from tests.support.pages import browser, written
from tests.support.steps import training_step
from tests.support.timing import timed

OPS = 30_000
MOVES = 21
_RECTANGLES = "stow.shownState.model.first.length + stow.shownState.model.raw.arenas[0].asides.length"
_PAINTS = """['first-contentful-paint', 'drawn'].map(
  (name) => performance.getEntriesByName(name)[0].startTime)"""
_MOVES = """(async (moves) => {
  const state = stow.shownState;
  for (let move = 1; move <= moves; move += 1) {
    state.hover((move * 7919) % state.model.steps);
    document.body.offsetHeight;
    await new Promise((done) => requestAnimationFrame(() => {
      const { port1, port2 } = new MessageChannel();
      port1.onmessage = done;
      port2.postMessage(null);
    }));
  }
})"""


def first_paint(page: Page) -> float:
    """Milliseconds of a processor's time to the first paint: of the time to the last, the same share."""
    first, last = page.run(_PAINTS)
    return float(1000 * page.own_seconds() * first / last)


def move(page: Page) -> float:
    """Milliseconds of a processor's time that one move of the cursor takes, with all that follows it."""
    before = page.own_seconds()
    page.run(f"{_MOVES}({MOVES})")
    return 1000 * (page.own_seconds() - before) / MOVES


def test_the_page_itself_is_small() -> None:
    empty = page_of([subject_of(Document("graph", Graph({}, ())), "empty")])
    assert len(empty.encode()) < 200_000


@pytest.mark.browser
@timed
def test_a_hundred_thousand_rectangles_open_and_follow_the_pointer() -> None:
    path = written(subject_of(training_step(OPS), "large"))
    with browser().page(path) as page:
        paint = first_paint(page)
        assert page.run(_RECTANGLES) >= 100_000
        assert page.run("stow.shownState.model.steps") >= 20_000
        assert paint < 1000
        assert move(page) < 50
        assert page.errors == []
