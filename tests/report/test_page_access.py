"""The page for those who use a keyboard or hear it read: everything to act on has a name and is reached."""

import importlib.resources

import pytest

from tests.support.pages import SUBJECTS, Dump, browser, compared_page, page_of_subject, plan_page

pytestmark = pytest.mark.browser

_NAMELESS = """(() => {
  const named = (e) => e.getAttribute('aria-label') || e.title || e.innerText.trim();
  const seen = (e) => e.closest('[aria-hidden=true]') === null && e.checkVisibility();
  return Array.from(document.querySelectorAll('button, input, canvas[role], [role=region], aside, nav'))
    .filter((e) => seen(e) && !named(e)).map((e) => e.outerHTML.slice(0, 200));
})()"""
_SCROLLS_WITHOUT_KEYS = """Array.from(document.querySelectorAll('main *')).filter((e) =>
  ['overflowX', 'overflowY'].some((way) => ['auto', 'scroll'].includes(getComputedStyle(e)[way]))
  && (e.scrollHeight > e.clientHeight + 1 || e.scrollWidth > e.clientWidth + 1)
  && e.tabIndex < 0 && !e.querySelector('button, a, input, [tabindex]')).map((e) => e.className)"""
_VIOLATIONS = "axe.run().then((r) => r.violations.map((v) => v.id + ' ' + v.nodes[0].html.slice(0, 200)))"


@pytest.mark.parametrize("width", [1400, 390])
def test_everything_to_act_on_has_a_name_and_keys_reach_what_scrolls(width: int, dump: Dump) -> None:
    with browser().page(plan_page(dump("chainer")), width, 844) as page:
        page.run("stow.shownState.select({tensor: stow.shownState.model.raw.rows[0]})")
        assert page.run(_NAMELESS) == []
        assert page.run(_SCROLLS_WITHOUT_KEYS) == []
        assert page.run("document.querySelector('#curve .plot').ariaLabel").startswith("Memory over ")
        page.press("ArrowRight")
        assert " alive while running " in page.run("document.querySelector('.unseen').textContent")
        assert page.errors == []


_INK = """(() => {
  const canvas = document.querySelector('#lifetimes .ground');
  const { data } = canvas.getContext('2d').getImageData(0, 0, 120, canvas.height);
  const shades = [];
  for (let at = 0; at < data.length; at += 4) if (data[at + 3] > 250) shades.push(data[at]);
  return shades.reduce((a, b) => a + b, 0) / shades.length;
})()"""


def test_pictures_follow_when_the_page_turns_dark(dump: Dump) -> None:
    with browser().page(plan_page(dump("chainer"))) as page:
        page.prefer_colours("light")
        assert page.run(_INK) < 100
        page.prefer_colours("dark")
        assert page.run(_INK) > 150
        assert page.errors == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["two plans", *SUBJECTS])
def test_axe_finds_nothing(name: str, scheme: str, dump: Dump) -> None:
    axe = (importlib.resources.files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8")
    path = compared_page(dump("chainer")) if name == "two plans" else page_of_subject(name, dump)
    for width in (1400, 390):
        with browser().page(path, width, 844) as page:
            page.prefer_colours(scheme)
            page.run("stow.shownState.select({tensor: stow.shownState.model.raw.rows[0]})")
            page.run(f"{axe}; 0")
            assert page.run(_VIOLATIONS) == []
