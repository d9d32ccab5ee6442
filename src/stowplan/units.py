"""Bytes and seconds: parse "6GiB", format figures, and make names printable."""

import re
from fractions import Fraction

from stowplan.errors import BadUse

_BYTES = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_QUANTITY = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,9})?)\s*([A-Za-z]{0,3})\s*")


def parse_bytes(text: str | int) -> int:
    """The number of bytes in "6GiB", "512 MB" or "1000"; an int passes through."""
    if isinstance(text, int):
        if text < 0:
            raise BadUse(f"{text} bytes: a size cannot be negative")
        return text
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2].upper() not in _BYTES:
        raise BadUse(f"{text!r} is not a size; write it like 6GiB, 512MB or 1000")
    return round(Fraction(match[1]) * _BYTES[match[2].upper()])


def printable(text: str) -> str:
    """`text` for a terminal: control characters become dots, line ends stay."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else "." for char in text)


def format_bytes(count: int) -> str:
    """`count` with a binary unit and three digits: 7.39 GiB, 91.9 MiB, 812 B."""
    if abs(count) < 1024:
        return f"{count} B"
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def format_count(count: int) -> str:
    """`count` with a decimal prefix: 1.26 T, 81.9 G, 950."""
    if abs(count) < 1000:
        return str(count)
    return _scaled(count, 1000, ("", "k", "M", "G", "T", "P"))


def format_seconds(seconds: float) -> str:
    """`seconds` with the unit that keeps three digits: 22.8 ms, 1.24 s, 3 min 05 s."""
    if not seconds:
        return "0 s"
    if abs(seconds) >= 120:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{_three_digits(seconds * 1e9)} ns"


def format_share(share: float) -> str:
    """A share in per cent; a small share is not shown as zero."""
    return f"{share:.2%}" if share >= 0.0001 or not share else "less than 0.01%"


def _scaled(count: int, base: int, units: tuple[str, ...]) -> str:
    """`count` in the largest unit it reaches, which is never the first."""
    exponent = 1
    while exponent < len(units) - 1 and abs(count) >= base ** (exponent + 1):
        exponent += 1
    return f"{_three_digits(count / base**exponent)} {units[exponent]}"


def _three_digits(size: float) -> str:
    """Fixed point with three significant digits, and whole numbers above 100."""
    return f"{size:.{2 if abs(size) < 10 else 1 if abs(size) < 100 else 0}f}"
