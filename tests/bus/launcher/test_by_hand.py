"""What people do to the buckets and to processes by hand has a defined outcome (bad input of issue 4)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from bus.launcher.launcher_helpers import Ledger, alive, judging, until
from openrl_common import duty
from openrl_common.events import Repaired, WorkerGone
from openrl_common.records import CutState, LeaseState, SeatState
from openrl_launcher.service import Launcher

Launch = Callable[..., AbstractAsyncContextManager[Launcher]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duty, "DUTY_RENEW_S", 0.2)


async def test_a_claim_deleted_by_hand_costs_its_worker_the_seat_and_frees_its_device(
    ledger: Ledger, launch: Launch, nats_url: str, home: Path
) -> None:
    """L6, B8: the janitor finds a seat whose claim lists nothing: fenced, released; the launcher stops and frees."""
    async with judging(nats_url, home, janitor_every_s=0.3), launch(devices=(8,)):
        workload, claim, assignment = await ledger.found("lease")
        pid = await ledger.started(assignment)
        await ledger.bus.store.ledger_claims.delete(claim)

        async def released() -> bool:
            seat = await ledger.bus.store.ledger_seats.get(workload)
            return seat is not None and seat.value.state is SeatState.EMPTY

        await until(released)
        await until(lambda: not alive(pid))
        lease = await ledger.bus.store.leases.get(assignment)
        assert lease is not None
        assert lease.value.state is LeaseState.TOMBSTONE

        async def free() -> bool:
            cut = await ledger.bus.store.cuts.get(claim)
            hold = await ledger.bus.store.devices.get("here.dev0")
            assert hold is not None
            return cut is not None and cut.value.state is CutState.FREED and not hold.value.claim

        await until(free)
        assert any(
            isinstance(delivery, Repaired) and (delivery.kind, delivery.workload) == ("unlisted-seat", workload)
            for delivery in await repairs(ledger)
        )


async def repairs(ledger: Ledger) -> list[object]:
    last = await ledger.bus.last(stream="OPENRL_EVENTS", subject="openrl.ev.ledger._fleet.repair.>")
    if last is None:
        return []
    found = []
    async for delivery in ledger.bus.tail(stream="OPENRL_EVENTS", subject="openrl.ev.ledger._fleet.repair.>"):
        found.append(delivery.event())
        if delivery.sequence >= last.sequence:
            break
    return list(found)


async def test_a_worker_nobody_launched_is_fenced_and_ended(ledger: Ledger, launch: Launch, home: Path) -> None:
    """B1: it carries an assignment of this home and node, and no seat names it. Another home's is left alone."""
    environment = {
        **os.environ, "OPEN_RL_HOME": str(home), "OPEN_RL_NODE": "here", "OPEN_RL_ASSIGNMENT": "a-made-up",
        "OPEN_RL_WORKLOAD": "team--ghost--trainer",
    }  # fmt: skip
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    ghost = subprocess.Popen(command, env=environment, start_new_session=True)  # noqa: ASYNC220
    elsewhere = {**environment, "OPEN_RL_HOME": "/elsewhere"}
    other = subprocess.Popen(command, env=elsewhere, start_new_session=True)  # noqa: ASYNC220
    try:
        async with launch(devices=(8,)):
            gone = await ledger.event(WorkerGone, assignment="a-made-up")
            assert gone.workload == "team--ghost--trainer"
            await until(lambda: not alive(ghost.pid))
            lease = await ledger.bus.store.leases.get("a-made-up")
            assert lease is not None
            assert lease.value.state is LeaseState.TOMBSTONE
            assert alive(other.pid)
    finally:
        for process in (ghost, other):
            process.kill()
            process.wait()
