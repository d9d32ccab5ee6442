"""The picture of the memory curve in pixels: what a browser on this machine makes of the shapes."""

import base64
import struct
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from stowplan.errors import BadUse
from stowplan.ir import Document, Graph, Kind, Phase
from stowplan.report.page import subject_of
from stowplan.report.picture import png_of, svg_of
from stowplan.report.picture.png import BROWSERS, png_of_drawing
from stowplan.report.picture.shapes import SIZE, Area, Drawing, Polyline, width_of
from tests.support.browser import chromium
from tests.support.pages import browser, plan_of

Dump = Callable[[str], Path]
Colour = tuple[int, ...]

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def size_of(png: bytes) -> tuple[int, ...]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", png[16:24])


def colours_at(png: bytes, places: list[tuple[int, int]], folder: Path) -> list[Colour]:
    """The colours at some places, in points, as a page reads them."""
    path, xy = folder / "shown.html", [list(place) for place in places]
    image = f'<img src="data:image/png;base64,{base64.b64encode(png).decode()}">'
    path.write_text(f"<!doctype html>{image}<canvas width=2160 height=1020></canvas>")
    with browser().page(path, until="document.images[0]?.complete") as page:
        pen = "const pen = document.querySelector('canvas').getContext('2d');"
        read = f"{xy}.map(([x, y]) => [...pen.getImageData(3 * x + 1, 3 * y + 1, 1, 1).data].slice(0, 3))"
        found = page.run(f"(() => {{ {pen} pen.drawImage(document.images[0], 0, 0); return {read}; }})()")
    return [tuple(colour) for colour in found]


@pytest.mark.browser
def test_shapes_are_where_they_belong_and_lie_over_one_another(tmp_path: Path) -> None:
    chromium()
    shapes = (
        Area(((5, 5), (15, 5), (15, 15), (25, 15), (25, 25), (5, 25)), "#ff0000"),
        Area(((5, 20), (10, 20), (10, 25), (5, 25)), "#0000ff"),
        Polyline(((0, 325), (700, 325)), "#ff0000", 4.0),
        Polyline(((0, 335), (700, 335)), "#0000ff", 4.0, (10.0, 10.0)),
    )
    png = png_of_drawing(Drawing("any", 720, 340, shapes))
    assert size_of(png) == (2160, 1020)
    places = [(10, 10), (20, 10), (20, 20), (7, 22), (350, 324), (5, 334), (15, 334)]
    assert colours_at(png, places, tmp_path) == [RED, WHITE, RED, BLUE, RED, BLUE, WHITE]


@pytest.mark.browser
def test_a_picture_has_the_pixels_that_print_wants(dump: Dump) -> None:
    chromium()
    assert size_of(png_of(subject_of(plan_of(dump("chainer")), "plan"))) == (2160, 1020)
    assert size_of(png_of(subject_of(Document("graph", Graph({}, ())), "empty"))) == (2160, 1020)


@pytest.mark.browser
def test_words_of_a_legend_do_not_meet(tmp_path: Path) -> None:
    """Each has the room that it takes in the font of this machine, and not twice as much."""
    words = [*map(str, (*Kind, *Phase)), "baseline", "measured", "offloaded"]
    path = tmp_path / "words.svg"
    texts = "".join(f"<text>{word}</text>" for word in words)
    font = f'font-family="Helvetica, Arial, sans-serif" font-size="{SIZE}"'
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {font}>{texts}</svg>')
    with browser().page(path, until="document.readyState === 'complete'") as page:
        widths = page.run(
            "[...document.querySelectorAll('text')].map((text) => text.getComputedTextLength())"
        )
    for word, width in zip(words, widths, strict=True):
        assert 0.5 * width_of(word) < width < width_of(word) + 10, word


def test_without_a_browser_it_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("stowplan.report.picture.png.BROWSERS", BROWSERS[:2])  # those that PATH leads to
    with pytest.raises(BadUse, match=r"none is found; install one .* or write \.svg"):
        png_of_drawing(Drawing("any", 40, 30, ()))


def test_a_browser_that_draws_nothing_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "chromium"
    script.write_text("#!/bin/sh\necho no usable sandbox >&2\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    with pytest.raises(BadUse, match=r"chromium drew no \.png: no usable sandbox"):
        png_of_drawing(Drawing("any", 40, 30, ()))
    script.write_text("#!/bin/sh\nexit 7\n")
    with pytest.raises(BadUse, match="it ended with 7"):
        png_of_drawing(Drawing("any", 40, 30, ()))


@pytest.mark.slow
def test_nothing_to_show_is_a_picture_of_nothing() -> None:
    drawn = ElementTree.fromstring(svg_of(subject_of(Document("graph", Graph({}, ())), "empty")))
    assert not [shape for shape in drawn if shape.tag.endswith("polygon")]
