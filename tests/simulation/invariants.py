"""Invariants 1 to 6 of docs/rules.md, looked at on every write of the store and at every step of a worker process.

They read the truth: the server's last values and the machines' processes, never a service's copy. What a write may do
is told by what it replaces, so a broken rule is caught at the very write that broke it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from openrl_common.events import EVENT_DECODER, WorkerGone
from openrl_common.identity import KEY
from openrl_common.memory_server import MemoryServer, Stored, Stream
from openrl_common.quantities import GIB
from openrl_common.records import (
    ClaimRecord,
    ClaimState,
    CutRecord,
    CutState,
    DeviceHold,
    JobRecord,
    LeaseRecord,
    LeaseState,
    LedgerIdentityRecord,
    NodeBudget,
    NodeRecord,
    ReadyRecord,
    SeatRecord,
    SeatState,
    Standing,
    TurnRecord,
    WorkerRecord,
    WorkloadRecord,
)

if TYPE_CHECKING:
    from simulation.machines import Worker
    from simulation.world import World

RESERVE_BYTES = GIB
"""Device memory that co-resident workers leave free."""
_IDENTITY = f"$KV.openrl_ledger.meta.{KEY}"
KINDS: dict[str, type[Any]] = {
    "$KV.openrl_ledger.seat.": SeatRecord,
    "$KV.openrl_ledger.claim.": ClaimRecord,
    "$KV.openrl_ledger.node.": NodeBudget,
    "$KV.openrl_leases.lease.": LeaseRecord,
    "$KV.openrl_claims.claim.": CutRecord,
    "$KV.openrl_claims.dev.": DeviceHold,
    "$KV.openrl_nodes.": NodeRecord,
    "$KV.openrl_workloads.": WorkloadRecord,
    "$KV.openrl_jobs.": JobRecord,
    "$KV.openrl_workers.": WorkerRecord,
    "$KV.openrl_ready.": ReadyRecord,
    "$KV.openrl_turns.": TurnRecord,
}
_MAY_BECOME: dict[ClaimState, set[ClaimState]] = {
    ClaimState.PENDING: {ClaimState.ALLOCATED, ClaimState.RETIRING, ClaimState.GONE, ClaimState.QUARANTINED},
    ClaimState.ALLOCATED: {ClaimState.RETIRING, ClaimState.GONE, ClaimState.QUARANTINED},
    ClaimState.RETIRING: {ClaimState.GONE, ClaimState.QUARANTINED},
    ClaimState.QUARANTINED: {ClaimState.GONE},
    ClaimState.GONE: set(),
}
_DECODERS = {root: msgspec.json.Decoder(kind) for root, kind in KINDS.items()}


def value_of(root: str, stored: Stored | None) -> Any:
    """The record in a stored message; None when there is none or it was deleted."""
    if stored is None or not stored.data:
        return None
    if stored.value is None:
        stored.value = _DECODERS[root].decode(stored.data)
    return stored.value


class Truth:
    """What the server holds, typed."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server
        self._read: dict[str, tuple[int, int, dict[str, Any]]] = {}
        """What was read of each root, and when: at what revision and with how many keys of its bucket."""

    def all(self, root: str) -> dict[str, Any]:
        bucket = self._server.streams[f"KV_{root.split('.')[1]}"]
        known = self._read.get(root)
        if known is not None and known[:2] == (bucket.seq, len(bucket.last)):
            return known[2]
        found: dict[str, Any] = {}
        for subject, stored in bucket.last.items():
            if subject.startswith(root):
                value = value_of(root, stored)
                if value is not None:
                    found[subject[len(root) :]] = value
        self._read[root] = (bucket.seq, len(bucket.last), found)
        return found

    def forget(self) -> None:
        """A bucket was made anew: its revisions begin again."""
        self._read.clear()

    def one(self, root: str, key: str) -> Any:
        return value_of(root, self._server.streams[f"KV_{root.split('.')[1]}"].last.get(root + key))

    def seat(self, workload: str) -> SeatRecord:
        return self.one("$KV.openrl_ledger.seat.", workload) or SeatRecord()

    def claim(self, claim: str) -> ClaimRecord | None:
        found: ClaimRecord | None = self.one("$KV.openrl_ledger.claim.", claim)
        return found

    def lease(self, assignment: str) -> LeaseRecord | None:
        found: LeaseRecord | None = self.one("$KV.openrl_leases.lease.", assignment)
        return found

    def seats(self) -> dict[str, SeatRecord]:
        return self.all("$KV.openrl_ledger.seat.")

    def claims(self) -> dict[str, ClaimRecord]:
        return self.all("$KV.openrl_ledger.claim.")

    def budgets(self) -> dict[str, NodeBudget]:
        return self.all("$KV.openrl_ledger.node.")

    def workloads(self) -> dict[str, WorkloadRecord]:
        return self.all("$KV.openrl_workloads.")

    def jobs(self) -> dict[str, JobRecord]:
        return self.all("$KV.openrl_jobs.")

    def holds(self) -> dict[str, DeviceHold]:
        return self.all("$KV.openrl_claims.dev.")

    def cuts(self) -> dict[str, CutRecord]:
        return self.all("$KV.openrl_claims.claim.")


class Invariants:
    """``World.landed`` calls ``written``; machines call ``worker_starts`` and ``worker_touches``."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.truth = Truth(world.server)
        self._lost_at_s: dict[str, float] = {}
        self.ledger_is_lost = False
        """Until it is rebuilt nothing in its bucket means anything: nobody may act on it, what runs goes on (L7)."""
        self._checks: dict[str, Callable[[str, Any, Any], None]] = {
            "$KV.openrl_ledger.seat.": self._seat,
            "$KV.openrl_ledger.claim.": self._claim,
            "$KV.openrl_ledger.node.": self._budget,
            "$KV.openrl_leases.lease.": self._lease,
            "$KV.openrl_claims.claim.": self._cut,
            "$KV.openrl_claims.dev.": self._hold,
        }

    def written(self, stream: Stream, message: Stored, before: Stored | None) -> None:
        subject = message.subject
        root = subject[: subject.find(".", 4) + 1]
        check = self._checks.get(root)
        if check is None:
            root = subject[: subject.find(".", len(root)) + 1]
            check = self._checks.get(root)
        if subject == _IDENTITY and message.data and msgspec.json.decode(message.data, type=LedgerIdentityRecord).id:
            self.ledger_is_lost = False  # (an empty one: it is being rebuilt)
        if check is not None and not (self.ledger_is_lost and root.startswith("$KV.openrl_ledger.")):
            check(subject[len(root) :], value_of(root, before), value_of(root, message))

    def _expect(self, holds: bool, what: str) -> None:
        if not holds:
            self._world.violation(what)

    def _process_of(self, assignment: str) -> Worker | None:
        for machine in self._world.machines.values():
            for each in machine.workers.values():
                if each.alive and each.launch.assignment == assignment:
                    return each
        return None

    def _at_work(self, assignment: str) -> Worker | None:
        """The process of an assignment, unless its node was lost and it cannot be at work any more (F3)."""
        found = self._process_of(assignment)
        return None if found is None or self._fenced_by_loss(found) else found

    def _fenced_by_loss(self, worker: Worker) -> bool:
        lease = self.truth.lease(worker.launch.assignment)
        fenced = lease is not None and lease.state is LeaseState.TOMBSTONE
        return fenced and self._lost_at_s.get(worker.node, -1.0) > worker.started_at and not worker.could_touch()

    # --- the ledger's keys ----------------------------------------------------------------------------------------

    def _seat(self, workload: str, before: SeatRecord | None, after: SeatRecord | None) -> None:
        if after is None:
            self._world.violation(f"seat {workload} was deleted")
            return
        before = before or SeatRecord()
        self._expect(after.closed >= before.closed, f"seat {workload}: closed fell to {after.closed}")
        self._expect(after.incarnation >= before.incarnation, f"seat {workload}: an older incarnation took it (L2)")
        had = before.state is not SeatState.EMPTY
        if had and (after.state is SeatState.EMPTY or after.assignment != before.assignment):
            self._expect(
                self._at_work(before.assignment) is None,
                f"seat {workload} left {before.assignment} whose process still runs (invariant 6)",
            )
        if after.state is SeatState.EMPTY and had:
            claim = self.truth.claim(before.claim)
            self._expect(
                claim is None or before.assignment not in claim.entries,
                f"seat {workload} was emptied before the claim let {before.assignment} go (L4)",
            )
        if after.state is SeatState.HELD and after.assignment != before.assignment:
            self._expect(
                after.incarnation > before.closed, f"seat {workload}: a closed incarnation {after.incarnation} booked"
            )
            self._named(workload, before, after)

    def _named(self, workload: str, before: SeatRecord, after: SeatRecord) -> None:
        lease = self.truth.lease(after.assignment)
        claim = self.truth.claim(after.claim)
        listed = claim is not None and after.assignment in claim.entries
        fenced = lease is not None and lease.state is LeaseState.TOMBSTONE
        self._expect(
            listed or fenced, f"seat {workload} names {after.assignment}, which claim {after.claim} does not list (L3)"
        )
        if before.state is SeatState.HELD:
            old = self.truth.lease(before.assignment)
            self._expect(
                old is not None and old.state is LeaseState.TOMBSTONE and old.found == "none",
                f"seat {workload} moved from {before.assignment}, which was not fenced before it started (L5)",
            )

    def _claim(self, claim_id: str, before: ClaimRecord | None, after: ClaimRecord | None) -> None:
        if after is None:
            self._world.violation(f"claim {claim_id} was deleted (L3: gone is a record)")
            return
        old = {} if before is None else before.entries
        added = after.entries.keys() - old.keys()
        removed = old.keys() - after.entries.keys()
        if before is not None:
            self._claim_state(claim_id, before, after)
        if added:
            self._entries_added(claim_id, before, after, swap=bool(removed))
        for assignment in sorted(removed):
            entry = old[assignment]
            seat = self.truth.seat(entry.workload)
            names = seat.assignment == assignment and seat.claim == claim_id
            self._expect(
                self._at_work(assignment) is None,
                f"claim {claim_id} let {assignment} go while its process runs (invariant 6)",
            )
            lease = self.truth.lease(assignment)
            fenced = lease is not None and lease.state is LeaseState.TOMBSTONE
            refused = after.state in (ClaimState.GONE, ClaimState.RETIRING) and not after.entries
            self._expect(
                not (names and seat.state is SeatState.HELD) or fenced or refused,
                f"claim {claim_id} let {assignment} go, which seat {entry.workload} holds",
            )

    def _claim_state(self, claim_id: str, before: ClaimRecord, after: ClaimRecord) -> None:
        if before.state is not after.state:
            self._expect(
                after.state in _MAY_BECOME[before.state],
                f"claim {claim_id} went from {before.state} to {after.state} (L3)",
            )
        if after.state is ClaimState.ALLOCATED:
            for other_id, other in self.truth.claims().items():
                shared = other.node == after.node and set(other.devices) & set(after.devices)
                self._expect(
                    other_id == claim_id or other.state in (ClaimState.GONE, ClaimState.RETIRING) or not shared,
                    f"claims {claim_id} and {other_id} have one device (invariant 3)",
                )

    def _entries_added(self, claim_id: str, before: ClaimRecord | None, after: ClaimRecord, *, swap: bool) -> None:
        limit = self._world.limit_in_force()
        if limit and not swap:
            self._expect(
                len(after.entries) <= limit, f"claim {claim_id} has {len(after.entries)} seats of {limit} (invariant 2)"
            )
        if before is not None:
            self._expect(before.state is ClaimState.ALLOCATED, f"claim {claim_id} was joined while {before.state} (P3)")
        exclusive = any(entry.exclusive for entry in after.entries.values())
        self._expect(
            not exclusive or len(after.entries) == 1, f"claim {claim_id}: an exclusive seat is not alone (invariant 3)"
        )
        if after.state is ClaimState.ALLOCATED:
            self._expect(
                all(entry.device_bytes <= after.device_bytes for entry in after.entries.values()),
                f"claim {claim_id} seats a workload that does not fit its device (P3)",
            )

    def _budget(self, node: str, before: NodeBudget | None, after: NodeBudget | None) -> None:
        old = {} if before is None else before.entries
        new = {} if after is None else after.entries
        if after is not None and after.standing is Standing.LOST:
            self._lost_at_s[node] = self._world.loop.now_s
        record: NodeRecord | None = self.truth.one("$KV.openrl_nodes.", node)
        if new.keys() - old.keys() and record is not None and record.host_allocatable_bytes:
            sizes: dict[str, list[int]] = {}
            for entry in new.values():  # S3: predecessor and successor are both there for a moment, one counts
                sizes.setdefault(entry.workload, []).append(entry.host_bytes)
            total = sum(max(each) for each in sizes.values())
            self._expect(
                total <= record.host_allocatable_bytes - record.host_reserved_bytes,
                f"node {node} is over its host memory (invariant 4)",
            )
        for assignment in old.keys() - new.keys():
            entry = old[assignment]
            seat = self.truth.seat(entry.workload)
            claim = self.truth.claim(entry.claim)
            listed = claim is not None and claim.state is ClaimState.ALLOCATED and assignment in claim.entries
            self._expect(
                not (listed and seat.state is SeatState.HELD and seat.assignment == assignment),
                f"node {node} gave back the host memory of {assignment}, whose seat is held (invariant 4)",
            )

    # --- leases, cuts, devices ------------------------------------------------------------------------------------

    def _lease(self, assignment: str, before: LeaseRecord | None, after: LeaseRecord | None) -> None:
        self._expect(after is not None, f"lease {assignment} was deleted")
        if before is not None and after is not None and before.state is LeaseState.TOMBSTONE:
            self._expect(after.state is LeaseState.TOMBSTONE, f"lease {assignment} rose from its tombstone (B7)")
        elif after is not None and after.found == "lapsed":
            holder = self._process_of(assignment)
            held = holder is not None and holder.context is not None and holder.context.lease_held
            self._expect(not held, f"lease {assignment} was taken for lapsed while its holder holds it (E13, F3)")

    def _cut(self, claim_id: str, before: CutRecord | None, after: CutRecord | None) -> None:
        if after is None:
            return
        if before is not None and before.state is CutState.FREED:
            self._expect(after.state is CutState.FREED, f"cut {claim_id} was freed and came back (B8)")
        if after.state is CutState.ALLOCATED:
            for device in after.devices:
                hold = self.truth.one("$KV.openrl_claims.dev.", f"{after.node}.{device}")
                self._expect(
                    hold is not None and hold.claim == claim_id,
                    f"claim {claim_id} was cut on {device} without holding it (B8)",
                )
        if after.state is CutState.FREED and before is not None:
            self._device_is_idle(claim_id, f"claim {claim_id} was freed")

    def _hold(self, device: str, before: DeviceHold | None, after: DeviceHold | None) -> None:
        was = "" if before is None else before.claim
        now = "" if after is None else after.claim
        if was and was != now:
            self._expect(now == "", f"device {device} went from claim {was} to {now} at once (B8)")
            cut: CutRecord | None = self.truth.one("$KV.openrl_claims.claim.", was)
            node, _, name = device.partition(".")
            self._expect(
                cut is None
                or cut.state not in (CutState.ALLOCATED, CutState.QUARANTINED)
                or cut.node != node
                or name not in cut.devices,
                f"device {device} was released while claim {was} is cut on it (B8)",
            )
            self._device_is_idle(was, f"device {device} was released", node, name)

    def _device_is_idle(self, claim_id: str, what: str, node: str = "", device: str = "") -> None:
        for machine in self._world.machines.values():
            for each in machine.alive():
                elsewhere = bool(node) and (machine.node != node or device not in each.launch.devices)
                self._expect(
                    elsewhere or each.claim != claim_id,
                    f"{what} while worker {each.launch.assignment} runs on it (invariant 5)",
                )

    def claim_of(self, worker: Worker) -> str:
        """The claim that lists a worker's assignment; empty when none does.

        While the ledger's bucket is lost: the one that is cut on the worker's devices (L7).
        """
        seat = self.truth.seat(worker.launch.workload)
        if self.ledger_is_lost:
            for claim, cut in self.truth.cuts().items():
                if (cut.state, cut.node, cut.devices) == (CutState.ALLOCATED, worker.node, worker.launch.devices):
                    return claim
        return seat.claim if seat.state is not SeatState.EMPTY and seat.assignment == worker.launch.assignment else ""

    def said_gone(self, message: Stored) -> None:
        """L4, B7: fence first, then stop, then see it gone, then WorkerGone."""
        event = EVENT_DECODER.decode(message.data)
        assert isinstance(event, WorkerGone)
        lease = self.truth.lease(event.assignment)
        self._expect(
            lease is not None and lease.state is LeaseState.TOMBSTONE,
            f"WorkerGone of {event.assignment} was said without a fence (B7)",
        )
        self._expect(
            self._process_of(event.assignment) is None,
            f"WorkerGone of {event.assignment} was said while its process runs (invariant 6)",
        )

    # --- worker processes -------------------------------------------------------------------------------------------

    def worker_starts(self, started: Worker) -> None:
        """B7: only with the gate open, on a seat that is named and listed, and never twice."""
        launch = started.launch
        for machine in self._world.machines.values():
            for each in machine.alive():
                self._expect(each.launch.assignment != launch.assignment, f"{launch.assignment} has two processes (B1)")
                self._expect(
                    each.launch.workload != launch.workload or self._fenced_by_loss(each),
                    f"workload {launch.workload} runs twice (invariant 1)",
                )
        lease = self.truth.lease(launch.assignment)
        self._expect(lease is not None, f"{launch.assignment} was started without a lease: no start gate (B7)")
        started.claim = self.claim_of(started)
        self._backed(started, "was started")

    def worker_touches(self, started: Worker) -> None:
        """Invariant 5: the seat is its own, the lease live."""
        lease = self.truth.lease(started.launch.assignment)
        self._expect(
            lease is not None and lease.state is not LeaseState.STARTING,
            f"{started.launch.assignment} touches the device without a live lease",
        )
        self._backed(started, "touches the device")

    def worker_enters(self, worker: Worker) -> None:
        """T2, T4: it comes to the device in its turn, and those whose memory is there fit together."""
        context, launch = worker.context, worker.launch
        assert context is not None
        assert context.turns is not None
        lease = self.truth.lease(launch.assignment)
        if lease is None or lease.state is LeaseState.TOMBSTONE:
            return  # fenced this very moment
        self._expect(context.lease_held, f"{launch.assignment} touches its device although its lease lapsed (B5, B7)")
        worker.resident = True
        worker.claim = worker.claim or self.claim_of(worker)
        if not context.turns.on:
            return
        record: TurnRecord = self.truth.one("$KV.openrl_turns.", worker.claim) or TurnRecord()
        residency = record.residents.get(launch.assignment)
        self._expect(
            residency is not None and residency.epoch == context.turns._epoch,
            f"{launch.assignment} touches its device under an epoch that is not its own now (T4)",
        )
        claim = self.truth.claim(worker.claim)
        there = [
            each
            for each in self._world.machines[worker.node].alive()
            if each.claim == worker.claim and each.resident and not self._fenced_by_loss(each)
        ]
        if claim is not None and len(there) > 1:
            declared = sum(each.launch.device_bytes for each in there)
            self._expect(
                self._world.plan.coresidency and declared <= claim.device_bytes - RESERVE_BYTES,
                f"{len(there)} workers are on the device of claim {worker.claim} and do not fit together (T2)",
            )

    def _backed(self, started: Worker, what: str) -> None:
        launch = started.launch
        if self.ledger_is_lost:
            return
        claim_id = self.claim_of(started)
        claim = self.truth.claim(claim_id) if claim_id else None
        lease = self.truth.lease(launch.assignment)
        if lease is not None and lease.state is LeaseState.TOMBSTONE:
            return  # fenced this very moment: it cannot go live, or it is about to be stopped
        self._expect(
            claim is not None and launch.assignment in claim.entries and claim.node == started.node,
            f"{launch.assignment} {what} without a seat (invariant 5)",
        )
        for device in launch.devices:
            hold = self.truth.one("$KV.openrl_claims.dev.", f"{started.node}.{device}")
            self._expect(
                hold is not None and hold.claim == claim_id,
                f"{launch.assignment} {what} of {device}, which is not its claim's (invariant 5)",
            )
