"""Small arithmetic of measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import psutil


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` of all are not above (nearest rank); 0 of nothing."""
    if not values:
        return 0.0
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 2)


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Resident and proportional set size of one process, MB of 10^6 bytes."""

    rss_mb: float
    pss_mb: float


def memory_of(pid: int) -> Memory:
    full = psutil.Process(pid).memory_full_info()
    return Memory(rss_mb=round(full.rss / 1e6, 1), pss_mb=round(getattr(full, "pss", full.rss) / 1e6, 1))


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def machine_busy_s() -> float:
    """Seconds that the cores of this machine have been busy so far, with whatever processes."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))
