"""A storm on a running system: jobs are submitted, cancelled and finished while processes are killed.

jobs     submitted at random, ended at random, names used again; what was acknowledged is remembered
faults   kill -9 of a service or of NATS · the launcher is stopped past its workers' leases · the disk is full
calm     every fault is taken back, the system comes to rest, every job ends, the system comes to rest again
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any

import psutil

from e2e.revisions import Replay, Revisions, consumers_behind, read_lives
from openrl_client.supervisor import LocalSystem
from openrl_common.bus import Bus
from openrl_common.errors import Rejected, Transient
from openrl_common.events import (
    EVENT_DECODER,
    Event,
    JobAdmitted,
    JobCancelled,
    JobEnded,
    JobFailed,
    JobFinished,
    JobSubmitted,
)
from openrl_common.records import JobKind, JobPhase, JobSpec, Overrides
from simulation.settled import Settled

TENANT = "storm"
SERVICES = ("ledger", "placement", "launcher")
PAUSE_S = 13.0
"""Longer than a lease (10 s) and than a node may be silent."""
STEADY = Overrides(trainer_device_gib=2, sampler_device_gib=2, trainer_host_gib=1, sampler_host_gib=1)
_UNENDED_MAX = 14
_STEADY_JOBS = 2
_REST_S = 120.0
_LOOK_S = 1.0
_CHUNK = b"\0" * (1 << 20)


class Storm:
    """One storm.

    Args:
        seed: of the jobs and of the order and moments of the faults; what the machine makes of them is its own.
        witness: where the workers write down that they live, on another disk than the system's.
    """

    def __init__(self, system: LocalSystem, bus: Bus, witness: Path, *, seed: int, limit: int, model: Path) -> None:
        self._system = system
        self._bus = bus
        self._witness = witness
        self._random = Random(f"storm {seed}")
        self._limit = limit
        self._model = model
        self._unended: dict[str, JobSubmitted] = {}
        self._over = asyncio.Event()
        self._lasting = asyncio.Lock()
        self.acknowledged: list[JobSubmitted] = []
        self.faults: Counter[str] = Counter()
        self.revisions = Revisions()

    async def blow(self, plan: dict[str, int]) -> None:
        """Jobs come and go until every fault of the plan (``kill ledger``: how often, ...) has happened."""
        faults = [name for name, times in plan.items() for _ in range(times)]
        self._random.shuffle(faults)
        await self._start_steady_jobs()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._submit_jobs(tasks))
            waiting = []
            for fault in faults:
                await asyncio.sleep(self._random.uniform(0.2, 2.0))
                waiting.append(tasks.create_task(self._fault(fault)))
            await asyncio.gather(*waiting)
            self._over.set()

    # --- jobs --------------------------------------------------------------------------------------------------------

    async def _start_steady_jobs(self) -> None:
        """Some workers are there from before the first fault to after the last one, however slow the machine is."""
        for number in range(_STEADY_JOBS):
            submitted = self._job_named(f"steady-{number}", f"steady-{number}", JobKind.FFT, STEADY, 9)
            await self._insist(submitted)
            self.acknowledged.append(submitted)
        async with asyncio.timeout(_REST_S):
            while True:
                jobs = (await self._bus.store.jobs.list()).values()
                if sum(entry.value.phase is JobPhase.READY for entry in jobs) == _STEADY_JOBS:
                    return
                await asyncio.sleep(0.1)

    async def _submit_jobs(self, tasks: asyncio.TaskGroup) -> None:
        number = 0
        while not self._over.is_set():
            await asyncio.sleep(self._random.uniform(0.05, 0.6))
            if len(self._unended) < _UNENDED_MAX:
                number += 1
                tasks.create_task(self._job(number))

    async def _job(self, number: int) -> None:
        submitted = self._draw_job(number)
        life_s = self._random.choice((0.0, self._random.uniform(0.0, 1.0), self._random.uniform(1.0, 12.0)))
        how = self._random.choice((JobCancelled, JobFinished))
        self._unended[submitted.submission] = submitted
        await self._insist(submitted)
        self.acknowledged.append(submitted)
        await asyncio.sleep(life_s)
        await self._insist(how(tenant=TENANT, job=submitted.job, submission=submitted.submission))
        del self._unended[submitted.submission]

    def _draw_job(self, number: int) -> JobSubmitted:
        """Names are used again, also too early: refusals, predecessors and late ends are part of it."""
        draw = self._random
        behaviour = draw.choices(("run", "die", "flaky"), weights=(7, 1, 1))[0]
        kind = draw.choices((JobKind.FFT, JobKind.LORA), weights=(3, 1))[0]
        exclusive = draw.random() < 0.15 if kind is JobKind.FFT else None
        sizes = Overrides(
            trainer_device_gib=draw.choice((3.0, 6.0, 12.0)),
            sampler_device_gib=draw.choice((2.0, 5.0)),
            trainer_host_gib=draw.choice((1.0, 3.0)),
            sampler_host_gib=1.0,
        )
        name, priority = f"{behaviour}-{number % 10}", draw.choice((0, 0, 0, 5))
        return self._job_named(name, f"s-{number}", kind, sizes, priority, exclusive=exclusive)

    def _job_named(
        self,
        name: str,
        submission: str,
        kind: JobKind,
        sizes: Overrides,
        priority: int,
        *,
        exclusive: bool | None = None,
    ) -> JobSubmitted:
        spec = JobSpec(
            name=name,
            kind=kind,
            base_model=str(self._model),
            exclusive=exclusive,
            priority=priority,
            overrides=sizes,
        )
        return JobSubmitted(tenant=TENANT, job=name, submission=submission, spec=spec)

    async def _insist(self, event: Event) -> None:
        while True:
            try:
                return await self._bus.publish(event)
            except Transient:
                await asyncio.sleep(0.3)

    # --- faults ------------------------------------------------------------------------------------------------------

    async def _fault(self, fault: str) -> None:
        what, _, whom = fault.partition(" ")
        if what == "kill":
            os.kill(await self._running(whom), signal.SIGKILL)
        else:  # these last: kills go on meanwhile, another of them waits
            async with self._lasting:
                await (self._pause(await self._running(whom)) if what == "pause" else self._fill())
        self.faults[fault] += 1

    async def _running(self, name: str) -> int:
        """The pid of a service once it runs: one that was just killed is back within its back-off."""
        async with asyncio.timeout(60.0):
            while True:
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(self._system.pids[name] or os.getpid())
                    if process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                        return process.pid
                await asyncio.sleep(0.05)

    async def _pause(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(PAUSE_S)
        with contextlib.suppress(ProcessLookupError):  # killed while it was stopped
            os.kill(pid, signal.SIGCONT)

    async def _fill(self) -> None:
        filler = self._system.home / "filler"
        try:
            await asyncio.to_thread(_fill, filler)
            await asyncio.sleep(self._random.uniform(0.5, 4.0))
        finally:
            filler.unlink()

    # --- calm --------------------------------------------------------------------------------------------------------

    async def calm(self) -> None:
        """Wait until every wait is true, end every job, wait until nothing is left (invariants 7 and 9)."""
        for name in SERVICES:
            await self._ready(name)
        await self._rests(lambda settled: settled.waits_are_true(), "the system does not come to rest")
        await self._rests(lambda settled: settled.nothing_is_left(), "something is left", self._finish_all)

    async def _ready(self, name: str) -> None:
        """``ready`` of a start gives a service up that ended three times in a row; here it was killed."""
        async with asyncio.timeout(60.0):
            while True:
                with contextlib.suppress(Rejected):
                    return await self._system.ready(name, deadline_s=60.0)
                await asyncio.sleep(0.2)

    async def _finish_all(self) -> None:
        for entry in (await self._bus.store.jobs.list()).values():
            job = entry.value
            if not job.phase.ended:
                await self._insist(JobFinished(tenant=TENANT, job=job.job, submission=job.submission))

    async def _rests(
        self,
        problems: Callable[[Settled], list[str]],
        what: str,
        meanwhile: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        deadline = time.monotonic() + _REST_S
        while True:
            if meanwhile is not None:
                await meanwhile()
            await self.revisions.read_on(self._bus)
            lives = await asyncio.to_thread(read_lives, self._witness)
            found = problems(Replay(self._limit).at_rest(self.revisions, lives)) + await consumers_behind(self._bus)
            if not found:
                return
            assert time.monotonic() < deadline, f"{what} within {_REST_S:g} s: {found[:6]}"
            await asyncio.sleep(_LOOK_S)

    async def verdict(self) -> list[str]:
        """Invariants 1 to 6 from the stored revisions; what was acknowledged and then lost or never answered (9)."""
        await self.revisions.read_on(self._bus)
        lives = await asyncio.to_thread(read_lives, self._witness)
        return self.revisions.lost() + Replay(self._limit).check(self.revisions, lives) + self.unanswered()

    def unanswered(self) -> list[str]:
        """Acknowledged submissions without an answer, admitted ones without an end."""
        said: dict[type, set[str]] = {kind: set() for kind in (JobSubmitted, JobAdmitted, JobFailed, JobEnded)}
        for message in self.revisions.of["OPENRL_EVENTS"]:
            event = EVENT_DECODER.decode(message.data)
            if isinstance(event, JobSubmitted | JobAdmitted | JobFailed | JobEnded):
                said[type(event)].add(event.submission)
        found = []
        for job in self.acknowledged:
            who = f"submission {job.submission} of job {job.job}"
            if job.submission not in said[JobSubmitted]:
                found.append(f"{who} is not stored")
            # cancelled before the answer could be said (placement was killed, the disk full): its end is the answer
            elif job.submission not in said[JobAdmitted] | said[JobFailed] | said[JobEnded]:
                found.append(f"{who} was never answered")
            elif job.submission in said[JobAdmitted] and job.submission not in said[JobEnded]:
                found.append(f"{who} was admitted and never ended")
        return found


def _fill(filler: Path) -> None:
    """Write until the disk takes not one byte more."""
    with filler.open("wb", buffering=0) as file:
        size = len(_CHUNK)
        while size:
            try:
                if file.write(_CHUNK[:size]) < size:
                    size //= 2
            except OSError:
                size //= 2
