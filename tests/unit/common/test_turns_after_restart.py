"""A worker that was started again on its assignment, and the turn that its former process had (T4)."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, cast

from prometheus_client import CollectorRegistry

from openrl_common.events import EVENT_DECODER, TurnGranted, TurnReleased
from openrl_common.memory import MemoryBus
from openrl_common.memory_server import MemoryServer
from openrl_common.quantities import GIB
from openrl_common.records import (
    JobKind,
    Residency,
    Role,
    SeatRecord,
    SeatState,
    Shape,
    TurnRecord,
    WorkloadPhase,
    WorkloadRecord,
)
from openrl_common.turns import Turns
from openrl_common.worker import WorkerContext

WORKLOAD = WorkloadRecord(
    workload="t--j--trainer", tenant="t", owner="t/j", owner_name="j", kind=JobKind.FFT, jobs=("t.j",), incarnation=1,
    shape=Shape(role=Role.TRAINER, device_bytes=GIB), base_model="m", phase=WorkloadPhase.STARTING, submitted_at=0.0,
)  # fmt: skip


def resident(epoch: int) -> TurnRecord:
    return TurnRecord(residents={"a1": Residency(epoch=epoch, granted_at=0.0, until=1e12)})


async def test_T4_what_a_former_process_was_granted_is_given_back_and_never_worked_under() -> None:
    """Its release of that very turn may still be on its way; somebody else would be granted the device then."""
    bus = MemoryBus(MemoryServer())
    await bus.store.ledger_seats.put(
        WORKLOAD.workload, SeatRecord(state=SeatState.HELD, incarnation=1, assignment="a1", claim="c1")
    )
    await bus.store.turns.put("c1", resident(1))
    context = WorkerContext(
        service=cast(Any, None), bus=bus, store=bus.store, workload=WORKLOAD, assignment="a1", node="n1",
        home=Path("home"), device_bytes=GIB, stopping=bus.stopping, renewed_at=time.monotonic(),
    )  # fmt: skip
    turns = Turns(context, CollectorRegistry())
    await turns.start()
    released = EVENT_DECODER.decode(bus.server.streams["OPENRL_EVENTS"].messages[0].data)
    assert isinstance(released, TurnReleased)
    assert (released.assignment, released.epoch) == ("a1", 1)
    entered = asyncio.Event()

    async def work() -> None:
        async with turns.hold():
            entered.set()

    working = asyncio.create_task(work())
    for _ in range(50):
        await asyncio.sleep(0)
    assert not entered.is_set()
    await bus.store.turns.put("c1", resident(2))
    await bus.publish(TurnGranted(tenant="t", claim="c1", assignment="a1", epoch=2, until=1e12))
    await working
    assert entered.is_set()
    await turns.close()
