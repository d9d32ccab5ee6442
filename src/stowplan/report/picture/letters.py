"""Letters as strokes, for pictures in pixels: no font file, and every machine draws the same.

A glyph is a few strokes on a grid with the baseline at 2, small letters up to 6 and capitals up to 8. A
stroke is a row of points, each an x and a y digit; after "~" they bend a curve, after "@" a closed one.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

_GLYPHS = {
    "0": "@02424808",
    "1": "172822",
    "2": "~0708484502 0242",
    "3": "~0708484525 ~2545420203",
    "4": "32380444",
    "5": "480805 ~0547420203",
    "6": "@02424606 ~04083847",
    "7": "084812",
    "8": "@05454808 @02424505",
    "9": "@04444808 ~46420203",
    "a": "@02323606 3632",
    "b": "@02323606 0802",
    "c": "~353606023233",
    "d": "@02323606 3832",
    "e": "0434 ~343606023233",
    "f": "~38181612 0626",
    "g": "@02323606 ~36313000",
    "h": "0802 ~0406363432",
    "i": "0602 0808",
    "j": "~16111000 1818",
    "k": "0802 3603 1432",
    "l": "0802",
    "m": "0602 ~0406262422 ~2426464442",
    "n": "0602 ~0406363432",
    "o": "@02323606",
    "p": "@02323606 0600",
    "q": "@02323606 3630",
    "r": "0602 ~040626",
    "s": "~3536060434320203",
    "t": "~18141222 0626",
    "u": "~0604023234 3632",
    "v": "062246",
    "w": "0612253246",
    "x": "0632 0236",
    "y": "0622 4610",
    "z": "06360232",
    "B": "0802 ~08484505 ~05454202",
    "G": "~474808024245 4525",
    "K": "0802 4804 1542",
    "M": "0208244842",
    "P": "0802 ~08484505",
    "T": "0848 2822",
    ".": "0202",
    ",": "1201",
    ":": "0202 0505",
    "-": "0535",
    " ": "",
}
_UNITS = 8.2  # of the grid to a text's size
_BASELINE = 2
_GAP = 1.7
_BLANK = 1.6
_ROUNDS = 3  # of cutting corners: after three a curve looks smooth at any size of print

Stroke = NDArray[np.float64]  # one point per row


def strokes_of(words: str, size: float) -> list[Stroke]:
    """The strokes of a text whose baseline begins at (0, 0), y downwards."""
    found: list[Stroke] = []
    at = 0.0
    for char in words:
        found += [(stroke * (1, -1) + (at, _BASELINE)) * (size / _UNITS) for stroke in _glyph(char)]
        at += _width(char) + _GAP
    return found


def width_of(words: str, size: float) -> float:
    """From the first letter's left to the last one's right."""
    return max(0.0, sum(_width(char) + _GAP for char in words) - _GAP) * size / _UNITS


def _width(char: str) -> float:
    return max((float(stroke[:, 0].max()) for stroke in _glyph(char)), default=_BLANK)


@cache
def _glyph(char: str) -> tuple[Stroke, ...]:
    return tuple(_stroke(told) for told in _GLYPHS[char].split())


def _stroke(told: str) -> Stroke:
    digits = [float(digit) for digit in told.lstrip("~@")]
    points = np.array(digits).reshape(-1, 2)
    for _ in range(_ROUNDS if told[0] in "~@" else 0):
        points = _cut(points, closed=told[0] == "@")
    return np.vstack([points, points[:1]]) if told[0] == "@" else points


def _cut(points: Stroke, *, closed: bool) -> Stroke:
    """Every corner cut at a quarter of its sides; the ends of an open stroke stay."""
    ahead = np.roll(points, -1, axis=0) if closed else points[1:]
    here = points if closed else points[:-1]
    cut = np.stack([0.75 * here + 0.25 * ahead, 0.25 * here + 0.75 * ahead], axis=1).reshape(-1, 2)
    return cut if closed else np.vstack([points[:1], cut[1:-1], points[-1:]])
