"""A simulated launcher for all nodes: cuts claims in line order, starts and stops workers, says what the real one does.

It follows the ledger's tables as the real one does (B1, B7, B8): a worker starts only for a held seat that its
allocated claim lists, a device is free only when its claim was freed, a worker is gone before WorkerGone is said.
"""

from __future__ import annotations

from collections.abc import Callable

from sortedcontainers import SortedList

from openrl_common.events import ClaimAllocated, ClaimFreed, Event, WorkerGone, WorkerLaunched, WorkerUnschedulable
from openrl_common.quantities import format_bytes
from openrl_common.records import (
    ClaimEntry,
    ClaimRecord,
    ClaimState,
    LeaseRecord,
    LeaseState,
    NodeBudget,
    NodeRecord,
    SeatRecord,
    SeatState,
    Tier,
)
from openrl_common.seating import accepts_role, host_refusal
from openrl_ledger.core.ops import Table
from openrl_rehearsal.agenda import Agenda
from openrl_rehearsal.control import Control
from openrl_rehearsal.profile import Control as ControlTimes
from openrl_rehearsal.workers import Worker

DeviceKey = tuple[int, int, int]
"""``(memory bytes, number of the node, number of the device)``: the smallest device first, then in the nodes' order."""


class Launcher:
    """``make_worker(assignment, entry, claim, claim record)`` makes the process that a seat stands for."""

    def __init__(
        self,
        control: Control,
        times: ControlTimes,
        nodes: list[NodeRecord],
        make_worker: Callable[[str, ClaimEntry, str, ClaimRecord], Worker],
    ) -> None:
        self._agenda: Agenda = control.agenda
        self._tables = control.tables
        self._publish: Callable[[Event], None] = control.publish
        self._times = times
        self._nodes = nodes
        self._make_worker = make_worker
        self._free: SortedList[DeviceKey] = SortedList(
            (device.memory_bytes, index, number)
            for index, node in enumerate(nodes)
            for number, device in enumerate(node.devices)
        )
        self._host_cutting: dict[str, tuple[str, int]] = {}
        self._pending: SortedList[tuple[tuple[int, int], str]] = SortedList()
        self._untold: dict[str, None] = {}
        self._held: dict[str, DeviceKey] = {}
        self._looking = False
        self._pulled: dict[str, float] = {}
        self.workers: dict[str, Worker] = {}
        self.by_workload: dict[str, Worker] = {}
        self.devices_used = 0
        self.devices_used_peak = 0

    def on_change(self, table: Table, key: str, value: object) -> None:
        """A write of the ledger's became known here."""
        if table is Table.CLAIMS and isinstance(value, ClaimRecord):
            self._claim_changed(key, value)
        elif table is Table.SEATS and isinstance(value, SeatRecord):
            self._seat_changed(key)

    # --- claims --------------------------------------------------------------------------------------------------

    def _claim_changed(self, claim: str, record: ClaimRecord) -> None:
        if record.state is ClaimState.PENDING:
            self._pending.add((record.order, claim))
            self._untold[claim] = None
            self._look_soon()
        elif record.state is ClaimState.ALLOCATED:
            for entry in record.entries.values():
                self._seat_changed(entry.workload)
        elif record.state is ClaimState.RETIRING:
            self._drop_pending(claim, record)
            self._agenda.after(self._times.free.seconds, self._free_claim, claim)
        else:
            self._drop_pending(claim, record)

    def _drop_pending(self, claim: str, record: ClaimRecord) -> None:
        self._pending.discard((record.order, claim))
        self._untold.pop(claim, None)

    def _free_claim(self, claim: str) -> None:
        if claim in self._host_cutting:
            return  # its cut is under way and will find it retired
        self._give_back(claim)

    def _give_back(self, claim: str) -> None:
        device = self._held.pop(claim, None)
        node = ""
        names: tuple[str, ...] = ()
        if device is not None:
            self._free.add(device)
            self.devices_used -= 1
            record = self._nodes[device[1]]
            node, names = record.node, (record.devices[device[2]].device,)
        self._publish(ClaimFreed(claim=claim, node=node, devices=names))
        self._look_soon()

    def _look_soon(self) -> None:
        if not self._looking:
            self._looking = True
            self._agenda.after(0.0, self._serve_pending)

    def _serve_pending(self) -> None:
        """W1: pending claims in line order, each its tightest tier and the smallest device that fits (P9)."""
        self._looking = False
        hopeless: set[tuple[tuple[Tier, ...], str, int]] = set()
        for order, claim in list(self._pending) if self._free else ():
            record: ClaimRecord | None = self._tables.value(Table.CLAIMS, claim)
            if record is None or record.state is not ClaimState.PENDING or not record.entries:
                continue
            ((_, entry),) = record.entries.items()
            alike = (record.tiers, entry.role, entry.host_bytes)
            device = None if alike in hopeless else self._choose(record, entry)
            if device is None:
                hopeless.add(alike)
                continue
            self._pending.discard((order, claim))
            self._untold.pop(claim, None)
            self._cut(claim, device, entry)
            if not self._free:
                break
        for claim in self._untold:
            self._say_unschedulable(claim)
        self._untold.clear()

    def _choose(self, record: ClaimRecord, entry: ClaimEntry) -> DeviceKey | None:
        for tier in record.tiers:
            assert tier.count == 1, "devices in groups are not rehearsed"
            ceiling_bytes = tier.ceiling_gib << 30
            refused: set[int] = set()
            key: DeviceKey
            for key in self._free.irange(minimum=(tier.floor_bytes, -1, -1)):
                if key[0] > ceiling_bytes:
                    break
                if key[1] in refused:
                    continue
                node = self._nodes[key[1]]
                if accepts_role(node, entry.role) and not self._host_refusal(node, entry):
                    return key
                refused.add(key[1])
        return None

    def _host_refusal(self, node: NodeRecord, entry: ClaimEntry) -> str:
        budget: NodeBudget = self._tables.value(Table.BUDGETS, node.node) or NodeBudget()
        used = sum(each.host_bytes for each in budget.entries.values())
        used += sum(host_bytes for name, host_bytes in self._host_cutting.values() if name == node.node)
        return host_refusal(node, used, entry.host_bytes)

    def _cut(self, claim: str, device: DeviceKey, entry: ClaimEntry) -> None:
        self._free.remove(device)
        self._held[claim] = device
        self.devices_used += 1
        self.devices_used_peak = max(self.devices_used_peak, self.devices_used)
        self._host_cutting[claim] = (self._nodes[device[1]].node, entry.host_bytes)
        self._agenda.after(self._times.cut.seconds, self._cut_done, claim, device)

    def _cut_done(self, claim: str, device: DeviceKey) -> None:
        del self._host_cutting[claim]
        record: ClaimRecord = self._tables.value(Table.CLAIMS, claim)
        if record.state is not ClaimState.PENDING:
            self._give_back(claim)
            return
        node = self._nodes[device[1]]
        self._publish(
            ClaimAllocated(
                claim=claim,
                node=node.node,
                devices=(node.devices[device[2]].device,),
                device_bytes=device[0],
                tier=f"1x{-(-device[0] >> 30)}",
            )
        )

    def _say_unschedulable(self, claim: str) -> None:
        record: ClaimRecord | None = self._tables.value(Table.CLAIMS, claim)
        if record is None or record.state is not ClaimState.PENDING:
            return
        for assignment, entry in record.entries.items():
            self._publish(
                WorkerUnschedulable(
                    tenant=entry.tenant,
                    workload=entry.workload,
                    assignment=assignment,
                    claim=claim,
                    cause=f"no device of at least {format_bytes(entry.device_bytes)} is free",
                )
            )

    # --- workers -------------------------------------------------------------------------------------------------

    def _seat_changed(self, workload: str) -> None:
        """Level-triggered: what the tables say now decides."""
        seat: SeatRecord | None = self._tables.value(Table.SEATS, workload)
        if seat is None or seat.state is SeatState.EMPTY:
            return
        claim: ClaimRecord | None = self._tables.value(Table.CLAIMS, seat.claim)
        if claim is None or claim.state is ClaimState.PENDING:
            return
        worker = self.workers.get(seat.assignment)
        if seat.state is SeatState.RELEASING:
            if worker is None or not worker.stopped:
                self._stop(workload, seat, claim, worker)
        elif worker is None and claim.state is ClaimState.ALLOCATED and seat.assignment in claim.entries:
            self._start(seat, claim)

    def _start(self, seat: SeatRecord, claim: ClaimRecord) -> None:
        if self._tables.value(Table.LEASES, seat.assignment) is not None:
            return  # fenced before it began (B7)
        entry = claim.entries[seat.assignment]
        self._tables.put(Table.LEASES, seat.assignment, LeaseRecord(state=LeaseState.LIVE, holder="simulated"))
        worker = self._make_worker(seat.assignment, entry, seat.claim, claim)
        self.workers[seat.assignment] = self.by_workload[entry.workload] = worker
        pulled_at = self._pulled.setdefault(claim.node, self._agenda.now + self._times.image_pull.seconds)
        worker.start(max(0.0, pulled_at - self._agenda.now))
        self._publish(
            WorkerLaunched(
                tenant=entry.tenant,
                workload=entry.workload,
                assignment=seat.assignment,
                claim=seat.claim,
                node=claim.node,
            )
        )

    def _stop(self, workload: str, seat: SeatRecord, claim: ClaimRecord, worker: Worker | None) -> None:
        entry = claim.entries.get(seat.assignment)
        if entry is None:
            return
        if worker is not None:
            worker.stop()
        gone = WorkerGone(
            tenant=entry.tenant, workload=workload, assignment=seat.assignment, claim=seat.claim, node=claim.node
        )
        self._agenda.after(self._times.stop.seconds if worker is not None else 0.0, self._publish, gone)
