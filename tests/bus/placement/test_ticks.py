"""What happens by time alone, in the service itself."""

from __future__ import annotations

import asyncio
import time

import pytest

from openrl_common import streams
from openrl_common.bus import Bus
from openrl_common.records import JobPhase
from openrl_placement import service
from support import until
from unit.placement.test_outbox import placement_on


async def test_W3_deadlines_pass_while_a_repairing_pass_lasts(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """With thousands of workloads it takes seconds, most of which it rests: here it rests for ever."""
    await streams.ensure(bus)
    monkeypatch.setattr(service, "_REST", 1e9)
    monkeypatch.setattr(service, "_TICK_S", 0.1)
    placement, it = placement_on(bus, placement_timeout_s=0.5, pass_every_s=0.01)
    it.now = time.time()
    it.submit("a")
    tasks = [asyncio.create_task(placement.follow_time()), asyncio.create_task(placement.repair())]
    try:
        await until(lambda: it.state.jobs["default.a"].phase is JobPhase.FAILED)
    finally:
        bus.stopping.set()
        async with asyncio.timeout(5):
            await asyncio.gather(*tasks)
