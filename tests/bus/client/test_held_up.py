"""Writes of a client that a real server does not confirm: said once, with what is known of the reason (C6)."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from openrl_client import write_watch
from openrl_client.sampling import SampleClient
from openrl_client.training import TrainingLog
from openrl_common import streams
from openrl_common.bus import Bus
from openrl_common.nats_server import NatsServer
from openrl_common.records import JobKind, JobPhase, JobRecord, JobSpec
from openrl_common.wire import SamplingParams, SaveWeights
from support import until

RECORD = JobRecord(
    tenant="default", job="j", submission="s", incarnation=1, phase=JobPhase.READY, runtime_tenant="default",
    runtime="j", trainer="default--j--trainer", sampler="default--j--sampler", submitted_at=0.0,
    spec=JobSpec(name="j", kind=JobKind.FFT, base_model="/m"),
)  # fmt: skip


async def running() -> None:
    return None


async def test_a_server_that_confirms_nothing_is_waited_for_aloud(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It stands still; under a full disk it is as silent to writes. The connection stays."""
    monkeypatch.setattr(write_watch, "SAY_AFTER_S", 0.3)
    bus = await Bus.connect(nats_server.url, name="client")
    await streams.ensure(bus)
    log = TrainingLog(bus, tenant="default", job="j", incarnation=1, next_seq=1, after=0, ended=running)
    samples = SampleClient(bus)
    await log.start()
    await samples.start()
    assert nats_server.pid is not None
    os.kill(nats_server.pid, signal.SIGSTOP)
    try:
        log.send(SaveWeights)
        sampling = asyncio.create_task(samples.sample(RECORD, [[1]], SamplingParams(n=1), timeout_s=60, ended=running))
        await until(lambda: caplog.text.count("trying on: NATS is there and does not confirm them") == 2)
    finally:
        os.kill(nats_server.pid, signal.SIGCONT)
    await until(lambda: caplog.text.count("NATS takes them again") == 2)
    said = [record.getMessage() for record in caplog.records if record.name == "openrl_client.write_watch"]
    assert len(said) == 4
    for what in ("requests of job j", "sampling requests"):
        assert sum(line.startswith(what) for line in said) == 2
    sampling.cancel()
    await asyncio.gather(sampling, return_exceptions=True)
    await log.close()
    await samples.close()
    await bus.close()
