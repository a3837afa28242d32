"""The ledger's bucket as it has to be, derived from what runs (L7). Pure.

    a worker that runs (its record says what for, its cut on which devices) ─▶ seat, entry on its claim, host memory
    a claim that is cut and has no worker                                  ─▶ retiring: its launcher frees it
    a workload without a worker                                            ─▶ an empty seat that keeps what is closed

Bookings of which nothing ran are not restored: placement finds its workloads without seats and asks again. A worker of
which nobody knows what it was started for gets no seat, so its launcher stops it. Times and limits that no launcher
knows are those of now.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from openrl_common.records import (
    ClaimEntry,
    ClaimRecord,
    ClaimState,
    CutRecord,
    CutState,
    NodeBudget,
    NodeEntry,
    SeatRecord,
    SeatState,
    WorkerRecord,
    WorkerState,
    WorkloadPhase,
    WorkloadRecord,
)

_CLAIM_STATES = {CutState.ALLOCATED: ClaimState.ALLOCATED, CutState.QUARANTINED: ClaimState.QUARANTINED}
_OVER = (WorkloadPhase.RELEASING, WorkloadPhase.FINISHED, WorkloadPhase.FAILED)


@dataclass
class Rebuilt:
    """What to write, and in ``notes`` what cannot be restored and what becomes of it."""

    seats: dict[str, SeatRecord] = field(default_factory=dict)
    claims: dict[str, ClaimRecord] = field(default_factory=dict)
    budgets: dict[str, NodeBudget] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def rebuild(
    workers: Iterable[WorkerRecord],
    cuts: Mapping[str, CutRecord],
    workloads: Mapping[str, WorkloadRecord],
    now: float,
) -> Rebuilt:
    """Derive the bucket.

    Args:
        workers: those with a process, as launchers say.
        cuts: what launchers say of every claim.
        workloads: placement's records, for what a launcher did not record and for incarnations that are closed.
    """
    found = Rebuilt()
    entries: dict[str, dict[str, ClaimEntry]] = {}
    for worker in sorted(workers, key=_age, reverse=True):
        entry = worker.entry or _entry_of(worker, workloads.get(worker.workload), now)
        why_not = _why_not(worker, entry, cuts.get(worker.claim), found)
        if why_not or entry is None:
            found.notes.append(f"worker {worker.assignment} of {worker.workload} on {worker.node}: {why_not}; no seat")
            continue
        found.seats[worker.workload] = _seat(worker, entry, workloads.get(worker.workload))
        entries.setdefault(worker.claim, {})[worker.assignment] = entry
    for claim_id, cut in sorted(cuts.items()):
        if cut.state in _CLAIM_STATES:
            found.claims[claim_id] = _claim(cut, entries.get(claim_id, {}), now)
            if not entries.get(claim_id):
                found.notes.append(f"claim {claim_id} on {cut.node} is {cut.state} and has no worker: it is retired")
    for claim_id, listed in entries.items():
        node = cuts[claim_id].node
        held = dict(found.budgets[node].entries) if node in found.budgets else {}
        for assignment, entry in listed.items():
            held[assignment] = NodeEntry(workload=entry.workload, claim=claim_id, host_bytes=entry.host_bytes)
        found.budgets[node] = NodeBudget(entries=held)
    for workload, record in sorted(workloads.items()):
        if workload not in found.seats:
            closed = record.incarnation if record.phase in _OVER else record.incarnation - 1
            found.seats[workload] = SeatRecord(incarnation=record.incarnation, closed=closed, attempt=record.attempt)
            if record.phase not in _OVER and record.assignment:
                found.notes.append(f"workload {workload} has no worker that runs: it asks for a seat again")
    return found


def _age(worker: WorkerRecord) -> tuple[float, str]:
    """The newest is the greatest. One that is being started has no start time of its own yet."""
    return max(worker.started_at, worker.launched_at), worker.assignment


def _why_not(worker: WorkerRecord, entry: ClaimEntry | None, cut: CutRecord | None, found: Rebuilt) -> str:
    if entry is None:
        return "nobody knows what it was started for"
    if cut is None or cut.state not in _CLAIM_STATES:
        return f"its claim {worker.claim or '?'} is not cut"
    if worker.workload in found.seats:
        return f"a newer worker, {found.seats[worker.workload].assignment}, runs for this workload"
    return ""


def _entry_of(worker: WorkerRecord, workload: WorkloadRecord | None, now: float) -> ClaimEntry | None:
    """What placement knows of a worker that its launcher never recorded, when it is this very assignment."""
    if workload is None or workload.assignment != worker.assignment:
        return None
    shape = workload.shape
    return ClaimEntry(
        workload=workload.workload,
        tenant=workload.tenant,
        owner=workload.owner,
        role=shape.role,
        device_bytes=shape.device_bytes,
        host_bytes=shape.host_bytes,
        exclusive=shape.exclusive or shape.device_count > 1,
        incarnation=workload.incarnation,
        reserved_at=now,
    )


def _seat(worker: WorkerRecord, entry: ClaimEntry, workload: WorkloadRecord | None) -> SeatRecord:
    """Held, or releasing when its end had begun: it counts until its process is seen gone (E3)."""
    same = workload is not None and workload.incarnation == entry.incarnation
    replaced = workload is not None and workload.incarnation > entry.incarnation
    over = replaced or (same and workload is not None and workload.phase in _OVER)
    ending = over or worker.state is WorkerState.STOPPING
    return SeatRecord(
        state=SeatState.RELEASING if ending else SeatState.HELD,
        incarnation=entry.incarnation,
        assignment=worker.assignment,
        claim=worker.claim,
        closed=entry.incarnation if over else entry.incarnation - 1,
        attempt=workload.attempt if same and workload is not None else 0,
    )


def _claim(cut: CutRecord, entries: dict[str, ClaimEntry], now: float) -> ClaimRecord:
    state = _CLAIM_STATES[cut.state]
    if not entries and state is ClaimState.ALLOCATED:
        state = ClaimState.RETIRING
    return ClaimRecord(
        state=state,
        node=cut.node,
        devices=cut.devices,
        device_bytes=cut.device_bytes,
        entries=entries,
        founded_at=now,
        seats_peak=len(entries),
    )
