"""The test plays the ledger: it writes its records and waits for what the launcher does."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
from prometheus_client import CollectorRegistry

from openrl_common.bus import Bus
from openrl_common.events import Event
from openrl_common.quantities import GIB
from openrl_common.records import (
    ClaimEntry,
    ClaimRecord,
    ClaimState,
    CutState,
    JobKind,
    Role,
    SeatRecord,
    SeatState,
    Shape,
    Tier,
    WorkloadPhase,
    WorkloadRecord,
)
from openrl_common.service import ServiceContext
from openrl_ledger.core.nodes import NodePolicy
from openrl_ledger.service import LedgerSettings, serve

T = TypeVar("T")
FAKE_WORKERS = Path(__file__).parent / "fake_workers"


@dataclasses.dataclass
class Ledger:
    """Writes what the ledger would: a claim with its founder's seat, and their ends."""

    bus: Bus
    home: Path
    node: str
    numbers: int = 0

    async def found(
        self,
        behaviour: str,
        *,
        gib: int = 8,
        count: int = 1,
        host_gib: int = 0,
        order: tuple[int, int] = (0, 1),
        role: Role = Role.TRAINER,
    ) -> tuple[str, str, str]:
        """Seat a workload on a pending claim of its own: (workload, claim, assignment)."""
        self.numbers += 1
        workload = f"team--{behaviour}--{role}"
        claim, assignment = f"claim-{self.numbers}", f"assignment-{self.numbers}"
        shape = Shape(role=role, device_bytes=gib * GIB, device_count=count)
        await self.bus.store.workloads.put(
            workload,
            WorkloadRecord(
                workload=workload, tenant="team", owner=f"team/{behaviour}", owner_name=behaviour, kind=JobKind.FFT,
                jobs=(f"team.{behaviour}",), incarnation=1, shape=shape, base_model="none",
                phase=WorkloadPhase.PENDING, submitted_at=time.time(),
            ),
        )  # fmt: skip
        entry = ClaimEntry(
            workload=workload, tenant="team", owner=f"team/{behaviour}", role=role, device_bytes=gib * GIB,
            host_bytes=host_gib * GIB, exclusive=False, incarnation=1, reserved_at=time.time(),
        )  # fmt: skip
        await self.bus.store.ledger_claims.write(
            claim,
            ClaimRecord(
                state=ClaimState.PENDING,
                tiers=(Tier(count=count, floor_bytes=gib * GIB, ceiling_gib=80),),
                entries={assignment: entry},
                order=order,
            ),
            last=0,
        )
        seat = await self.bus.store.ledger_seats.get(workload)
        await self.bus.store.ledger_seats.write(
            workload,
            SeatRecord(state=SeatState.HELD, incarnation=1, assignment=assignment, claim=claim),
            last=0 if seat is None else seat.revision,
        )
        return workload, claim, assignment

    async def allocate(self, claim: str) -> tuple[str, ...]:
        """What the ledger does on ClaimAllocated; returns the devices."""
        cut = await until(lambda: self.bus.store.cuts.get(claim))
        assert cut.value.state is CutState.ALLOCATED
        await self.change_claim(
            claim,
            state=ClaimState.ALLOCATED,
            node=cut.value.node,
            devices=cut.value.devices,
            device_bytes=cut.value.device_bytes,
        )
        return cut.value.devices

    async def run(self, behaviour: str, **fields: Any) -> tuple[str, str, str, int]:
        """Found, allocate and wait for the process: (workload, claim, assignment, pid)."""
        workload, claim, assignment = await self.found(behaviour, **fields)
        await self.allocate(claim)
        return workload, claim, assignment, await self.started(assignment)

    async def started(self, assignment: str, times: int = 1) -> int:
        """Wait until the process of an assignment has been started ``times`` times; the newest pid."""
        mark = self.home / f"starts-{assignment}"
        lines = await until(lambda: starts(mark) if len(starts(mark)) >= times else None)
        return int(lines[-1])

    async def release(self, workload: str) -> None:
        seat = await self.bus.store.ledger_seats.get(workload)
        assert seat is not None
        await self.bus.store.ledger_seats.write(
            workload, msgspec.structs.replace(seat.value, state=SeatState.RELEASING), last=seat.revision
        )

    async def drop(self, workload: str, claim: str) -> None:
        """What the ledger does on WorkerGone of the last seat: entry off the claim, which retires, seat empty."""
        await self.change_claim(claim, entries={}, state=ClaimState.RETIRING)
        seat = await self.bus.store.ledger_seats.get(workload)
        assert seat is not None
        await self.bus.store.ledger_seats.write(workload, SeatRecord(closed=1), last=seat.revision)

    async def change_claim(self, claim: str, **fields: Any) -> None:
        entry = await self.bus.store.ledger_claims.get(claim)
        assert entry is not None
        await self.bus.store.ledger_claims.write(
            claim, msgspec.structs.replace(entry.value, **fields), last=entry.revision
        )

    async def event(self, kind: type[T], **fields: object) -> T:
        """Wait for an event of this kind with these fields."""
        events = await until(lambda: self._events(kind, fields))
        return events[0]

    async def events(self, kind: type[T], **fields: object) -> list[T]:
        return await self._events(kind, fields) or []

    async def _events(self, kind: type[T], fields: dict[str, object]) -> list[T] | None:
        found = [
            event
            for event in self.seen
            if isinstance(event, kind) and all(getattr(event, name) == value for name, value in fields.items())
        ]
        return found or None

    seen: list[Event] = dataclasses.field(default_factory=list)

    async def listen(self) -> None:
        async for delivery in self.bus.tail(stream="OPENRL_EVENTS", subject="openrl.ev.launcher.>"):
            self.seen.append(delivery.event())


def starts(mark: Path) -> list[str]:
    return mark.read_text().splitlines() if mark.exists() else []


def alive(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


async def until(look: Callable[[], Any], deadline_s: float = 20.0) -> Any:
    """Poll ``look`` (plain or async) until it gives something true."""
    deadline = time.monotonic() + deadline_s
    while True:
        found = look()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def judging(
    url: str, home: Path, policy: NodePolicy | None = None, *, janitor_every_s: float = 60.0
) -> AsyncIterator[None]:
    """The ledger service, in this process."""
    bus = await Bus.connect(url, name="ledger")
    context = ServiceContext(bus, bus.stopping, CollectorRegistry(), {})
    config = LedgerSettings(
        nats_url=url, home=home, log_level="info", log_format="json", health_host="127.0.0.1", health_port=0,
        max_seats_per_claim=0, janitor_every_s=janitor_every_s, nodes=policy or NodePolicy(),
    )  # fmt: skip
    serving = asyncio.create_task(serve(context, config))
    try:
        yield
        assert not serving.done(), serving
    finally:
        bus.stopping.set()
        await asyncio.gather(serving, return_exceptions=True)
        await bus.close()
