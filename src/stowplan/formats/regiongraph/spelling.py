"""How OCR misreads: it confuses shapes (O and 0, l and 1), loses blanks and dots, and splits words.

Texts are compared by keys. A key maps characters of one shape to one character and drops separators. Keys
that differ are compared by edit distance. Lists of numbers may have lost a blank or an element.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

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


LARGEST = 2**31 - 1  # the drawing says dtype=int32
_NUMBER = re.compile(r"-?[0-9]{1,400}")


def numbers_of(text: str) -> tuple[int, ...]:
    """The readable numbers of a list, in order; an unreadable one is left out, as if it were lost."""
    words = as_digits(text).replace(",", " ").split()
    return tuple(int(word) for word in words if _NUMBER.fullmatch(word))


def was_misread(text: str) -> bool:
    """Whether a character of the list had to be taken for another one."""
    return as_digits(text) != text


def digits_of(text: str) -> str:
    """All digits of a list of numbers, run together."""
    return re.sub(r"\D", "", as_digits(text))


def listed(numbers: Sequence[int]) -> str:
    """The list as the drawing writes dims."""
    return " ".join(map(str, numbers))


def run_together(numbers: Sequence[int]) -> str:
    """The digits that a list of these numbers would have."""
    return "".join(map(str, numbers))


def is_part_of(short: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether `short` is `whole` with some elements lost."""
    left = iter(whole)
    return all(number in left for number in short)


def only_split(digits: str, least: Sequence[int]) -> tuple[int, ...] | None:
    """The one way to cut `digits` into numbers that are at least these, if there is just one."""

    @cache
    def ways(start: int, dim: int) -> list[tuple[int, ...]]:
        """Up to two ways to cut what is left: the second is enough to know that there is more than one."""
        if dim == len(least):
            return [()] if start == len(digits) else []
        found: list[tuple[int, ...]] = []
        for end in range(start + 1, min(start + 10, len(digits)) + 1):
            head = digits[start:end]
            if int(head) >= least[dim] and head == str(int(head)) and len(found) < 2:
                found += [(int(head), *rest) for rest in ways(end, dim + 1)]
        return found[:2]

    cuts = ways(0, 0) if len(digits) <= 10 * len(least) else []
    return cuts[0] if len(cuts) == 1 else None
