"""The pictures in docs/pictures, from real pages, plans and runs: `python -m tools.pictures [NAME ...]`.

It needs Chromium, and some minutes: one picture shows a measured run. `make pictures` is for looking at pages
on several screens, and writes none of these.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from markdown_it import MarkdownIt
from rich.console import Console
from rich.text import Text

from stowplan import Search, api
from stowplan.capture import capture
from stowplan.formats import chainer
from stowplan.plan.explain.peers import Peer
from stowplan.plan.options import PlanOptions
from stowplan.plan.planner import Planner
from stowplan.plan.prices import price_by_macs, price_by_roofline
from stowplan.plan.pricing import Machine, Tier
from stowplan.report.files import opened, write_report
from stowplan.report.page import PageSubject, subject_of
from tests.support.nets import NETS, Example
from tests.support.pages import browser, tiled_plan_of, written

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
UNET = ROOT / "examples" / "data" / "unet_step.txt"
GIB = 1 << 30
SEGMENTS = Peer("8 equal segments", 4_090_912_016, 1.219)  # as in tests/formats/test_chainer_segments.py
DISK = Tier("disk", 1 << 40, store_bytes_per_second=4e8, load_bytes_per_second=8e8)


@cache
def unet_plans() -> tuple[PageSubject, PageSubject]:
    """Two plans of the U-Net document, the first with the frontier of both."""
    graph = chainer.read(UNET.read_text(encoding="utf-8"), chainer.SavedView.RETAIN).graph
    planner = Planner.of(graph, price_by_macs(graph))
    tight, roomy = (planner.plan(int(size * GIB)) for size in (3.11, 4.84))
    return (
        subject_of(tight, "unet_3.1GiB.plan.json", frontier=planner.frontier, peers=(SEGMENTS,)),
        subject_of(roomy, "unet_4.8GiB.plan.json"),
    )


def offloading() -> PageSubject:
    """A plan of a small ResNet-50 with a disk, at its smallest budget."""
    graph = capture(*NETS["resnet50"].build("tiny")).graph
    pricing = replace(price_by_roofline(graph, Machine()), tier=DISK)
    planner = Planner.of(graph, pricing, PlanOptions(("recompute", "offload"), search=Search(moves=400)))
    return subject_of(planner.plan(planner.minimum_bytes), "a plan that offloads")


def tiled() -> PageSubject:
    """The U-Net document in tiles."""
    return subject_of(tiled_plan_of(UNET, 400 << 20), "U-Net within 400 MiB")


def run() -> PageSubject:
    """A step that was run and measured."""
    return subject_of(api.check("examples.unet:step", "329MiB"), "unet.run.json")


def vit() -> Example:
    """The step of README's picture and first figure."""
    return NETS["vit"].build("real")


def vit_run() -> PageSubject:
    """That step, run and measured in the memory that the README names."""
    return subject_of(api.check("tools.pictures:vit", "215.3MiB", steps=1), "ViT-S")


def gpt() -> PageSubject:
    """The GPT of `stowplan demo` in half of its memory."""
    return subject_of(
        api.plan_for("stowplan.demo:gpt", 58 << 20, search=Search(gap=0.05)), "gpt_58MiB.plan.json"
    )


def workers() -> list[PageSubject]:
    """The plans of three workers, from a run of examples/several_workers.py."""
    with TemporaryDirectory() as folder:
        _told("torchrun --standalone --nproc-per-node 3 -m examples.several_workers", folder)
        plans = sorted(Path(folder).glob("*.plan.json"))
        return [subject_of(opened(plan), plan.name) for plan in plans]


def _told(command: str, *arguments: str, **settings: str) -> str:
    """What a command prints when it is run in the root of the project."""
    words, environment = [*command.split(), *arguments], {**os.environ, **settings}
    return subprocess.run(
        words, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def terminal() -> None:
    """A command on a terminal of 80 columns."""
    command = "stowplan plan examples/data/unet_step.txt --saved retain --budget 3.11GiB"
    printed = _told(command, COLUMNS="80", FORCE_COLOR="1", TERM="xterm-256color")
    console = Console(record=True, width=80, file=StringIO(), force_terminal=True)
    console.print(Text(f"$ {command}", "bold"), Text.from_ansi(printed), sep="\n")
    _page_taken("terminal", console.export_html(inline_styles=True), 800, 60 + 19 * len(printed.splitlines()))


def readme() -> None:
    """README as a browser shows it, its first screen."""
    body = MarkdownIt("commonmark").enable("table").render((ROOT / "README.md").read_text(encoding="utf-8"))
    head = f'<!doctype html><meta charset="utf-8"><base href="{ROOT.as_uri()}/"><style>{_PAPER}</style>'
    _page_taken("readme", head + body, 1000, 900)


_PAPER = """
body { max-width: 900px; margin: 20px auto; font: 16px/1.5 system-ui, sans-serif; color: #1f2328 }
pre, code { background: #f6f8fa } pre { padding: 12px; font-size: 13px; overflow: auto }
img { max-width: 100% } table { border-collapse: collapse }
td, th { border: 1px solid #d1d9e0; padding: 6px }
"""


def _page_taken(name: str, html: str, width: int, height: int) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        path.write_text(html, encoding="utf-8")
        with browser().page(path, width, height, until="document.readyState === 'complete'") as page:
            page.screenshot(FOLDER / f"{name}.png")


def taken(
    name: str,
    *subjects: PageSubject,
    show: str = "",
    width: int = 1280,
    height: int = 800,
    colours: str = "light",
) -> None:
    """A picture of the page after the script `show`."""
    with browser().page(written(*subjects), width, height) as page:
        page.prefer_colours(colours)
        page.run(show)
        page.settle()
        page.screenshot(FOLDER / f"{name}.png")
        assert page.errors == []


def _scrolled_to(title: str) -> str:
    """A script that scrolls to a heading, with some space above it."""
    found = f"[...document.querySelectorAll('h2')].find((h) => h.textContent.startsWith({title!r}))"
    return f"{found}.scrollIntoView(); scrollBy(0, -8)"


_SELECTED = """(() => { const { shownState: state } = stow, { model } = state;
  const numbers = [...model.raw.tensors.id.keys()];
  state.select({ tensor: numbers.find((number) => model.tensorName(number) === "71 of ReLU.71") }); })()"""

PICTURES: Mapping[str, Callable[[], object]] = {
    "plan": lambda: taken("plan", *unet_plans(), show=_SELECTED),
    "frontier": lambda: taken(
        "frontier", *unet_plans(), show=_scrolled_to("What a budget costs"), height=330
    ),
    "modules": lambda: taken("modules", gpt(), show=_scrolled_to("Which modules"), height=240),
    "dark": lambda: taken(
        "dark", *unet_plans(), show="stow.shownState.measureBy(true)", height=560, colours="dark"
    ),
    "curve": lambda: write_report([vit_run()], FOLDER / "curve.png"),
    "tiles": lambda: taken("tiles", tiled(), show=_scrolled_to("Tile ")),
    "offload": lambda: taken("offload", offloading()),
    "run": lambda: taken("run", run()),
    "narrow": lambda: taken("narrow", gpt(), width=390, height=844),
    "workers": lambda: taken("workers", *workers(), show=_scrolled_to("Side by side"), height=200),
    "terminal": terminal,
    "readme": readme,
}

if __name__ == "__main__":
    for chosen in sys.argv[1:] or PICTURES:
        PICTURES[chosen]()
