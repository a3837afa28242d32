"""One replica at a time tidies up (L6, E13), and what is over is kept no longer than it guards something (E9)."""

from __future__ import annotations

import asyncio
import sys
import time

import pytest
from prometheus_client import CollectorRegistry

from openrl_common import duty as duty_module
from openrl_common import streams
from openrl_common.bus import Bus
from openrl_common.duty import Duty
from openrl_common.errors import Conflict, Transient
from openrl_common.process_name import process_is_gone, this_process
from openrl_common.records import (
    ClaimRecord,
    ClaimState,
    CutRecord,
    CutState,
    DutyRecord,
    LeaseRecord,
    LeaseState,
    ReadyRecord,
    SeatRecord,
    SeatState,
)
from openrl_common.store import Entry
from openrl_ledger.core.retention import KEEP_S_MIN, is_over
from openrl_ledger.retention_service import Retention, Retirer
from support import until


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_l6_one_replica_has_the_duty_and_another_takes_it_over_once_it_is_silent(bus: Bus) -> None:
    """L6, E13: judged by the other's own clock since it saw the last renewal; who lost it learns it by its write."""
    clock = Clock()
    one = Duty(bus.store.duties, "upkeep", holder="one", clock=clock)
    two = Duty(bus.store.duties, "upkeep", holder="two", clock=clock)
    await one.look()
    await two.look()
    assert (one.held, two.held) == (True, False)
    for _ in range(5):
        clock.now += 3.0
        await one.look()
        await two.look()
        assert (one.held, two.held) == (True, False)
    clock.now += 9.9
    assert one.held
    await two.look()
    assert not two.held
    clock.now += 0.2
    assert not one.held, "it knows by itself, before anybody can have taken it over"
    await two.look()
    assert two.held
    await one.look()
    assert (one.held, two.held) == (False, True)


async def test_l6_silence_begins_when_a_look_is_answered_not_when_it_is_asked(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked in an outage, it showed a later renewal: two had the duty, and what one wrote the other never saw."""
    clock = Clock()
    one = Duty(bus.store.duties, "upkeep", holder="one", clock=clock)
    two = Duty(bus.store.duties, "upkeep", holder="two", clock=clock)
    await one.look()
    get = bus.store.duties.get

    async def answered_late(name: str) -> Entry[DutyRecord] | None:
        clock.now += 5.0
        await one.look()
        return await get(name)

    with monkeypatch.context() as outage:
        outage.setattr(bus.store.duties, "get", answered_late)
        await two.look()
    clock.now += 6.0
    await two.look()
    assert (one.held, two.held) == (True, False)


async def test_l6_a_duty_of_a_process_that_is_gone_is_taken_over_at_once(bus: Bus) -> None:
    """L6: only where its name tells that it ran here and does not any more."""
    clock = Clock()
    ended = await asyncio.create_subprocess_exec(sys.executable, "-c", "pass")
    pid = ended.pid
    await ended.wait()
    here = this_process()
    assert not process_is_gone(here)
    where, _, started = here.split("/")
    assert not process_is_gone(f"elsewhere/{pid}/{started}"), "another machine's: its silence must tell"
    dead = f"{where}/{pid}/{started}"
    one = Duty(bus.store.duties, "upkeep", holder=dead, clock=clock)
    two = Duty(bus.store.duties, "upkeep", holder=here, clock=clock, gone=process_is_gone)
    await one.look()
    await two.look()
    assert two.held
    with pytest.raises(Transient, match="another replica has taken over"):
        await one.confirm()
    await two.confirm()


async def test_l6_a_duty_is_handed_back_when_its_holder_stops(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duty_module, "DUTY_RENEW_S", 0.05)
    stopping, still = asyncio.Event(), asyncio.Event()
    one = Duty(bus.store.duties, "upkeep", holder="one", clock=time.monotonic)
    two = Duty(bus.store.duties, "upkeep", holder="two", clock=time.monotonic)
    first = asyncio.create_task(one.keep(stopping))
    await until(lambda: one.held)
    second = asyncio.create_task(two.keep(still))
    stopping.set()
    await first
    await until(lambda: two.held, within_s=5.0)  # at once: the silence of 10 s is for holders that died
    still.set()
    await second


async def test_l6_records_of_what_is_over_are_deleted_and_nothing_else(bus: Bus) -> None:
    """L6: by age, from the very revision that was old; the markers go too, and a mirror hears of it."""
    store = bus.store
    await store.ledger_seats.write("over", SeatRecord(closed=3), last=0)
    await store.ledger_seats.write("held", SeatRecord(state=SeatState.HELD, assignment="a", claim="c"), last=0)
    await store.ledger_claims.write("gone", ClaimRecord(state=ClaimState.GONE), last=0)
    await store.ledger_claims.write("retiring", ClaimRecord(state=ClaimState.RETIRING), last=0)
    await store.cuts.write("gone", CutRecord(state=CutState.FREED), last=0)
    await store.cuts.write("retiring", CutRecord(state=CutState.FREED), last=0)
    await store.leases.write("fenced", LeaseRecord(state=LeaseState.TOMBSTONE), last=0)
    await store.leases.write("live", LeaseRecord(state=LeaseState.LIVE), last=0)
    for assignment in ("fenced", "live"):
        await store.ready.put(assignment, ReadyRecord(assignment=assignment, workload="w", ready=True))
    mirror = await store.ledger_seats.mirror()
    retirer = Retirer(bus, Retention(keep_s=0.0, markers_s=3600.0), CollectorRegistry())
    assert await retirer.look(time.time() - 3600.0) == 0, "nothing is that old"
    assert await retirer.look(time.time() + 1.0) == 5
    assert set(await store.ledger_seats.list()) == {"held"}
    assert set(await store.ledger_claims.list()) == {"retiring"}
    assert set(await store.cuts.list()) == {"retiring"}
    assert set(await store.leases.list()) == {"live"}
    assert set(await store.ready.list()) == {"live"}
    await until(lambda: set(mirror.entries) == {"held"})
    await mirror.close()
    assert await Retirer(bus, Retention(markers_s=0.0), CollectorRegistry()).look(time.time() + 1.0) == 5
    left = await store.ledger_seats.written_before(time.time() + 1.0, 10)
    assert [old.key for old in left] == ["held"]


async def test_e9_a_join_cannot_resurrect_a_claim_whose_record_is_deleted(bus: Bus) -> None:
    """E9: a writer that still holds its revision loses, over the marker and after it is dropped."""
    claims = bus.store.ledger_claims
    revision = await claims.write("c", ClaimRecord(state=ClaimState.GONE), last=0)
    await Retirer(bus, Retention(keep_s=0.0), CollectorRegistry()).look(time.time() + 1.0)
    with pytest.raises(Conflict):
        await claims.write("c", ClaimRecord(state=ClaimState.ALLOCATED), last=revision)
    await Retirer(bus, Retention(markers_s=0.0), CollectorRegistry()).look(time.time() + 1.0)
    with pytest.raises(Conflict):
        await claims.write("c", ClaimRecord(state=ClaimState.ALLOCATED), last=revision)


async def test_l6_what_is_written_meanwhile_stays(bus: Bus) -> None:
    """A workload's seat is used again under its name: neither the deletion nor the drop of its marker takes it."""
    seats = bus.store.ledger_seats
    first = await seats.write("w", SeatRecord(closed=1), last=0)
    (old,) = await seats.written_before(time.time() + 1.0, 10)
    again = await seats.write(
        "w", SeatRecord(state=SeatState.HELD, incarnation=2, assignment="a", claim="c"), last=first
    )
    with pytest.raises(Conflict):
        await seats.delete("w", last=old.revision)
    await seats.forget_marker(old)
    standing = await seats.get("w")
    assert standing is not None
    assert standing.revision == again


def test_l6_records_outlive_every_message_that_could_still_speak_of_them() -> None:
    assert streams.EVENTS.max_age_s == KEEP_S_MIN
    assert Retention().keep_s > KEEP_S_MIN
    assert is_over(SeatRecord(closed=1))
    assert not is_over(SeatRecord(state=SeatState.RELEASING))
    assert not is_over(ClaimRecord(state=ClaimState.QUARANTINED))
    assert not is_over(CutRecord(state=CutState.QUARANTINED))
