"""Every view of the page shows real data, and all follow one cursor."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from stowplan.report.files import opened
from stowplan.report.page import subject_of
from tests.support.browser import Page, collisions
from tests.support.pages import (
    browser,
    compared_page,
    gpt_plan,
    plan_in_spatial_tiles,
    plan_page,
    planner_of,
    written,
)
from tests.support.plans import moved

pytestmark = pytest.mark.browser

FORMATS = ["chainer", "megengine", "regiongraph", "tensorflow", "tilelog"]
STRIPS = ["curve", "network", "lifetimes", "arena"]

Dump = Callable[[str], Path]

_COLOURS = """(() => {
  const canvas = document.querySelector('#%s canvas:not(.overlay)');
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  return new Set(new Uint32Array(data.buffer)).size;
})()"""

_CURSOR_COLUMN = """(() => {
  const { cursor, model } = stow.shownState;
  const width = document.querySelector('.overlay').clientWidth - 196 - 18;
  return 196 + (width * (cursor + 0.5)) / model.steps;
})()"""


def colours(page: Page, view: str) -> int:
    """How many colours a view's canvas has; a blank one has a single one."""
    return int(page.run(_COLOURS % (f"{view} .u-wrap" if view in ("curve", "frontier") else view)))


def middle_of(page: Page, view: str, share: float = 0.5) -> tuple[float, float]:
    """A point of a strip: this share of the way along its steps, in the middle of what can be seen of it."""
    page.run(f"document.getElementById('{view}').scrollIntoView({{block: 'center'}})")
    box = page.run(f"document.querySelector('#{view} .overlay').getBoundingClientRect().toJSON()")
    left, right = 196, 18  # the margins of every strip on a wide page
    return box["left"] + left + share * (box["width"] - left - right), box["top"] + box["height"] / 2


def step_shown(page: Page) -> int:
    return int(page.run("document.querySelector('.where').textContent").split()[1].replace(",", ""))


@pytest.mark.parametrize("name", FORMATS)
def test_every_view_of_every_document_is_drawn(name: str, dump: Dump) -> None:
    path = written(subject_of(opened(dump(name)), name))
    with browser().page(path) as page:
        assert all(colours(page, view) > 3 for view in STRIPS)
        assert page.run("document.querySelectorAll('.alive .row').length") > 0
        assert bool(page.run("document.querySelectorAll('#tiles canvas').length")) == (name == "tilelog")
        assert bool(page.run("document.querySelectorAll('#regions .dim').length")) == (name == "regiongraph")
        assert page.errors == []
        assert page.requests == [path.as_uri()]


@pytest.mark.parametrize("size", [(1280, 800), (1920, 1080), (390, 844)])
def test_headings_and_keys_of_a_comparison_do_not_collide(size: tuple[int, int], dump: Dump) -> None:
    with browser().page(compared_page(dump("chainer")), *size) as page:
        assert collisions(page) == []


@pytest.mark.parametrize("view", STRIPS)
def test_the_cursor_of_one_view_moves_all(view: str, dump: Dump) -> None:
    with browser().page(plan_page(dump("chainer"))) as page:
        steps = page.run("stow.shownState.model.steps")
        page.point(*middle_of(page, view, 0.25))
        page.settle()
        assert abs(step_shown(page) - steps / 4) <= 2
        columns = page.run(
            "Array.from(document.querySelectorAll('.overlay'), canvas => { const {width, height} = canvas;"
            "const row = canvas.getContext('2d').getImageData(0, height >> 1, width, 1).data;"
            "return Array.from({length: width}, (_, x) => row[4 * x + 3]).findIndex(alpha => alpha > 200) })"
        )
        assert len(columns) == len(STRIPS)
        assert len(set(columns)) == 1
        assert abs(columns[0] - page.run(_CURSOR_COLUMN)) <= 2
        expected = page.run("stow.text.bytes(stow.shownState.model.raw.curve.total[stow.shownState.cursor])")
        assert page.run("document.querySelector('.alive-now b').textContent") == expected
        page.point(5, 5)
        page.settle()
        assert "the peak" in page.run("document.querySelector('.where').textContent")


def test_a_click_stays_and_a_drag_comes_closer(dump: Dump) -> None:
    with browser().page(plan_page(dump("chainer"))) as page:
        x, y = middle_of(page, "curve", 0.7)
        page.click(x, y)
        page.point(5, 5)
        page.settle()
        assert page.run("stow.shownState.pinned") + 1 == step_shown(page)
        page.drag(x - 200, y, x)
        low, high = page.run("stow.shownState.range")
        assert low > 0
        assert high - low < page.run("stow.shownState.model.steps")
        page.run("stow.shownState.showAll()")
        assert page.run("stow.shownState.range") == [0, page.run("stow.shownState.model.steps")]


def test_a_tensor_says_who_makes_keeps_remakes_and_reads_it(dump: Dump) -> None:
    with browser().page(plan_page(dump("chainer"))) as page:
        page.run(
            "(() => { const {model} = stow.shownState; const tensor = model.raw.rows.find(row =>"
            "model.staysOf[row].length > 1); stow.shownState.select({tensor}) })()"
        )
        card = page.run("document.querySelector('.card').innerText")
        for word in ("decided", "recompute", "made by", "recomputed", "read by", "in memory", "baseline"):
            assert word in card
        page.run("document.querySelector('.card .link').click()")
        assert "runs at" in page.run("document.querySelector('.card').innerText")


def test_an_op_says_where_it_comes_from_and_what_it_takes(dump: Dump) -> None:
    with browser().page(plan_page(dump("chainer"))) as page:
        page.run(
            "(() => { const {macs} = stow.shownState.model.raw.ops;"
            "stow.shownState.select({op: macs.indexOf(Math.max(...macs))}) })()"
        )
        card = page.run("document.querySelector('.card').innerText")
        for word in ("module", "takes", "MACs", "runs at", "reads", "makes"):
            assert word in card


def test_searching_leaves_the_rows_that_match(dump: Dump) -> None:
    with browser().page(written(subject_of(opened(dump("tensorflow")), "alexnet"))) as page:
        page.run("document.querySelector('.search').focus()")
        counts = []
        for more in ("conv1", " gradient", " nowhere"):
            page.type(more)
            counts.append(page.run("document.querySelector('.found').textContent").split(" of "))
        (one, total), (both, _), (none, _) = counts
        assert int(total) > int(one) > int(both) > int(none) == 0
        page.run("document.querySelector('.search').value = 'conv1 gradient'")
        page.run("document.querySelector('.search').dispatchEvent(new Event('input'))")
        x, _ = middle_of(page, "lifetimes")
        page.click(x, page.run("document.querySelector('.scroll').getBoundingClientRect().top") + 5)
        card = page.run("document.querySelector('.card').innerText")
        assert "conv1" in card
        assert "gradient" in card


def test_a_key_of_the_legend_shows_its_tensors_alone(dump: Dump) -> None:
    with browser().page(plan_page(dump("chainer"))) as page:
        first = "document.querySelector('#lifetimes button.key')"
        assert page.run(f"{first}.textContent") == "recompute"
        page.run(f"{first}.click()")
        assert page.run(f"{first}.getAttribute('aria-pressed')") == "true"
        some, total = map(int, page.run("document.querySelector('.found').textContent").split(" of "))
        assert 0 < some < total
        x, _ = middle_of(page, "lifetimes")
        page.click(x, page.run("document.querySelector('.scroll').getBoundingClientRect().top") + 5)
        assert "recompute" in page.run("document.querySelector('.card').innerText")
        page.run(f"{first}.click()")
        assert page.run("document.querySelector('.found').textContent") == ""


def test_keys_move_the_cursor(dump: Dump) -> None:
    with browser().page(plan_page(dump("chainer"))) as page:
        before = step_shown(page)
        for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowRight"):
            page.press(key)
        assert step_shown(page) == before + 2
        page.press("p")
        assert step_shown(page) == before


def test_modules_hold_all_of_the_peak_and_open() -> None:
    with browser().page(written(subject_of(gpt_plan(), "GPT"))) as page:
        labels = "Array.from(document.querySelectorAll('#modules %s'), (e) => e.title.split(', '))"
        total = page.run("stow.text.bytes(stow.shownState.model.raw.curve.total[stow.shownState.pinned])")
        assert page.run("document.querySelector('.alive-now b').textContent") == total
        first = page.run(labels % ".modules > .parts > .part > .box")
        assert sum(float(share.split()[0]) for _, _, share in first) == pytest.approx(100, abs=1)
        assert max(float(share.split()[0]) for _, _, share in first) > 10
        page.run("document.querySelector('#modules .part .parts').parentElement.firstChild.click()")
        inner = page.run(labels % ".modules > .parts > .part > .box")
        assert inner != first
        assert page.run("document.querySelectorAll('#modules .crumbs button').length") == 2
        assert page.run("document.activeElement.parentElement.className") == "crumbs"
        page.run("document.querySelector('#modules .crumbs button').click()")
        assert page.run(labels % ".modules > .parts > .part > .box") == first
        boxes = page.run("document.querySelectorAll('#modules .box').length")
        page.run("document.querySelector('#modules .key').click()")
        assert page.run("document.querySelectorAll('#modules .box').length") < boxes
        assert page.errors == []


def test_the_axis_counts_time_and_steps(dump: Dump) -> None:
    with browser().page(plan_page(dump("chainer"))) as page:
        steps = page.run("stow.shownState.model.steps")
        page.press("t")
        assert page.run("document.querySelectorAll('#curve .axis [aria-pressed=true]')[0].textContent") in (
            "by work",
            "by time",
        )
        page.point(*middle_of(page, "curve", 0.25))
        page.settle()
        step = step_shown(page) - 1
        before, after = page.run(f"[{step}, {step + 1}].map((step) => stow.shownState.model.times[step])")
        assert before <= 0.25 * page.run("stow.shownState.model.duration") + 1e-9 <= after * 1.01
        assert all(colours(page, view) > 3 for view in STRIPS)
        page.press("t")
        page.point(5, 5)
        page.point(*middle_of(page, "curve", 0.25))
        page.settle()
        assert abs(step_shown(page) - steps / 4) <= 2
        assert page.errors == []


def test_several_plans_are_compared(dump: Dump) -> None:
    with browser().page(compared_page(dump("chainer"))) as page:
        assert page.run("Array.from(document.querySelectorAll('nav .tab'), tab => tab.textContent)") == [
            "tight",
            "roomy",
        ]
        assert "roomy" in page.run("document.querySelector('#curve .legend').textContent")
        assert colours(page, "frontier") > 5
        assert len(page.run("stow.shownState.model.raw.curve.beside")) == 2
        cards = page.run("Array.from(document.querySelectorAll('#beside .subject'), card => card.innerText)")
        assert [card.splitlines()[0] for card in cards] == ["tight", "roomy"]
        assert all("peak" in card and " of " in card for card in cards)
        assert colours(page, "beside") > 2
        steps = page.run("stow.shownState.model.steps")
        page.run("document.querySelectorAll('#beside .subject')[1].click()")
        page.wait_for("document.getElementById('frontier') !== null")
        assert page.run("stow.shownState.model.steps") < steps
        assert page.run("document.querySelector('nav .tab.chosen').textContent") == "roomy"
        assert page.errors == []


def test_a_tile_is_shown_level_by_level(dump: Dump) -> None:
    with browser().page(written(subject_of(opened(dump("tilelog")), "tiles"))) as page:
        assert page.run("document.querySelectorAll('#tiles .tile').length") == 16
        assert page.run("document.querySelectorAll('#tiles .level').length") == 4
        assert "24,336 against 2,880 untiled (8.45 x)" in page.run(
            "document.querySelector('#tiles').innerText"
        )
        page.run(
            "Array.from(document.querySelectorAll('#tiles .tile')).find(t => t.textContent === '1,2').click()"
        )
        assert "Tile 1,2" in page.run("document.querySelector('#tiles h2').textContent")
        page.run("stow.shownState.pin(2)")
        assert (
            page.run(
                "Array.from(document.querySelectorAll('#tiles .level')).findIndex(l => l.matches('.here'))"
            )
            == 2
        )


@pytest.mark.torch
def test_a_plan_shows_what_each_of_its_tiles_needs() -> None:
    plan = plan_in_spatial_tiles()
    (tiled,) = plan.tile_maps
    middle = [part // 2 for part in tiled.parts]
    with browser().page(written(subject_of(plan, "tiles"))) as page:
        assert page.run("document.querySelectorAll('#tiles .tile').length") == tiled.tiles
        assert page.run("document.querySelectorAll('#tiles .level').length") == len(tiled.levels) - 1
        corner = page.run("document.querySelector('#tiles .levels').innerText")
        assert "cells of halo" in corner
        assert f"All {tiled.tiles} tiles" in page.run("document.querySelector('#tiles').innerText")
        hover = "dispatchEvent(new Event('pointerenter'))"
        page.run(
            f"document.querySelectorAll('#tiles .tile')[{np.ravel_multi_index(middle, tiled.parts)}].{hover}"
        )
        assert f"Tile {','.join(map(str, middle))}" in page.run(
            "document.querySelector('#tiles h2').textContent"
        )
        assert page.run("document.querySelector('#tiles .levels').innerText") != corner
        assert "inside a tile" in page.run("document.querySelector('.alive').innerText")
        assert "sweep" in page.run("document.querySelector('#network .legend').textContent")
        assert page.errors == []


def test_what_is_offloaded_is_seen_to_leave_and_come_back(dump: Dump) -> None:
    planner = planner_of(dump("chainer"))
    plan = moved(planner.plan(planner.plain_peak_bytes))
    with browser().page(written(subject_of(plan, "moved"))) as page:
        for view, words in (
            ("curve", ("offloaded",)),
            ("network", ("store", "load")),
            ("lifetimes", ("offload",)),
        ):
            legend = page.run(f"document.querySelector('#{view} .legend').textContent")
            assert all(word in legend for word in words)
        page.run("stow.shownState.select({tensor: stow.shownState.model.raw.away.tensor[0]})")
        card = page.run("document.querySelector('.card').innerText")
        for word in ("decided", "offload", "host", "stored", "loaded"):
            assert word in card
        assert "recomputed" not in card
        step = page.run("stow.shownState.model.raw.away.last[0]")
        page.run(f"stow.shownState.pin({step})")
        assert "being loaded back" in page.run("document.querySelector('.alive').innerText")
        assert page.errors == []
