"""What can be checked of a page's looks: words that meet, and what is seen without scrolling."""

from typing import Any

from browser import Page

_COLLISIONS = """(() => {
  const words = 'h1, h2, .key, .tab, .figure b, .searching, figcaption';
  const texts = Array.from(document.querySelectorAll(words));
  const inSight = (text) => {
    const own = text.getBoundingClientRect();
    const around = text.closest('.levels')?.getBoundingClientRect();
    return !around || own.bottom <= around.bottom;
  };
  const boxes = texts.filter(inSight).map((text) => [text.textContent, text.getBoundingClientRect()]);
  const meet = (a, b) =>
    a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  return boxes.flatMap(([one, box], at) =>
    boxes.slice(at + 1).filter(([, other]) => meet(box, other)).map(([two]) => `${one} / ${two}`));
})()"""

_ROWS = """Array.from(document.querySelectorAll('.alive .row'), (row) => [
  row.getBoundingClientRect().bottom,
  row.querySelector('.name').textContent,
  row.querySelector('.why').textContent,
])"""

_SPILLED = """Array.from(document.querySelectorAll('h1, h2, h3, .key, .tab, figcaption, .alive-now, .where'))
  .filter((text) => text.scrollWidth > text.clientWidth + 1 && getComputedStyle(text).overflowX === 'visible'
    && getComputedStyle(text).display !== 'inline').map((text) => text.textContent)"""


def collisions(page: Page) -> list[str]:
    """Pairs of words that lie over one another."""
    found: list[str] = page.run(_COLLISIONS)
    return found


def spilled(page: Page) -> list[str]:
    """Words that are wider than the place they stand in."""
    found: list[str] = page.run(_SPILLED)
    return found


def rows_in_sight(page: Page, height: int) -> list[tuple[str, str]]:
    """What is alive and why, as far as it is seen without scrolling."""
    rows: list[list[Any]] = page.run(_ROWS)
    return [(name, why) for bottom, name, why in rows if bottom <= height]
