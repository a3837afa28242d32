"""Sizes and durations are exact, strict, and say what is wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrl_common.quantities import GIB, format_bytes, format_seconds, gib, parse_bytes, parse_seconds


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("1024", 1024),
        ("7B", 7),
        ("512Mi", 512 * 1024**2),
        ("512MiB", 512 * 1024**2),
        ("22.5GiB", 24_159_191_040),
        ("79.65GiB", 85_523_536_281),  # 85,523,536,281.6 rounded down
        ("1.5GB", 1_500_000_000),
        ("64kB", 64_000),
        (" 2 TiB ", 2 * 1024**4),
    ],
)
def test_sizes_are_read_exactly(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "-1GiB",
        "1e3MiB",
        "5G",
        "1.5",
        "1GiBx",
        "1 2GiB",
        "9" * 30 + "TiB",
        "٣GiB",
        "9999999PiB",
        "nan",
        "1_0GiB",
    ],
)
def test_unclear_sizes_are_refused_and_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a size|no known unit|fraction of a byte|too large"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("90", 90),
        ("90s", 90),
        ("15m", 900),
        ("1h30m", 5400),
        ("2d", 172_800),
        ("500ms", 0.5),
        ("1.5h", 5400),
        ("1m0.5s", 60.5),
    ],
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "-1s", "soon", "1:30", "30m1h", "1m1m", "1h 30m", "1w", "11000d", "inf", "1" * 50]
)
def test_unclear_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a duration|too long"):
        parse_seconds(text)


def test_sizes_print_in_the_largest_whole_unit() -> None:
    assert [format_bytes(value) for value in (0, 7, 1536, 85_523_536_281, 24_159_191_040, -GIB)] == [
        "0 B",
        "7 B",
        "1.5 KiB",
        "79.65 GiB",
        "22.5 GiB",
        "-1 GiB",
    ]
    assert gib(GIB * 3) == 3.0


def test_durations_print_as_they_are_written() -> None:
    seconds = [0, 0.85, 0.9996, 4.25, 59.99, 60, 900, 5400, 3600, 187_200, -90]
    assert [format_seconds(value) for value in seconds] == [
        "0s",
        "850ms",
        "1s",
        "4.2s",
        "1m",
        "1m",
        "15m",
        "1h30m",
        "1h",
        "2d4h",
        "-1m30s",
    ]


@given(st.integers(min_value=0, max_value=2**62))
def test_every_printed_size_reads_back_within_its_two_decimals(num_bytes: int) -> None:
    text = format_bytes(num_bytes)
    assert abs(parse_bytes(text) - num_bytes) <= max(1, num_bytes) * 0.0051


@given(st.floats(min_value=0, max_value=300_000_000))
def test_every_printed_duration_reads_back(seconds: float) -> None:
    assert parse_seconds(format_seconds(seconds)) == pytest.approx(seconds, rel=0.05, abs=0.001)
