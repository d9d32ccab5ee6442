"""A page of a hundred thousand rectangles opens and follows the pointer; the page itself is small."""

from os import getloadavg
from statistics import median

from browser import Page
from pages import browser, written

from steps import training_step
from stowplan.ir import Document, Graph
from stowplan.report.page import page_of, subject_of

OPS = 30_000
_TRIES = 4  # the machine may be busy with other things
_RECTANGLES = "stow.shownState.model.first.length + stow.shownState.model.raw.arena.asides.length"
_MOVES = """(async () => {
  const state = stow.shownState;
  const milliseconds = [];
  for (let move = 1; move <= 21; move += 1) {
    const begin = performance.now();
    state.hover((move * 7919) % state.model.steps);
    document.body.offsetHeight;
    await new Promise((done) => requestAnimationFrame(() => {
      const { port1, port2 } = new MessageChannel();
      port1.onmessage = done;
      port2.postMessage(null);
    }));
    milliseconds.push(performance.now() - begin);
  }
  return milliseconds;
})()"""


def first_paint(page: Page) -> float:
    return float(page.run("performance.getEntriesByName('first-contentful-paint')[0].startTime"))


def test_the_page_itself_is_small() -> None:
    empty = page_of([subject_of(Document("graph", Graph({}, ())), "empty")])
    assert len(empty.encode()) < 200_000


def test_a_hundred_thousand_rectangles_open_and_follow_the_pointer() -> None:
    subject = subject_of(training_step(OPS), "large")
    path = written(subject)
    took: list[tuple[float, float]] = []
    while len(took) < _TRIES and not any(paint < 1000 and move < 50 for paint, move in took):
        with browser().page(path) as page:
            assert page.run(_RECTANGLES) >= 100_000
            assert page.run("stow.shownState.model.steps") >= 20_000
            took.append((first_paint(page), median(page.run(_MOVES))))
            assert page.errors == []
    share = max(
        1.0, getloadavg()[0]
    )  # others run meanwhile, and the browser gets its share of the processors
    assert any(paint < 1000 * share and move < 50 * share for paint, move in took), took
