"""The arbiter's shell (T1-T7): hears requests and releases, looks at contended claims, judges leases by its own clock.

Every replica of the ledger runs one; they share the durable consumer, and every write is a compare-and-swap. A claim
nobody waits for costs nothing: only claims with a waiter, or with a resident that is off the claim, are looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from openrl_common import settings
from openrl_common.bus import Bus, Delivery
from openrl_common.errors import Conflict, Transient
from openrl_common.events import FenceRequested, TurnGranted, TurnReleased, TurnRequested
from openrl_common.liveness import Pulses
from openrl_common.records import ClaimRecord, ClaimState, LeaseState, TurnRecord
from openrl_common.store import Entry, Mirror
from openrl_ledger.core import turns
from openrl_ledger.core.ops import Emit, Environment, Steps
from openrl_ledger.core.turn_steps import Change, look
from openrl_ledger.core.turns import TurnPolicy

log = logging.getLogger(__name__)

SUBJECTS = ["openrl.ev.worker.*.turn.*.*"]
LOOK_S = 0.25
"""How often contended claims are looked at; their leases every ``PULSE_S``."""
LOOK_IDLE_S = 8.0
"""How often records are cleared of who is gone when nobody waits."""
PULSE_S = 1.0
_SWITCH_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0)

CORESIDENCY = settings.setting(
    "--co-residency",
    name="coresidency",
    type=settings.SWITCH,
    default="on",
    help="Workers of one claim use the device together while what they declare fits; off: strictly one at a time.",
)
DEVICE_RESERVE_BYTES = settings.setting(
    "--device-reserve",
    name="device_reserve_bytes",
    type=settings.BYTES,
    default="512MiB",
    help="Device memory that co-resident workers must leave free.",
)
MAX_TURN_S = settings.setting(
    "--max-turn",
    name="max_turn_s",
    type=settings.SECONDS,
    default="120s",
    help="How long a worker may keep a device that another one waits for, before it is asked to yield.",
)
TURN_GRACE_S = settings.setting(
    "--turn-grace",
    name="turn_grace_s",
    type=settings.SECONDS,
    default="30s",
    help="How long a worker may take to yield once asked; then it is fenced and stopped.",
)
LOAD_GRACE_S = settings.setting(
    "--load-grace",
    name="load_grace_s",
    type=settings.SECONDS,
    default="30m",
    help="How long a worker that loads its model, and so cannot yield, may keep a device that another one waits for.",
)
TURN_SETTINGS = (CORESIDENCY, DEVICE_RESERVE_BYTES, MAX_TURN_S, TURN_GRACE_S, LOAD_GRACE_S)


class ClaimGauges(Collector):
    """T7: every claim with seats as it stands, read when it is scraped: kept up by the loop, 7,000 took 0.15 s."""

    def __init__(self, claims: Mirror[ClaimRecord], records: Mirror[TurnRecord], limit: int) -> None:
        self._claims, self._records, self._limit = claims, records, limit

    def collect(self) -> Iterator[GaugeMetricFamily]:
        def gauge(name: str, what: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"openrl_turns_{name}", what, labels=["claim"])

        seats = gauge("seats", "Seats on the claim.")
        limit = gauge("seat_limit", "Seat limit in force (0 = none).")
        residents = gauge("residents", "Workers that may use the device now.")
        waiting = gauge("waiting", "Workers that wait for the device.")
        for claim_id, claim in list(self._claims.entries.items()):
            if claim.value.entries:
                entry = self._records.entries.get(claim_id)
                record = TurnRecord() if entry is None else entry.value
                seats.add_metric([claim_id], len(claim.value.entries))
                limit.add_metric([claim_id], self._limit)
                residents.add_metric([claim_id], len(record.residents))
                waiting.add_metric([claim_id], len(record.waiting))
        yield from (seats, limit, residents, waiting)


class Metrics:
    """T7: what was done. A claim's switches and hits end with it, and come with TurnReleased: who never leaves the
    device, alone or co-resident, counts its hits in its own process only (``openrl_turn_hits``).
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._claims: set[str] = set()
        """Those that have series."""
        self.granted = Counter("openrl_turns_granted", "Turns granted.", registry=registry)
        self.fenced = Counter("openrl_turns_fenced", "Holders fenced: hung or dead.", registry=registry)
        self.double_holds = Counter("openrl_turns_double_holds", "More resident than may be.", registry=registry)
        self.hits = Counter("openrl_turns_hits", "Work that found its worker resident or parked.",
                            ["claim", "found"], registry=registry)  # fmt: skip
        self.switch = Histogram(
            "openrl_turns_switch_seconds",
            "Leaving (park) and entering (resume) the device.",
            ["claim", "part"],
            buckets=_SWITCH_S,
            registry=registry,
        )

    def released(self, event: TurnReleased) -> None:
        self._claims.add(event.claim)
        self.switch.labels(event.claim, "park").observe(event.park_seconds)
        self.switch.labels(event.claim, "resume").observe(event.resume_seconds)
        self.hits.labels(event.claim, "hot").inc(event.hits_hot)
        self.hits.labels(event.claim, "warm").inc(event.hits_warm)

    def keep(self, claims: Mapping[str, Entry[ClaimRecord]]) -> None:
        """End the series of all others, and of those without a seat."""
        for claim_id in [key for key in self._claims if key not in claims or not claims[key].value.entries]:
            self._claims.discard(claim_id)
            for part in ("park", "resume"):
                self.switch.remove(claim_id, part)
            for found in ("hot", "warm"):
                self.hits.remove(claim_id, found)


Drive = Callable[[Steps[TurnRecord]], Awaitable[TurnRecord]]


class Arbiter:
    """``drive`` runs steps against the store and the bus (the ledger's). ``start``, then ``consume`` and ``watch``."""

    def __init__(
        self, bus: Bus, environment: Environment, drive: Drive, policy: TurnPolicy, registry: CollectorRegistry
    ) -> None:
        self.policy = policy
        self.metrics = Metrics(registry)
        self._registry = registry
        self._bus = bus
        self._environment = environment
        self._drive = drive
        self._turns: Mirror[TurnRecord]
        self._claims: Mirror[ClaimRecord]
        self._pulses = Pulses()
        self._pulses_at = 0.0
        self._changed = asyncio.Event()
        self._dead: frozenset[str] = frozenset()

    async def start(self, claims: Mirror[ClaimRecord]) -> None:
        """``claims``: the ledger's mirror, for telling which claims need a look; a look itself reads the server."""
        self._claims = claims
        self._turns = await self._bus.store.turns.mirror(on_change=self._on_change)
        self._registry.register(ClaimGauges(claims, self._turns, self._environment.limit))

    async def close(self) -> None:
        await self._turns.close()

    def _on_change(self, _claim: str, _entry: Entry[TurnRecord] | None) -> None:
        self._changed.set()

    async def consume(self) -> None:
        await self._bus.consume(
            stream="OPENRL_EVENTS",
            durable="ledger-turns",
            subjects=SUBJECTS,
            handler=self.handle,
            concurrency=16,
            ack_wait_s=5.0,
        )

    async def handle(self, delivery: Delivery) -> None:
        """A worker asks for the device, says whether it can yield it, or has left it. Twice changes nothing."""
        event = delivery.event()
        match event:
            case TurnRequested(loading=None):
                await self._look(event.claim, partial(turns.request, assignment=event.assignment, now=time.time()))
            case TurnRequested(loading=bool(loading)):
                said = partial(turns.load, assignment=event.assignment, epoch=event.epoch, loading=loading)
                await self._look(event.claim, partial(said, policy=self.policy, now=time.time()))
            case TurnReleased():
                await self._look(event.claim, partial(turns.release, assignment=event.assignment, epoch=event.epoch))
                if delivery.deliveries == 1 and event.resaid == 0:
                    self.metrics.released(event)
            case _:
                return

    async def watch(self) -> None:
        """Time passes: turns end, graces end, leases lapse, seats go; until the bus is stopping."""
        stopping = asyncio.create_task(self._bus.stopping.wait())
        stopping.add_done_callback(lambda _: self._changed.set())
        try:
            while not self._bus.stopping.is_set():
                self._changed.clear()
                try:
                    await self._pass()
                except Transient as error:
                    self._pulses.cut_off()  # who could not be heard is not dead (E13)
                    self._dead = frozenset()
                    log.warning("turns left for the next pass: %s", error)
                contended = bool(self._contended())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S if contended else LOOK_IDLE_S):
                        await (self._bus.stopping if contended else self._changed).wait()
        finally:
            stopping.cancel()

    # --- internals -------------------------------------------------------------------------------------------------

    def _contended(self) -> list[str]:
        """Claims with a waiter or a resident that its claim does not list: all others have nothing to decide."""
        found = []
        for claim_id, entry in self._turns.entries.items():
            claim = self._claims.entries.get(claim_id)
            listed = claim.value.entries.keys() if claim is not None else ()
            if entry.value.waiting or any(assignment not in listed for assignment in entry.value.residents):
                found.append(claim_id)
        return found

    async def _pass(self) -> None:
        contended = self._contended()
        if not self._bus.connected:
            raise Transient("not connected to NATS")
        now = time.monotonic()
        self.metrics.keep(self._claims.entries)
        if now - self._pulses_at >= PULSE_S:
            self._pulses_at = now
            await self._judge({a for claim_id in contended for a in self._turns.entries[claim_id].value.residents})
        for claim_id in contended:
            await self._look(claim_id, lambda record: record)
        for claim_id, entry in list(self._turns.entries.items()):
            claim = self._claims.entries.get(claim_id)
            if claim is None and not entry.value.residents and not entry.value.waiting:
                await self._forget(claim_id, entry)

    async def _judge(self, holders: set[str]) -> None:
        """Whose lease has not changed for too long (T6). A tombstone is somebody's fence already."""
        dead = set()
        for assignment in holders:
            lease = await self._bus.store.leases.get(assignment)
            state = None if lease is None else lease.value.state
            limit_s = turns.START_LAPSE_S if state is LeaseState.STARTING else turns.LAPSE_S
            revision = 0 if lease is None else lease.revision
            lapsed = self._pulses.lapsed(assignment, revision, time.monotonic(), limit_s=limit_s)
            if lapsed and state is not LeaseState.TOMBSTONE:
                dead.add(assignment)
        self._pulses.keep(holders)
        self._dead = frozenset(dead)

    async def _look(self, claim_id: str, change: Change) -> None:
        await self._drive(self._observed(claim_id, change))

    def _observed(self, claim_id: str, change: Change) -> Steps[TurnRecord]:
        """The steps of a look, counting what they tell."""
        steps = look(claim_id, self._environment, self.policy, change, self._dead)
        answer = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as ended:
                record: TurnRecord = ended.value
                break
            if isinstance(step, Emit) and isinstance(step.event, TurnGranted):
                self.metrics.granted.inc()
            elif isinstance(step, Emit) and isinstance(step.event, FenceRequested):
                self.metrics.fenced.inc()
                log.warning("worker %s is fenced: %s", step.event.workload, step.event.why)
            answer = yield step
        claim = self._claims.entries.get(claim_id)
        if claim is not None and turns.double_hold(record, claim.value, self.policy):
            self.metrics.double_holds.inc()
            log.error("more workers are resident on claim %s than may be: %s", claim_id, sorted(record.residents))
        return record

    async def _forget(self, claim_id: str, entry: Entry[TurnRecord]) -> None:
        """The claim is gone and nobody is on it: its record goes too. Claim ids are never reused (E9)."""
        claim = await self._bus.store.ledger_claims.get(claim_id)
        if claim is None or claim.value.state is ClaimState.GONE:
            with contextlib.suppress(Conflict):
                await self._bus.store.turns.delete(claim_id, last=entry.revision)
