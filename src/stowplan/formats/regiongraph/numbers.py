"""Lists of numbers as OCR leaves them: O for 0, l for 1, a blank or an element lost."""

import re
from collections.abc import Sequence
from functools import cache

from stowplan.formats.regiongraph.spelling import as_digits

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
