"""The picture of the memory curve in pixels: the shapes where they belong, in a file that readers accept."""

import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from stowplan.ir import Document, Graph, Kind
from stowplan.report.page import subject_of
from stowplan.report.picture import drawing_of, png_of
from stowplan.report.picture.letters import strokes_of, width_of
from stowplan.report.picture.png import png_of_drawing
from stowplan.report.picture.shapes import Area, Drawing, Line, Shape, Text
from tests.support.pages import browser, plan_of

Dump = Callable[[str], Path]
Pixels = NDArray[np.uint8]

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The chunks of a file, whose sums must be right."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    at = 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        kind, content = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        assert struct.unpack(">I", png[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + content)
        yield kind, content
        at += 12 + length


def decoded(png: bytes) -> Pixels:
    """The pixels of a file whose rows are told by what is above them."""
    found = dict(chunks(png))
    assert list(found) == [b"IHDR", b"pHYs", b"IDAT", b"IEND"]
    width, height = struct.unpack(">II", found[b"IHDR"][:8])
    rows = np.frombuffer(zlib.decompress(found[b"IDAT"]), dtype=np.uint8).reshape(height, 1 + 3 * width)
    assert set(rows[:, 0].tolist()) == {2}
    pixels: Pixels = np.cumsum(rows[:, 1:], axis=0, dtype=np.uint8).reshape(height, width, 3)
    return pixels


def drawn(*shapes: Shape) -> Pixels:
    return decoded(png_of_drawing(Drawing("any", 40, 30, shapes)))


def colour_at(pixels: Pixels, x: float, y: float) -> tuple[int, ...]:
    """The colour at a place given in points."""
    return tuple(pixels[int(3 * y), int(3 * x)].tolist())


def test_areas_are_filled_up_to_their_edges_and_lie_over_one_another() -> None:
    step = Area(((5, 5), (15, 5), (15, 15), (25, 15), (25, 25), (5, 25)), "#ff0000")
    pixels = drawn(step, Area(((5, 20), (10, 20), (10, 25), (5, 25)), "#0000ff"))
    assert colour_at(pixels, 10, 10) == RED
    assert colour_at(pixels, 20, 10) == WHITE
    assert colour_at(pixels, 20, 20) == RED
    assert colour_at(pixels, 7, 22) == BLUE
    painted = (pixels != 255).any(axis=2)
    assert painted.sum() == 9 * (10 * 20 + 10 * 10)


def test_a_dashed_line_has_gaps_and_a_solid_one_none() -> None:
    points = ((2.0, 10.0), (38.0, 10.0))
    solid, dashed = (drawn(Line(points, "#ff0000", 2.0, dash)) for dash in ((), (4.0, 4.0)))
    assert {colour_at(solid, x, 10) for x in range(3, 38)} == {RED}
    assert [colour_at(dashed, x, 10) == RED for x in (4, 8, 12, 16)] == [True, False, True, False]


@pytest.mark.parametrize(("anchor", "begin"), [("start", 20.0), ("middle", 14.0), ("end", 8.0)])
def test_text_stands_at_its_anchor(anchor: str, begin: float) -> None:
    words = "mm"
    pixels = drawn(Text(20.0, 20.0, words, anchor, "#0000ff"))
    columns = np.flatnonzero((pixels != 255).any(axis=(0, 2))) / 3
    assert columns[0] == pytest.approx(20.0 - (20.0 - begin) / 12.0 * width_of(words, 11), abs=1.0)
    assert columns[-1] - columns[0] == pytest.approx(width_of(words, 11), abs=1.5)


@pytest.mark.slow
def test_there_is_a_letter_for_all_that_pictures_say(dump: Dump) -> None:
    said = [
        shape.words
        for shape in drawing_of(subject_of(plan_of(dump("chainer")), "plan")).shapes
        if isinstance(shape, Text)
    ]
    assert said
    for words in (*said, *map(str, Kind), "0123456789 B KiB MiB GiB TiB PiB"):
        assert strokes_of(words, 11)
        assert width_of(words, 11) > 0


@pytest.mark.browser
def test_a_browser_shows_the_pixels(dump: Dump, tmp_path: Path) -> None:
    path = tmp_path / "curve.png"
    path.write_bytes(png_of(subject_of(plan_of(dump("chainer")), "plan")))
    with browser().page(path, until="document.images[0].complete") as page:
        assert page.run("[document.images[0].naturalWidth, document.images[0].naturalHeight]") == [2160, 1020]


@pytest.mark.slow
def test_nothing_to_show_is_a_picture_of_nothing() -> None:
    assert decoded(png_of(subject_of(Document("graph", Graph({}, ())), "empty"))).shape == (1020, 2160, 3)
