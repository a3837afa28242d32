"""From a delivery to its place in the line (V10, V11), with what surrounds it stood in for."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from prometheus_client import CollectorRegistry

from openrl_common.wire import SAMPLE_RESULT_DECODER, SampleRequest, SampleResult, SamplingParams
from openrl_sampler.admission import Limits
from openrl_sampler.metrics import Metrics
from openrl_sampler.requests import Requests
from openrl_sampler.waiting import WaitingLine


class Surroundings:
    """A bus that keeps answers, and an engine whose tokenizer takes as long as the test says."""

    def __init__(self) -> None:
        self.bus = self
        self.stopping = asyncio.Event()
        self.phases: list[Any] = []
        self.jobs = frozenset({"t.j.1"})
        self.answers: list[SampleResult] = []
        self.tokenizer_is_read = threading.Event()
        self.num_checked = 0

    async def send(self, _subject: str, body: bytes) -> None:
        self.answers.append(SAMPLE_RESULT_DECODER.decode(body))

    async def publish_phases(self) -> None:
        pass

    def check(self, _call: Any) -> None:
        self.num_checked += 1
        assert self.tokenizer_is_read.wait(10)


async def test_v11_a_request_redelivered_while_it_is_checked_runs_once() -> None:
    """Reading a tokenizer takes longer than the server waits for an ack: two of one key in the line broke the engine
    loop once the first was answered."""
    around = Surroundings()
    everything = cast(Any, around)
    limits = Limits(max_model_len=64, vocabulary_size=61, sequences_max=16)
    wake, metrics = asyncio.Event(), Metrics(CollectorRegistry())
    requests = Requests(everything, everything, everything, WaitingLine(4), limits, metrics, wake)
    request = SampleRequest(
        request="r", tenant="t", job="j", incarnation=1, prompts=[[5, 9]], deadline=1e12, reply_to="inbox",
        params=SamplingParams(max_tokens=4, stop=["x"]),
    )  # fmt: skip
    body = msgspec.json.encode(request)
    deliveries = [
        SimpleNamespace(body=body, sequence=8, deliveries=number, subject="openrl.sample.t.j.t") for number in (1, 2)
    ]
    handling = []
    for delivery in deliveries:
        handling.append(asyncio.create_task(requests.handle(cast(Any, delivery))))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    around.tokenizer_is_read.set()
    async with asyncio.timeout(10):
        await wake.wait()
    for _ in range(100):
        await asyncio.sleep(0)
    assert around.num_checked == 1
    assert [waiter.key for waiter in requests.line.drain()] == ["8"]
    requests.resolve("8", SampleResult(request="r"))
    async with asyncio.timeout(10):
        await asyncio.gather(*handling)
    assert around.answers == [SampleResult(request="r")]
    assert requests.in_hand == {}
