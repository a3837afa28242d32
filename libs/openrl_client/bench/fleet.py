"""A fleet that exists only in the buckets: nodes, seated claims, and a stand-in for their launchers.

    ordinary nodes   hold the joinable claims (one seat each) and the devices that founded claims are cut on
    large nodes      every device is claimed and every seat taken: what asks for their size waits

Everything but the workers is real: node, claim, seat, budget, cut and device records are those that the services write,
consistent with each other, so neither the janitor nor placement's pass finds anything to repair. The stand-in answers a
founded claim as a launcher does: it holds the device, writes the cut, says ClaimAllocated.

Not here: worker processes, leases, heartbeats.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from openrl_common.bus import Bus
from openrl_common.errors import Rejected
from openrl_common.events import ClaimAllocated, ClaimFreed, SeatBooked, WorkerGone, WorkerUnschedulable
from openrl_common.quantities import GIB
from openrl_common.records import (
    ClaimEntry,
    ClaimRecord,
    ClaimState,
    CutRecord,
    CutState,
    Device,
    DeviceHold,
    NodeBudget,
    NodeEntry,
    NodeRecord,
    Role,
    SeatRecord,
    SeatState,
)

DEVICES_PER_NODE = 8
SEATS_PER_CLAIM = 16
ORDINARY_GIB = (79.65, 79.65, 79.65, 79.65, 22.5)
"""Device sizes of ordinary nodes, in turn: four nodes of H100s, one of L4s."""
LARGE_GIB = 139.8
HOST_BYTES = 4096 * GIB
SEED_HOST_BYTES = 24 * GIB
_AT_ONCE = 64

T = TypeVar("T")


@dataclass(frozen=True)
class Size:
    """``num_claims`` counts the full claims of the large nodes too; of these ``num_wakes`` seats are to be freed."""

    num_nodes: int
    num_claims: int
    num_wakes: int

    @property
    def num_large_nodes(self) -> int:
        return max(1, -(-self.num_wakes // (DEVICES_PER_NODE * (SEATS_PER_CLAIM - 1))))

    @property
    def num_full(self) -> int:
        return self.num_large_nodes * DEVICES_PER_NODE

    @property
    def num_joinable(self) -> int:
        return self.num_claims - self.num_full

    @property
    def num_free_devices(self) -> int:
        return (self.num_nodes - self.num_large_nodes) * DEVICES_PER_NODE - self.num_joinable

    @property
    def joins_max(self) -> int:
        return self.num_joinable * (SEATS_PER_CLAIM - 1)

    def check(self, num_jobs: int) -> None:
        """Raises Rejected when this fleet cannot hold a load of ``num_jobs``, half of whose seats found a claim."""
        if self.num_joinable < 1:
            raise Rejected(
                f"--claims {self.num_claims} leaves none to join: use more than {self.num_full}", code="usage"
            )
        if self.num_free_devices < num_jobs:
            raise Rejected(
                f"{self.num_nodes} nodes with {self.num_claims} claims have {max(0, self.num_free_devices)} devices "
                f"free, {num_jobs} jobs found {num_jobs} claims: use more --nodes, or fewer --claims or --jobs",
                code="usage",
            )
        if self.joins_max < num_jobs:
            raise Rejected(
                f"{self.num_claims} claims take {self.joins_max} joins, {num_jobs} jobs join {num_jobs} times: "
                "use more --claims or fewer --jobs",
                code="usage",
            )


@dataclass(frozen=True)
class Seat:
    """A seeded seat, to be released when the bench frees one."""

    workload: str
    assignment: str
    claim: str
    node: str


class Fleet:
    """Writes the fleet into the buckets, then stands in for its launchers."""

    def __init__(self, bus: Bus, size: Size) -> None:
        self._bus = bus
        self._size = size
        self._free: deque[tuple[str, str, int]] = deque()
        self._cuts: dict[str, CutRecord] = {}
        self.seats_to_free: deque[Seat] = deque()

    # --- seeding -----------------------------------------------------------------------------------------------

    async def seed(self) -> None:
        """Write every record; returns when all are stored."""
        size = self._size
        nodes = [(f"large-{index:04d}", LARGE_GIB) for index in range(size.num_large_nodes)]
        nodes += [
            (f"node-{index:04d}", ORDINARY_GIB[index % len(ORDINARY_GIB)])
            for index in range(size.num_nodes - size.num_large_nodes)
        ]
        devices = {
            name: [(name, f"dev-{index}", int(gib * GIB)) for index in range(DEVICES_PER_NODE)] for name, gib in nodes
        }
        large = [device for name, _ in nodes[: size.num_large_nodes] for device in devices[name]]
        by_index = zip(*(devices[name] for name, _ in nodes[size.num_large_nodes :]), strict=True)
        ordinary = [device for same_index in by_index for device in same_index]
        self._free.extend(ordinary[size.num_joinable :])
        await _all(
            self._bus.store.nodes.put(
                name,
                NodeRecord(
                    node=name,
                    devices=tuple(Device(device=device, memory_bytes=memory) for _, device, memory in devices[name]),
                    host_allocatable_bytes=HOST_BYTES,
                    declared=True,
                ),
            )
            for name, _ in nodes
        )
        budgets: dict[str, dict[str, NodeEntry]] = {}
        plan = [(device, SEATS_PER_CLAIM) for device in large]
        plan += [(device, 1) for device in ordinary[: size.num_joinable]]
        await _all(
            self._seed_claim(f"c-seed-{index:05d}", device, num_seats, budgets)
            for index, (device, num_seats) in enumerate(plan)
        )
        await _all(self._bus.store.ledger_nodes.put(node, NodeBudget(entries=held)) for node, held in budgets.items())

    async def _seed_claim(
        self, claim: str, device: tuple[str, str, int], num_seats: int, budgets: dict[str, dict[str, NodeEntry]]
    ) -> None:
        node, device_id, memory = device
        entries: dict[str, ClaimEntry] = {}
        for index in range(num_seats):
            workload, assignment = f"seed--{claim[2:]}-{index}--trainer", f"a-{claim[2:]}-{index}"
            entries[assignment] = ClaimEntry(
                workload=workload, tenant="seed", owner=f"seed/{claim[2:]}-{index}", role=Role.TRAINER,
                device_bytes=8 * GIB, host_bytes=SEED_HOST_BYTES, exclusive=False, incarnation=1, reserved_at=0.0,
            )  # fmt: skip
            held = NodeEntry(workload=workload, claim=claim, host_bytes=SEED_HOST_BYTES)
            budgets.setdefault(node, {})[assignment] = held
            if num_seats == SEATS_PER_CLAIM and index > 0:  # one stays: the claim of none goes away
                self.seats_to_free.append(Seat(workload, assignment, claim, node))
        await self._cut(claim, device)
        record = ClaimRecord(
            state=ClaimState.ALLOCATED, node=node, devices=(device_id,), device_bytes=memory, entries=entries,
            limit=SEATS_PER_CLAIM, seats_peak=num_seats,
        )  # fmt: skip
        await self._bus.store.ledger_claims.put(claim, record)
        for assignment, entry in entries.items():
            seat = SeatRecord(state=SeatState.HELD, incarnation=1, assignment=assignment, claim=claim)
            await self._bus.store.ledger_seats.put(entry.workload, seat)

    # --- standing in for launchers -----------------------------------------------------------------------------

    async def answer_founded(self, booked: SeatBooked, device_bytes: int) -> None:
        """Cut a founded claim on a free device, or say that none of its size is free."""
        if device_bytes > max(ORDINARY_GIB) * GIB or not self._free:
            await self._bus.publish(
                WorkerUnschedulable(
                    tenant=booked.tenant, workload=booked.workload, assignment=booked.assignment, claim=booked.claim,
                    cause="every device of this size is in use",
                )
            )  # fmt: skip
            return
        device = self._free.popleft()
        cut = await self._cut(booked.claim, device)
        await self._bus.publish(
            ClaimAllocated(
                claim=booked.claim, node=cut.node, devices=cut.devices, device_bytes=cut.device_bytes, tier=cut.tier
            )
        )

    async def answer_retired(self, claim: str, node: str) -> None:
        """Give the claim's device back, as far as it had one."""
        cut = self._cuts.get(claim, CutRecord(state=CutState.FREED, node=node))
        freed = CutRecord(state=CutState.FREED, node=cut.node, devices=cut.devices, device_bytes=cut.device_bytes)
        await self._bus.store.cuts.put(claim, freed)
        await self._bus.publish(ClaimFreed(claim=claim, node=cut.node, devices=cut.devices))

    async def free_a_seat(self) -> Seat:
        """The worker of a seated workload on a full claim is gone."""
        seat = self.seats_to_free.popleft()
        await self._bus.publish(
            WorkerGone(
                tenant="seed", workload=seat.workload, assignment=seat.assignment, claim=seat.claim, node=seat.node
            )
        )
        return seat

    async def _cut(self, claim: str, device: tuple[str, str, int]) -> CutRecord:
        node, device_id, memory = device
        record = CutRecord(
            state=CutState.ALLOCATED, node=node, devices=(device_id,), device_bytes=memory, tier=f"1x{memory // GIB}GiB"
        )
        await self._bus.store.devices.write(f"{node}.{device_id}", DeviceHold(claim=claim), last=0)
        await self._bus.store.cuts.write(claim, record, last=0)
        self._cuts[claim] = record
        return record


async def _all(steps: Iterable[Awaitable[T]]) -> None:
    """Run every step, ``_AT_ONCE`` at a time."""
    slots = asyncio.Semaphore(_AT_ONCE)

    async def one(step: Awaitable[T]) -> None:
        try:
            await step
        finally:
            slots.release()

    async with asyncio.TaskGroup() as tasks:
        for step in steps:
            await slots.acquire()
            tasks.create_task(one(step))
