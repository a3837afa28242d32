"""Host memory this process may still fill: the machine's, and what its control groups leave of it.

A container's limit is not in /proc/meminfo; who reads a checkpoint of 15 GiB under a limit of 8 GiB evicts its own page
cache. Both hierarchies are read (cgroup 2, and the memory controller of cgroup 1), at every level up to the root.
Inactive file pages count as free, as in the working set that Kubernetes reports: the kernel drops them first.

It reads files only; nothing is cached. Not here: what a seat declares.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from openrl_common.quantities import format_bytes

_NO_LIMIT = 1 << 62
"""Limits at and above this are cgroup 1's way to say none."""


@dataclass(frozen=True)
class Room:
    """``num_bytes`` that may still be filled, and ``bound``: what says so, for a sentence."""

    num_bytes: int
    bound: str


def room(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Room:
    """The least of what the machine and each control group of this process leave."""
    rooms = [Room(psutil.virtual_memory().available, "available on this machine")]
    for directory, limit_name, usage_name, reclaimable in _groups(proc, cgroups):
        limit = _number(directory / limit_name)
        usage = _number(directory / usage_name)
        if limit is None or usage is None or limit >= _NO_LIMIT:
            continue
        free = max(0, limit - usage + _statistic(directory / "memory.stat", reclaimable))
        rooms.append(Room(free, f"left of the control group's limit of {format_bytes(limit)}"))
    return min(rooms, key=lambda one: one.num_bytes)


def _groups(proc: Path, cgroups: Path) -> list[tuple[Path, str, str, str]]:
    """Directories of this process's groups with the names of limit, usage and reclaimable bytes in them."""
    found: list[tuple[Path, str, str, str]] = []
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        number, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if number == "0" and not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
            root = cgroups if (cgroups / "cgroup.controllers").exists() else cgroups / "unified"
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            root = cgroups / "memory"
        else:
            continue
        # Without a namespace of its own a container sees the host's path here and only its own group in the mount.
        group = root / path.lstrip("/")
        levels = [group, *group.parents] if group.is_dir() else [root]
        found += [(level, *names) for level in levels if level == root or root in level.parents]
    return found


def _number(path: Path) -> int | None:
    """The number in a file; None when there is none (``max``)."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _statistic(path: Path, name: str) -> int:
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
