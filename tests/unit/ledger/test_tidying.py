"""The janitor's shell (L6): what it makes of one snapshot after another. What counts as a leftover is in the core."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter

from openrl_common.errors import Conflict
from openrl_common.events import ClaimFreed, ClaimRetired, Event, Repaired, SeatBooked, SeatReleased
from openrl_common.records import ClaimState, LeaseRecord, LeaseState, SeatState
from openrl_common.store import Entry, Mirror
from openrl_ledger import service
from openrl_ledger.core.ops import Table
from openrl_ledger.service import Ledger
from unit.ledger.test_booking import founded, gone, release, request
from unit.ledger.world import Handler, World


class Kept:
    """One of the world's tables as a bucket; mirrors follow what is written through it, and a fresh one sees all."""

    def __init__(self, world: World, table: Table) -> None:
        self.world, self.table = world, table

    async def get(self, key: str) -> Entry[Any] | None:
        return self.world.tables[self.table].get(key)

    async def list(self, *, rest: float) -> dict[str, Entry[Any]]:
        return dict(self.world.tables[self.table])

    async def write(self, key: str, value: Any, *, last: int) -> int:
        standing = self.world.tables[self.table].get(key)
        if last != (standing.revision if standing else 0):
            raise Conflict(f"another revision of {key}")
        return self.world.put(self.table, key, value)

    async def mirror(self, on_change: Callable[..., None] | None = None) -> Mirror[Any]:
        mirror: Mirror[Any] = Mirror(on_change)
        self.world.followers[self.table].append(mirror)
        for entry in list(self.world.tables[self.table].values()):
            mirror.learn(entry)
        return mirror


class Followed(World):
    """A world whose tables are followed by mirrors."""

    def __init__(self) -> None:
        self.followers: dict[Table, list[Mirror[Any]]] = {table: [] for table in Table}
        super().__init__(limit=0, devices=4, host_gib=100)

    def put(self, table: Table, key: str, value: Any) -> int:
        revision = super().put(table, key, value)
        for mirror in self.followers[table]:
            mirror.learn(self.tables[table][key])
        return revision


class Tidying:
    """A replica that tidies up. ``after(what, ...)``: a pass before each of these, and one after the last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world = Followed()
        self.published: list[Event] = []
        self.duty = SimpleNamespace(held=True)
        self.now = 0.0
        self._stopping = asyncio.Event()
        self._meanwhile: list[Callable[[], object]] = []
        self._registry = CollectorRegistry()
        self._repaired = Counter("repairs", "Leftovers repaired", ["kind"], registry=self._registry)
        store = SimpleNamespace(**{table.value: Kept(self.world, table) for table in Table})
        bus = SimpleNamespace(store=store, stopping=self._stopping, publish=self._publish)
        self.ledger = Ledger(cast(Any, bus), limit=0)
        self.ledger.environment = dataclasses.replace(self.ledger.environment, now=lambda: self.now)
        monkeypatch.setattr(service, "pause", self._between)

    async def after(self, *meanwhile: Callable[[], object]) -> None:
        self._stopping.clear()
        self._meanwhile = list(meanwhile)
        await self.ledger.start()
        await self.ledger.tidy(60.0, self._repaired, cast(Any, self.duty))

    async def _publish(self, event: Event) -> None:
        self.published.append(event)

    async def _between(self, stopping: asyncio.Event, seconds: float) -> None:
        if self._meanwhile:
            self._meanwhile.pop(0)()
        else:
            stopping.set()

    def said(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.published if isinstance(event, kind)]

    def counted(self, kind: str) -> float:
        return self._registry.get_sample_value("repairs_total", {"kind": kind}) or 0.0


@pytest.fixture
def tidying(monkeypatch: pytest.MonkeyPatch) -> Tidying:
    return Tidying(monkeypatch)


def nothing() -> None:
    """Between two passes nothing happens."""


def a_booking_in_flight(world: World) -> tuple[Handler, SeatBooked]:
    """w2 has reserved on w1's claim and is about to name it: what the janitor sees of it is a reservation."""
    first = founded(world, "w1")
    booking = world.deliver(request("w2", first.claim))
    world.run_until_write(booking, Table.SEATS)
    assert {leftover.kind for leftover in world.sightings()} == {"reservation"}
    return booking, first


async def test_L6_what_one_pass_alone_has_seen_is_spared(tidying: Tidying) -> None:
    """A booking in flight looks like a leftover; a grace later it has named what it reserved."""
    world = tidying.world
    booking, first = a_booking_in_flight(world)
    await tidying.after(lambda: world.finish(booking))
    assert world.seats()["w2"].state is SeatState.HELD
    assert len(world.claims()[first.claim].entries) == 2
    assert tidying.published == []


async def test_L6_a_leftover_seen_for_the_first_time_in_a_later_pass_is_spared_as_well(tidying: Tidying) -> None:
    """Two sightings of the same thing, not two passes."""
    world, bookings = tidying.world, list[Handler]()
    await tidying.after(lambda: bookings.append(a_booking_in_flight(world)[0]))
    world.finish(bookings[0])
    assert world.seats()["w2"].state is SeatState.HELD
    assert tidying.published == []


async def test_L6_what_two_passes_have_seen_is_repaired_once_counted_and_said(tidying: Tidying) -> None:
    world = tidying.world
    _, first = a_booking_in_flight(world)
    ((left, _),) = [(a, e) for a, e in world.claims()[first.claim].entries.items() if e.workload == "w2"]
    await tidying.after(nothing, nothing)
    assert list(world.claims()[first.claim].entries) == [first.assignment]
    assert list(world.tables[Table.BUDGETS]["n1"].value.entries) == [first.assignment]
    assert [(each.kind, each.workload, each.assignment) for each in tidying.said(Repaired)] == [
        ("reservation", "w2", left)
    ]
    assert tidying.counted("reservation") == 1


async def test_L6_two_sightings_with_the_duty_lost_in_between_are_one_each(tidying: Tidying) -> None:
    """Another replica tidied meanwhile: what this one saw before tells nothing any more."""
    world = tidying.world
    a_booking_in_flight(world)

    def hold(held: bool) -> Callable[[], object]:
        return lambda: setattr(tidying.duty, "held", held)

    await tidying.after(hold(False), hold(True))
    assert tidying.published == []


async def test_L6_F3_a_releasing_seat_on_a_claim_that_is_gone_is_finished(tidying: Tidying) -> None:
    """Claims that are gone are in the bucket, not in the mirror; only a missing record means that nobody knows."""
    world = tidying.world
    first = founded(world, "w1")
    world.put(Table.LEASES, first.assignment, LeaseRecord(state=LeaseState.TOMBSTONE, found="lapsed"))
    world.handle(release("w1", first.assignment, close=False))
    claim = msgspec.structs.replace(world.claims()[first.claim], state=ClaimState.GONE, entries={})
    world.put(Table.CLAIMS, first.claim, claim)
    await tidying.after(nothing)
    assert first.claim not in tidying.ledger.claims.entries
    assert world.seats()["w1"].state is SeatState.EMPTY
    assert [event.assignment for event in tidying.said(SeatReleased)] == [first.assignment]
    assert tidying.counted("unlisted-seat") == 1


async def test_L6_a_launcher_is_asked_again_each_minute_until_it_has_freed_a_retiring_claim(tidying: Tidying) -> None:
    world = tidying.world
    first = founded(world, "w1")
    world.handle(release("w1", first.assignment, close=False))
    world.handle(gone(first))

    def at(seconds: float) -> Callable[[], object]:
        return lambda: setattr(tidying, "now", seconds)

    await tidying.after(at(59.0))
    assert tidying.said(ClaimRetired) == []
    await tidying.after(at(60.0), at(119.0))
    assert [(event.claim, event.node) for event in tidying.said(ClaimRetired)] == [(first.claim, "n1")]
    await tidying.after(at(120.0))
    assert len(tidying.said(ClaimRetired)) == 2
    world.handle(ClaimFreed(claim=first.claim, node="n1"))
    await tidying.after(at(600.0))
    assert len(tidying.said(ClaimRetired)) == 2


async def test_S7_W1_what_is_open_says_the_limit_in_force(tidying: Tidying) -> None:
    """A launcher knows from there whom a claim has a seat for; what it keeps for nobody a later waiter goes without."""
    world = tidying.world
    standing, ended = founded(world, "w1"), founded(world, "w2")
    world.handle(release("w2", ended.assignment))
    world.handle(gone(ended))
    world.handle(ClaimFreed(claim=ended.claim, node="n1"))
    before = world.claims()[ended.claim]
    entries = world.claims()[standing.claim].entries
    tidying.ledger.environment = dataclasses.replace(tidying.ledger.environment, limit=1)
    await tidying.after()
    assert (world.claims()[standing.claim].limit, world.claims()[standing.claim].entries) == (1, entries)
    assert world.claims()[ended.claim] == before
    assert tidying.published == []
