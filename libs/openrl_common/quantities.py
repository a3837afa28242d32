"""Bytes and durations as people write them: ``79.65GiB``, ``512Mi``, ``1.5GB``; ``15m``, ``1h30m``, ``500ms``.

Exact (decimal arithmetic, never floats), strict (no guessing: ``5G`` is refused, because it is read both as 10^9 and as
2^30), one clear line on error. It does not parse the Kubernetes suffixes ``m``, ``k``, ``M``, ``G``: its backend does.
Kept libraries do not fit: humanfriendly multiplies floats, pytimeparse reads ``1:30``.
"""

from __future__ import annotations

import re
from decimal import Decimal

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TIB = 1024**4

_BYTE_UNITS: dict[str, int] = {
    "": 1,
    "B": 1,
    **{f"{prefix}i{suffix}": 1024**power for power, prefix in enumerate("KMGTP", 1) for suffix in ("", "B")},
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGTP", 1)},
}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s?([A-Za-z]*)", re.ASCII)
_SECONDS_PER_UNIT = {
    "d": Decimal(86_400),
    "h": Decimal(3_600),
    "m": Decimal(60),
    "s": Decimal(1),
    "ms": Decimal("0.001"),
}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|d|h|m|s))+", re.ASCII)
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|d|h|m|s)", re.ASCII)
_NUMBER = re.compile(r"\d+(?:\.\d+)?", re.ASCII)
_BYTES_MAX = 2**63 - 1
_SECONDS_MAX = 10 * 365 * 86_400
_CHARACTERS_MAX = 40


def parse_bytes(text: str) -> int:
    """Bytes of ``text``, rounded down to a whole byte, so that nothing declares more than was written.

    Raises:
        ValueError: not a size, an ambiguous or unknown unit, or more than 2^63 - 1 bytes.
    """
    match = _BYTES.fullmatch(text.strip()) if len(text) <= _CHARACTERS_MAX else None
    if match is None:
        raise ValueError(
            f"{text[:_CHARACTERS_MAX]!r} is not a size: write a number and a unit, for example 79.65GiB or 512MiB"
        )
    number, unit = match.groups()
    if unit not in _BYTE_UNITS:
        raise ValueError(
            f"{text!r} has no known unit: write KiB, MiB, GiB, TiB (powers of 1024) or kB, MB, GB, TB (1000)"
        )
    if unit == "" and "." in number:
        raise ValueError(f"{text!r} is a fraction of a byte: add a unit, for example {number}GiB")
    num_bytes = int(Decimal(number) * _BYTE_UNITS[unit])
    if num_bytes > _BYTES_MAX:
        raise ValueError(f"{text!r} is too large: at most 2^63 - 1 bytes")
    return num_bytes


def parse_seconds(text: str) -> float:
    """Seconds of a duration: parts largest first (``1h30m``), or a bare number of seconds.

    Raises:
        ValueError: not a duration, parts repeated or out of order, or more than ten years.
    """
    stripped = text.strip()
    hint = "write for example 90s, 15m, 1h30m or a number of seconds"
    if len(stripped) > _CHARACTERS_MAX:
        raise ValueError(f"{stripped[:_CHARACTERS_MAX]!r}… is not a duration: {hint}")
    if _NUMBER.fullmatch(stripped):
        seconds = Decimal(stripped)
    elif _DURATION.fullmatch(stripped):
        parts = _DURATION_PART.findall(stripped)
        ranks = [list(_SECONDS_PER_UNIT).index(unit) for _, unit in parts]
        if ranks != sorted(set(ranks)):
            raise ValueError(f"{text!r} is not a duration: each unit once, largest first; {hint}")
        seconds = sum((Decimal(number) * _SECONDS_PER_UNIT[unit] for number, unit in parts), Decimal(0))
    else:
        raise ValueError(f"{text!r} is not a duration: {hint}")
    if seconds > _SECONDS_MAX:
        raise ValueError(f"{text!r} is too long: at most ten years")
    return float(seconds)


def format_bytes(num_bytes: int) -> str:
    """The largest binary unit that keeps the number ≥ 1, at most two decimals: ``79.65 GiB``, ``512 MiB``, ``7 B``."""
    sign, rest = ("-", -num_bytes) if num_bytes < 0 else ("", num_bytes)
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if rest >= size:
            return f"{sign}{_trimmed(rest / size)} {unit}"
    return f"{sign}{rest} B"


def format_seconds(seconds: float) -> str:
    """Two units at most, as :func:`parse_seconds` reads them: ``850ms``, ``4.2s``, ``15m``, ``1h30m``, ``2d4h``."""
    if seconds < 0:
        return "-" + format_seconds(-seconds)
    if seconds < 0.9995:
        return f"{round(seconds * 1000)}ms" if seconds > 0 else "0s"
    if seconds < 59.95:
        return f"{_trimmed(round(seconds, 1))}s"
    whole = round(seconds)
    for large, small in (("d", "h"), ("h", "m"), ("m", "s")):
        large_s, small_s = int(_SECONDS_PER_UNIT[large]), int(_SECONDS_PER_UNIT[small])
        if whole >= large_s:
            rest = whole % large_s // small_s
            return f"{whole // large_s}{large}" + (f"{rest}{small}" if rest else "")
    return f"{whole}s"


def gib(num_bytes: int) -> float:
    """Bytes as GiB, for records and messages that carry GiB."""
    return num_bytes / GIB


def _trimmed(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")
