"""``openrl bench up``: the time until the whole control plane of one host is ready, and its memory."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median

import msgspec

from openrl_client.bench.figures import Memory, memory_of
from openrl_client.bench.machine import Machine, StorePlace, describe, store_place
from openrl_client.home import Progress
from openrl_client.local_system import LocalSystem


class StartReport(msgspec.Struct, frozen=True, kw_only=True):
    """``up_ready_s``: median over ``starts_s``, each on an empty store: NATS and three services answer /readyz."""

    up_ready_s: float
    starts_s: list[float]
    memory: dict[str, Memory]
    store: StorePlace
    machine: Machine


async def measure(store: Path | None, *, num_times: int, progress: Progress) -> StartReport:
    """Start and stop the system ``num_times``. Raises what LocalSystem raises; Rejected for a store in memory."""
    place = store_place(store)
    Path(place.path).mkdir(parents=True, exist_ok=True)
    starts: list[float] = []
    memory: dict[str, Memory] = {}
    for _ in range(num_times):
        with tempfile.TemporaryDirectory(prefix="openrl-bench-", dir=place.path) as scratch:
            began = time.monotonic()
            async with LocalSystem(Path(scratch), devices="2x8GiB") as system:
                starts.append(round(time.monotonic() - began, 3))
                progress(f"ready in {starts[-1]:.2f} s")
                memory = {name: memory_of(pid) for name, pid in system.pids.items()}
    return StartReport(
        up_ready_s=round(median(starts), 3), starts_s=starts, memory=memory, store=place, machine=describe()
    )
