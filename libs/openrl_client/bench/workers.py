"""``openrl bench workers``: from the launch of a trainer or sampler until it answers, with and without warm start (B6).

Real processes on a real system, a tiny model, so that what is measured is the start itself: the time from the
launcher's record to the ready record, the phases that the worker stamped, the memory that it then holds.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
import urllib.request
from pathlib import Path
from statistics import median

import msgspec

from openrl_client import Client, JobSpec, connect
from openrl_client.bench.figures import Memory, cpu_seconds, memory_of
from openrl_client.bench.machine import Machine, StorePlace, describe, store_place
from openrl_client.home import Progress
from openrl_client.local_system import LocalSystem
from openrl_client.tiny import make_tiny_model
from openrl_common.errors import Unreachable
from openrl_common.records import JobKind, ReadyRecord, WorkerRecord

_READY_S = 180.0


class WorkerStart(msgspec.Struct, frozen=True, kw_only=True):
    """``ready_s``: from the launcher's record until the worker answers. ``cpu_s``: its own user and system time."""

    workload: str
    at_once: int
    ready_s: float
    imports_s: float
    cpu_s: float
    memory: Memory


class WorkersReport(msgspec.Struct, frozen=True, kw_only=True):
    """``ready_s_1`` and ``ready_s_4``: medians of one worker alone and of four that were launched at once.

    ``warm_ready_s``: from ``openrl up`` until workers could be forked; ``warm_parent``: memory of the parent.
    """

    warm_start: str
    ready_s_1: float
    ready_s_4: float
    warm_ready_s: float
    warm_parent: Memory | None
    workers: list[WorkerStart]
    store: StorePlace
    machine: Machine


async def measure(store: Path | None, *, warm_start: str, progress: Progress) -> WorkersReport:
    """Four workers at once, then one alone, killed and started again, three times. Raises what LocalSystem raises."""
    place = store_place(store)
    Path(place.path).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="openrl-bench-", dir=place.path) as scratch:
        model = Path(scratch) / "tiny"
        await make_tiny_model(model, steps=1, environment={**os.environ, "OMP_NUM_THREADS": "1"})
        async with LocalSystem(
            Path(scratch) / "home",
            devices="4x6GiB",
            trainer_host_base="256MiB",
            sampler_host_base="256MiB",
            warm_start=warm_start,
        ) as system:
            warm_ready_s, parent = await _await_warm(system, warm_start)
            progress(f"warm start {warm_start}: workers can be launched after {warm_ready_s:.2f} s")
            async with connect(system.nats_url) as client:
                starts = await _measure(client, model, progress)
            memory = memory_of(parent) if parent else None
    return WorkersReport(
        warm_start=warm_start,
        ready_s_1=_median(starts, 1),
        ready_s_4=_median(starts, 4),
        warm_ready_s=round(warm_ready_s, 2),
        warm_parent=memory,
        workers=starts,
        store=place,
        machine=describe(),
    )


def _median(starts: list[WorkerStart], at_once: int) -> float:
    return round(median(start.ready_s for start in starts if start.at_once == at_once), 2)


async def _measure(client: Client, model: Path, progress: Progress) -> list[WorkerStart]:
    jobs = [
        await client.submit(JobSpec(name=name, kind=JobKind.FFT, base_model=str(model), dtype="float32"))
        for name in ("first", "second")
    ]
    starts = [await _start_of(client, workload, 4, 0, progress) for workload in await _workloads(client, 4)]
    for job in jobs[1:]:
        await job.cancel()
    victim = next(start.workload for start in starts if "first" in start.workload and "trainer" in start.workload)
    for times in range(1, 4):
        worker, _ = await _ready(client, victim, times - 1)
        os.kill(worker.pid, signal.SIGKILL)
        starts.append(await _start_of(client, victim, 1, times, progress))
    await jobs[0].cancel()
    return starts


async def _workloads(client: Client, num: int) -> list[str]:
    async with asyncio.timeout(_READY_S):
        while True:
            found = [entry.value.workload for entry in (await client.bus.store.workers.list()).values()]
            if len(found) == num:
                return sorted(found)
            await asyncio.sleep(0.05)


async def _ready(client: Client, workload: str, restarts: int) -> tuple[WorkerRecord, ReadyRecord]:
    """Wait until the worker that was started again ``restarts`` times is ready."""
    async with asyncio.timeout(_READY_S):
        while True:
            for assignment, entry in (await client.bus.store.workers.list()).items():
                worker = entry.value
                ready = await client.bus.store.ready.get(assignment)
                if (
                    worker.workload == workload
                    and worker.restarts >= restarts
                    and worker.pid
                    and ready is not None
                    and ready.value.ready
                    and ready.value.process_started_at >= worker.started_at - 0.1
                ):
                    return worker, ready.value
            await asyncio.sleep(0.05)


async def _start_of(client: Client, workload: str, at_once: int, restarts: int, progress: Progress) -> WorkerStart:
    worker, ready = await _ready(client, workload, restarts)
    assert ready.ready_at is not None
    start = WorkerStart(
        workload=workload,
        at_once=at_once,
        ready_s=round(ready.ready_at - worker.launched_at, 2),
        imports_s=round(sum(phase.seconds for phase in ready.phases if phase.name == "imports"), 2),
        cpu_s=round(cpu_seconds(worker.pid), 2),
        memory=memory_of(worker.pid),
    )
    progress(f"{workload}: ready in {start.ready_s:.2f} s, {at_once} at once")
    return start


async def _await_warm(system: LocalSystem, warm_start: str) -> tuple[float, int]:
    """Seconds until the launcher can fork, and the parent's pid; (0, 0) without warm start. Raises Unreachable."""
    if warm_start == "off":
        return 0.0, 0
    began = time.monotonic()
    url = f"http://127.0.0.1:{system.health_ports['launcher']}/metrics"
    while time.monotonic() - began < _READY_S:
        figures = await asyncio.to_thread(_figures, url)
        if figures.get("openrl_launcher_warm_ready") == 1.0:
            return time.monotonic() - began, int(figures["openrl_launcher_warm_pid"])
        await asyncio.sleep(0.1)
    raise Unreachable(f"no warm start after {_READY_S:g} s: see {system.home / 'logs' / 'launcher.log'}")


def _figures(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=5.0) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}
