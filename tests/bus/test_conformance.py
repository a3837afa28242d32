"""One suite over the real nats-server and the in-memory one, so that what the simulator proves holds for NATS too.

``two`` are two connections to one server, a test's own. Where a server is away for a while, the real one is killed and
started again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import msgspec
import pytest

from openrl_common import streams
from openrl_common.bus import Bus, Delivery
from openrl_common.errors import Conflict, Poison, Rejected, Transient, UnknownOutcome, Unreachable
from openrl_common.events import JobFinished
from openrl_common.memory import MemoryBus
from openrl_common.memory_server import MemoryServer, Network, outcome, settle
from openrl_common.nats_server import NatsServer
from openrl_common.records import ClaimRecord, ClaimState, LeaseRecord, LeaseState, SeatRecord
from support import until

LIVE = LeaseRecord(state=LeaseState.LIVE)
SUBJECTS = ["openrl.ev.client.>"]


@dataclass
class System:
    """A server with two connections. ``stop`` and ``start`` take it away and bring it back with all it stored."""

    first: Bus
    second: Bus
    stop: Callable[[], object]
    start: Callable[[], object]


@pytest.fixture(params=["nats", "memory"])
async def system(request: pytest.FixtureRequest) -> AsyncIterator[System]:
    if request.param == "memory":
        memory = MemoryServer()
        made = System(MemoryBus(memory, "first"), MemoryBus(memory, "second"), memory.stop, memory.start)
    else:
        server: NatsServer = request.getfixturevalue("nats_server")
        first = await Bus.connect(server.url, name="first")
        made = System(first, await Bus.connect(server.url, name="second"), server.kill, server.start)
    await streams.ensure(made.first)
    yield made
    await made.first.close()
    await made.second.close()


def renewed(times: int) -> LeaseRecord:
    return LeaseRecord(state=LeaseState.LIVE, renewals=times)


def finished(submission: str) -> JobFinished:
    return JobFinished(tenant="t", job="j", submission=submission)


@contextlib.asynccontextmanager
async def consuming(
    bus: Bus, handler: Callable[[Delivery], Awaitable[None]], **options: object
) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(
        bus.consume(stream="OPENRL_EVENTS", durable="test", subjects=SUBJECTS, handler=handler, **options)  # type: ignore[arg-type]
    )
    yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


# --- compare-and-swap ------------------------------------------------------------------------------------------------


async def test_of_two_writers_from_one_revision_the_second_conflicts(system: System) -> None:
    mine, theirs = system.first.store.leases, system.second.store.leases
    revision = await mine.write("a", renewed(1), last=0)
    second = await theirs.write("a", renewed(2), last=revision)
    with pytest.raises(Conflict) as caught:
        await mine.write("a", renewed(3), last=revision)
    assert not isinstance(caught.value, UnknownOutcome)
    entry = await mine.get("a")
    assert entry is not None
    assert (entry.value.renewals, entry.revision) == (2, second)


async def test_E9_last_zero_refuses_a_live_key_and_passes_over_a_delete_marker(system: System) -> None:
    leases = system.first.store.leases
    revision = await leases.write("a", LIVE, last=0)
    with pytest.raises(Conflict):
        await leases.write("a", LIVE, last=0)
    await leases.delete("a", last=revision)
    assert await leases.get("a") is None
    assert await leases.write("a", LIVE, last=0) > revision


async def test_E8_a_delete_from_a_stale_revision_conflicts(system: System) -> None:
    leases = system.first.store.leases
    revision = await leases.write("a", LIVE, last=0)
    await leases.write("a", LIVE, last=revision)
    with pytest.raises(Conflict):
        await leases.delete("a", last=revision)


async def test_revisions_of_one_bucket_rise_over_all_of_its_views(system: System) -> None:
    store = system.first.store
    first = await store.ledger_seats.put("x", SeatRecord())
    second = await store.ledger_claims.put("x", ClaimRecord(state=ClaimState.PENDING))
    assert second == first + 1
    assert list(await store.ledger_seats.list()) == ["x"]
    assert await store.ledger_nodes.list() == {}


async def test_E11_of_sixteen_racers_each_lands_exactly_once(system: System) -> None:
    leases = system.first.store.leases
    await leases.write("a", LIVE, last=0)

    async def increment(bus: Bus) -> None:
        while True:
            entry = await bus.store.leases.get("a")
            assert entry is not None
            try:
                await bus.store.leases.write("a", renewed(entry.value.renewals + 1), last=entry.revision)
            except Conflict:
                continue
            return

    await asyncio.gather(*(increment((system.first, system.second)[index % 2]) for index in range(16)))
    entry = await leases.get("a")
    assert entry is not None
    assert entry.value.renewals == 16


async def test_a_list_has_every_key_however_often_all_are_written_meanwhile(system: System) -> None:
    """L6: leases are renewed all the time. A key that is written again moves behind those that are still to be read."""
    leases = system.first.store.leases
    keys = [f"a{number}" for number in range(1_000)]
    await asyncio.gather(*(leases.put(key, renewed(0)) for key in keys))
    listing = asyncio.create_task(leases.list(rest=10.0))
    times = 0
    while not listing.done():
        times += 1
        await asyncio.gather(*(system.second.store.leases.put(key, renewed(times)) for key in keys[:500]))
        await asyncio.gather(*(system.second.store.leases.put(key, renewed(times)) for key in keys[500:]))
    assert (await listing).keys() == set(keys)


async def test_garbage_is_poison_for_a_reader_and_passed_over_by_a_list(system: System) -> None:
    await system.first.store.leases.put("good", LIVE)
    await system.first.jetstream.publish("$KV.openrl_leases.lease.bad", b"\xff not json")
    with pytest.raises(Poison, match="bad"):
        await system.first.store.leases.get("bad")
    assert list(await system.first.store.leases.list()) == ["good"]


# --- outages and unknown outcomes ------------------------------------------------------------------------------------


async def test_E7_a_write_during_an_outage_lands_once_and_returns_its_revision(system: System) -> None:
    leases = system.first.store.leases
    revision = await leases.write("a", LIVE, last=0)
    system.stop()
    writing = asyncio.create_task(leases.write("a", renewed(7), last=revision))
    await asyncio.sleep(2.3)  # longer than one try, so that the outcome of the first is unknown
    system.start()
    landed = await writing
    entry = await leases.get("a")
    assert entry is not None
    assert (entry.revision, entry.value.renewals) == (landed, 7)


class _Unlucky(Network):
    """Loses the answer of the next write; ``meanwhile`` happens before the writer tries again."""

    def __init__(self) -> None:
        self.meanwhile: Callable[[], object] | None = None

    def _arrive(
        self, bus: MemoryBus, apply: Callable[[], object], answer: asyncio.Future[object], timeout_s: float
    ) -> None:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is None:
            super()._arrive(bus, apply, answer, timeout_s)
            return
        outcome(apply)
        meanwhile()
        self.post(0.01, settle, answer, None, TimeoutError())


async def test_E8_a_lost_answer_is_found_again_by_the_write_id_or_told_as_unknown() -> None:
    """In memory only: a real server cannot be made to lose just the answer. The code that decides is the real one."""
    network = _Unlucky()
    bus = MemoryBus(MemoryServer(network))
    leases = bus.store.leases
    revision = await leases.write("a", LIVE, last=0)
    network.meanwhile = lambda: None
    landed = await leases.write("a", renewed(1), last=revision)
    assert landed == revision + 1
    value = msgspec.json.encode(renewed(9))
    network.meanwhile = lambda: bus.server.publish("$KV.openrl_leases.lease.a", value, {})
    with pytest.raises(UnknownOutcome):
        await leases.write("a", renewed(2), last=landed)
    await bus.close()


async def test_E15_a_mirror_lists_again_after_the_server_was_away(system: System) -> None:
    store = system.first.store
    changes: list[tuple[str, bool]] = []
    mirror = await store.leases.mirror(on_change=lambda key, entry: changes.append((key, entry is not None)))
    await store.leases.put("before", LIVE)
    await until(lambda: "before" in mirror.entries)
    system.stop()
    system.start()
    await system.second.store.leases.put("after", LIVE)
    await system.second.store.leases.delete("before")
    await until(lambda: "after" in mirror.entries and "before" not in mirror.entries)
    assert changes.count(("after", True)) == 1
    assert changes.count(("before", False)) == 1
    await mirror.close()


async def test_a_mirror_is_complete_when_it_opens_and_follows_in_order(system: System) -> None:
    leases = system.first.store.leases
    for index in range(20):
        await leases.put(f"k{index}", LIVE)
    seen: list[int] = []
    mirror = await system.second.store.leases.mirror(
        on_change=lambda key, entry: seen.append(entry.value.renewals) if key == "k0" and entry is not None else None
    )
    assert len(mirror.entries) == 20
    for times in range(1, 6):
        await leases.put("k0", renewed(times))
    await leases.delete("k1")
    await until(lambda: "k1" not in mirror.entries)
    # a mirror may skip values, it never goes back
    assert seen == sorted(seen)
    assert mirror.entries["k0"].value.renewals == 5
    await mirror.close()


async def test_what_an_owner_learns_is_not_taken_back_by_an_older_change(system: System) -> None:
    leases = system.first.store.leases
    mirror = await leases.mirror()
    revision = await leases.put("a", renewed(1))
    await until(lambda: "a" in mirror.entries)
    for times in range(2, 5):
        revision = await leases.write("a", renewed(times), last=revision)
        entry = await leases.get("a")
        assert entry is not None
        mirror.learn(entry)
        assert mirror.entries["a"].value.renewals == times
    await mirror.close()


# --- messages --------------------------------------------------------------------------------------------------------


async def test_E6_publishing_twice_stores_once(system: System) -> None:
    seen: list[str] = []

    async def handler(delivery: Delivery) -> None:
        seen.append(delivery.headers["ce-id"])

    for submission in ("s1", "s1", "s2"):
        await system.first.publish(finished(submission))
    async with consuming(system.second, handler):
        await until(lambda: len(seen) == 2)
    assert seen == ["job.finished.v1:t:j:s1", "job.finished.v1:t:j:s2"]


async def test_a_publish_during_an_outage_arrives_once(system: System) -> None:
    seen: list[str] = []

    async def handler(delivery: Delivery) -> None:
        seen.append(delivery.headers["ce-id"])

    async with consuming(system.second, handler):
        await system.first.publish(finished("before"))
        await until(lambda: len(seen) == 1)
        system.stop()
        publishing = asyncio.create_task(system.first.publish(finished("during")))
        await asyncio.sleep(0.3)
        system.start()
        await publishing
        await system.first.publish(finished("after"))
        await until(lambda: len(set(seen)) == 3)


async def test_a_transient_error_is_delivered_again_and_a_rejection_is_not(system: System) -> None:
    tries: list[tuple[str, int]] = []

    async def handler(delivery: Delivery) -> None:
        submission = delivery.headers["ce-id"].rsplit(":", 1)[1]
        tries.append((submission, delivery.deliveries))
        if submission == "later" and delivery.deliveries < 3:
            raise Transient("not yet")
        if submission == "no":
            raise Rejected("no")

    await system.first.publish(finished("no"))
    await system.first.publish(finished("later"))
    async with consuming(system.first, handler):
        await until(lambda: ("later", 3) in tries)
    assert sorted(tries) == [("later", 1), ("later", 2), ("later", 3), ("no", 1)]


async def test_poison_goes_to_the_dead_letters_with_its_story(system: System) -> None:
    async def handler(delivery: Delivery) -> None:
        delivery.event()

    await system.first.publish_raw("openrl.ev.client.t.job.j.finished", b"{garbage", message_id="g1")
    async with consuming(system.first, handler):
        letter = await anext(system.second.tail(stream="OPENRL_DLQ", subject="openrl.dlq.>"))
    assert letter.body == b"{garbage"
    assert letter.headers["openrl-dlq-subject"] == "openrl.ev.client.t.job.j.finished"
    assert "Poison" in letter.headers["openrl-dlq-error"]


async def test_two_members_of_one_durable_share_its_messages(system: System) -> None:
    seen: dict[str, list[str]] = {"first": [], "second": []}

    def handler(name: str) -> Callable[[Delivery], Awaitable[None]]:
        async def handle(delivery: Delivery) -> None:
            seen[name].append(delivery.headers["ce-id"])
            await asyncio.sleep(0.01)

        return handle

    async with consuming(system.first, handler("first")), consuming(system.second, handler("second")):
        for index in range(40):
            await system.first.publish(finished(str(index)))
        await until(lambda: len(seen["first"]) + len(seen["second"]) == 40)
        assert not set(seen["first"]) & set(seen["second"])


async def test_a_handler_cancelled_in_the_middle_gets_its_message_again(system: System) -> None:
    """Invariant 9."""
    started = asyncio.Event()

    async def hanging(_delivery: Delivery) -> None:
        started.set()
        await asyncio.sleep(60)

    await system.first.publish(finished("s1"))
    async with consuming(system.first, hanging):
        await started.wait()
    again: list[int] = []

    async def handler(delivery: Delivery) -> None:
        again.append(delivery.deliveries)

    async with consuming(system.second, handler):
        await until(lambda: bool(again))
    assert again == [2]


async def test_a_message_without_an_ack_comes_again_after_its_wait(system: System) -> None:
    deliveries: list[int] = []
    hold = asyncio.Event()

    async def handler(delivery: Delivery) -> None:
        deliveries.append(delivery.deliveries)
        if delivery.deliveries == 1:
            await hold.wait()

    async with consuming(system.first, handler, concurrency=2, ack_wait_s=0.5):
        await system.first.publish(finished("s1"))
        await until(lambda: deliveries == [1, 2])
        hold.set()


async def test_one_at_a_time_keeps_the_order_of_the_stream(system: System) -> None:
    order: list[str] = []

    async def handler(delivery: Delivery) -> None:
        order.append(delivery.headers["ce-id"].rsplit(":", 1)[1])

    for index in range(30):
        await system.first.publish(finished(str(index)))
    async with consuming(system.first, handler):
        await until(lambda: len(order) == 30)
    assert order == [str(index) for index in range(30)]


async def test_a_new_durable_may_start_behind_what_is_there(system: System) -> None:
    seen: list[str] = []
    bound = asyncio.Event()

    async def handler(delivery: Delivery) -> None:
        seen.append(delivery.headers["ce-id"].rsplit(":", 1)[1])

    await system.first.publish(finished("old"))
    async with consuming(system.first, handler, from_now=True, bound=bound):
        await bound.wait()
        await system.first.publish(finished("new"))
        await until(lambda: bool(seen))
    assert seen == ["new"]


async def test_a_tail_starts_where_it_is_told_and_goes_on_over_an_outage(system: System) -> None:
    for index in range(5):
        await system.first.publish(finished(str(index)))
    got: list[int] = []

    async def follow() -> None:
        tail = system.second.tail(stream="OPENRL_EVENTS", subject="openrl.ev.client.>", start_sequence=3)
        async for delivery in tail:
            got.append(delivery.sequence)  # noqa: PERF401 (it never ends)

    following = asyncio.create_task(follow())
    await until(lambda: got == [3, 4, 5])
    system.stop()
    system.start()
    await system.first.publish(finished("more"))
    await until(lambda: got == [3, 4, 5, 6])
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


# --- request and reply -----------------------------------------------------------------------------------------------


class Question(msgspec.Struct):
    value: int = 0


async def test_answers_and_typed_errors_come_back(system: System) -> None:
    async def answer(question: Question) -> Question:
        if question.value < 0:
            raise Rejected(f"value is {question.value}: give 0 or more", code="negative")
        return Question(question.value + 1)

    await system.first.serve("openrl.q.test.add", Question, answer)
    await system.first.store.leases.get("nothing")  # the server has heard of it
    assert (await system.second.request("openrl.q.test.add", Question(1), Question)).value == 2
    with pytest.raises(Rejected, match="give 0 or more") as caught:
        await system.second.request("openrl.q.test.add", Question(-1), Question)
    assert caught.value.code == "negative"
    with pytest.raises(Unreachable, match=r"openrl\.q\.test\.none"):
        await system.second.request("openrl.q.test.none", Question(), Question)


async def test_an_inbox_takes_what_is_sent_to_it(system: System) -> None:
    inbox = system.first.new_inbox()
    got: list[bytes] = []

    async def callback(body: bytes, _headers: dict[str, str]) -> None:
        got.append(body)

    unsubscribe = await system.first.subscribe(inbox, callback)
    await system.first.store.leases.get("nothing")  # the server has heard of it
    for number in range(3):
        await system.second.send(inbox, str(number).encode())
    await until(lambda: got == [b"0", b"1", b"2"])
    await unsubscribe()
