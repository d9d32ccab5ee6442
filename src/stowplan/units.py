"""Bytes and seconds: reading "6GiB", writing figures people can compare."""

import re

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
    return (
        round(float(match[1]) * _BYTES[match[2].upper()])
        if "." in match[1]
        else int(match[1]) * _BYTES[match[2].upper()]
    )


def format_bytes(count: int) -> str:
    """`count` with a binary unit and three digits: 7.39 GiB, 91.9 MiB, 812 B."""
    exponent = min(4, max(0, abs(count).bit_length() - 1) // 10)
    if exponent == 0:
        return f"{count} B"
    size = count / 1024**exponent
    digits = 2 if abs(size) < 10 else 1 if abs(size) < 100 else 0
    return f"{size:.{digits}f} {('KiB', 'MiB', 'GiB', 'TiB')[exponent - 1]}"


def format_seconds(seconds: float) -> str:
    """`seconds` with the unit that keeps three digits: 22.8 ms, 1.24 s, 3 min 05 s."""
    for unit, scale in (("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3)):
        if abs(seconds) < scale * 1000:
            return f"{seconds / scale:.3g} {unit}"
    if abs(seconds) < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def format_count(count: int) -> str:
    """`count` with a decimal prefix: 1.26 T, 81.9 G, 950."""
    exponent = min(5, (len(str(abs(count))) - 1) // 3)
    return f"{count / 1000**exponent:.3g} {('', 'k', 'M', 'G', 'T', 'P')[exponent]}".rstrip()
