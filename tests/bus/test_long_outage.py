"""An outage of the real server that is longer than a write waits for its answer: nobody loses what is still theirs.

The client sends after the reconnect what its callers have given up (E7). ``tests/simulation/test_outages.py`` has the
cases in between, on a virtual clock and with the times of production.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import pytest

from openrl_common import duty as duty_module
from openrl_common import store as store_module
from openrl_common import streams, worker
from openrl_common.bus import Bus
from openrl_common.duty import Duty
from openrl_common.nats_server import NatsServer
from openrl_common.records import LeaseState
from openrl_launcher import leases
from support import until

_GIVE_UP_S = 0.6
_OUTAGE_S = 3.0


async def test_B5_E7_E13_a_lease_and_a_duty_outlast_an_outage_in_which_their_renewals_are_given_up(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_module, "_TRY_S", 0.2)
    monkeypatch.setattr(store_module, "_DEADLINE_S", _GIVE_UP_S)
    monkeypatch.setattr(worker, "RENEW_S", 0.2)
    monkeypatch.setattr(duty_module, "DUTY_RENEW_S", 0.2)
    bus = await Bus.connect(nats_server.url, name="test")
    await streams.ensure(bus)
    stopping = asyncio.Event()
    context = worker.WorkerContext(
        service=cast(Any, None), bus=bus, store=bus.store, workload=cast(Any, None), assignment="a-1", node="n1",
        home=Path("home"), device_bytes=0, stopping=stopping,
    )  # fmt: skip
    await leases.open_gate(bus.store.leases, "a-1", holder="launcher")
    revision = await worker._go_live(context, wait_s=0.0)
    assert revision is not None
    duty = Duty(bus.store.duties, "upkeep", holder="one", clock=time.monotonic)
    renewing = asyncio.create_task(worker._renew(context, revision))
    keeping = asyncio.create_task(duty.keep(stopping))
    lost = asyncio.create_task(duty.wait_lost(stopping))
    await until(lambda: duty.held)
    nats_server.kill()
    await asyncio.sleep(_OUTAGE_S)
    assert "it may have landed" in caplog.text
    back_at = time.monotonic()
    nats_server.start()
    await until(lambda: context.renewed_at > back_at or renewing.done(), within_s=20.0)
    await until(lambda: duty._sent_at is None or duty._sent_at > back_at, within_s=20.0)
    assert not renewing.done()
    assert not lost.done()
    assert duty.held
    entry = await bus.store.leases.get("a-1")
    assert entry is not None
    assert (entry.value.state, entry.value.holder) == (LeaseState.LIVE, context.holder)
    await leases.fence(bus.store.leases, "a-1", why="moved")
    async with asyncio.timeout(5.0):
        await renewing
    stopping.set()
    await asyncio.gather(keeping, lost)
    await bus.close()
