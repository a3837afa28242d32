"""The ledger's shell: drives the steps of the core against the store and the bus, several events at once.

Several replicas may run: they share one durable consumer, and every write is a compare-and-swap. The janitor runs in
each, two sightings apart and through the same rules; that two replicas repair the same thing at once is harmless.

Mirrors answer reads for which an old copy will do. What this replica writes it learns at once, so with one replica the
first compare-and-swap lands; another replica's write makes it lose, and the core then reads from the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Histogram

from openrl_common.bus import Bus, Delivery, Handler
from openrl_common.controls import LedgerState, LedgerStateAnswer
from openrl_common.duty import Duty
from openrl_common.errors import Conflict, Poison, Transient, UnknownOutcome
from openrl_common.events import ClaimRetired, Event, Repaired, SeatBooked, SeatRefused
from openrl_common.names import query_subject
from openrl_common.pause import pause
from openrl_common.process_name import process_is_gone, this_process
from openrl_common.records import ClaimRecord, ClaimState, SeatRecord, SeatState
from openrl_common.service import ServiceContext, ServiceSettings, until_stopped
from openrl_common.store import Bucket, Entry, Mirror
from openrl_ledger.core import janitor
from openrl_ledger.core.decide import decide, separate
from openrl_ledger.core.nodes import NodePolicy
from openrl_ledger.core.ops import Contended, Emit, Environment, Lost, Pause, Read, Steps, Table, Write
from openrl_ledger.core.turns import TurnPolicy
from openrl_ledger.founding import Founding
from openrl_ledger.nodes_service import NodeJudge
from openrl_ledger.retention_service import Retention, Retirer
from openrl_ledger.turns_service import Arbiter

log = logging.getLogger(__name__)

T = TypeVar("T")

SUBJECTS = [
    "openrl.ev.placement.*.seat.*.requested",
    "openrl.ev.placement.*.seat.*.release-requested",
    "openrl.ev.launcher._fleet.claim.*.*",
    "openrl.ev.launcher.*.worker.*.gone",
]
_MIRRORED = (Table.CLAIMS, Table.BUDGETS, Table.NODES)
_CONCURRENCY = 128
_ASK_AGAIN_S = 60.0
_DUTY_LOOK_S = 0.5
_PAUSE_S = 0.002
_PAUSE_MAX_S = 0.25
_REST = 4.0
"""What the janitor rests while it reads leases, in multiples of what that takes: bookings do not wait for it."""


@dataclass(frozen=True)
class LedgerSettings(ServiceSettings):
    max_seats_per_claim: int
    janitor_every_s: float
    coresidency: bool = True
    device_reserve_bytes: int = 512 << 20
    max_turn_s: float = 120.0
    turn_grace_s: float = 30.0
    load_grace_s: float = 1800.0
    nodes: NodePolicy = field(default_factory=NodePolicy)
    keep_records_s: float = 8 * 86_400.0


class Ledger:
    """One replica. ``handle`` is what the consumer calls; tests call it too."""

    def __init__(self, bus: Bus, limit: int) -> None:
        self._bus = bus
        self._buckets: dict[Table, Bucket[Any]] = {table: getattr(bus.store, table.value) for table in Table}
        self.environment = Environment(
            limit=limit, now=time.time, mint=lambda prefix: f"{prefix}-{secrets.token_hex(6)}"
        )
        self.on_event: list[Any] = []
        self._mirrors: dict[Table, Mirror[Any]] = {}
        self._retiring: dict[str, float] = {}

    async def start(self) -> None:
        """Follow the tables whose old copies are of use. Without it every read goes to the server."""
        for table in _MIRRORED:
            self._mirrors[table] = await self._buckets[table].mirror(on_change=self._forget_gone)
        for key, entry in list(self._mirrors[Table.CLAIMS].entries.items()):
            self._forget_gone(key, entry)

    async def close(self) -> None:
        for mirror in self._mirrors.values():
            await mirror.close()

    async def handle(self, delivery: Delivery) -> None:
        """A job's two requests side by side: after one another, the first claims of later jobs would be founded in
        between, and get the device that the job's second worker is due (W1)."""
        parts = [self.drive(decide(each, self.environment)) for each in separate(delivery.event())]
        for ended in await asyncio.gather(*parts, return_exceptions=True):
            if isinstance(ended, BaseException):
                raise ended

    @property
    def claims(self) -> Mirror[ClaimRecord]:
        """The live copy of the claims, once started."""
        return self._mirrors[Table.CLAIMS]

    def judge(self, policy: NodePolicy, registry: CollectorRegistry) -> NodeJudge:
        """The judge of this replica's view of the nodes, once started."""
        return NodeJudge(
            self._bus, self.environment, self.drive, policy, registry,
            records=self._mirrors[Table.NODES], budgets=self._mirrors[Table.BUDGETS], clock=time.monotonic,
        )  # fmt: skip

    async def drive(self, steps: Steps[T]) -> T:
        """Run a rule to its end. A crash anywhere in between loses nothing: redelivery re-derives (E6)."""
        answer: Any = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as ended:
                return cast(T, ended.value)
            except Contended as error:
                raise Transient(f"{error}: too many other writers, trying again") from error
            match step:
                case Read(table, key, old_copy):
                    answer = await self._read(table, key, old_copy)
                case Write(table, key, value, last):
                    answer = await self._write(table, key, value, last)
                case Emit(event):
                    await self._emit(event)
                    answer = None
                case Pause(tries):
                    await asyncio.sleep(random.uniform(0, min(_PAUSE_S * 2 ** min(tries, 8), _PAUSE_MAX_S)))
                    answer = None

    async def _write(self, table: Table, key: str, value: Any, last: int) -> int | Lost:
        try:
            revision = await self._buckets[table].write(key, value, last=last)
        except UnknownOutcome:
            return Lost.UNKNOWN
        except Conflict:
            return Lost.DEFINITE
        if table in self._mirrors:
            self._mirrors[table].learn(Entry(key, value, revision))
        return revision

    async def _read(self, table: Table, key: str, old_copy: bool) -> Entry[Any] | None:
        mirror = self._mirrors.get(table)
        if old_copy and mirror is not None and key in mirror.entries:
            return mirror.entries[key]
        entry = await self._buckets[table].get(key)
        if mirror is not None and entry is not None:
            mirror.learn(entry)
        return entry

    async def _emit(self, event: Event) -> None:
        await self._bus.publish(event)
        for callback in self.on_event:
            callback(event)

    async def tidy(self, grace_s: float, repaired: Counter, duty: Duty) -> None:
        """The janitor's pass, for ever, by the replica whose duty it is (L6)."""
        before: set[janitor.Leftover] = set()
        async with contextlib.AsyncExitStack() as stack:
            seats: Mirror[SeatRecord] | None = None
            while not self._bus.stopping.is_set():
                try:
                    if duty.held and seats is None:  # listed in every pass they would take a tenth of a core
                        seats = await self._bus.store.ledger_seats.mirror()
                        stack.push_async_callback(seats.close)
                    before = await self._tidy_once(seats, before, repaired) if duty.held and seats else set()
                except Transient as error:
                    log.warning("janitor pass left for the next one: %s", error)
                # By who has the duty soon after it starts: all seats are listed once, best before others come to it.
                await pause(self._bus.stopping, grace_s if duty.held else min(grace_s, _DUTY_LOOK_S))

    async def _tidy_once(
        self, followed: Mirror[SeatRecord], before: set[janitor.Leftover], repaired: Counter
    ) -> set[janitor.Leftover]:
        """Repair what this snapshot and the one before both show; returns what this one shows.

        Mirrors will do for it: each repair looks once more. Leases are renewed too often to be followed.
        """
        leases = await self._bus.store.leases.list(rest=_REST)
        seats, claims = _values(followed.entries), _values(self._mirrors[Table.CLAIMS].entries)
        for key in {seat.claim for seat in seats.values() if seat.state is not SeatState.EMPTY} - claims.keys():
            with contextlib.suppress(Poison):  # cannot be read: as if it were missing
                gone = await self._buckets[Table.CLAIMS].get(key)  # kept there, not in memory
                if gone is not None:
                    claims[key] = gone.value
        budgets, seen = _values(self._mirrors[Table.BUDGETS].entries), set[janitor.Leftover]()
        for part in janitor.sightings(seats, claims, budgets, _values(leases)):
            seen |= part
            await asyncio.sleep(0)
        for leftover in sorted(seen & before):
            seat = seats.get(leftover.workload)
            log.warning("janitor repairs %s", leftover)
            await self.drive(janitor.repair(leftover, leftover.tenant or "_fleet", seat.incarnation if seat else 0))
            repaired.labels(leftover.kind).inc()
            await self._emit(
                Repaired(
                    kind=leftover.kind, at=self.environment.now(), workload=leftover.workload,
                    assignment=leftover.assignment, claim=leftover.claim, node=leftover.node,
                )
            )  # fmt: skip
        limit = self.environment.limit
        for key in [key for key, claim in claims.items() if claim.state.stands and claim.limit != limit]:
            await self.drive(janitor.restate_limit(key, limit))
        await self._ask_again(janitor.retiring(claims))
        return seen

    async def _ask_again(self, retiring: dict[str, str]) -> None:
        """Launchers free retiring claims from what is stored; one that still stands after a minute is said again."""
        now = self.environment.now()
        self._retiring = {claim: self._retiring.get(claim, now) for claim in retiring}
        for claim, since in self._retiring.items():
            if now - since >= _ASK_AGAIN_S:
                self._retiring[claim] = now
                await self._emit(ClaimRetired(claim=claim, node=retiring[claim]))

    def _forget_gone(self, key: str, entry: Entry[Any] | None) -> None:
        """Claims that are gone are kept in the bucket (ids are never reused, E9), not in memory."""
        if entry is not None and isinstance(entry.value, ClaimRecord) and entry.value.state is ClaimState.GONE:
            mirror = self._mirrors.get(Table.CLAIMS)
            if mirror is not None:
                mirror.entries.pop(key, None)


def _values(entries: Mapping[str, Entry[T]]) -> dict[str, T]:
    return {key: entry.value for key, entry in entries.items()}


async def serve(context: ServiceContext, config: LedgerSettings) -> None:
    """The body of the service: once the bucket has an identity, consume events, and by duty tidy and judge nodes."""
    bus, registry = context.bus, context.registry
    founding = Founding(bus)
    context.checks["ledger"] = founding.problem
    bound = context.require("consumer", "the ledger's consumer is not bound yet")
    await _tell_state(context, config, founding)
    await founding.wait(context.stopping)
    ledger = Ledger(bus, config.max_seats_per_claim)
    policy = TurnPolicy(
        coresidency=config.coresidency, reserve_bytes=config.device_reserve_bytes, max_turn_s=config.max_turn_s,
        grace_s=config.turn_grace_s, load_grace_s=config.load_grace_s,
    )  # fmt: skip
    arbiter = Arbiter(bus, ledger.environment, ledger.drive, policy, registry)
    duty = Duty(
        bus.store.duties,
        "upkeep",
        holder=f"{this_process()}#{secrets.token_hex(4)}",  # one process may run several, in tests
        clock=time.monotonic,
        gone=lambda holder: process_is_gone(holder.rpartition("#")[0]),
    )
    repaired = Counter("openrl_ledger_janitor_repairs", "Leftovers repaired", ["kind"], registry=registry)
    await ledger.start()
    await arbiter.start(ledger.claims)
    try:
        await until_stopped(
            context.stopping,
            bus.consume(
                stream="OPENRL_EVENTS",
                durable="ledger",
                subjects=SUBJECTS,
                handler=_measured(ledger, registry),
                concurrency=_CONCURRENCY,
                bound=bound,
            ),
            duty.keep(bus.stopping),
            ledger.tidy(config.janitor_every_s, repaired, duty),
            ledger.judge(config.nodes, registry).watch(duty),
            Retirer(bus, Retention(keep_s=config.keep_records_s), registry).watch(duty),
            founding.identity.watch(bus.stopping),
            arbiter.consume(),
            arbiter.watch(),
        )
    finally:
        await arbiter.close()
        await ledger.close()


async def _tell_state(context: ServiceContext, config: LedgerSettings, founding: Founding) -> None:
    async def answer(_: LedgerState) -> LedgerStateAnswer:
        known = founding.identity.known
        return LedgerStateAnswer(active=bool(known), identity=known, seat_limit=config.max_seats_per_claim)

    await context.bus.serve(query_subject("ledger", "state"), LedgerState, answer)


def _measured(ledger: Ledger, registry: CollectorRegistry) -> Handler:
    """The ledger's handler, with its time and its answers counted."""
    handled = Histogram("openrl_ledger_handle_seconds", "Time to handle one event", registry=registry)
    answers = Counter("openrl_ledger_answers", "Bookings and refusals", ["answer"], registry=registry)

    def count(event: Event) -> None:
        if isinstance(event, SeatBooked):
            answers.labels("founded" if event.founded else "joined").inc()
        elif isinstance(event, SeatRefused):
            answers.labels(event.code).inc()

    async def handle(delivery: Delivery) -> None:
        with handled.time():
            await ledger.handle(delivery)

    ledger.on_event.append(count)
    return handle
