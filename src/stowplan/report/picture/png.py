"""A drawing as PNG: shapes are filled into fine pixels, which are averaged into those of the picture."""

import struct
import zlib
from itertools import accumulate, cycle, pairwise
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from stowplan.report.picture.letters import Stroke, strokes_of, width_of
from stowplan.report.picture.shapes import SIZE, Area, Drawing, Line, Points, Shape, Text

PIXELS = 3  # to a point: 216 to an inch, which print wants
_FINE = 2  # fine pixels to a pixel, each way
_LETTER = 1.15  # points that the stroke of a letter is wide
_DOT = 0.6  # points that a dot is wider
_RIM = 3.0
_ANCHORS = {"start": 0.0, "middle": 0.5, "end": 1.0}


class Canvas:
    """White fine pixels that shapes are drawn on."""

    def __init__(self, width: int, height: int) -> None:
        self._scale = PIXELS * _FINE
        self._pixels = np.full((height * self._scale, width * self._scale, 3), 255, dtype=np.uint8)

    def draw(self, shape: Shape) -> None:
        """Paint a shape over what is there."""
        match shape:
            case Area(points, fill):
                self._fill(np.array(points) * self._scale, _colour(fill))
            case Line(points, stroke, width, dash):
                for part in _dashed(points, dash):
                    self._stroke(part, width, _colour(stroke))
            case Text():
                self._write(shape)
            case _:
                assert_never(shape)

    def averaged(self) -> NDArray[np.uint8]:
        """The pixels of the picture."""
        rows, columns = (size // _FINE for size in self._pixels.shape[:2])
        fine = self._pixels.reshape(rows, _FINE, columns, _FINE, 3)
        mean: NDArray[np.uint8] = fine.mean(axis=(1, 3)).round().astype(np.uint8)
        return mean

    def _write(self, text: Text) -> None:
        origin = np.array((text.x - _ANCHORS[text.anchor] * width_of(text.words, SIZE), text.y))
        strokes = [stroke + origin for stroke in strokes_of(text.words, SIZE)]
        for width, colour in ((_LETTER + _RIM, "#ffffff"), (_LETTER, text.fill)):
            for stroke in strokes:
                is_dot = not np.ptp(stroke, axis=0).any()
                self._stroke(stroke, width + _DOT * is_dot, _colour(colour))

    def _fill(self, corners: NDArray[np.float64], colour: NDArray[np.uint8]) -> None:
        """Row by row between the edges that cross its middle, taken in pairs."""
        starts, ends = corners, np.roll(corners, -1, axis=0)
        for row in range(
            max(0, int(corners[:, 1].min())), min(len(self._pixels), int(corners[:, 1].max()) + 1)
        ):
            crossing = (starts[:, 1] <= row + 0.5) != (ends[:, 1] <= row + 0.5)
            (x0, y0), (x1, y1) = starts[crossing].T, ends[crossing].T
            columns = np.sort(x0 + (row + 0.5 - y0) / (y1 - y0) * (x1 - x0)).round().astype(int)
            for begin, end in columns.reshape(-1, 2).tolist():
                self._pixels[row, max(0, begin) : max(0, end)] = colour

    def _stroke(self, points: Stroke, width: float, colour: NDArray[np.uint8]) -> None:
        radius = width * self._scale / 2
        for start, end in pairwise(points * self._scale):
            self._segment(start, end, radius, colour)

    def _segment(self, start: Stroke, end: Stroke, radius: float, colour: NDArray[np.uint8]) -> None:
        """All fine pixels whose middle is no farther than the radius from the line between two points."""
        low = np.maximum(np.floor(np.minimum(start, end) - radius), 0).astype(int)
        high = np.ceil(np.maximum(start, end) + radius).astype(int) + 1
        part = self._pixels[low[1] : high[1], low[0] : high[0]]
        y, x = np.ogrid[low[1] : low[1] + part.shape[0], low[0] : low[0] + part.shape[1]]
        x, y = x + 0.5 - start[0], y + 0.5 - start[1]
        along = end - start
        share = np.clip((x * along[0] + y * along[1]) / max(float(along @ along), 1e-9), 0.0, 1.0)
        part[np.hypot(x - share * along[0], y - share * along[1]) <= radius] = colour


def _dashed(points: Points, dash: tuple[float, ...]) -> list[Stroke]:
    """The parts of a line that are drawn."""
    line = np.array(points, dtype=np.float64)
    lengths = [0.0, *accumulate(np.hypot(*np.diff(line, axis=0).T).tolist())]
    if not dash:
        return [line]
    parts: list[Stroke] = []
    at, drawn = 0.0, True
    for length in cycle(dash):
        if at >= lengths[-1]:
            return parts
        if drawn:
            parts.append(_between(line, lengths, at, min(at + length, lengths[-1])))
        at, drawn = at + length, not drawn
    return parts


def _between(line: Stroke, lengths: list[float], begin: float, end: float) -> Stroke:
    """The stretch of a line between two lengths along it, with the corners on the way."""
    corners = [length for length in lengths if begin < length < end]
    places = [begin, *corners, end]
    return np.stack([np.interp(places, lengths, line[:, dim]) for dim in (0, 1)], axis=1)


def _colour(told: str) -> NDArray[np.uint8]:
    """From "#rrggbb"."""
    return np.frombuffer(bytes.fromhex(told[1:]), dtype=np.uint8)


_METRE = 72 * PIXELS * 10_000 // 254  # pixels to a metre


def png_of_drawing(drawing: Drawing) -> bytes:
    """The drawing at three pixels to a point."""
    canvas = Canvas(drawing.width, drawing.height)
    for shape in drawing.shapes:
        canvas.draw(shape)
    return _encoded(canvas.averaged())


def _encoded(pixels: NDArray[np.uint8]) -> bytes:
    """Rows as differences to the row above, which are mostly zero, compressed."""
    height, width, _ = pixels.shape
    above = np.vstack([np.zeros_like(pixels[:1]), pixels[:-1]])
    rows = (pixels - above).reshape(height, -1)
    filtered = np.hstack([np.full((height, 1), 2, dtype=np.uint8), rows])
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
            _chunk(b"pHYs", struct.pack(">IIB", _METRE, _METRE, 1)),
            _chunk(b"IDAT", zlib.compress(filtered.tobytes(), 9)),
            _chunk(b"IEND", b""),
        )
    )


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
