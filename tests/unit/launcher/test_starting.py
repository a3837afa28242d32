"""Starting a worker: recorded, then through the gate, then at once (B7, L7)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import openrl_common.identity
from openrl_common.errors import Rejected
from openrl_common.identity import KEY, LedgerIdentity
from openrl_common.memory import MemoryBus
from openrl_common.memory_server import MemoryServer, Network
from openrl_common.quantities import GIB
from openrl_common.records import (
    ClaimEntry,
    ClaimRecord,
    ClaimState,
    LedgerIdentityRecord,
    Role,
    SeatRecord,
    SeatState,
    WorkerState,
)
from openrl_launcher.backend import Launch, Process
from openrl_launcher.core import Start, Status, Stop
from openrl_launcher.leases import fence
from openrl_launcher.workers import Workers

ENTRY = ClaimEntry(
    workload="t--j--trainer", tenant="t", owner="t/j", role=Role.TRAINER, device_bytes=GIB, host_bytes=GIB,
    exclusive=False, incarnation=1, reserved_at=1.0,
)  # fmt: skip


class CutOff(Network):
    """Keeps one bus's writes of workers' records until they are let go."""

    def __init__(self) -> None:
        self.bus: MemoryBus | None = None
        self.kept: list[tuple[Any, ...]] = []

    def ask(self, bus: MemoryBus, apply: Callable[[], Any], answer: asyncio.Future[Any], timeout_s: float) -> None:
        if bus is self.bus and "openrl_workers" in repr(apply):
            self.kept.append((bus, apply, answer, timeout_s))
        else:
            super().ask(bus, apply, answer, timeout_s)

    def let_go(self) -> None:
        self.bus = None
        for request in self.kept:
            super().ask(*request)


class Started:
    """Of a machine, what is asked to be started."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    async def launch(self, launch: Launch) -> Process:
        self.launches.append(launch)
        raise OSError("the test is over")

    def log_path(self, launch: Launch) -> Path:
        return Path("logs") / launch.assignment

    def sweep(self, assignment: str) -> int:
        return 0

    def last_error(self, log_path: str) -> str:
        return ""


async def test_B7_one_that_is_fenced_while_its_record_is_being_written_is_not_started() -> None:
    """A launcher that was cut off comes back: what it was about to start has a new seat by now, and runs there."""
    network = CutOff()
    bus, machine = MemoryBus(MemoryServer(network)), Started()
    others = MemoryBus(bus.server)
    tasks: list[asyncio.Future[None]] = []
    workers = Workers(
        bus, cast(Any, machine), cast(Any, None), node="n1", stop_grace_s=1.0, restarts_max=1, clock=time.monotonic,
        now=time.time, wake=lambda: None, spawn=lambda work: tasks.append(asyncio.ensure_future(work)),
    )  # fmt: skip
    network.bus = bus
    workers.start(Start("a1", "c1", ENTRY), ("d0",))
    for _ in range(20):
        await asyncio.sleep(0)
    assert network.kept, "the record is on its way"
    assert await fence(others.store.leases, "a1", why="its node is lost") == "none"
    network.let_go()
    await asyncio.gather(*tasks)
    assert machine.launches == []
    record = await others.store.workers.get("a1")
    assert record is not None
    assert record.value.state is WorkerState.GONE


class Ending(Started):
    """A machine whose one worker ends when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.over = asyncio.Event()

    async def launch(self, launch: Launch) -> Process:
        return Process(launch.assignment, launch.workload, 7, 1.0)

    async def wait(self, process: Process) -> int:
        await self.over.wait()
        return 3

    def sweep(self, assignment: str) -> int:
        return 0

    def last_error(self, log_path: str) -> str:
        return "it broke"


async def test_F4_one_that_ends_while_an_old_view_asks_for_its_stop_is_started_again() -> None:
    """Its seat is held, so it is spared; but its end must not get lost between the two."""
    bus, machine = MemoryBus(MemoryServer()), Ending()
    await bus.store.ledger_claims.put("c1", ClaimRecord(state=ClaimState.ALLOCATED, node="n1", entries={"a1": ENTRY}))
    seat = SeatRecord(state=SeatState.HELD, incarnation=1, assignment="a1", claim="c1")
    await bus.store.ledger_seats.put(ENTRY.workload, seat)
    tasks: list[asyncio.Future[None]] = []
    workers = Workers(
        bus, cast(Any, machine), cast(Any, None), node="n1", stop_grace_s=1.0, restarts_max=1, clock=time.monotonic,
        now=time.time, wake=lambda: None, spawn=lambda work: tasks.append(asyncio.ensure_future(work)),
    )  # fmt: skip
    workers.start(Start("a1", "c1", ENTRY), ("d0",))
    await tasks[0]
    assert workers.view()["a1"].status is Status.RUNNING
    workers.stop(Stop("a1", ENTRY.workload, "c1", "no seat backs it"))
    machine.over.set()
    await asyncio.gather(*tasks)
    assert workers.view()["a1"].status is Status.BACKING_OFF


@pytest.mark.parametrize("cut_off_s", [0.0, 30.0])
async def test_L7_B7_one_whose_ledger_was_rebuilt_while_this_launcher_was_cut_off_is_not_started(
    cut_off_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new ledger knows nothing of its seat, so nobody has fenced it. Who was not cut off need not ask."""
    bus, machine, now = MemoryBus(MemoryServer()), Started(), [1000.0]
    monkeypatch.setattr(openrl_common.identity, "time", SimpleNamespace(monotonic=lambda: now[0]))
    await bus.store.ledger_meta.put(KEY, LedgerIdentityRecord(id="lost"))
    identity = LedgerIdentity(bus)
    await identity.wait(asyncio.Event())
    await bus.store.ledger_meta.put(KEY, LedgerIdentityRecord(id="rebuilt"))
    now[0] += cut_off_s
    tasks: list[asyncio.Future[None]] = []
    workers = Workers(
        bus, cast(Any, machine), cast(Any, None), node="n1", stop_grace_s=1.0, restarts_max=1,
        clock=time.monotonic, now=time.time, wake=lambda: None, identity=identity,
        spawn=lambda work: tasks.append(asyncio.ensure_future(work)),
    )  # fmt: skip
    workers.start(Start("a1", "c1", ENTRY), ("d0",))
    (ended,) = await asyncio.gather(*tasks, return_exceptions=True)
    replaced = isinstance(ended, Rejected) and ended.code == "ledger-replaced"
    assert (replaced, len(machine.launches)) == ((True, 0) if cut_off_s else (False, 1))
