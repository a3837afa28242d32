"""Sampling requests of the client (V10)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from openrl_client.errors import JobEndedError, Rejected, TimedOut
from openrl_client.sampling import SampleClient
from openrl_common.records import JobKind, JobPhase, JobRecord, JobSpec
from openrl_common.wire import CANCEL_DECODER, SAMPLE_DECODER, ErrorInfo, SampleResult, SamplingParams, Sequence
from unit.client.fakes import FakeBus

RECORD = JobRecord(
    tenant="default",
    job="j",
    submission="s",
    incarnation=7,
    spec=JobSpec(name="j", kind=JobKind.LORA, base_model="/m"),
    phase=JobPhase.READY,
    runtime_tenant="_shared",
    runtime="lora-m-1",
    trainer="shared--lora-m-1--trainer",
    sampler="shared--lora-m-1--sampler",
    submitted_at=0.0,
)
DONE = [[Sequence(tokens=[1], logprobs=[-0.5], versions=[2], finish_reason="stop")]]


async def running() -> Exception | None:
    return None


@pytest.fixture
def bus() -> FakeBus:
    return FakeBus()


@pytest.fixture
async def samples(bus: FakeBus) -> AsyncIterator[SampleClient]:
    client = SampleClient(bus)  # type: ignore[arg-type]
    await client.start()
    yield client
    await client.close()


def answering(bus: FakeBus, *results: SampleResult) -> None:
    """Answer the requests in turn with ``results``."""
    left = list(results)

    async def on_publish(subject: str, body: bytes) -> None:
        request = SAMPLE_DECODER.decode(body)
        result = msgspec.structs.replace(left.pop(0), request=request.request)
        await bus.inboxes[request.reply_to](msgspec.json.encode(result), {})

    bus.on_publish = on_publish


async def test_request_goes_to_the_runtime_of_the_job(bus: FakeBus, samples: SampleClient) -> None:
    answering(bus, SampleResult(request="", sequences=DONE))
    result = await samples.sample(RECORD, [[1, 2]], SamplingParams(n=1), timeout_s=5, at_least=2, ended=running)
    assert result.sequences == DONE
    subject, body, message_id = bus.published[0]
    request = SAMPLE_DECODER.decode(body)
    assert subject == "openrl.sample._shared.lora-m-1.default"
    assert (request.job, request.incarnation, request.at_least) == ("j", 7, 2)
    assert message_id == request.request


async def test_busy_answer_is_tried_again(bus: FakeBus, samples: SampleClient, monkeypatch: pytest.MonkeyPatch) -> None:
    real_sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda _: real_sleep(0))
    busy = SampleResult(request="", error=ErrorInfo(code="busy", message="queue is full"))
    answering(bus, busy, busy, SampleResult(request="", sequences=DONE))
    result = await samples.sample(RECORD, [[1]], SamplingParams(), timeout_s=5, ended=running)
    assert result.sequences == DONE
    assert len({message_id for _, _, message_id in bus.published}) == 3


async def test_typed_no_is_raised(bus: FakeBus, samples: SampleClient) -> None:
    answering(bus, SampleResult(request="", error=ErrorInfo(code="too-long", message="300 tokens, at most 256")))
    with pytest.raises(Rejected, match="300 tokens") as caught:
        await samples.sample(RECORD, [[1]], SamplingParams(), timeout_s=5, ended=running)
    assert caught.value.code == "too-long"


async def test_no_answer_ends_at_the_deadline(samples: SampleClient) -> None:
    with pytest.raises(TimedOut, match="no completions within"):
        await samples.sample(RECORD, [[1]], SamplingParams(), timeout_s=0.01, ended=running)


async def test_no_answer_of_an_ended_job_says_how_it_ended(samples: SampleClient) -> None:
    async def ended() -> Exception | None:
        return JobEndedError("job j is Failed", code="worker-failed")

    with pytest.raises(JobEndedError):
        await samples.sample(RECORD, [[1]], SamplingParams(), timeout_s=0.01, ended=ended)


async def test_a_cancelled_call_takes_its_request_back(bus: FakeBus, samples: SampleClient) -> None:
    call = asyncio.create_task(samples.sample(RECORD, [[1]], SamplingParams(), timeout_s=60, ended=running))
    await bus.wait_published(1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    ((subject, body),) = bus.sent
    assert subject == "openrl.q.sampler._shared.lora-m-1.cancel"
    assert CANCEL_DECODER.decode(body).request == bus.published[0][2]


async def test_an_answered_call_takes_nothing_back(bus: FakeBus, samples: SampleClient) -> None:
    answering(bus, SampleResult(request="", sequences=DONE))
    await samples.sample(RECORD, [[1]], SamplingParams(), timeout_s=5, ended=running)
    assert bus.sent == []
