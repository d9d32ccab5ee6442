"""How an OCR misreads: it takes one shape for another (O for 0, l for 1), loses blanks and dots, tears words.

Two texts are compared by their keys, in which characters of one shape are one character and separators are
gone; keys that differ are compared by how many edits turn one into the other.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

_DIGITS = str.maketrans("OoQlI|!", "0001111")
ANY = "?"
_SHAPES = {"o": "0", "q": "0", "i": "1", "l": "1", "|": "1", "!": "1", ".": "", "_": "", " ": ""}
_KEYS = {
    code: _SHAPES.get(char, char if char.isalnum() else ANY)
    for code, char in enumerate(map(str.lower, map(chr, range(128))))
}
_FOREIGN = re.compile(r"[^\x00-\x7f]")


def as_digits(text: str) -> str:
    """`text` with every letter that looks like a digit replaced by it."""
    return text.translate(_DIGITS)


def key_of(text: str) -> str:
    """`text` with shapes that OCR confuses made one; ANY stands for an unreadable character."""
    return (text if text.isascii() else _FOREIGN.sub(ANY, text)).translate(_KEYS)


def swaps_letters(read: str, meant: str) -> bool:
    """Whether the two have the same letters in another order: a slip of the writer, which OCR never makes."""
    return read != meant and sorted(read) == sorted(meant)


@dataclass(frozen=True, slots=True)
class Pattern:
    """A key prepared for many comparisons: for each character, a bit per position where it stands."""

    key: str
    places: dict[str, int]
    anywhere: int

    @staticmethod
    def of(key: str) -> "Pattern":
        anywhere = sum(1 << position for position, char in enumerate(key) if char == ANY)
        places = dict.fromkeys(key, anywhere)
        for position, char in enumerate(key):
            places[char] |= 1 << position
        return Pattern(key, places, anywhere)

    def distance(self, read: str) -> int:
        """How many insertions, deletions and substitutions part `read` from the key; ANY fits everything.

        One column of the usual table per character, held as two integers of +1 and -1 steps (Myers, 1999).
        """
        full, last = (1 << len(self.key)) - 1, 1 << len(self.key) >> 1
        up, down, score = full, 0, len(self.key)
        for char in read:
            same = full if char == ANY else self.places.get(char, self.anywhere)
            across = ((same & up) + up) ^ up | same
            right, left = down | ~(across | up) & full, up & across
            score += bool(right & last) - bool(left & last)
            right, left = (right << 1 | 1) & full, left << 1 & full
            up, down = left | ~(same | down | right) & full, right & (same | down)
        return score


def nearest(read: str, patterns: Iterable[Pattern], limit: int) -> tuple[int, list[Pattern]]:
    """The smallest distance of the key `read` from any pattern, and all patterns at it up to `limit`."""
    best: list[Pattern] = []
    for pattern in patterns:
        if abs(len(pattern.key) - len(read)) > limit:
            continue
        distance = pattern.distance(read)
        if distance < limit:
            best.clear()
            limit = distance
        if distance <= limit:
            best.append(pattern)
    return limit, best
