"""The typed buckets against a real server: CAS, delete markers, unknown outcomes, mirrors that survive restarts."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from openrl_common import streams
from openrl_common.bus import Bus
from openrl_common.errors import Bug, Conflict, Poison
from openrl_common.nats_server import NatsServer
from openrl_common.records import LeaseRecord, LeaseState
from openrl_common.service import ServiceContext, _run_body
from openrl_common.store import Entry
from support import until

LIVE = LeaseRecord(state=LeaseState.LIVE)


async def test_a_write_from_a_stale_revision_is_a_conflict(bus: Bus) -> None:
    leases = bus.store.leases
    first = await leases.write("a", LeaseRecord(state=LeaseState.STARTING), last=0)
    second = await leases.write("a", LIVE, last=first)
    with pytest.raises(Conflict):
        await leases.write("a", LIVE, last=first)
    entry = await leases.get("a")
    assert entry is not None
    assert (entry.value, entry.revision) == (LIVE, second)


async def test_last_zero_refuses_a_live_key_and_passes_over_a_delete_marker(bus: Bus) -> None:
    """E9."""
    leases = bus.store.leases
    revision = await leases.write("a", LIVE, last=0)
    with pytest.raises(Conflict):
        await leases.write("a", LIVE, last=0)
    await leases.delete("a", last=revision)
    assert await leases.get("a") is None
    assert await leases.write("a", LIVE, last=0) > revision


async def test_a_delete_from_a_stale_revision_is_a_conflict_too(bus: Bus) -> None:
    """E8: the client library raises another error class for it."""
    leases = bus.store.leases
    revision = await leases.write("a", LIVE, last=0)
    await leases.write("a", LIVE, last=revision)
    with pytest.raises(Conflict):
        await leases.delete("a", last=revision)


async def test_of_thirty_two_racers_each_lands_exactly_once(bus: Bus) -> None:
    """E11."""
    leases = bus.store.leases
    await leases.write("a", LIVE, last=0)

    async def increment() -> None:
        while True:
            entry = await leases.get("a")
            assert entry is not None
            changed = LeaseRecord(state=LeaseState.LIVE, renewals=entry.value.renewals + 1)
            try:
                await leases.write("a", changed, last=entry.revision)
            except Conflict:
                continue
            return

    await asyncio.gather(*(increment() for _ in range(32)))
    entry = await leases.get("a")
    assert entry is not None
    assert entry.value.renewals == 32


async def test_typed_views_of_one_bucket_do_not_see_each_other(bus: Bus) -> None:
    from openrl_common.records import ClaimRecord, ClaimState, SeatRecord

    await bus.store.ledger_seats.put("x", SeatRecord())
    await bus.store.ledger_claims.put("x", ClaimRecord(state=ClaimState.PENDING))
    assert list(await bus.store.ledger_seats.list()) == ["x"]
    assert list(await bus.store.ledger_claims.list()) == ["x"]
    assert await bus.store.ledger_nodes.list() == {}


async def test_garbage_in_a_bucket_is_poison_for_a_reader_and_skipped_by_a_list(bus: Bus) -> None:
    await bus.store.leases.put("good", LIVE)
    await bus.jetstream.publish("$KV.openrl_leases.lease.bad", b"\xff not json")
    with pytest.raises(Poison, match="bad"):
        await bus.store.leases.get("bad")
    assert list(await bus.store.leases.list()) == ["good"]


async def test_a_mirror_is_complete_at_once_and_follows(bus: Bus) -> None:
    for index in range(700):  # more than one batch of the reader
        await bus.store.leases.put(f"k{index}", LIVE)
    changes: list[tuple[str, bool]] = []
    mirror = await bus.store.leases.mirror(on_change=lambda key, entry: changes.append((key, entry is not None)))
    assert len(mirror.entries) == 700
    await bus.store.leases.delete("k3")
    await bus.store.leases.put("new", LIVE)
    await until(lambda: "new" in mirror.entries)
    assert "k3" not in mirror.entries
    assert changes[-2:] == [("k3", False), ("new", True)]
    await mirror.close()


async def test_a_mirror_lists_again_after_the_server_was_killed(nats_server: NatsServer) -> None:
    """E15: no blind minutes after a restart."""
    bus = await Bus.connect(nats_server.url, name="test")
    other = await Bus.connect(nats_server.url, name="other")
    await streams.ensure(bus)
    mirror = await bus.store.leases.mirror()
    await bus.store.leases.put("before", LIVE)
    await until(lambda: "before" in mirror.entries)
    nats_server.kill()
    nats_server.start()
    await other.store.leases.put("after", LIVE)
    await other.store.leases.delete("before")
    await until(lambda: "after" in mirror.entries and "before" not in mirror.entries)
    await mirror.close()
    await other.close()
    await bus.close()


async def test_a_write_during_an_outage_lands_once_and_returns_its_revision(nats_server: NatsServer) -> None:
    """E7, E8: the try that timed out may be sent after the reconnect; the answer still tells the truth."""
    bus = await Bus.connect(nats_server.url, name="test")
    await streams.ensure(bus)
    revision = await bus.store.leases.write("a", LIVE, last=0)
    nats_server.kill()
    writing = asyncio.create_task(
        bus.store.leases.write("a", LeaseRecord(state=LeaseState.LIVE, renewals=7), last=revision)
    )
    await asyncio.sleep(2.5)  # longer than one try, so that the outcome of the first is unknown
    nats_server.start()
    landed = await writing
    entry = await bus.store.leases.get("a")
    assert entry is not None
    assert (entry.revision, entry.value.renewals) == (landed, 7)
    await bus.close()


async def test_a_service_whose_mirror_has_ended_ends_too_and_lives_on_no_old_view(bus: Bus) -> None:
    def on_change(key: str, entry: Entry[LeaseRecord] | None) -> None:
        raise ValueError(f"not expected: {key}")

    async def body(context: ServiceContext) -> None:
        await context.bus.store.leases.mirror(on_change=on_change)
        await context.bus.store.leases.write("a", LIVE, last=0)
        await context.stopping.wait()

    with pytest.raises(Bug, match="has ended"):
        await _run_body(ServiceContext(bus, asyncio.Event(), CollectorRegistry(), {}, health_port=0), body)
