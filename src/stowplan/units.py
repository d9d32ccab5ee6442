"""Bytes and seconds: read sizes as people write them, format figures, and make names printable.

A size is a number of bytes, or a text with a unit:

    6GiB  6G  6g     2**30 each: one letter is binary, as in Slurm, Docker, `ulimit` and the JVM
    6GB   6 gb       10**9 each, as disks and networks count
    6000000000  6_000_000_000  6e9  1.5e9   bytes

Numbers of NumPy, PyTorch, `decimal` and `fractions` count as Python's. A part of a byte is dropped, as of
`0.9 * free`; a number below one KiB with such a part was hardly meant in bytes, and is refused.
"""

import re
from decimal import Decimal
from fractions import Fraction
from math import floor

from stowplan.errors import BadUse

_KILO, _KIBI = 10**3, 2**10
_BYTES = {"": 1, "B": 1, "BYTE": 1, "BYTES": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _BYTES |= {f"{_letter}B": _KILO**_power, f"{_letter}IB": _KIBI**_power, _letter: _KIBI**_power}
_QUANTITY = re.compile(
    r"\s*((?:[0-9][0-9_]{0,29}(?:\.[0-9]{0,9})?|\.[0-9]{1,9})(?:[eE]\+?[0-9]{1,2})?)\s*([A-Za-z]{0,5})\s*"
)
_MOST = 2**80  # bytes; more is a mistake, and would only slow arithmetic down
_WRITE = 'write "6GiB", "512MB" or a number of bytes'


def parse_bytes(amount: object, what: str = "") -> int:
    """The number of bytes in "6GiB", "512 MB", "6G", 1e9 or 1000; `what` names the argument in a refusal."""
    shown = f"{what}={amount!r}" if what else repr(amount)
    number = _number_in(amount) if isinstance(amount, str) else _number_of(amount)
    if number is None:
        raise BadUse(f"{shown} is not a size; {_WRITE}")
    if isinstance(number, float):  # as infinite sizes stay
        raise BadUse(f'{shown} is not finite; for no limit, write a size above what eager takes, as "1TiB"')
    if number < 0:
        raise BadUse(f"{shown}: a size cannot be negative; {_WRITE}")
    if number > _MOST:
        raise BadUse(f"{shown} is more than any memory; {_WRITE}")
    if number.denominator != 1 and number < _KIBI:
        raise BadUse(f'{shown} is a part of a byte; if GiB were meant, write "{amount}GiB"')
    return floor(number)


def is_automatic(budget: object) -> bool:
    """Whether a budget is "auto": what is free."""
    return isinstance(budget, str) and budget.strip().lower() == "auto"


def bytes_left(budget_bytes: int, reserve_bytes: int) -> int:
    """The budget without the reserve; BadUse if the reserve is larger."""
    if reserve_bytes > budget_bytes:
        raise BadUse(
            f"reserve is {format_bytes(reserve_bytes)} of a budget of {format_bytes(budget_bytes)}, which"
            " leaves nothing for the step: the reserve is a part of the budget; lower it or raise the budget"
        )
    return budget_bytes - reserve_bytes


def _number_in(text: str) -> Fraction | None:
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2].upper() not in _BYTES:
        return None
    try:
        return Fraction(match[1]) * _BYTES[match[2].upper()]
    except ValueError:  # misplaced underscores
        return None


def _number_of(amount: object) -> Fraction | float | None:
    """A number of any package, exactly; infinity as a float; None if it is no number."""
    item = getattr(amount, "item", None)  # of NumPy's and PyTorch's scalars
    if callable(item):
        try:
            amount = item()
        except (RuntimeError, ValueError):  # more than one element, or no data
            return None
    if isinstance(amount, bool) or not isinstance(amount, int | float | Decimal | Fraction):
        return None
    try:
        return Fraction(amount)
    except OverflowError:
        return float(amount)
    except ValueError:  # NaN
        return None


def printable(text: str) -> str:
    """`text` for a terminal: control characters become dots, line ends stay."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else "." for char in text)


def on_one_line(text: str) -> str:
    """`text` with a dot for every control character and line end, as titles and XML want it."""
    return "".join(char if char.isprintable() else "." for char in text)


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
