"""The end of a service whose NATS is away: it comes, and says what was not written (E17)."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from openrl_common import service, streams
from openrl_common.bus import Bus
from openrl_common.nats_server import NatsServer
from openrl_common.records import LeaseRecord, LeaseState
from openrl_common.service import ServiceContext, _run_body

LIVE = LeaseRecord(state=LeaseState.LIVE)


async def test_E17_a_body_that_waits_on_although_it_was_cancelled_is_given_up(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As placement did: its last act was to wait for a write that has 20 s for its tries."""
    monkeypatch.setattr(service, "_DRAIN_S", 0.05)
    monkeypatch.setattr(service, "_CANCEL_S", 0.05)
    answered = asyncio.Event()

    async def body(context: ServiceContext) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await answered.wait()

    stopping = asyncio.Event()
    stopping.set()
    async with asyncio.timeout(5):
        await _run_body(ServiceContext(bus, stopping, CollectorRegistry(), {}), body)
    answered.set()
    assert "it is given up" in caplog.text


async def test_E17_writes_that_the_end_cut_off_are_named_and_no_others(nats_server: NatsServer) -> None:
    bus = await Bus.connect(nats_server.url, name="test")
    await streams.ensure(bus)
    await bus.store.leases.write("stored", LIVE, last=0)
    nats_server.kill()

    async def cut_off(key: str) -> None:
        writing = asyncio.create_task(bus.store.leases.write(key, LIVE, last=0))
        await asyncio.sleep(0.05)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)

    await cut_off("given-up-by-its-caller")
    assert str(bus.unwritten) == ""
    bus.stopping.set()
    for number in range(10):
        await cut_off(f"w{number}")
    assert str(bus.unwritten) == ", ".join(f"openrl_leases.lease.w{n}" for n in range(8)) + " and 2 more"
    await bus.close()
