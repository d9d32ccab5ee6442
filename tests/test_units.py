"""Sizes that people write, and figures that people compare."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stowplan.errors import BadUse
from stowplan.units import format_bytes, format_count, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("6GiB", 6 * 2**30),
        ("512 MB", 512 * 10**6),
        ("1000", 1000),
        (" 1.5 kib ", 1536),
        ("0.3GB", 300_000_000),
        ("0", 0),
        ("6G", 6 * 2**30),
        ("6g", 6 * 2**30),
        ("6 GB", 6 * 10**9),
        ("512 mb", 512 * 10**6),
        ("2 bytes", 2),
        (".5GiB", 2**29),
        ("1e9", 10**9),
        ("1.5e3 MiB", 1500 * 2**20),
        ("6_000_000", 6_000_000),
        (812, 812),
        (1e9, 10**9),
        (1.5e9, 1_500_000_000),
        (0.9 * 2**30, 966_367_641),
        (np.int64(10**9), 10**9),
        (np.float32(2**20), 2**20),
        (Decimal("1e9"), 10**9),
        (Fraction(2**21, 2), 2**20),
    ],
)
def test_sizes_are_read_with_their_units(text: object, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "GiB", "6 gigs", "-1", "6GiB6", "1__0", "_", "٣", "1.5", "1e99", "auto", "9" * 30),
        *(-1, -1.5, 1.5, 1e300, math.inf, math.nan, Decimal("nan"), True, np.bool_(1)),
        *(None, [1], b"6GiB", np.ones(2)),
    ],
)
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(BadUse, match="write "):
        parse_bytes(text, "budget")


@given(st.integers(0, 2**60))
def test_a_formatted_size_reads_back_within_its_digits(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.006)


@given(st.integers(0, 10**16))
def test_a_formatted_count_keeps_three_digits(count: int) -> None:
    number, _, prefix = format_count(count).partition(" ")
    assert float(number) * 1000 ** " kMGTP".index(prefix or " ") == pytest.approx(count, rel=0.006)


@given(st.floats(1e-9, 119))
def test_formatted_seconds_never_turn_to_exponents(seconds: float) -> None:
    number, unit = format_seconds(seconds).split()
    assert "e" not in number
    assert float(number) * {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit] == pytest.approx(
        seconds, rel=0.006
    )


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        (format_bytes(7_938_850_064), "7.39 GiB"),
        (format_bytes(96_337_920), "91.9 MiB"),
        (format_bytes(812), "812 B"),
        (format_count(1_258_354_034_688), "1.26 T"),
        (format_count(950), "950"),
        (format_count(999_600), "1000 k"),
        (format_seconds(0.0227968), "22.8 ms"),
        (format_seconds(0.0009996), "1000 us"),
        (format_seconds(0.0), "0 s"),
        (format_seconds(1.244), "1.24 s"),
        (format_seconds(185), "3 min 05 s"),
    ],
)
def test_figures_read_as_people_write_them(shown: str, wanted: str) -> None:
    assert shown == wanted
