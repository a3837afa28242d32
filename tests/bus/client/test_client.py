"""The client on a real nats-server, with the far side played by the test (C1, C2)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from openrl_client import Datum, JobSpec, Rejected, TimedOut, connect
from openrl_client.connection import Client
from openrl_client.errors import JobEndedError
from openrl_common import streams
from openrl_common.bus import Bus
from openrl_common.events import JobAdmitted, JobCancelled, JobEnded, JobFailed, JobFinished, JobReady, JobSubmitted
from openrl_common.records import JobKind, JobPhase, JobRecord, Role, Shape, WorkloadPhase, WorkloadRecord
from openrl_common.wire import TRAIN_DECODER, AnyTrainRequest, ForwardBackward, TrainResult

SPEC = JobSpec(name="j", kind=JobKind.FFT, base_model="/m")


def record_of(event: JobSubmitted, incarnation: int, phase: JobPhase = JobPhase.READY) -> JobRecord:
    return JobRecord(
        tenant=event.tenant,
        job=event.job,
        submission=event.submission,
        incarnation=incarnation,
        spec=event.spec,
        phase=phase,
        runtime_tenant=event.tenant,
        runtime=event.job,
        trainer=f"{event.tenant}--{event.job}--trainer",
        sampler=f"{event.tenant}--{event.job}--sampler",
        submitted_at=0.0,
    )


def trainer_of(record: JobRecord) -> WorkloadRecord:
    return WorkloadRecord(
        workload=record.trainer, tenant="t", owner="t/j", owner_name="j", kind=JobKind.FFT, jobs=("t.j",),
        incarnation=record.incarnation, shape=Shape(role=Role.TRAINER, device_bytes=1, host_bytes=1),
        base_model="/m", phase=WorkloadPhase.READY, submitted_at=0.0,
    )  # fmt: skip


@pytest.fixture
async def far_side(nats_url: str) -> AsyncIterator[Bus]:
    bus = await Bus.connect(nats_url, name="far-side")
    await streams.ensure(bus)
    yield bus
    await bus.close()


@contextlib.asynccontextmanager
async def playing(task: Awaitable[None]) -> AsyncIterator[None]:
    running = asyncio.ensure_future(task)
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def admit(bus: Bus) -> None:
    """Placement: admits every job as ready, ends it when asked."""
    async for delivery in bus.tail(stream="OPENRL_EVENTS", subject="openrl.ev.client.>"):
        event = delivery.event()
        if isinstance(event, JobSubmitted) and event.spec.priority < 0:
            await bus.publish(
                JobFailed(
                    tenant=event.tenant,
                    job=event.job,
                    submission=event.submission,
                    code="impossible",
                    message="too large",
                )
            )
        elif isinstance(event, JobSubmitted):
            await bus.store.jobs.put(f"{event.tenant}.{event.job}", record_of(event, delivery.sequence))
            ids = {"tenant": event.tenant, "job": event.job, "submission": event.submission}
            await bus.publish(JobAdmitted(**ids, incarnation=delivery.sequence, workloads=("a", "b")))  # type: ignore[arg-type]
            await bus.publish(JobReady(**ids, incarnation=delivery.sequence))  # type: ignore[arg-type]
        elif isinstance(event, JobFinished | JobCancelled):
            phase = JobPhase.FINISHED if isinstance(event, JobFinished) else JobPhase.CANCELLED
            entry = await bus.store.jobs.get(f"{event.tenant}.{event.job}")
            assert entry is not None
            changed = JobRecord(**{**_fields(entry.value), "phase": phase})
            await bus.store.jobs.put(entry.key, changed)
            await bus.publish(
                JobEnded(tenant=event.tenant, job=event.job, submission=event.submission, outcome=phase.value)
            )


def _fields(record: JobRecord) -> dict[str, object]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


async def train(bus: Bus, on_request: Callable[[AnyTrainRequest], Awaitable[None]]) -> None:
    """A trainer's ear: every entry of the log, in order."""
    async for delivery in bus.tail(stream="OPENRL_TRAIN", subject="openrl.train.>"):
        await on_request(TRAIN_DECODER.decode(delivery.body))


@pytest.fixture
async def client(nats_url: str, far_side: Bus) -> AsyncIterator[Client]:
    async with connect(nats_url, "t") as client, playing(admit(far_side)):
        yield client


async def test_submitted_job_becomes_ready_and_finishes(client: Client) -> None:
    """C1: submit, ready, finish."""
    job = await client.submit(SPEC)
    seen: list[str] = []
    record = await job.ready(5.0, lambda progress: seen.append(progress.job.phase.value))
    assert record.phase is JobPhase.READY
    assert (await job.finish()).phase is JobPhase.FINISHED
    with pytest.raises(JobEndedError):
        await client.cancel("j")


async def test_waiting_for_a_job_that_has_ended_tells_nothing_of_its_workers(client: Client) -> None:
    """They may serve another job by now: a LoRA runtime outlives its jobs."""
    job = await client.submit(SPEC)
    worker = trainer_of(job.record)
    await client.bus.store.workloads.put(worker.workload, worker)
    told: list[str] = []
    await job.ready(5.0, lambda progress: told.extend(progress.lines()))
    assert told == ["j/trainer: Ready"]
    await job.finish()
    with pytest.raises(JobEndedError, match="Finished"):
        await job.ready(5.0, lambda progress: told.extend(progress.lines()))
    assert told == ["j/trainer: Ready"]


async def test_what_an_earlier_job_of_the_name_left_is_not_told_as_this_ones(client: Client) -> None:
    """Its workload stands under the same key until the new one's is written for the first time."""
    job = await client.submit(SPEC)
    new = msgspec.structs.replace(trainer_of(job.record), phase=WorkloadPhase.SUBMITTED)
    old = msgspec.structs.replace(new, incarnation=new.incarnation - 1, phase=WorkloadPhase.FINISHED)
    await client.bus.store.workloads.put(old.workload, old)
    await client.bus.store.jobs.put("t.j", msgspec.structs.replace(job.record, workloads=(new,)))
    assert (await job.progress()).lines() == ["j/trainer: Submitted"]


async def test_relative_model_path_means_the_clients_directory(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """C1: services run in other directories; and progress prints as lines for people."""
    monkeypatch.chdir(tmp_path)
    job = await client.submit(JobSpec(name="near", kind=JobKind.FFT, base_model="./tiny"))
    assert job.record.spec.base_model == str(tmp_path / "tiny")
    await job.ready(5.0, print)
    print(await job.progress())
    assert capsys.readouterr().out.splitlines()[-1] == "near: Ready"


async def test_refused_job_raises_placements_code(client: Client) -> None:
    """C5: impossible is told apart from every other failure."""
    with pytest.raises(Rejected, match="too large") as caught:
        await client.submit(JobSpec(name="big", kind=JobKind.FFT, base_model="/m", priority=-1))
    assert caught.value.code == "impossible"


@pytest.mark.parametrize("name", ["", "*", ">", "a b", "a.b", "x" * 300])
async def test_a_name_that_no_job_can_have_is_refused_whatever_nats_makes_of_it(client: Client, name: str) -> None:
    """C5: a wildcard found some job, an empty name was never answered, a blank broke the connection's protocol."""
    await client.submit(SPEC)
    for ask in (client.attach, client.cancel):
        with pytest.raises(Rejected, match=r"job name .* is not usable"):
            await ask(name)


async def test_waiting_for_a_job_that_was_refused_says_why(client: Client, far_side: Bus) -> None:
    """C5: exit code 3, not 5: it has no workload that could be read."""
    job = await client.submit(SPEC)
    refused = msgspec.structs.replace(
        job.record, phase=JobPhase.FAILED, trainer="", sampler="", reason="impossible", message="too large"
    )
    await far_side.store.jobs.put("t.j", refused)
    assert str(await job.progress()) == "j: Failed"
    with pytest.raises(JobEndedError, match="too large") as caught:
        await job.ready(5.0)
    assert caught.value.code == "impossible"


async def test_a_job_cancelled_before_it_was_admitted_is_told_as_ended(nats_url: str, far_side: Bus) -> None:
    """Placement was killed between its record and its answer, the cancellation came first: no JobAdmitted follows."""

    async def end_at_once() -> None:
        async for delivery in far_side.tail(stream="OPENRL_EVENTS", subject="openrl.ev.client.>"):
            event = delivery.event()
            assert isinstance(event, JobSubmitted)
            record = record_of(event, delivery.sequence, JobPhase.CANCELLED)
            await far_side.store.jobs.put(f"{event.tenant}.{event.job}", record)
            await far_side.publish(
                JobEnded(tenant=event.tenant, job=event.job, submission=event.submission, outcome="Cancelled")
            )

    async with connect(nats_url, "t") as client, playing(end_at_once()):
        job = await client.submit(SPEC)
        with pytest.raises(JobEndedError, match="Cancelled"):
            await job.ready(5.0)


async def test_nobody_answers_in_time(nats_url: str, far_side: Bus) -> None:
    published: list[str] = []
    async with connect(nats_url, "t") as client:
        with pytest.raises(TimedOut, match="openrl cancel j"):
            await client.submit(SPEC, timeout_s=2.0, on_published=published.append)
    assert len(published) == 1


async def test_second_client_goes_on_at_the_next_number(client: Client, far_side: Bus, nats_url: str) -> None:
    """C2, R4: the log has neither a gap nor a number twice, whoever writes it."""

    async def reply(request: AnyTrainRequest) -> None:
        await far_side.send(request.reply_to, encode(TrainResult(seq=request.seq, version=request.seq)))

    async with playing(train(far_side, reply)):
        job = await client.submit(SPEC)
        pending = [job.publish_weights() for _ in range(3)]
        assert [await one for one in pending] == [1, 2, 3]
        async with connect(nats_url, "t") as other:
            again = await other.attach("j")
            assert await again.publish_weights() == 4


async def test_a_loss_of_ones_own_travels_as_its_derivatives_by_token(client: Client, far_side: Bus) -> None:
    """R8: the log-probabilities come here, the derivatives go back as the weights of loss ``custom``."""
    seen: list[AnyTrainRequest] = []

    async def answer(request: AnyTrainRequest) -> None:
        seen.append(request)
        result = TrainResult(seq=request.seq, logprobs=[[0.0, -0.5, -2.0]])
        await far_side.send(request.reply_to, encode(result))

    async with playing(train(far_side, answer)):
        job = await client.submit(SPEC)
        data = [Datum(tokens=[1, 2, 3])]
        pending = await job.forward_backward_custom(data, lambda rows: [[2 * value for value in row] for row in rows])
        await pending
        with pytest.raises(Rejected, match="one per token of every datum"):
            await job.forward_backward_custom(data, lambda rows: [rows[0][:2]])
    sent = seen[1]
    assert isinstance(sent, ForwardBackward)
    assert sent.loss == "custom"
    assert sent.data[0].weights == [0.0, -1.0, -4.0]


async def test_lost_reply_is_found_in_the_results(client: Client, far_side: Bus) -> None:
    """R4: the trainer answered to an inbox that was away; its stored result is read instead."""

    async def store_only(request: AnyTrainRequest) -> None:
        key = f"t.j.{request.incarnation}.{request.seq}"
        await far_side.store.results.put(key, TrainResult(seq=request.seq, metrics={"loss": 0.5}))

    async with playing(train(far_side, store_only)):
        job = await client.submit(SPEC)
        result = await job.forward([Datum(tokens=[1, 2])])
        assert result.metrics == {"loss": 0.5}


async def test_job_that_ends_ends_its_requests(client: Client) -> None:
    job = await client.submit(SPEC)
    pending = job.forward([Datum(tokens=[1, 2])])
    await client.cancel("j")
    with pytest.raises(JobEndedError, match="Cancelled"):
        await pending


async def test_resubmitted_name_is_another_job(client: Client) -> None:
    """A handle of the old job does not follow the new one of its name."""
    old = await client.submit(SPEC)
    await old.finish()
    new = await client.submit(SPEC)
    assert new.record.incarnation > old.record.incarnation
    with pytest.raises(JobEndedError, match="replaced"):
        await old.refresh()


async def test_unknown_loss_is_refused_before_anything_is_sent(client: Client, far_side: Bus) -> None:
    job = await client.submit(SPEC)
    with pytest.raises(Rejected, match="cross_entropy") as caught:
        job.forward_backward([Datum(tokens=[1, 2])], loss="hinge")
    assert caught.value.code == "unknown-loss"
    assert await far_side.last(stream="OPENRL_TRAIN", subject="openrl.train.t.j") is None


def test_the_same_without_asyncio(nats_url: str) -> None:
    """C1: the sync facade; its loop runs beside, calls block."""
    from openrl_client import sync

    async def ensure() -> None:
        bus = await Bus.connect(nats_url, name="far-side")
        await streams.ensure(bus)
        await bus.close()

    asyncio.run(ensure())
    with sync.connect(nats_url, "t") as client, pytest.raises(TimedOut):
        client.submit(SPEC, timeout_s=2.0)


def encode(result: TrainResult) -> bytes:
    import msgspec

    return msgspec.json.encode(result)
