"""Carrying out what ``core`` decided about workers: the start gate, the process, its exits, its end (B1, B4, B7, F4).

    start:  record ─▶ lease starting (CAS) ─▶ process ─▶ record, WorkerLaunched ─▶ watched
    exit:   what it left is killed ─▶ WorkerExited ─▶ back-off and start again, or left as exited (F4)
    stop:   seat read once more ─▶ lease fenced ─▶ SIGTERM, grace, SIGKILL ─▶ seen gone, memory returned ─▶ WorkerGone

Invariants: one task at a time works on an assignment (status BUSY); no assignment ever has two processes; WorkerGone
is final for it. A NATS outage makes these tasks wait, it kills nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec

from openrl_common.bus import Bus
from openrl_common.errors import Transient
from openrl_common.events import WorkerExited, WorkerFenced, WorkerGone, WorkerLaunched
from openrl_common.identity import LedgerIdentity
from openrl_common.names import SHARED
from openrl_common.records import SeatState, WorkerRecord, WorkerState
from openrl_launcher import leases
from openrl_launcher.backend import Backend, Launch, Process
from openrl_launcher.claims import Claims
from openrl_launcher.core import LocalWorker, Start, Status, Stop, judge_exit

log = logging.getLogger(__name__)

EXIT_CODE_UNKNOWN = -1
"""The worker ended while no launcher was its parent."""
EXIT_CODE_NOT_STARTED = 127

_RETRY_S = (0.1, 0.5, 1.0, 2.0, 5.0)
_MEMORY_RETURN_S = 10.0
_SAY_AGAIN_S = 5.0
_IDENTITY_S = 5.0
"""A start looks whether the ledger is the one that is known, if nobody has for so long; a rebuild takes longer."""


@dataclass
class Tracked:
    """What this launcher knows of one assignment."""

    record: WorkerRecord
    status: Status
    process: Process | None = None
    devices: tuple[str, ...] = ()
    restart_at: float = 0.0
    said_gone_at: float = 0.0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the process last attached has ended."""


class Workers:
    """The workers of one node.

    Args:
        clock, now: monotonic seconds (back-off), Unix seconds (records).
        identity: of the ledger's bucket, known; a missing seat stops a worker only while it is still that one.
        wake: asks the reconcile loop for another pass.
        spawn: runs a coroutine in the service's task group, where a Bug stops the service.
    """

    def __init__(
        self,
        bus: Bus,
        backend: Backend,
        claims: Claims,
        *,
        node: str,
        stop_grace_s: float,
        restarts_max: int,
        clock: Callable[[], float],
        now: Callable[[], float],
        wake: Callable[[], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        identity: LedgerIdentity | None = None,
    ) -> None:
        self._bus = bus
        self._store = bus.store
        self._backend = backend
        self._claims = claims
        self._node = node
        self._stop_grace_s = stop_grace_s
        self._restarts_max = restarts_max
        self._clock = clock
        self._now = now
        self._identity = identity
        self._wake = wake
        self._spawn = spawn
        self._table: dict[str, Tracked] = {}
        self._fences: dict[str, str] = {}
        self.draining = False

    def view(self) -> dict[str, LocalWorker]:
        return {
            assignment: LocalWorker(
                assignment, tracked.record.workload, tracked.record.claim, tracked.status, tracked.restart_at
            )
            for assignment, tracked in self._table.items()
        }

    def next_restart_at(self) -> float | None:
        return min((t.restart_at for t in self._table.values() if t.status is Status.BACKING_OFF), default=None)

    @property
    def running(self) -> int:
        return sum(tracked.process is not None for tracked in self._table.values())

    async def adopt(self) -> None:
        """Take over what a former launcher of this node left: its records and whatever really runs (B1)."""
        found = await asyncio.to_thread(self._backend.running)
        for assignment, entry in (await self._store.workers.list()).items():
            record = entry.value
            if not self._is_mine(record):
                continue
            tracked = self._table[assignment] = Tracked(record, Status.IDLE, devices=self._devices(record.claim))
            process = found.pop(assignment, None)
            if record.state is WorkerState.GONE and process is None:
                tracked.status = Status.GONE
            elif process is not None:
                self._take(tracked, process)
            elif record.state is WorkerState.RUNNING:
                tracked.status = Status.BUSY
                self._run(tracked, self._on_exit(tracked, None))
            elif record.state is WorkerState.BACKING_OFF:
                tracked.status = Status.BACKING_OFF
            elif record.state is WorkerState.EXITED:
                tracked.status = Status.EXITED
        for assignment, process in found.items():  # the record is lost, or its launcher wrote it only afterwards
            seat = await self._store.ledger_seats.get(process.workload) if process.workload else None
            claim = seat.value.claim if seat is not None and seat.value.assignment == assignment else ""
            record = WorkerRecord(
                assignment=assignment,
                workload=process.workload,
                tenant=_tenant_of(process.workload),
                claim=claim,
                node=self._node_of(claim),
                state=WorkerState.RUNNING,
                launched_at=process.started_at,
            )
            tracked = self._table[assignment] = Tracked(record, Status.IDLE, devices=self._devices(record.claim))
            self._take(tracked, process)

    def start(self, action: Start, devices: tuple[str, ...]) -> None:
        tracked = self._table.get(action.assignment)
        if tracked is None:
            record = WorkerRecord(
                assignment=action.assignment,
                workload=action.entry.workload,
                tenant=action.entry.tenant,
                claim=action.claim,
                node=self._node_of(action.claim),
                state=WorkerState.STOPPING,
                entry=action.entry,
            )
            tracked = self._table[action.assignment] = Tracked(record, Status.IDLE)
        tracked.status = Status.BUSY
        tracked.devices = devices
        if tracked.record.entry is None:  # found running by an earlier launcher, or recorded by an older one
            tracked.record = msgspec.structs.replace(tracked.record, entry=action.entry)
        launch = Launch(action.assignment, action.entry.workload, action.entry.role, devices, action.entry.device_bytes)
        self._run(tracked, self._start(tracked, launch))

    def stop(self, action: Stop) -> None:
        tracked = self._table.get(action.assignment)
        if tracked is None:
            record = WorkerRecord(
                assignment=action.assignment,
                workload=action.workload,
                tenant=_tenant_of(action.workload),
                claim=action.claim,
                node=self._node_of(action.claim),
                state=WorkerState.STOPPING,
            )
            tracked = self._table[action.assignment] = Tracked(record, Status.IDLE)
        before, tracked.status = tracked.status, Status.BUSY
        self._run(tracked, self._stop(tracked, before, action.why, although_held=action.although_held))

    def note_fence(self, assignment: str, why: str) -> None:
        """The ledger asked for this fence (T3): once the worker is seen gone, WorkerFenced is said too.

        The stop itself follows from the seat, which the ledger is releasing; other nodes' assignments are ignored.
        """
        tracked = self._table.get(assignment)
        if tracked is not None and tracked.status is not Status.GONE:
            log.warning("worker %s is to be fenced: %s", tracked.record.workload, why)
            self._fences[assignment] = why

    async def say_gone(self, assignment: str) -> None:
        tracked = self._table[assignment]
        if self._clock() - tracked.said_gone_at >= _SAY_AGAIN_S:
            await self._publish_gone(tracked)

    async def forget(self, assignment: str) -> None:
        await self._store.workers.delete(assignment)
        self._table.pop(assignment, None)

    async def drain(self) -> int:
        """Stop every process without touching a seat or a lease (``openrl down``): the next start resumes them."""
        self.draining = True
        stopped = self.running
        while any(t.process is not None or t.status is Status.BUSY for t in self._table.values()):
            for tracked in self._table.values():
                if tracked.process is not None and tracked.status is Status.RUNNING:
                    tracked.status = Status.BUSY
                    self._run(tracked, self._halt(tracked))
            await asyncio.sleep(0.02)
        return stopped

    # --- one task per assignment -------------------------------------------------------------------------------------

    def _run(self, tracked: Tracked, work: Coroutine[Any, Any, None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except Transient as error:
                log.warning("assignment %s: %s; trying again", tracked.record.assignment, error)
                await asyncio.sleep(_RETRY_S[1])
                tracked.status = Status.RUNNING if tracked.process is not None else Status.IDLE
            self._wake()

        self._spawn(guarded())

    async def _start(self, tracked: Tracked, launch: Launch) -> None:
        record = tracked.record
        if record.state is not WorkerState.STARTING:  # else a try that was given up
            again = record.launched_at > 0
            tracked.record = record = msgspec.structs.replace(
                record,
                state=WorkerState.STARTING,
                restarts=record.restarts + 1 if again else 0,
                launched_at=self._now(),
                log_path=str(self._backend.log_path(launch)),
                exit_code=None,
                why="",
            )
        # First, because this launcher may die the moment the process is there, and the ledger's bucket be lost with the
        # seat: on what claim it runs must be known all the same (B4, L7, T2). Nothing is waited for behind the gate.
        await self._insist(lambda: self._store.workers.put(record.assignment, record))
        gate = await leases.open_gate(self._store.leases, launch.assignment, holder=self._node)
        if gate is leases.Gate.FENCED:
            # somebody fenced it before it ran: nothing of it runs here, so it is gone
            await self._gone(tracked)
            return
        if gate is leases.Gate.TAKEN_OVER and await asyncio.to_thread(self._backend.sweep, launch.assignment) > 0:
            raise Transient(f"what an earlier process of {launch.workload} left does not end")
        if self._identity is not None:
            # Was this launcher cut off, a ledger that was rebuilt without this seat has fenced nothing.
            await self._identity.check(within_s=_IDENTITY_S)
        if self.draining:
            tracked.status = Status.IDLE
            return
        tracked.record = record = msgspec.structs.replace(record, launched_at=self._now())
        try:
            process = await self._backend.launch(launch)
        except OSError as error:
            log.error("worker %s cannot be started: %s", launch.workload, error)
            await self._on_exit(tracked, EXIT_CODE_NOT_STARTED, why=f"cannot be started: {error}")
            return
        tracked.record = record = msgspec.structs.replace(
            record, state=WorkerState.RUNNING, pid=process.pid, started_at=process.started_at
        )
        self._attach(tracked, process)
        log.info(
            "worker %s started: pid %d, restarts %d, log %s",
            record.workload,
            process.pid,
            record.restarts,
            record.log_path,
        )
        await self._insist(lambda: self._store.workers.put(record.assignment, record))
        await self._insist(
            lambda: self._bus.publish(WorkerLaunched(**record.who, restarts=record.restarts, pid=process.pid))
        )
        tracked.status = Status.RUNNING
        await self._on_exit_meanwhile(tracked)

    async def _on_exit_meanwhile(self, tracked: Tracked) -> None:
        """A process that ended while a task was at its assignment is nobody's but that task's (F4)."""
        if tracked.status is Status.RUNNING and tracked.ended.is_set():
            tracked.status = Status.BUSY
            await self._on_exit(tracked, tracked.record.exit_code)

    def _take(self, tracked: Tracked, process: Process) -> None:
        self._attach(tracked, process)
        tracked.record = msgspec.structs.replace(
            tracked.record, state=WorkerState.RUNNING, pid=process.pid, started_at=process.started_at
        )
        tracked.status = Status.RUNNING
        record = tracked.record
        log.info("worker %s found running: pid %d", record.workload, process.pid)
        self._spawn(self._insist(lambda: self._store.workers.put(record.assignment, record)))

    def _attach(self, tracked: Tracked, process: Process) -> None:
        tracked.process = process
        tracked.ended.clear()
        self._spawn(self._watch(tracked, process))

    async def _watch(self, tracked: Tracked, process: Process) -> None:
        exit_code = await self._backend.wait(process)
        if tracked.process is not process:
            return
        tracked.process = None
        tracked.ended.set()
        tracked.record = msgspec.structs.replace(tracked.record, exit_code=exit_code)
        if tracked.status is Status.RUNNING:  # else the task that works on it sees the end itself
            tracked.status = Status.BUSY
            self._run(tracked, self._on_exit(tracked, exit_code))

    async def _on_exit(self, tracked: Tracked, exit_code: int | None, *, why: str = "") -> None:
        """It ended by itself: say so, and start it again on the same booking unless it failed too often (F4)."""
        record = tracked.record
        await asyncio.to_thread(self._backend.sweep, record.assignment)
        if not why:
            why = self._backend.last_error(record.log_path)
        if exit_code is None:
            exit_code = EXIT_CODE_UNKNOWN
            why = f"exit code unknown, it ended while no launcher was its parent{'; last line: ' + why if why else ''}"
        verdict = judge_exit(
            failures_before=record.failures, ran_s=self._now() - record.launched_at, restarts_max=self._restarts_max
        )
        again = verdict.restart_in_s is not None
        log.warning("worker %s exited: code %d, will restart: %s, %s", record.workload, exit_code, again, why)
        await self._insist(lambda: self._not_ready(record))
        # the event first: a crash in between says it twice under one id, the other way round would lose it
        await self._insist(
            lambda: self._bus.publish(
                WorkerExited(**record.who, exit_code=exit_code, restarts=record.restarts, will_restart=again, why=why)
            )
        )
        tracked.record = record = msgspec.structs.replace(
            record,
            state=WorkerState.BACKING_OFF if again else WorkerState.EXITED,
            exit_code=exit_code,
            why=why,
            failures=verdict.failures,
            pid=0,
        )
        await self._insist(lambda: self._store.workers.put(record.assignment, record))
        tracked.restart_at = self._clock() + (verdict.restart_in_s or 0.0)
        tracked.status = Status.BACKING_OFF if again else Status.EXITED

    async def _not_ready(self, record: WorkerRecord) -> None:
        """What the ended process said of itself is over: events may come late or twice, this record is believed.

        By compare-and-swap: a try given up as lost must not land on what the next process says (E7).
        """
        entry = await self._store.ready.get(record.assignment)
        if entry is not None and entry.value.ready:
            over = msgspec.structs.replace(entry.value, ready=False)
            await self._store.ready.write(record.assignment, over, last=entry.revision)

    async def _stop(self, tracked: Tracked, before: Status, why: str, *, although_held: bool = False) -> None:
        record = tracked.record
        seat = None if although_held else await self._store.ledger_seats.get(record.workload)
        if seat is None and not although_held and self._identity is not None:
            await self._identity.check()  # no record at all: is it the ledger itself that is lost? (L7)
        if seat is not None and seat.value.state is SeatState.HELD and seat.value.assignment == record.assignment:
            claim = await self._store.ledger_claims.get(seat.value.claim)
            if claim is not None and record.assignment in claim.value.entries:
                tracked.status = before  # what asked for the stop was an old view: the seat is held
                await self._on_exit_meanwhile(tracked)
                return
        await self._insist(lambda: leases.fence(self._store.leases, record.assignment, why=why))
        log.info("worker %s is fenced and stopped: %s", record.workload, why)
        await self._end(tracked)
        expect_idle = not any(
            other is not tracked and other.process is not None and other.record.claim == record.claim
            for other in self._table.values()
        )
        leak = await self._memory_leak(tracked.devices, expect_idle=expect_idle)
        if leak is not None and record.claim:
            await self._insist(lambda: self._claims.quarantine(record.claim, f"worker {record.workload}: {leak}"))
        await self._gone(tracked)

    async def _halt(self, tracked: Tracked) -> None:
        await self._end(tracked)
        tracked.status = Status.IDLE

    async def _end(self, tracked: Tracked) -> None:
        """SIGTERM, the grace, SIGKILL; returns when nothing of the assignment runs."""
        process = tracked.process
        record = tracked.record = msgspec.structs.replace(tracked.record, state=WorkerState.STOPPING)
        await self._insist(lambda: self._store.workers.put(record.assignment, record))
        if process is not None:
            self._backend.terminate(process)
            try:
                async with asyncio.timeout(self._stop_grace_s):
                    await tracked.ended.wait()
            except TimeoutError:
                log.warning("worker %s ignored SIGTERM for %g s: killed", record.workload, self._stop_grace_s)
                self._backend.kill(process)
                await tracked.ended.wait()
        while await asyncio.to_thread(self._backend.sweep, record.assignment) > 0:
            log.warning("worker %s: what it left does not end yet", record.workload)

    async def _memory_leak(self, devices: tuple[str, ...], *, expect_idle: bool) -> str | None:
        deadline = self._clock() + _MEMORY_RETURN_S
        leak = self._backend.leaked(devices, expect_idle=expect_idle)
        while leak is not None and self._clock() < deadline:
            await asyncio.sleep(0.1)  # the driver sends no event
            leak = self._backend.leaked(devices, expect_idle=expect_idle)
        return leak

    async def _gone(self, tracked: Tracked) -> None:
        record = tracked.record = msgspec.structs.replace(tracked.record, state=WorkerState.GONE, pid=0)
        await self._insist(lambda: self._store.workers.put(record.assignment, record))
        why = self._fences.pop(record.assignment, None)
        if why is not None:
            await self._insist(lambda: self._bus.publish(WorkerFenced(**record.who, why=why)))
        await self._insist(lambda: self._publish_gone(tracked))
        tracked.status = Status.GONE

    async def _publish_gone(self, tracked: Tracked) -> None:
        await self._bus.publish(WorkerGone(**tracked.record.who))
        tracked.said_gone_at = self._clock()

    async def _insist(self, call: Callable[[], Awaitable[object]]) -> None:
        """Repeat an idempotent call until it succeeds: a worker's life does not end with an outage of NATS."""
        tries = 0
        while True:
            try:
                await call()
                return
            except Transient as error:
                log.warning("%s; trying again", error)
                await asyncio.sleep(_RETRY_S[min(tries, len(_RETRY_S) - 1)])
                tries += 1

    # --- what a backend of many nodes answers otherwise --------------------------------------------------------------

    def _is_mine(self, record: WorkerRecord) -> bool:
        return record.node == self._node

    def _node_of(self, claim: str) -> str:
        return self._node

    def _devices(self, claim: str) -> tuple[str, ...]:
        cut = self._claims.cuts.get(claim)
        return () if cut is None else cut.devices


def _tenant_of(workload: str) -> str:
    tenant = workload.split("--", 1)[0]
    return SHARED if f"_{tenant}" == SHARED else tenant
