"""The bus against a real server: ids, redelivery by error class, dead letters, tails, requests, shutdown, outages."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from openrl_common import streams
from openrl_common.bus import Bus, Delivery
from openrl_common.errors import Bug, Poison, Rejected, Transient, Unreachable
from openrl_common.events import JobCancelled, JobFinished
from openrl_common.nats_server import NatsServer
from openrl_common.records import JobKind, JobPhase, JobRecord, JobSpec
from openrl_common.wire import PayloadRef
from support import until

SUBJECTS = ["openrl.ev.client.>"]


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


async def test_publishing_twice_stores_once_and_the_headers_are_cloudevents(bus: Bus) -> None:
    """E2, E6."""
    seen: list[Delivery] = []

    async def handler(delivery: Delivery) -> None:
        seen.append(delivery)

    await bus.publish(finished("s1"))
    await bus.publish(finished("s1"))
    await bus.publish(finished("s2"))
    async with consuming(bus, handler):
        await until(lambda: len(seen) == 2)
    headers = seen[0].headers
    assert headers["ce-id"] == headers["Nats-Msg-Id"] == "job.finished.v1:t:j:s1"
    assert headers["ce-type"] == "job.finished.v1"
    assert seen[0].subject == "openrl.ev.client.t.job.j.finished"
    assert seen[0].event() == finished("s1")


async def test_the_trace_of_the_publisher_reaches_the_handler(bus: Bus) -> None:
    """E2, O2."""
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    got: list[str] = []

    async def handler(delivery: Delivery) -> None:
        got.append(delivery.headers["traceparent"].split("-")[1])

    with tracer.start_as_current_span("submit") as span:
        await bus.publish(finished("s1"))
        expected = trace.format_trace_id(span.get_span_context().trace_id)
    async with consuming(bus, handler):
        await until(lambda: bool(got))
    assert got == [expected]


async def test_a_transient_error_is_delivered_again_until_it_works(bus: Bus) -> None:
    tries: list[int] = []

    async def handler(delivery: Delivery) -> None:
        tries.append(delivery.deliveries)
        if len(tries) < 4:
            raise Transient("not yet")

    await bus.publish(finished("s1"))
    async with consuming(bus, handler, max_deliver=2):
        await until(lambda: len(tries) == 4)
    assert tries == [1, 2, 3, 4]


async def test_a_rejected_message_is_not_delivered_again(bus: Bus) -> None:
    tries: list[str] = []

    async def handler(delivery: Delivery) -> None:
        tries.append(delivery.headers["ce-id"])
        raise Rejected("no")

    await bus.publish(finished("s1"))
    async with consuming(bus, handler):
        await until(lambda: len(tries) == 1)
        await bus.publish(finished("s2"))
        await until(lambda: len(tries) == 2)
        await asyncio.sleep(0.3)
    assert len(tries) == 2


async def test_garbage_goes_to_the_dead_letters_with_its_story_and_the_rest_goes_on(bus: Bus) -> None:
    handled: list[Delivery] = []

    async def handler(delivery: Delivery) -> None:
        delivery.event()
        handled.append(delivery)

    await bus.publish_raw("openrl.ev.client.t.job.j.finished", b"{garbage", message_id="g1")
    await bus.publish(finished("s1"))
    async with consuming(bus, handler):
        await until(lambda: len(handled) == 1)
        letter = await anext(bus.tail(stream="OPENRL_DLQ", subject="openrl.dlq.>"))
    assert letter.body == b"{garbage"
    assert letter.headers["openrl-dlq-subject"] == "openrl.ev.client.t.job.j.finished"
    assert letter.headers["openrl-dlq-consumer"] == "test"
    assert "Poison" in letter.headers["openrl-dlq-error"]


async def test_a_handler_that_keeps_failing_ends_in_the_dead_letters_after_the_limit(bus: Bus) -> None:
    tries: list[int] = []

    async def handler(delivery: Delivery) -> None:
        tries.append(delivery.deliveries)
        raise KeyError("a fault of the handler")

    await bus.publish(finished("s1"))
    async with consuming(bus, handler, max_deliver=3):
        async with asyncio.timeout(10):
            letter = await anext(bus.tail(stream="OPENRL_DLQ", subject="openrl.dlq.>"))
    assert tries == [1, 2, 3]
    assert letter.headers["openrl-dlq-deliveries"] == "3"


async def test_a_bug_ends_the_consumer(bus: Bus) -> None:
    async def handler(_delivery: Delivery) -> None:
        raise Bug("an invariant broke")

    await bus.publish(finished("s1"))
    with pytest.raises((Bug, ExceptionGroup)):
        async with asyncio.timeout(10):
            await bus.consume(stream="OPENRL_EVENTS", durable="test", subjects=SUBJECTS, handler=handler)


async def test_one_at_a_time_keeps_the_order_of_the_stream(bus: Bus) -> None:
    order: list[str] = []

    async def handler(delivery: Delivery) -> None:
        event = delivery.event()
        assert isinstance(event, JobFinished)
        order.append(event.submission)

    for index in range(50):
        await bus.publish(finished(str(index)))
    async with consuming(bus, handler):
        await until(lambda: len(order) == 50)
    assert order == [str(index) for index in range(50)]


async def test_stopping_finishes_what_is_in_hand_and_leaves_the_rest_for_the_next(bus: Bus) -> None:
    """E17."""
    started, finished_ones = asyncio.Event(), []

    async def slow(delivery: Delivery) -> None:
        started.set()
        await asyncio.sleep(0.3)
        finished_ones.append(delivery.headers["ce-id"])

    for index in range(3):
        await bus.publish(finished(str(index)))
    async with consuming(bus, slow) as task:
        await started.wait()
        bus.stopping.set()
        async with asyncio.timeout(5):
            await task
    assert len(finished_ones) == 1
    bus.stopping.clear()
    rest: list[str] = []

    async def quick(delivery: Delivery) -> None:
        rest.append(delivery.headers["ce-id"])

    async with consuming(bus, quick):
        await until(lambda: len(rest) == 2)


async def test_a_handler_cancelled_in_the_middle_gets_its_message_again(bus: Bus) -> None:
    """Invariant 9, for an orderly cancel; a kill -9 waits for the ack deadline instead."""
    started = asyncio.Event()

    async def hanging(_delivery: Delivery) -> None:
        started.set()
        await asyncio.sleep(60)

    await bus.publish(finished("s1"))
    async with consuming(bus, hanging):
        await started.wait()
    again: list[int] = []

    async def handler(delivery: Delivery) -> None:
        again.append(delivery.deliveries)

    async with consuming(bus, handler):
        await until(lambda: bool(again))
    assert again == [2]


async def test_a_deleted_consumer_is_made_again(bus: Bus) -> None:
    """E14."""
    seen: list[str] = []

    async def handler(delivery: Delivery) -> None:
        seen.append(delivery.headers["ce-id"])

    await bus.publish(finished("s1"))
    async with consuming(bus, handler):
        await until(lambda: len(seen) == 1)
        await bus.jetstream.delete_consumer("OPENRL_EVENTS", "test")
        await bus.publish(finished("s2"))
        await until(lambda: any("s2" in one for one in seen))


async def test_consumers_and_tails_go_on_after_the_server_was_killed(nats_server: NatsServer) -> None:
    """Invariant 9: nothing acknowledged is lost; a publish during the outage arrives once."""
    bus = await Bus.connect(nats_server.url, name="test")
    await streams.ensure(bus)
    handled: list[str] = []
    tailed: list[int] = []

    async def handler(delivery: Delivery) -> None:
        handled.append(delivery.headers["ce-id"])

    async def tail() -> None:
        async for delivery in bus.tail(stream="OPENRL_EVENTS", subject="openrl.ev.client.t.job.>"):
            tailed.append(delivery.sequence)  # noqa: PERF401 (it never ends)

    tailing = asyncio.create_task(tail())
    async with consuming(bus, handler):
        for index in range(5):
            await bus.publish(finished(f"before-{index}"))
        await until(lambda: len(handled) == 5)
        nats_server.kill()
        publishing = asyncio.create_task(bus.publish(finished("during")))
        await asyncio.sleep(0.5)
        nats_server.start()
        await publishing
        await bus.publish(finished("after"))
        await until(lambda: {one.split(":")[-1] for one in handled} >= {"during", "after"} and len(tailed) >= 7)
    assert tailed == sorted(set(tailed))
    assert len(tailed) == 7
    tailing.cancel()
    await bus.close()


async def test_a_tail_starts_where_it_is_told(bus: Bus) -> None:
    for index in range(5):
        await bus.publish(finished(str(index)))
    got: list[int] = []
    async for delivery in bus.tail(stream="OPENRL_EVENTS", subject="openrl.ev.client.>", start_sequence=3):
        got.append(delivery.sequence)
        if len(got) == 3:
            break
    assert got == [3, 4, 5]


class Question(msgspec.Struct):
    value: int = 0


async def test_a_query_answers_several_at_once_and_errors_are_typed(bus: Bus) -> None:
    async def answer(question: Question) -> Question:
        if question.value < 0:
            raise Rejected(f"value is {question.value}: give 0 or more", code="negative")
        await asyncio.sleep(0.2)
        return Question(question.value + 1)

    await bus.serve("openrl.q.test.add", Question, answer)
    loop = asyncio.get_running_loop()
    started = loop.time()
    answers = await asyncio.gather(*(bus.request("openrl.q.test.add", Question(i), Question) for i in range(8)))
    assert [one.value for one in answers] == list(range(1, 9))
    assert loop.time() - started < 8 * 0.2  # not one after the other
    with pytest.raises(Rejected, match="give 0 or more") as caught:
        await bus.request("openrl.q.test.add", Question(-1), Question)
    assert caught.value.code == "negative"
    with pytest.raises(Unreachable, match=r"openrl\.q\.test\.none"):
        await bus.request("openrl.q.test.none", Question(), Question)


class Rows(msgspec.Struct):
    rows: list[str]


async def test_a_list_of_thousands_fits_an_answer_and_one_that_does_not_is_said(bus: Bus) -> None:
    async def answer(question: Question) -> Rows:
        noise = random.Random(1).randbytes(question.value).hex()
        return Rows([f"row {number} {noise}" for number in range(20_000)] if question.value < 1_000 else [noise])

    await bus.serve("openrl.q.test.rows", Question, answer)
    rows = await bus.request("openrl.q.test.rows", Question(300), Rows)
    assert len(rows.rows) == 20_000
    with pytest.raises(Rejected, match="ask for less") as caught:
        await bus.request("openrl.q.test.rows", Question(12_000_000), Rows)
    assert caught.value.code == "too-large"


async def test_a_large_payload_travels_by_reference_and_is_verified(bus: Bus) -> None:
    """R7."""
    body = bytes(range(256)) * 8_000
    name, digest = await bus.put_payload(body)
    assert digest == hashlib.sha256(body).hexdigest()
    assert await bus.put_payload(body) == (name, digest)
    reference = PayloadRef(seq=1, incarnation=1, object_name=name, digest=digest, size_bytes=len(body))
    assert await bus.get_payload(reference) == body
    with pytest.raises(Rejected, match="another digest"):
        await bus.get_payload(msgspec.structs.replace(reference, digest="0" * 64))
    with pytest.raises(Rejected, match="not in the store"):
        await bus.get_payload(msgspec.structs.replace(reference, object_name="nothing"))


async def test_a_payload_whose_parts_are_gone_is_lost_and_not_waited_for_E16_R7(bus: Bus) -> None:
    """They are stored before what lists them, and expire before it; the client library waits for them for ever."""
    name, digest = await bus.put_payload(b"x" * 300_000)
    await bus.jetstream.purge_stream(f"OBJ_{streams.PAYLOADS}", subject=f"$O.{streams.PAYLOADS}.C.>")
    reference = PayloadRef(seq=1, incarnation=1, object_name=name, digest=digest, size_bytes=300_000)
    async with asyncio.timeout(10):
        with pytest.raises(Rejected, match="not in the store") as caught:
            await bus.get_payload(reference)
    assert caught.value.code == "payload-lost"


async def test_connecting_to_nobody_says_what_to_do_within_the_deadline() -> None:
    with pytest.raises(Unreachable, match="openrl up"):
        await Bus.connect("nats://127.0.0.1:9", name="test", deadline_s=0.5)


async def test_setting_up_the_streams_twice_changes_nothing(bus: Bus) -> None:
    await bus.publish(JobCancelled(tenant="t", job="j", submission="s"))
    await streams.ensure(bus)
    info = await bus.jetstream.stream_info("OPENRL_EVENTS")
    assert info.state.messages == 1


async def test_L2_events_whose_stream_was_lost_go_on_behind_those_that_the_buckets_know(bus: Bus) -> None:
    """A job's incarnation is its place in the stream: one that began at 1 again would refuse every name used before."""
    for submission in ("s1", "s2"):
        await bus.publish(JobCancelled(tenant="t", job="j", submission=submission))
    await bus.jetstream.delete_stream("OPENRL_EVENTS")
    await streams.ensure(bus)
    await bus.publish(JobCancelled(tenant="t", job="j", submission="s3"))
    info = await bus.jetstream.stream_info("OPENRL_EVENTS")
    assert info.state.last_seq == 1, "nothing is known of any job yet"
    spec = JobSpec(name="j", kind=JobKind.FFT, base_model="/m")
    record = JobRecord(
        tenant="t", job="j", submission="s1", incarnation=2, spec=spec, phase=JobPhase.FAILED, runtime_tenant="",
        runtime="", trainer="", sampler="", submitted_at=1.0,
    )  # fmt: skip
    await bus.store.jobs.put("t.j", record)
    await bus.jetstream.delete_stream("OPENRL_EVENTS")
    for submission in ("s4", "s5"):
        await streams.ensure(bus)  # the second time it changes nothing
        await bus.publish(JobCancelled(tenant="t", job="j", submission=submission))
    info = await bus.jetstream.stream_info("OPENRL_EVENTS")
    assert info.state.messages == 2
    assert info.state.last_seq > 1_700_000_000_000


async def test_poison_raised_by_a_handler_is_terminated_at_the_first_delivery(bus: Bus) -> None:
    tries: list[int] = []

    async def handler(delivery: Delivery) -> None:
        tries.append(delivery.deliveries)
        raise Poison("unusable")

    await bus.publish(finished("s1"))
    async with consuming(bus, handler):
        await until(lambda: bool(tries))
        await asyncio.sleep(0.3)
    assert tries == [1]


@pytest.mark.parametrize("subject", ["", "a b", "x 0\r\n\r\nPUB y", "openrl.>", "a" * 2000])
async def test_an_answer_to_what_is_no_subject_is_dropped_and_the_connection_lives(bus: Bus, subject: str) -> None:
    """E16: ``reply_to`` is the asker's word; written as it is, it could end the protocol line or the worker."""
    await bus.send(subject, b"answer")
    await bus.publish(finished("after"))


async def test_nobody_writes_into_buckets_logs_or_jetstream_by_asking_for_an_answer_there_E1_E4(bus: Bus) -> None:
    """Workers may write what a tenant may not: its ``reply_to`` named another tenant's record, and that was gone."""
    subjects = ["$KV.openrl_jobs.t.j", "openrl.train.other.j", "openrl.ev.client.t.job.j.submitted", "_INBOX", "a.b"]
    for subject in [*subjects, "$JS.API.STREAM.PURGE.OPENRL_EVENTS"]:
        await bus.send(subject, b'{"seq":9}')
    await bus.publish(finished("after"))  # what was sent before it on this connection has arrived by now
    assert await bus.last(stream="KV_openrl_jobs", subject="$KV.openrl_jobs.t.j") is None
    assert await bus.last(stream="OPENRL_TRAIN", subject="openrl.train.>") is None
    assert (await bus.jetstream.stream_info("OPENRL_EVENTS")).state.messages == 1
    inbox, heard = bus.new_inbox(), asyncio.Event()

    async def callback(_body: bytes, _headers: dict[str, str]) -> None:
        heard.set()

    await bus.subscribe(inbox, callback)
    await bus.send(inbox, b"answer")
    async with asyncio.timeout(10):
        await heard.wait()


async def test_closing_in_the_middle_of_a_reconnect_is_no_cancellation(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E16, E17: the library cancels a future of its own then; whoever closes was not cancelled, and goes on."""
    bus = await Bus.connect(nats_server.url, name="test")

    async def close() -> None:
        raise asyncio.CancelledError

    closed = bus._connection.close
    monkeypatch.setattr(bus._connection, "close", close)
    await bus.close()
    monkeypatch.undo()
    await closed()
