"""The port behind which machines stand: what the launcher asks of a place where workers run.

``local`` is the backend built now; a cluster backend implements the same protocol. Invariants: every call may be
repeated (B1: launching what runs is the caller's mistake, ending what is gone succeeds); a backend keeps no decision,
only handles of what it started; it knows no bus and no bucket.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from openrl_common.records import Device, Role


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a node offers. ``declared``: the devices are the operator's word, not hardware."""

    devices: tuple[Device, ...]
    host_allocatable_bytes: int
    declared: bool


@dataclass(frozen=True, slots=True)
class Launch:
    """One process to start. ``device_bytes`` is what the seat declares, not what the device has."""

    assignment: str
    workload: str
    role: Role
    devices: tuple[str, ...]
    device_bytes: int


@dataclass(frozen=True, slots=True)
class Process:
    """A started worker: ``started_at`` (Unix seconds, of the kernel) tells it from a later one with the same pid."""

    assignment: str
    workload: str
    pid: int
    started_at: float


class Backend(Protocol):
    """A place where workers run."""

    def inventory(self) -> Inventory:
        """Devices and host memory as they are now; asked at every beat. Raises Rejected or OSError when unknown."""

    def running(self) -> dict[str, Process]:
        """Every worker of this node and home that runs, by assignment, whoever started it."""

    async def launch(self, launch: Launch) -> Process:
        """Start a worker that outlives this process. Raises OSError when it cannot be started."""

    def log_path(self, launch: Launch) -> Path:
        """Where the worker's output goes."""

    async def wait(self, process: Process) -> int | None:
        """Return when the process is gone (a zombie counts as gone): its exit code, None when nobody can know it."""

    def terminate(self, process: Process) -> None:
        """Ask it to end. Nothing happens when it is gone."""

    def kill(self, process: Process) -> None:
        """End it now, with everything it started."""

    def sweep(self, assignment: str) -> int:
        """Kill what the worker left behind (children that outlived it); return how many are still there."""

    def leaked(self, devices: tuple[str, ...], *, expect_idle: bool) -> str | None:
        """Device memory that dead processes still hold, in one line with pid, bytes and device; None when none (B4).

        A device that does not answer is a reason as well. ``expect_idle``: no other worker is left on these devices.
        """

    def last_error(self, log_path: str) -> str:
        """The line of the worker's log that best says why it ended; empty when there is none."""
