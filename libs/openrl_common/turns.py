"""A worker's side of turns (T1-T6): ``async with worker.turn():`` around whatever touches the device.

    off the device ──work comes──▶ TurnRequested ─▶ record says resident ─▶ resume ─▶ on the device
          ▲                                                                               │
          └── TurnReleased ◀── park ◀── idle and pressed · asked, at a boundary · stale ◀─┘

Invariants:
- the device is touched only inside ``turn()``, only under the epoch that the record gives this assignment now (T4);
- TurnReleased is said only after the park has ended; a park that fails ends the process, and the turn stays with it
  until the process is gone (T5);
- the record in openrl_turns is the truth, events are hints: it is read on every hint and every ``LOOK_S`` (E5), and
  what it does not show yet is said again;
- while there are no movers (a load inside the first turn) the record says so, and nobody is asked to yield (T3);
- alone or co-resident, a turn costs a look at two fields (T1, T2). An exclusive workload has no turns at all.

Not here: what is parked and how (``parking``), who gets the turn (the ledger).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from openrl_common.errors import Transient
from openrl_common.events import TurnReleased, TurnRequested
from openrl_common.records import Residency, TurnRecord

if TYPE_CHECKING:
    from openrl_common.worker import WorkerContext

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often the record is read whatever the hints say."""
LINGER_S = 0.1
"""A worker that somebody waits for is idle after this long without work: requests of a step follow each other fast."""
_SWITCH_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0)


class TurnStopped(Transient):
    """The worker is told to stop while it waits for the device: the work in hand is not done and must be given back."""


@dataclass(frozen=True, slots=True)
class Moved:
    """One park or resume: bytes that left or entered the device, seconds, and what is still held there."""

    bytes: int
    seconds: float
    bytes_held: int = 0


Move = Callable[[], Awaitable[Moved]]


class TurnMetrics:
    """T7, of one worker."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.switch = Histogram(
            "openrl_turn_switch_seconds", "Parking and resuming.", ["part"], buckets=_SWITCH_S, registry=registry
        )
        self.wait = Histogram(
            "openrl_turn_wait_seconds", "From asking for the device to having it.", buckets=_SWITCH_S, registry=registry
        )
        self.parked_bytes = Gauge("openrl_turn_parked_bytes", "Off the device now.", registry=registry)
        self.hits = Counter(
            "openrl_turn_hits", "Work that found its worker on the device (hot), parked (warm) or new (cold).",
            ["found"], registry=registry,
        )  # fmt: skip


class Turns:
    """One worker's turns. ``start`` before the first ``turn``; ``movers`` once there is something to park."""

    def __init__(self, context: WorkerContext, registry: CollectorRegistry) -> None:
        self._context = context
        self._metrics = TurnMetrics(registry)
        self._session = secrets.token_hex(4)
        self._claim = ""
        self._park: Move | None = None
        self._resume: Move | None = None
        self._record = TurnRecord()
        self._alone = True
        self._epoch = 0
        """The epoch under which this process is on the device; 0 = it is not."""
        self._left_epoch = 0
        self._parked = False
        self._users = 0
        self._idle_since = 0.0
        self._attempt = 0
        self._hits = {"hot": 0, "warm": 0, "cold": 0}
        self._resume_seconds = 0.0
        self._lock = asyncio.Lock()
        self._hint = asyncio.Event()
        self._hint_coming = asyncio.Event()
        self._left: TurnReleased | None = None
        self._left_said_at = 0.0
        self._load_said_at = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self._unsubscribe: Callable[[], Awaitable[None]] | None = None

    # --- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Find the claim. A workload that is exclusive, or that no ledger has seated, has the device for itself."""
        if self._context.workload.shape.exclusive:
            return
        claim = await self._find_claim()
        if not claim:
            log.warning("no ledger has seated workload %s: it takes no turns", self._context.workload.workload)
            return
        self._claim = claim
        await self._give_back_what_was_left()

        async def on_hint(_body: bytes, _headers: dict[str, str]) -> None:
            self._hint.set()
            self._hint_coming.set()

        self._unsubscribe = await self._context.bus.subscribe(f"openrl.ev.ledger.*.turn.{claim}.*", on_hint)
        self._tasks.append(asyncio.create_task(self._tend(), name="turns"))

    async def _give_back_what_was_left(self) -> None:
        """Of a residency that an earlier process of this assignment had, its release may be on its way: not ours (T4).

        What is granted from here on cannot be released by anybody else.
        """
        entry = await self._context.store.turns.get(self._claim)
        residency = None if entry is None else entry.value.residents.get(self._context.assignment)
        if residency is not None:
            await self._say_left(self._released(residency.epoch, Moved(0, 0.0)))

    async def _find_claim(self) -> str:
        """The claim of this assignment. Named otherwise: the seat is moving or lost, and a fence is on its way.

        No seat, although a launcher has started this process on a claim: the ledger's bucket is lost, and will be
        rebuilt with this claim (L7). Whoever took no turns meanwhile would be on the device beside others then.
        """
        store = self._context.store
        while not self._context.stopping.is_set():
            seat = await store.ledger_seats.get(self._context.workload.workload)
            if seat is None:
                launched = await store.workers.get(self._context.assignment)
                return "" if launched is None else launched.value.claim
            if seat.value.assignment == self._context.assignment:
                return seat.value.claim
            await _pause(self._hint, LOOK_S)
        raise TurnStopped("stopped before the seat was found")

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._unsubscribe is not None:
            await self._unsubscribe()

    def movers(self, park: Move, resume: Move) -> None:
        """How to leave the device and to come back. Until this is called the worker cannot yield."""
        self._park, self._resume = park, resume
        self._load_said_at = 0.0
        self._hint.set()

    @property
    def on(self) -> bool:
        """Whether this worker takes turns at all."""
        return bool(self._claim)

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """One that ends ends the process: a park that failed (T5)."""
        return self._tasks

    # --- the worker's calls ----------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """The device is ours inside. Waits for it; raises TurnStopped when told to stop meanwhile."""
        if not self.on:
            await self._until_lease_held()
            yield
            return
        async with self._lock:
            held = self._context.lease_held
            found = "hot" if held and self._current and not self._asked and not self._parked else "cold"
            if found != "hot":
                if self._epoch and self._can_park and (self._asked or not self._current):
                    await self._leave()
                found = "warm" if self._parked else "cold"
                await self._come()
            self._users += 1
            self._hits[found] += 1
            self._metrics.hits.labels(found).inc()
        try:
            yield
        finally:
            self._users -= 1
            self._idle_since = time.monotonic()
            if self._record.waiting:
                self._hint.set()

    async def boundary(self) -> None:
        """A safe boundary inside ``hold``: leaves and comes back when asked to, or when the epoch is stale.

        Cut off for longer than the lease lasts: waits here, off the device where it can park (B5, B7).
        """
        if not self.on:
            await self._until_lease_held()
            return
        if self._current and not self._asked and self._context.lease_held:
            return
        async with self._lock:
            if self._can_park and (self._asked or not self._current):
                await self._leave()
            elif self._context.lease_held:
                return
            elif self._can_park:
                await self._park_and_keep()
            await self._come()

    # --- what the record says --------------------------------------------------------------------------------------

    @property
    def _residency(self) -> Residency | None:
        return self._record.residents.get(self._context.assignment)

    @property
    def _current(self) -> bool:
        """T4: on the device, under the epoch that the record gives now."""
        residency = self._residency
        return residency is not None and self._epoch == residency.epoch

    @property
    def _asked(self) -> bool:
        residency = self._residency
        return self._can_park and residency is not None and (
            residency.asked_at is not None or residency.fenced_at is not None
        )  # fmt: skip

    @property
    def _can_park(self) -> bool:
        return self._park is not None

    async def _refresh(self) -> None:
        """Read the record; say again what it does not show yet."""
        try:
            entry = await self._context.store.turns.get(self._claim)
            if entry is not None:
                self._record = entry.value
                self._alone = len(self._record.residents) + len(self._record.waiting) < 2
            residency = self._residency
            if self._left is not None:
                if residency is not None and residency.epoch == self._left.epoch:
                    if (
                        time.monotonic() - self._left_said_at >= LOOK_S
                    ):  # under a new id: the first may never be handled
                        self._attempt += 1
                        self._left = msgspec.structs.replace(
                            self._left, attempt=self._attempt, resaid=self._left.resaid + 1
                        )
                        await self._say_left(self._left)
                else:
                    self._left = None
        except Transient as error:
            log.warning("turns of claim %s not read: %s", self._claim, error)

    async def _until_lease_held(self) -> None:
        """Wait while the lease has lapsed by this process's own clock: whoever fences may have given the seat away."""
        while not self._context.lease_held:
            if self._context.stopping.is_set():
                raise TurnStopped("the worker is stopping, it no longer waits for its lease")
            await asyncio.sleep(LINGER_S)

    # --- coming and leaving (under the lock) -----------------------------------------------------------------------

    async def _come(self) -> None:
        """Be on the device, in turn and under a lease that is held when this returns."""
        while True:
            await self._enter()
            if self._context.lease_held:
                return
            await self._park_and_keep()  # it lapsed on the way in: resuming, and saying so, take their time

    async def _enter(self) -> None:
        asked_at = time.monotonic()
        said_at = 0.0
        while True:
            self._hint_coming.clear()
            await self._refresh()
            residency = self._residency
            if residency is not None and residency.epoch > self._left_epoch and self._context.lease_held:
                break
            if self._context.stopping.is_set():
                raise TurnStopped("the worker is stopping, it no longer waits for the device")
            waiting = self._context.assignment in self._record.waiting
            if residency is None and not waiting and time.monotonic() - said_at >= LOOK_S:
                said_at = time.monotonic()
                await self._request()
            await _pause(self._hint_coming, LOOK_S)
        self._metrics.wait.observe(time.monotonic() - asked_at)
        self._epoch = residency.epoch
        if not self._can_park:
            self._hint.set()
        if self._parked and self._resume is not None:
            moved = await self._resume()
            self._parked = False
            self._resume_seconds = moved.seconds
            self._metrics.switch.labels("resume").observe(moved.seconds)
            self._metrics.parked_bytes.set(0)
            log.info("resumed: %d bytes in %.3f s, epoch %d", moved.bytes, moved.seconds, self._epoch)
            await self._note({"resume_seconds": f"{moved.seconds:.3f}"})

    async def _leave(self) -> None:
        """Park, then say so. A failed park is a fault of the process, which keeps the turn until it is gone (T5)."""
        assert self._park is not None
        moved = Moved(0, 0.0)
        if not self._parked:
            moved = await self._park()
            self._parked = True
            self._metrics.switch.labels("park").observe(moved.seconds)
            self._metrics.parked_bytes.set(moved.bytes)
            log.info("parked: %d bytes in %.3f s, epoch %d", moved.bytes, moved.seconds, self._epoch)
        await self._say_left(self._released(self._epoch, moved))
        await self._note({"parked_bytes": str(moved.bytes), "park_seconds": f"{moved.seconds:.3f}"})

    def _released(self, epoch: int, moved: Moved) -> TurnReleased:
        """Off the device for good under this epoch: what says so, and is said again until the record shows it."""
        self._left_epoch, self._epoch = epoch, 0
        self._attempt += 1
        self._left = TurnReleased(
            tenant=self._context.workload.tenant, claim=self._claim, assignment=self._context.assignment,
            epoch=epoch, session=self._session, attempt=self._attempt, bytes_held=moved.bytes_held,
            bytes_parked=moved.bytes, park_seconds=moved.seconds, resume_seconds=self._resume_seconds,
            hits_hot=self._hits["hot"], hits_warm=self._hits["warm"],
        )  # fmt: skip
        self._hits = dict.fromkeys(self._hits, 0)
        return self._left

    async def _say_left(self, event: TurnReleased) -> None:
        self._left_said_at = time.monotonic()
        try:
            await self._context.bus.publish(event)
        except Transient as error:
            log.warning("not said yet that the turn is released: %s", error)

    async def _request(self, loading: bool | None = None) -> None:
        """Ask for a turn; with ``loading``, say of the turn it has whether it cannot yield it yet."""
        self._attempt += 1
        try:
            await self._context.bus.publish(
                TurnRequested(
                    tenant=self._context.workload.tenant, claim=self._claim, assignment=self._context.assignment,
                    epoch=self._left_epoch if loading is None else self._epoch, session=self._session,
                    attempt=self._attempt, loading=loading,
                )
            )  # fmt: skip
        except Transient as error:
            log.warning("the turn is not asked for yet: %s", error)

    async def _say_load(self) -> None:
        """Whether it can yield the turn it has, when that is not what the record shows (T3)."""
        residency, loading = self._residency, not self._can_park
        if residency is None or not self._current or not self._context.lease_held:
            return
        unsaid = residency.loading is None if loading else residency.loading is True
        if unsaid and time.monotonic() - self._load_said_at >= LOOK_S:
            self._load_said_at = time.monotonic()
            await self._request(loading)

    async def _note(self, detail: dict[str, str]) -> None:
        try:
            await self._context.note(detail)
        except Transient as error:
            log.warning("ready record not updated: %s", error)

    # --- the background --------------------------------------------------------------------------------------------

    async def _tend(self) -> None:
        """While nobody works here: follow the record, leave when somebody waits, park when cut off (B5)."""
        while True:
            self._hint.clear()
            if not self._lock.locked():
                await self._refresh()
                await self._say_load()
            idle_s = time.monotonic() - self._idle_since
            if self._users == 0 and self._epoch and self._can_park and not self._lock.locked():
                residency = self._residency
                pressed = residency is not None and residency.pressed_at is not None and idle_s >= LINGER_S
                if pressed or self._asked or not self._current:
                    await self._leave_if_idle()
                elif not self._context.lease_held and not self._alone and not self._parked:
                    await self._park_only()
            await _pause(self._hint, LINGER_S if self._record.waiting and self._epoch else LOOK_S)

    async def _leave_if_idle(self) -> None:
        async with self._lock:
            if self._users == 0 and self._epoch:
                await self._leave()

    async def _park_only(self) -> None:
        async with self._lock:
            if self._users == 0:
                await self._park_and_keep()

    async def _park_and_keep(self) -> None:
        """Cut off for longer than the lease: off the device, the turn kept; nobody could be told anyway."""
        if self._park is not None and not self._parked:
            moved = await self._park()
            self._parked = True
            log.warning("parked: the lease could not be renewed; %d bytes", moved.bytes)


async def _pause(hint: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await hint.wait()
