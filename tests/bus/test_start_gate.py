"""B7: the start gate as a pod meets it: its process may run before its lease is starting, and again after a restart."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from openrl_common.bus import Bus
from openrl_common.records import LeaseRecord, LeaseState
from openrl_common.worker import _go_live
from openrl_launcher import leases


def process(bus: Bus) -> Any:
    return SimpleNamespace(store=bus.store, assignment="a-1", holder="n1:1#one", stopping=asyncio.Event())


async def test_B7_a_pod_that_runs_early_waits_for_its_gate(bus: Bus) -> None:
    waiting = asyncio.create_task(_go_live(process(bus), wait_s=20.0))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await leases.open_gate(bus.store.leases, "a-1", holder="launcher")
    assert await waiting is not None
    entry = await bus.store.leases.get("a-1")
    assert entry is not None
    assert entry.value.state is LeaseState.LIVE


async def test_B7_F4_a_container_restarted_in_place_waits_until_the_launcher_has_taken_the_lease_over(bus: Bus) -> None:
    await bus.store.leases.write("a-1", LeaseRecord(state=LeaseState.LIVE, holder="its last start"), last=0)
    waiting = asyncio.create_task(_go_live(process(bus), wait_s=20.0))
    await asyncio.sleep(0.3)
    assert not waiting.done(), "what is live may be another process"
    assert await leases.open_gate(bus.store.leases, "a-1", holder="launcher") is leases.Gate.TAKEN_OVER
    assert await waiting is not None


async def test_B7_a_tombstone_ends_the_wait_and_without_a_wait_a_closed_gate_ends_the_process(bus: Bus) -> None:
    assert await _go_live(process(bus), wait_s=0.0) is None
    waiting = asyncio.create_task(_go_live(process(bus), wait_s=20.0))
    await leases.fence(bus.store.leases, "a-1", why="moved")
    assert await waiting is None
