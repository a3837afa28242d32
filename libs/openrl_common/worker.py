"""The life of a worker process (trainer, sampler): lease, phases, ready record, drain.

Start gate (B7): the launcher made ``lease.<assignment>`` *starting* before it started this process; the worker makes it
*live* by CAS from that very revision before it touches the device, renews it, exits on a tombstone, and parks (the
``parked`` event) when it cannot renew for longer than the lease. A worker that is cut off from the bus waits, it does
not exit (B5).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import psutil

from openrl_common import settings
from openrl_common.bus import Bus
from openrl_common.errors import Conflict, Rejected, Transient
from openrl_common.health import check
from openrl_common.liveness import LEASE_S, RENEW_S
from openrl_common.pause import pause
from openrl_common.phase_metrics import PhaseMetrics
from openrl_common.records import LeaseRecord, LeaseState, Phase, ReadyRecord, WorkloadRecord
from openrl_common.service import SERVICE_SETTINGS, ServiceContext, ServiceSettings, run
from openrl_common.store import Store
from openrl_common.turns import Move, Turns, TurnStopped

log = logging.getLogger(__name__)

_RECORD_S = 30.0
_GATE_LOOK_S = 0.5

WORKLOAD = settings.setting("--workload", required=True, help="The workload this process is (set by the launcher).")
ASSIGNMENT = settings.setting("--assignment", required=True, help="The seat it was started for (set by the launcher).")
NODE = settings.setting("--node", default="", help="The node it runs on (set by the launcher).")
DEVICE_BYTES = settings.setting(
    "--device-bytes", type=settings.BYTES, default="0", help="Device memory its seat declares (set by the launcher)."
)
START_GATE_WAIT_S = settings.setting(
    "--start-gate-wait",
    name="start_gate_wait_s",
    type=settings.SECONDS,
    default="0s",
    help="How long to wait for the launcher to open the start gate: a pod may run before its seat is on an allocated "
    "claim, and again after its container was restarted. 0: it must be open (set by the launcher).",
)
WORKER_SETTINGS = (*SERVICE_SETTINGS, WORKLOAD, ASSIGNMENT, NODE, DEVICE_BYTES, START_GATE_WAIT_S)


@dataclass(frozen=True)
class WorkerSettings(ServiceSettings):
    """The values of WORKER_SETTINGS; a worker's own dataclass extends it."""

    workload: str
    assignment: str
    node: str
    device_bytes: int
    start_gate_wait_s: float


@dataclass
class WorkerContext:
    """What a worker's main gets. ``await live.wait()`` has passed before it is called: the device may be touched."""

    service: ServiceContext
    bus: Bus
    store: Store
    workload: WorkloadRecord
    assignment: str
    node: str
    home: Path
    device_bytes: int
    stopping: asyncio.Event
    phases: list[Phase] = field(default_factory=list)
    renewed_at: float = field(default_factory=time.monotonic)
    turns: Turns | None = None
    process: str = field(default_factory=lambda: f"{os.getpid()}#{secrets.token_hex(4)}")
    """Of this process and no other: in a pod every pid is 1."""
    _ready_at: float | None = None
    _detail: dict[str, str] = field(default_factory=dict)
    _ready_revision: int = 0

    @property
    def holder(self) -> str:
        """What the lease calls this process."""
        return f"{self.node}:{self.process}"

    @property
    def lease_held(self) -> bool:
        """False when the lease could not be renewed for longer than it lasts: park until it is True again."""
        return time.monotonic() - self.renewed_at < LEASE_S

    def turn(self) -> contextlib.AbstractAsyncContextManager[None]:
        """``async with worker.turn():`` around work on the device; raises TurnStopped when told to stop first (T4)."""
        return contextlib.nullcontext() if self.turns is None else self.turns.hold()

    async def boundary(self) -> None:
        """A safe boundary within a turn: the device is left and entered again when somebody waits long enough (T3)."""
        if self.turns is not None:
            await self.turns.boundary()

    def movers(self, park: Move, resume: Move) -> None:
        """How to leave the device and come back (T5); a worker that never says so cannot yield."""
        if self.turns is not None:
            self.turns.movers(park, resume)

    @contextlib.contextmanager
    def stamp(self, name: str, detail: str = "") -> Iterator[None]:
        """Record one phase of the start: UTC start, monotonic duration."""
        started_at, started = time.time(), time.monotonic()
        yield
        self.phases.append(Phase(name=name, started_at=started_at, seconds=time.monotonic() - started, detail=detail))

    async def publish_phases(self) -> None:
        """Show how far the start is (``openrl status``); while the bus is away that is left for the next time (B5)."""
        try:
            await self._write_ready()
        except Transient as error:
            log.warning("ready record not updated: %s", error)

    async def _write_ready(self) -> None:
        """Write the ready record as it stands.

        By compare-and-swap, because the launcher writes it too once this process has ended: a try that was given up as
        lost, or last words still on their way, must not land on what was said later (E7).
        """
        while True:
            record = ReadyRecord(
                assignment=self.assignment,
                workload=self.workload.workload,
                ready=self._ready_at is not None,
                phases=tuple(self.phases),
                process_started_at=psutil.Process().create_time(),
                ready_at=self._ready_at,
                detail=self._detail,
            )
            try:
                self._ready_revision = await self.store.ready.write(self.assignment, record, last=self._ready_revision)
                return
            except Conflict:
                standing = await self.store.ready.get(self.assignment)
                self._ready_revision = 0 if standing is None else standing.revision

    async def ready(self, detail: dict[str, str] | None = None) -> None:
        """The worker answers requests from here on. Waits while the bus is away: what is loaded stays loaded (B5).

        Raises Transient when told to stop meanwhile.
        """
        self._ready_at = self._ready_at or time.time()
        self._detail |= detail or {}
        while True:
            try:
                await self._write_ready()
                return
            except Transient as error:
                if self.stopping.is_set():
                    raise
                log.warning("not said yet that this worker is ready: %s", error)
            await pause(self.stopping, RENEW_S)

    async def note(self, detail: dict[str, str]) -> None:
        """Add to the ready record's detail, whether ready or not. Raises Transient."""
        self._detail |= detail
        await self._write_ready()


WorkerMain = Callable[[WorkerContext], Awaitable[None]]


def run_worker(service: str, config: WorkerSettings, main: WorkerMain) -> NoReturn:
    """Run a worker process until it is told to stop, then end the process with its exit code."""

    async def body(context: ServiceContext) -> None:
        await _work(context, config, main)

    code = run(service, config, body, instance=config.assignment)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is saved and said. Taking torch and its threads down in order takes seconds (5 s were seen), during
    # which the seat is not free and the first waiter waits.
    os._exit(code)


async def _record(store: Store, workload: str, assignment: str) -> WorkloadRecord | None:
    """What this worker is, once placement has written it.

    A worker on a seat that was booked at once can be here before that. What stands there until then is nothing, or an
    earlier incarnation of the same name, which may be of another model and have the device for itself.
    """
    deadline = time.monotonic() + _RECORD_S
    while True:
        seat = await store.ledger_seats.get(workload)
        entry = await store.workloads.get(workload)
        seated = seat.value.incarnation if seat is not None and seat.value.assignment == assignment else 0
        if seat is None:  # the ledger's bucket is lost (L7): its launcher has the seat's entry
            launched = await store.workers.get(assignment)
            seated = launched.value.entry.incarnation if launched is not None and launched.value.entry else 0
        if entry is not None and entry.value.incarnation >= seated:
            return entry.value
        if time.monotonic() >= deadline:
            return None
        await asyncio.sleep(0.1)


async def _work(context: ServiceContext, config: WorkerSettings, main: WorkerMain) -> None:
    store = context.bus.store
    workload = await _record(store, config.workload, config.assignment)
    if workload is None:
        raise Rejected(
            f"workload {config.workload!r} has no record: it was withdrawn, or --nats-url is another system's"
        )
    worker = WorkerContext(
        service=context,
        bus=context.bus,
        store=store,
        workload=workload,
        assignment=config.assignment,
        node=config.node,
        home=config.home,
        device_bytes=config.device_bytes,
        stopping=context.stopping,
    )
    process_started = psutil.Process().create_time()
    worker.phases.append(
        Phase(name="start", started_at=process_started, seconds=max(0.0, time.time() - process_started))
    )
    context.registry.register(PhaseMetrics(worker.phases))
    revision = await _go_live(worker, wait_s=config.start_gate_wait_s)
    if revision is None:
        return
    await worker.publish_phases()  # its first word: it has started, what takes long now is its own work (F2)
    context.checks["lease"] = check(lambda: worker.lease_held, "the lease could not be renewed lately")
    renewing = asyncio.create_task(_renew(worker, revision), name="renew lease")
    worker.turns = Turns(worker, context.registry)
    working = asyncio.ensure_future(_with_turns(worker, worker.turns, main))
    try:
        await asyncio.wait({renewing, working}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():  # fenced: the seat is not ours any more
            context.stopping.set()
            context.bus.stopping.set()
            await asyncio.wait({working}, timeout=5.0)
        if working.done():
            working.result()
        if renewing.done():
            renewing.result()
    finally:
        for task in (renewing, working):
            task.cancel()
        await asyncio.gather(renewing, working, return_exceptions=True)


async def _with_turns(worker: WorkerContext, turns: Turns, main: WorkerMain) -> None:
    """Run the main; a fault of the turns ends it: a worker that failed to park must not go on (T5)."""
    working: asyncio.Future[None] | None = None
    try:
        await turns.start()
        working = asyncio.ensure_future(main(worker))
        await asyncio.wait({working, *turns.tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in turns.tasks:
            if task.done():
                task.result()
        await working
    except TurnStopped as stopped:
        log.info("%s", stopped)
    finally:
        if working is not None and not working.done():
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
        await turns.close()


async def _go_live(worker: WorkerContext, *, wait_s: float) -> int | None:
    """Starting → live by CAS. None: fenced before the start, or another process is live on this assignment.

    With ``wait_s`` a lease that is absent, or live from this worker's last start, may still become starting.
    """
    deadline = time.monotonic() + wait_s
    while True:
        entry = await worker.store.leases.get(worker.assignment)
        over = entry is not None and entry.value.state in (LeaseState.STARTING, LeaseState.TOMBSTONE)
        if over or worker.stopping.is_set() or time.monotonic() >= deadline:
            break
        await asyncio.sleep(_GATE_LOOK_S)
    if entry is None or entry.value.state is not LeaseState.STARTING:
        state = "absent" if entry is None else entry.value.state
        log.warning("lease is %s, not starting: this process must not run assignment=%s", state, worker.assignment)
        return None
    live = LeaseRecord(state=LeaseState.LIVE, holder=worker.holder, renewals=0)
    try:
        return await worker.store.leases.write(worker.assignment, live, last=entry.revision)
    except Conflict:
        log.warning("lease was fenced while starting assignment=%s", worker.assignment)
        return None


async def _renew(worker: WorkerContext, revision: int) -> None:
    """Renew until fenced; returns then. A bus outage only delays: nobody expires while the bus is away (E13)."""
    renewals = 0
    while True:
        await asyncio.sleep(RENEW_S)
        renewals += 1
        record = LeaseRecord(state=LeaseState.LIVE, holder=worker.holder, renewals=renewals)
        sent_at = time.monotonic()
        try:
            revision = await worker.store.leases.write(worker.assignment, record, last=revision)
        except Conflict:
            standing = await _own_revision(worker, revision)
            if standing is None:
                log.warning("fenced: the lease is not ours any more assignment=%s", worker.assignment)
                return
            revision = standing  # held again once a renewal from there is confirmed
            continue
        except Transient as error:
            log.warning("lease not renewed: %s", error)
            continue
        worker.renewed_at = sent_at  # not when the answer came: whoever judges the lease saw the write before that


async def _own_revision(worker: WorkerContext, last: int) -> int | None:
    """Where the lease stands while it is still this process's: a renewal given up as lost may land later (E7).

    None: fenced, or another process's. ``last`` when nobody can tell now.
    """
    try:
        entry = await worker.store.leases.get(worker.assignment)
    except Transient as error:
        log.warning("lease not read: %s", error)
        return last
    if entry is None or entry.value.state is not LeaseState.LIVE or entry.value.holder != worker.holder:
        return None
    return entry.revision
