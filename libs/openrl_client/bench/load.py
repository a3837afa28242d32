"""The client's side of the seat benchmark: publishes jobs, sees seats booked, answers as the launchers do.

Times are the bus's own: a grant runs from the moment before JobSubmitted is published to the moment at which the
server stored SeatBooked (same clock on one host), so a slow reader here makes no figure better or worse.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from openrl_client.bench.fleet import Fleet
from openrl_client.errors import TimedOut
from openrl_common.bus import Bus, Delivery
from openrl_common.events import ClaimRetired, JobFailed, JobSubmitted, SeatBooked, SeatRefused
from openrl_common.quantities import GIB
from openrl_common.records import JobKind, JobSpec, Overrides

TENANT = "bench"
LARGE_JOB_GIB = 120.0
IMPOSSIBLE_GIB = 10_000.0
_STALLED_S = 30.0
_ANSWERS_AT_ONCE = 32


@dataclass(frozen=True)
class Grant:
    """One booked seat. Times are Unix seconds."""

    workload: str
    incarnation: int
    claim: str
    founded: bool
    sent_at: float
    booked_at: float


@dataclass
class Tally:
    """What came of the jobs of one phase."""

    grants: dict[str, Grant] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    late_s: list[float] = field(default_factory=list)

    @property
    def joined(self) -> int:
        return sum(not grant.founded for grant in self.grants.values())

    @property
    def founded(self) -> int:
        return sum(grant.founded for grant in self.grants.values())

    @property
    def latencies_s(self) -> list[float]:
        return [grant.booked_at - grant.sent_at for grant in self.grants.values()]

    @property
    def grants_per_s(self) -> float:
        if not self.grants:
            return 0.0
        first = min(grant.sent_at for grant in self.grants.values())
        last = max(grant.booked_at for grant in self.grants.values())
        return len(self.grants) / (last - first)


class Load:
    """Use as ``async with``: follows the ledger's and placement's events while the block lasts."""

    def __init__(self, bus: Bus, fleet: Fleet, model: str) -> None:
        self._bus = bus
        self._fleet = fleet
        self._model = model
        self._sent_at: dict[str, float] = {}
        self._left: dict[str, int] = {}
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._large: set[str] = set()
        self._failed_at: dict[str, asyncio.Future[float]] = {}
        self._answers: asyncio.Queue[SeatBooked | ClaimRetired] = asyncio.Queue()
        self._moved: asyncio.Queue[Grant] = asyncio.Queue()
        self._seen_at = time.monotonic()
        self._num_jobs = 0
        self._num_impossible = 0
        self.tally = Tally()

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[Load]:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._follow_ledger()), tasks.create_task(self._follow_failures())]
            running += [tasks.create_task(self._answer()) for _ in range(_ANSWERS_AT_ONCE)]
            await asyncio.sleep(0.5)  # the readers start at the end of the stream: let them be there
            try:
                yield self
            finally:
                for task in running:
                    task.cancel()

    # --- loads -------------------------------------------------------------------------------------------------

    async def saturate(self, num_jobs: int, *, window: int, large: bool = False) -> Tally:
        """Publish ``num_jobs``, never more than ``window`` unanswered, and wait for every seat."""
        self.tally = Tally()
        slots = asyncio.Semaphore(window)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(num_jobs):
                await self._acquire(slots)
                tasks.create_task(self._submit(self._next_job(large), slots))
        await self._settled()
        return self.tally

    async def pace(self, num_jobs: int, *, grants_per_s: float) -> Tally:
        """Publish ``num_jobs`` at a fixed rate, whatever the answers do (open loop), and wait for every seat."""
        self.tally = Tally()
        start = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for index in range(num_jobs):
                due = start + index * 2 / grants_per_s
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                self.tally.late_s.append(time.monotonic() - due)
                tasks.create_task(self._submit(self._next_job(False), None))
        await self._settled()
        return self.tally

    async def impossible(self) -> float:
        """Submit a job that no node could hold; seconds until the stream has the answer."""
        spec = self._spec(f"impossible-{self._num_impossible}", Overrides(trainer_device_gib=IMPOSSIBLE_GIB))
        self._num_impossible += 1
        answered: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._failed_at[spec.name] = answered
        sent_at = time.time()
        await self._publish(spec)
        async with asyncio.timeout(_STALLED_S):
            return await answered - sent_at

    async def wake(self) -> tuple[float, Grant]:
        """Free a seat of a full claim; seconds from the publish until the stream has the next booking, and that one."""
        freed_at = time.time()
        await self._fleet.free_a_seat()
        grant = await self._next_moved()
        return grant.booked_at - freed_at, grant

    async def wake_together(self, num_seats: int) -> tuple[float, list[Grant]]:
        """Free seats of full claims all at once; seconds until as many were booked, and these."""
        freed_at = time.time()
        await asyncio.gather(*(self._fleet.free_a_seat() for _ in range(num_seats)))
        grants = [await self._next_moved() for _ in range(num_seats)]
        return max(grant.booked_at for grant in grants) - freed_at, grants

    async def _next_moved(self) -> Grant:
        try:
            async with asyncio.timeout(_STALLED_S):
                return await self._moved.get()
        except TimeoutError:
            raise TimedOut(f"no waiting workload took a freed seat within {_STALLED_S:g} s") from None

    # --- jobs --------------------------------------------------------------------------------------------------

    def _next_job(self, large: bool) -> JobSpec:
        """Every second job is exclusive, so that both of its seats found; the other's join. Large ones wait."""
        index = self._num_jobs
        self._num_jobs += 1
        if large:
            overrides = Overrides(trainer_device_gib=LARGE_JOB_GIB, sampler_device_gib=LARGE_JOB_GIB)
            return self._spec(f"large-{index}", overrides)
        return self._spec(f"job-{index}", Overrides(), exclusive=index % 2 == 1)

    def _spec(self, name: str, overrides: Overrides, *, exclusive: bool = False) -> JobSpec:
        return JobSpec(
            name=name, kind=JobKind.FFT, base_model=self._model, exclusive=exclusive, overrides=overrides
        )  # fmt: skip

    async def _submit(self, spec: JobSpec, slots: asyncio.Semaphore | None) -> None:
        self._left[spec.name] = 2
        if slots is not None:
            self._slots[spec.name] = slots
        for role in ("trainer", "sampler"):
            workload = f"{TENANT}--{spec.name}--{role}"
            self._sent_at[workload] = time.time()
            if spec.overrides.trainer_device_gib is not None:
                self._large.add(workload)
        await self._publish(spec)

    async def _publish(self, spec: JobSpec) -> None:
        await self._bus.publish(
            JobSubmitted(tenant=TENANT, job=spec.name, submission=uuid.uuid4().hex, spec=spec),
        )

    async def _acquire(self, slots: asyncio.Semaphore) -> None:
        self._seen_at = time.monotonic()
        while True:
            try:
                async with asyncio.timeout(1.0):
                    await slots.acquire()
                return
            except TimeoutError:
                self._check_moving()

    async def _settled(self) -> None:
        self._seen_at = time.monotonic()
        while self._left:
            self._check_moving()
            await asyncio.sleep(0.02)
        async with asyncio.timeout(_STALLED_S):
            await self._answers.join()

    def _check_moving(self) -> None:
        if time.monotonic() - self._seen_at > _STALLED_S:
            first = next(iter(self._left), "")
            told = next(
                (why for key, why in self.tally.refused.items() if f"--{first}--" in key), "nothing was refused"
            )
            raise TimedOut(f"no seat was booked for {_STALLED_S:g} s, {len(self._left)} jobs wait: {first}: {told}")

    # --- following ---------------------------------------------------------------------------------------------

    async def _follow_ledger(self) -> None:
        async for delivery in self._bus.tail(stream="OPENRL_EVENTS", subject="openrl.ev.ledger.>", from_now=True):
            match delivery.event():
                case SeatBooked(tenant="bench") as booked:
                    self._on_booked(booked, delivery)
                case SeatRefused(tenant="bench") as refused:
                    self.tally.refused[refused.workload] = f"{refused.code}: {refused.message}"
                case ClaimRetired() as retired:
                    self._answers.put_nowait(retired)
                case _:
                    pass

    async def _follow_failures(self) -> None:
        subject = f"openrl.ev.placement.{TENANT}.job.*.failed"
        async for delivery in self._bus.tail(stream="OPENRL_EVENTS", subject=subject, from_now=True):
            match delivery.event():
                case JobFailed(job=job) as failed:
                    waiter = self._failed_at.pop(job, None)
                    if waiter is not None:
                        if not waiter.done():  # else its probe has ended meanwhile
                            waiter.set_result(delivery.published_at)
                    else:
                        raise TimedOut(f"job {job} failed: {failed.message}")
                case _:
                    pass

    def _on_booked(self, booked: SeatBooked, delivery: Delivery) -> None:
        self._seen_at = time.monotonic()
        grant = Grant(
            workload=booked.workload,
            incarnation=booked.incarnation,
            claim=booked.claim,
            founded=booked.founded,
            sent_at=self._sent_at.get(booked.workload, delivery.published_at),
            booked_at=delivery.published_at,
        )
        if booked.founded:
            self._answers.put_nowait(booked)
        job = booked.workload.split("--")[1]
        if job not in self._left:
            self._moved.put_nowait(grant)
            return
        if booked.workload in self.tally.grants:
            return
        self.tally.grants[booked.workload] = grant
        self._left[job] -= 1
        if self._left[job] == 0:
            del self._left[job]
            slots = self._slots.pop(job, None)
            if slots is not None:
                slots.release()

    async def _answer(self) -> None:
        while True:
            match await self._answers.get():
                case SeatBooked() as booked:
                    large = booked.workload in self._large
                    await self._fleet.answer_founded(booked, int((LARGE_JOB_GIB if large else 1.0) * GIB))
                case ClaimRetired(claim=claim, node=node):
                    await self._fleet.answer_retired(claim, node)
            self._answers.task_done()
