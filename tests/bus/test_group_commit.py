"""Group commit against a real server: conditions, ids, markers and lost answers inside a batch (E6-E10, E18)."""

from __future__ import annotations

import asyncio

import pytest

from openrl_common import streams
from openrl_common.bus import Bus
from openrl_common.errors import Conflict
from openrl_common.group_commit import ALONE_MAX
from openrl_common.nats_server import NatsServer
from openrl_common.records import LeaseRecord, LeaseState
from support import until

STARTING = LeaseRecord(state=LeaseState.STARTING)
LIVE = LeaseRecord(state=LeaseState.LIVE)


async def test_many_writes_leave_in_groups_and_each_knows_its_revision(bus: Bus) -> None:
    leases = bus.store.leases
    names = [f"k{n}" for n in range(300)]
    revisions = await asyncio.gather(*(leases.write(name, STARTING, last=0) for name in names))
    assert bus.jetstream.commits.grouped > 100
    listed = await leases.list()
    assert {name: entry.revision for name, entry in listed.items()} == dict(zip(names, revisions, strict=True))
    again = await asyncio.gather(
        *(leases.write(name, LIVE, last=revision) for name, revision in zip(names, revisions, strict=True))
    )
    assert {entry.value.state for entry in (await leases.list()).values()} == {LeaseState.LIVE}
    assert len(set(again)) == len(names)


async def test_one_stale_write_in_a_group_is_the_only_conflict(bus: Bus) -> None:
    """E10: the others of its batch are stored all the same."""
    leases = bus.store.leases
    names = [f"k{n}" for n in range(100)]
    revisions = await asyncio.gather(*(leases.write(name, STARTING, last=0) for name in names))
    revisions[60] -= 1
    answers = await asyncio.gather(
        *(leases.write(name, LIVE, last=revision) for name, revision in zip(names, revisions, strict=True)),
        return_exceptions=True,
    )
    assert [n for n, answer in enumerate(answers) if isinstance(answer, Exception)] == [60]
    assert isinstance(answers[60], Conflict)
    assert bus.jetstream.commits.refused >= 1
    states = {name: entry.value.state for name, entry in (await leases.list()).items()}
    assert states.pop("k60") is LeaseState.STARTING
    assert set(states.values()) == {LeaseState.LIVE}


async def test_deletes_and_writes_over_markers_go_in_groups(bus: Bus) -> None:
    """E9: ``last=0`` passes over a delete marker here too."""
    leases = bus.store.leases
    names = [f"k{n}" for n in range(80)]
    revisions = await asyncio.gather(*(leases.write(name, LIVE, last=0) for name in names))
    await asyncio.gather(*(leases.delete(name, last=revision) for name, revision in zip(names, revisions, strict=True)))
    assert await leases.list() == {}
    again = await asyncio.gather(*(leases.write(name, LIVE, last=0) for name in names))
    assert min(again) > max(revisions)


async def test_a_message_published_again_in_a_group_is_stored_once(bus: Bus) -> None:
    """E6: a redelivered handler publishes its ids again, in the company of new ones."""

    async def publish(number: int) -> int:
        return await bus.publish_raw(f"openrl.ev.t._fleet.t.{number}.done", b"{}", message_id=f"t:{number}")

    first = await asyncio.gather(*(publish(n) for n in range(100)))
    second = await asyncio.gather(*(publish(n) for n in range(50, 200)))
    assert second[:50] == first[50:]
    info = await bus.jetstream.stream_info(streams.EVENTS.name)
    assert info.state.messages == 200


async def test_an_expected_sequence_holds_in_a_group(bus: Bus) -> None:
    """E8: a gap in a log is refused, its neighbours are not."""

    async def publish(number: int, after: int) -> int:
        return await bus.publish_raw(f"openrl.train.t.j.{number}", b"{}", message_id=f"t:{number}", after=after)

    answers = await asyncio.gather(*(publish(n, 7 if n == 50 else 0) for n in range(100)), return_exceptions=True)
    assert [n for n, answer in enumerate(answers) if isinstance(answer, Exception)] == [50]
    assert isinstance(answers[50], Conflict)


async def test_a_mirror_sees_every_write_of_a_group(bus: Bus) -> None:
    mirror = await bus.store.leases.mirror()
    try:
        await asyncio.gather(*(bus.store.leases.write(f"k{n}", LIVE, last=0) for n in range(200)))
        await until(lambda: len(mirror.entries) == 200)
    finally:
        await mirror.close()


async def test_racers_for_few_keys_each_land_exactly_once(bus: Bus) -> None:
    """E11: groups full of conflicts lose and double nothing."""
    leases = bus.store.leases
    names = [f"k{n}" for n in range(4)]
    await asyncio.gather(*(leases.write(name, LIVE, last=0) for name in names))

    async def increment(name: str) -> None:
        while True:
            entry = await leases.get(name)
            assert entry is not None
            changed = LeaseRecord(state=LeaseState.LIVE, renewals=entry.value.renewals + 1)
            try:
                await leases.write(name, changed, last=entry.revision)
                return
            except Conflict:
                await asyncio.sleep(0)

    await asyncio.gather(*(increment(names[n % 4]) for n in range(4 * ALONE_MAX)))
    assert {entry.value.renewals for entry in (await leases.list()).values()} == {ALONE_MAX}


async def test_a_server_killed_amid_groups_keeps_every_write_it_confirmed(nats_server: NatsServer) -> None:
    """E7, E18: each writer counts what it was told is stored; the server is killed and started under them."""
    bus = await Bus.connect(nats_server.url, name="test")
    await streams.ensure(bus)
    leases = bus.store.leases
    stop = asyncio.Event()

    async def count(name: str) -> tuple[int, int]:
        """Write 0, 1, 2, … from the revision before; a write that ends without an answer ends the test."""
        revision = renewals = 0
        while not stop.is_set():
            renewals += 1
            revision = await leases.write(name, LeaseRecord(state=LeaseState.LIVE, renewals=renewals), last=revision)
        return revision, renewals

    async def kill() -> None:
        for _ in range(3):
            goal = bus.jetstream.commits.grouped + 300
            await until(lambda goal=goal: bus.jetstream.commits.grouped > goal, within_s=60.0)
            nats_server.kill()
            nats_server.start()
        stop.set()

    names = [f"k{n}" for n in range(100)]
    try:
        async with asyncio.TaskGroup() as tasks:
            counting = [tasks.create_task(count(name)) for name in names]
            tasks.create_task(kill())
        told = {name: task.result() for name, task in zip(names, counting, strict=True)}
        stored = {name: (entry.revision, entry.value.renewals) for name, entry in (await leases.list()).items()}
        assert stored == told
    finally:
        await bus.close()


@pytest.mark.parametrize("allowed", [True, False])
async def test_a_stream_that_takes_no_batches_takes_the_writes(bus: Bus, allowed: bool) -> None:
    """A bucket made by an older release, before ``ensure`` has brought it up to date."""
    info = await bus.jetstream.stream_info("KV_openrl_leases")
    info.config.allow_atomic = allowed
    await bus.jetstream.update_stream(info.config)
    await asyncio.gather(*(bus.store.leases.write(f"k{n}", LIVE, last=0) for n in range(100)))
    assert len(await bus.store.leases.list()) == 100
    assert (bus.jetstream.commits.grouped > 0) is allowed
