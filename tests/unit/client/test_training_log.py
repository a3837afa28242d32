"""The client's end of the training log (C2, R4, R7)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from openrl_client import write_watch
from openrl_client.errors import Conflict, JobEndedError, Rejected
from openrl_client.training import IN_FLIGHT_MAX, TrainingLog
from openrl_common.wire import (
    TRAIN_DECODER,
    AdamParams,
    Datum,
    ErrorInfo,
    Forward,
    OptimStep,
    PayloadRef,
    SaveWeights,
    TrainResult,
)
from unit.client.fakes import FakeBus

ADAM = AdamParams(learning_rate=1e-3)


class Ending:
    error: Exception | None = None

    async def __call__(self) -> Exception | None:
        return self.error


@pytest.fixture
def bus() -> FakeBus:
    return FakeBus()


@pytest.fixture
def ending() -> Ending:
    return Ending()


@pytest.fixture
async def log(bus: FakeBus, ending: Ending) -> AsyncIterator[TrainingLog]:
    log = TrainingLog(
        bus,  # type: ignore[arg-type]
        tenant="default",
        job="j",
        incarnation=7,
        next_seq=4,
        after=0,
        ended=ending,
        recover_interval_s=0.0,
    )
    await log.start()
    yield log
    await log.close()


async def answer(bus: FakeBus, result: TrainResult) -> None:
    (callback,) = bus.inboxes.values()
    await callback(msgspec.json.encode(result), {})


async def test_numbers_are_taken_at_the_call_and_published_in_that_order(bus: FakeBus, log: TrainingLog) -> None:
    """C2, R4: several in flight, gapless from the next free number, whoever is awaited first."""
    pending = [log.send(OptimStep, adam=ADAM) for _ in range(5)]
    assert [one.seq for one in pending] == [4, 5, 6, 7, 8]
    await bus.wait_published(5)
    for one in reversed(pending):
        await answer(bus, TrainResult(seq=one.seq, metrics={"n": one.seq}))
    assert (await pending[4]).metrics == {"n": 8}
    assert [TRAIN_DECODER.decode(body).seq for _, body, _ in bus.published] == [4, 5, 6, 7, 8]
    assert [message_id for _, _, message_id in bus.published][:2] == ["default.j.7.4.0", "default.j.7.5.0"]
    assert {subject for subject, _, _ in bus.published} == {"openrl.train.default.j"}


async def test_unknown_outcome_is_published_again_under_the_same_id(
    bus: FakeBus, log: TrainingLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E7: no gap and no second number when the bus did not answer."""
    real_sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda _: real_sleep(0))
    bus.failures_left = 2
    first, second = log.send(SaveWeights), log.send(SaveWeights)
    await bus.wait_published(2)
    assert [message_id for _, _, message_id in bus.published] == ["default.j.7.4.0", "default.j.7.5.0"]
    await answer(bus, TrainResult(seq=4, version=1))
    await answer(bus, TrainResult(seq=5, version=2))
    assert (await first).version == 1
    assert (await second).version == 2


async def test_a_write_that_is_held_up_is_said_once_with_the_reason_and_again_when_it_goes_on(
    bus: FakeBus, log: TrainingLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """C6: the retries last for minutes under a full disk, and were silent."""
    real_sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda _: real_sleep(0))
    monkeypatch.setattr(write_watch, "SAY_AFTER_S", 0.0)
    bus.failures_left = 10
    log.send(SaveWeights)
    await bus.wait_published(1)
    log.send(SaveWeights)
    await bus.wait_published(2)
    await real_sleep(0)
    assert [record.getMessage() for record in caplog.records] == [
        "requests of job j: not stored for 0 s, trying on: no answer",
        "requests of job j: NATS takes them again",
    ]


async def test_refusal_raises_the_trainers_code(bus: FakeBus, log: TrainingLog) -> None:
    """R6: a typed error reaches the one who awaits."""
    pending = log.send(SaveWeights)
    await answer(bus, TrainResult(seq=4, error=ErrorInfo(code="nan-loss", message="the loss is not finite")))
    with pytest.raises(Rejected, match="not finite") as caught:
        await pending
    assert caught.value.code == "nan-loss"


async def test_lost_reply_is_read_from_the_stored_results(bus: FakeBus, log: TrainingLog) -> None:
    """R4: results stay in openrl_results; a reply that was lost is no loss."""
    pending = log.send(SaveWeights)
    bus.store.results.values["default.j.7.4"] = TrainResult(seq=4, version=3)
    assert (await pending).version == 3


async def test_second_answer_changes_nothing(bus: FakeBus, log: TrainingLog) -> None:
    """Reply and stored result may both come."""
    pending = log.send(SaveWeights)
    await answer(bus, TrainResult(seq=4, version=3))
    await answer(bus, TrainResult(seq=4, version=9))
    assert (await pending).version == 3


async def test_end_of_the_job_ends_what_is_in_flight(bus: FakeBus, log: TrainingLog, ending: Ending) -> None:
    """Nobody waits for ever for a job that is over, and later requests say so at once."""
    pending = log.send(SaveWeights)
    ending.error = JobEndedError("job j is Failed: exit code 1", code="worker-failed")
    with pytest.raises(JobEndedError, match="exit code 1"):
        await pending
    with pytest.raises(JobEndedError):
        log.send(SaveWeights)


async def test_large_body_travels_by_reference(bus: FakeBus, log: TrainingLog) -> None:
    """R7: above 256 KiB the log carries a reference with the digest."""
    pending = log.send(Forward, data=[Datum(tokens=list(range(100_000)))])
    await bus.wait_published(1)
    request = TRAIN_DECODER.decode(bus.published[0][1])
    assert isinstance(request, PayloadRef)
    assert request.seq == 4
    real = TRAIN_DECODER.decode(bus.payloads["object"])
    assert isinstance(real, Forward)
    assert real.data[0].tokens[-1] == 99_999
    assert request.size_bytes == len(bus.payloads["object"])
    await answer(bus, TrainResult(seq=4))
    await pending


async def test_requests_in_flight_are_bounded(bus: FakeBus, log: TrainingLog) -> None:
    """Every queue has a bound; the refused call takes no number."""
    pending = [log.send(SaveWeights) for _ in range(IN_FLIGHT_MAX)]
    with pytest.raises(Rejected, match="in flight") as caught:
        log.send(SaveWeights)
    assert caught.value.code == "too-many-in-flight"
    await answer(bus, TrainResult(seq=pending[0].seq, version=1))
    assert log.send(SaveWeights).seq == pending[-1].seq + 1


async def test_garbage_in_the_inbox_harms_nobody(bus: FakeBus, log: TrainingLog) -> None:
    pending = log.send(SaveWeights)
    (callback,) = bus.inboxes.values()
    await callback(b"\xff not json", {})
    await answer(bus, TrainResult(seq=4, version=1))
    assert (await pending).version == 1


@pytest.mark.parametrize(
    ("data", "names"),
    [
        ([Datum(tokens=[1, object()])], "unsupported"),  # type: ignore[list-item]
        ([Datum(tokens=[1, 2], advantages=[0.0, float("nan")])], r"data\[0\].advantages\[1\] is None, NaN or infinite"),
        ([Datum(tokens=[1, 2], logprobs=[float("-inf"), 0.0])], r"data\[0\].logprobs\[0\]"),
    ],
)
async def test_what_cannot_be_sent_is_refused_at_the_call_and_the_log_goes_on(
    bus: FakeBus, log: TrainingLog, data: list[Datum], names: str
) -> None:
    """C2, C5: such a request once ended the publishing task, and everything after it waited for ever."""
    with pytest.raises(Rejected, match=names) as refused:
        log.send(Forward, data=data)
    assert refused.value.code == "bad-request"
    pending = log.send(OptimStep, adam=ADAM)
    assert pending.seq == 4, "a refused request takes no number"
    await answer(bus, TrainResult(seq=4))
    await pending


async def test_a_request_travels_as_it_was_at_the_call(bus: FakeBus, log: TrainingLog) -> None:
    """C2: what the caller does to its lists afterwards changes nothing."""
    tokens = [1, 2, 3]
    log.send(Forward, data=[Datum(tokens=tokens)])
    tokens.append(4)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    ((_, body, _),) = bus.published
    assert TRAIN_DECODER.decode(body).data[0].tokens == [1, 2, 3]  # type: ignore[union-attr]


async def test_of_two_clients_one_is_told_instead_of_taking_the_answers_of_the_other(
    bus: FakeBus, log: TrainingLog
) -> None:
    """R4: both sent the same number, and the later one took the result of the earlier one's data for its own."""
    mine = log.send(OptimStep, adam=ADAM)
    await bus.wait_published(1)
    theirs = msgspec.json.encode(SaveWeights(seq=5, incarnation=7, reply_to="other"))
    bus.published.append(("openrl.train.default.j", theirs, "other"))
    with pytest.raises(Rejected, match="another client has sent request 5") as refused:
        await log.send(OptimStep, adam=ADAM)
    assert refused.value.code == "another-client"
    with pytest.raises(Rejected, match="another client"):
        log.send(OptimStep, adam=ADAM)
    await answer(bus, TrainResult(seq=4))
    assert (await mine).seq == 4, "what was sent before is still answered"
    assert len(bus.published) == 2


async def test_a_request_that_landed_unheard_is_not_taken_for_anothers(bus: FakeBus, log: TrainingLog) -> None:
    """E7, E8: the second try is refused by its own first one."""
    publish, lost = bus.publish_raw, [True]

    async def first_answer_lost(*arguments: Any, **named: Any) -> int:
        sequence = await publish(*arguments, **named)
        if lost:
            lost.clear()
            raise Conflict("the first try's answer was lost, the second one came second")
        return sequence

    bus.publish_raw = first_answer_lost  # type: ignore[method-assign]
    one, two = log.send(OptimStep, adam=ADAM), log.send(SaveWeights)
    await bus.wait_published(2)
    for pending in (one, two):
        await answer(bus, TrainResult(seq=pending.seq))
        await pending
    assert len(bus.published) == 2


DEEP = b'{"seq":1,"incarnation":7,"odd":' + b"[" * 5000 + b"]" * 5000 + b"}"


@pytest.mark.parametrize(
    "garbage", [b"\xff", b"[]", b'{"op":"optim_step","seq":9,"incarnation":3}', pytest.param(DEEP, id="deep")]
)
async def test_garbage_on_the_subject_does_not_end_the_log(bus: FakeBus, log: TrainingLog, garbage: bytes) -> None:
    """Nothing of this incarnation takes a number: the request goes behind it."""
    bus.published.append(("openrl.train.default.j", garbage, "garbage"))
    pending = log.send(OptimStep, adam=ADAM)
    await bus.wait_published(2)
    await answer(bus, TrainResult(seq=pending.seq))
    await pending
