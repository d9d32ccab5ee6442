"""Things to look at and a browser to do it with, made once for all tests of a process."""

import atexit
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from stowplan import Search
from stowplan.formats import chainer
from stowplan.plan.explain.peers import Peer
from stowplan.plan.options import PlanOptions
from stowplan.plan.plan import Plan
from stowplan.plan.planner import Planner
from stowplan.plan.prices import price_by_macs
from stowplan.plan.select import Candidate, Selector
from stowplan.plan.select import planner_of as tile_planner_of
from stowplan.report.files import opened
from stowplan.report.page import PageSubject, page_of, subject_of
from tests.support.browser import Browser

Dump = Callable[[str], Path]


@cache
def browser() -> Browser:
    """A running browser, which ends with the tests."""
    running = Browser()
    atexit.register(running.close)
    return running


@cache
def _folder() -> Path:
    folder = TemporaryDirectory()
    atexit.register(folder.cleanup)
    return Path(folder.name)


def written(*subjects: PageSubject) -> Path:
    """Where the page of some subjects has been written."""
    path = _folder() / f"{len(list(_folder().iterdir()))}.html"
    path.write_text(page_of(subjects), encoding="utf-8")
    return path


@cache
def planner_of(document: Path) -> Planner:
    """The U-Net document with a frontier that was searched for a moment only."""
    graph = chainer.read(document.read_text(), chainer.SavedView.RETAIN).graph
    return Planner.of(graph, price_by_macs(graph), options=PlanOptions(search=Search(moves=400)))


@cache
def plan_of(document: Path) -> Plan:
    """A plan that recomputes many tensors."""
    return planner_of(document).plan(planner_of(document).minimum_bytes)


@cache
def _tile_planner(document: Path) -> Selector[Candidate]:
    graph = chainer.read(document.read_text(), chainer.SavedView.RETAIN).graph
    return tile_planner_of(graph, price_by_macs(graph), PlanOptions(search=Search(moves=400)))


@cache
def tiled_plan_of(document: Path, allowed_bytes: int) -> Plan:
    """A plan of the U-Net document that may compute tile by tile."""
    return _tile_planner(document).plan(allowed_bytes)


@cache
def plan_in_spatial_tiles() -> Plan:
    """A chain of convolutions on one image, in less than recomputation could do with."""
    from torch import nn, randn

    from stowplan.capture import capture

    blocks = [layer for _ in range(4) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())]
    captured = capture(nn.Sequential(*blocks), (randn(1, 4, 64, 64),), loss=lambda made: made.square().mean())
    planner = tile_planner_of(
        captured.graph, price_by_macs(captured.graph), PlanOptions(("tile",), search=Search(moves=50))
    )
    return planner.plan(planner.baseline.peak_bytes // 3)


@cache
def gpt_plan() -> Plan:
    """A small GPT, captured, within three quarters of what it takes plainly."""
    from stowplan.capture import capture
    from tests.support.nets import NETS

    model, args = NETS["gpt"].build("tiny")
    graph = capture(model, args).graph
    planner = Planner.of(graph, price_by_macs(graph), options=PlanOptions(search=Search(moves=400)))
    return planner.plan((planner.minimum_bytes + planner.plain_peak_bytes) // 2)


@cache
def plan_page(document: Path) -> Path:
    """The page of that plan."""
    return written(subject_of(plan_of(document), "plan"))


@cache
def compared_page(document: Path) -> Path:
    """The page of two plans, with the frontier they come from and a peer."""
    planner = planner_of(document)
    peers = (Peer("checkpoint per block", planner.plain_peak_bytes * 3 // 4, 1.4),)
    tight = subject_of(plan_of(document), "tight", frontier=planner.frontier, peers=peers)
    return written(tight, subject_of(planner.plan(planner.plain_peak_bytes), "roomy"))


def _document(name: str) -> Callable[[Dump], PageSubject]:
    return lambda dump: subject_of(opened(dump(name)), dump(name).name)


def _plain(dump: Dump) -> PageSubject:
    planner = planner_of(dump("chainer"))
    return subject_of(planner.plan(planner.plain_peak_bytes), "U-Net, plain")


SUBJECTS: dict[str, Callable[[Dump], PageSubject]] = {
    **{name: _document(name) for name in ("chainer", "megengine", "regiongraph", "tensorflow", "tilelog")},
    "unet-plain": _plain,
    "unet-recomputed": lambda dump: subject_of(plan_of(dump("chainer")), "U-Net, recomputed"),
    "unet-fifth": lambda dump: subject_of(
        tiled_plan_of(dump("chainer"), int(6.9 * (1 << 30)) // 5), "U-Net, a fifth"
    ),
    "unet-tiles": lambda dump: subject_of(tiled_plan_of(dump("chainer"), 400 << 20), "U-Net, 400 MiB"),
    "gpt": lambda _: subject_of(gpt_plan(), "GPT"),
}
"""A subject of each kind that a report shows."""


@cache
def page_of_subject(name: str, dump: Dump) -> Path:
    """The page of one of them, made once for all screens."""
    return written(SUBJECTS[name](dump))
