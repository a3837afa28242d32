"""The janitor (L6): finds what a crash left behind, and repairs it through the same functions as everybody else.

Pure: ``sightings`` looks at a snapshot and names each leftover; the shell repairs one only when two snapshots a grace
apart show it, so that a booking in flight is spared. It frees nothing that a launcher has not confirmed gone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from openrl_common.events import ClaimRetired
from openrl_common.records import ClaimRecord, ClaimState, LeaseRecord, LeaseState, NodeBudget, SeatRecord, SeatState
from openrl_ledger.core import releasing
from openrl_ledger.core.ops import (
    TRIES_MAX,
    Contended,
    Emit,
    Pause,
    Steps,
    Table,
    Write,
    drop_node_entry,
    names,
    read_claim,
    read_seat,
)

T = TypeVar("T")

_PART = 500


@dataclass(frozen=True, order=True)
class Leftover:
    """One thing to repair.

    ``kind``: reservation, unlisted-seat, fenced-seat, unstarted-seat, node-entry, empty-claim.
    """

    kind: str
    workload: str
    assignment: str
    claim: str
    node: str
    tenant: str


def sightings(
    seats: Mapping[str, SeatRecord],
    claims: Mapping[str, ClaimRecord],
    budgets: Mapping[str, NodeBudget],
    leases: Mapping[str, LeaseRecord],
) -> Iterator[set[Leftover]]:
    """Every leftover in one snapshot of the bucket, part by part: between those of a large one others have a turn.

    ``claims``: also those that are gone, where a seat names one.
    """
    for some_claims in _parts(claims):
        yield set(_of_claims(some_claims, seats))
    for some_seats in _parts(seats):
        yield set(_of_seats(some_seats, claims, leases))
    for some_budgets in _parts(budgets):
        yield set(_of_nodes(some_budgets, claims))


def _parts(table: Mapping[str, T]) -> Iterator[list[tuple[str, T]]]:
    rows = iter(table.items())
    while part := list(itertools.islice(rows, _PART)):
        yield part


def _of_claims(claims: list[tuple[str, ClaimRecord]], seats: Mapping[str, SeatRecord]) -> Iterator[Leftover]:
    for claim_id, claim in claims:
        for assignment, entry in claim.entries.items():
            seat = seats.get(entry.workload, SeatRecord())
            if not names(seat, assignment, claim_id):
                yield Leftover("reservation", entry.workload, assignment, claim_id, claim.node, entry.tenant)
        if not claim.entries and claim.state.stands:
            yield Leftover("empty-claim", "", "", claim_id, claim.node, "")


def _of_seats(
    seats: list[tuple[str, SeatRecord]], claims: Mapping[str, ClaimRecord], leases: Mapping[str, LeaseRecord]
) -> Iterator[Leftover]:
    for workload, seat in seats:
        if seat.state is SeatState.EMPTY:
            continue
        holder = claims.get(seat.claim)
        lease = leases.get(seat.assignment)
        tenant = ""
        if holder is not None and seat.assignment in holder.entries:
            tenant = holder.entries[seat.assignment].tenant
            if seat.state is SeatState.HELD and lease is not None and lease.state is LeaseState.TOMBSTONE:
                yield Leftover("fenced-seat", workload, seat.assignment, seat.claim, holder.node, tenant)
            elif seat.state is SeatState.RELEASING and (lease is None or lease.found == "none"):
                # No process was ever started for it and none can be: nobody will say WorkerGone.
                yield Leftover("unstarted-seat", workload, seat.assignment, seat.claim, holder.node, tenant)
        elif seat.state is SeatState.HELD or holder is not None or lease is None or lease.found == "none":
            # Releasing, too: who took the entry off the claim was to empty the seat next, and no message repeats that.
            # Only where the claim's record itself is missing may a worker still be at work: wait for WorkerGone.
            yield Leftover("unlisted-seat", workload, seat.assignment, seat.claim, "", tenant)


def _of_nodes(budgets: list[tuple[str, NodeBudget]], claims: Mapping[str, ClaimRecord]) -> Iterator[Leftover]:
    for node, budget in budgets:
        for assignment, reserved in budget.entries.items():
            holder = claims.get(reserved.claim)
            if holder is None or assignment not in holder.entries:
                yield Leftover("node-entry", reserved.workload, assignment, reserved.claim, node, "")


def retiring(claims: Mapping[str, ClaimRecord]) -> dict[str, str]:
    """Claims that only wait for their launcher to free them, with their nodes: it is asked again, nothing is freed."""
    return {
        key: claim.node for key, claim in claims.items() if claim.state is ClaimState.RETIRING and not claim.entries
    }


def repair(leftover: Leftover, tenant: str, incarnation: int) -> Steps[None]:
    """Repair one leftover that was seen twice. ``tenant``, ``incarnation``: of the workload's seat.

    The snapshots come from mirrors and may lag: each repair looks once more before anything is fenced or freed.
    """
    if leftover.kind == "reservation":
        yield from releasing.clean(leftover.workload, leftover.assignment, leftover.claim)
    elif leftover.kind == "unlisted-seat":
        seat, _ = yield from read_seat(leftover.workload)
        claim, _ = yield from read_claim(leftover.claim)
        listed = claim is not None and leftover.assignment in claim.entries
        if listed or not names(seat, leftover.assignment, leftover.claim):
            return
        yield from releasing.fence(leftover.assignment, "its claim does not list it")
        yield from releasing.finish(leftover.workload, tenant, leftover.assignment, leftover.claim)
    elif leftover.kind == "fenced-seat":
        yield from releasing.request_release(leftover.workload, tenant, incarnation, leftover.assignment, close=False)
    elif leftover.kind == "unstarted-seat":
        seat, _ = yield from read_seat(leftover.workload)
        if seat.state is not SeatState.RELEASING or not names(seat, leftover.assignment, leftover.claim):
            return
        if (yield from releasing.fence(leftover.assignment, "released before it started")) == "none":
            yield from releasing.finish(leftover.workload, tenant, leftover.assignment, leftover.claim)
    elif leftover.kind == "node-entry":
        if (yield from releasing.clean(leftover.workload, leftover.assignment, leftover.claim)):
            yield from drop_node_entry(leftover.node, leftover.assignment)
    elif leftover.kind == "empty-claim":
        yield from _retire_empty(leftover.claim)


def restate_limit(claim_id: str, limit: int) -> Steps[None]:
    """Write the limit in force on a claim (S7): local launchers know from there whom a claim has a seat for (W1)."""
    for tries in range(TRIES_MAX):
        claim, revision = yield from read_claim(claim_id)
        if claim is None or claim.limit == limit or not claim.state.stands:
            return
        landed = yield Write(Table.CLAIMS, claim_id, msgspec.structs.replace(claim, limit=limit), revision)
        if isinstance(landed, int):
            return
        yield Pause(tries)
    raise Contended(f"claim {claim_id}")


def _retire_empty(claim_id: str) -> Steps[None]:
    for tries in range(TRIES_MAX):
        claim, revision = yield from read_claim(claim_id)
        if claim is None or claim.entries or not claim.state.stands:
            return
        retiring = msgspec.structs.replace(claim, state=ClaimState.RETIRING)
        landed = yield Write(Table.CLAIMS, claim_id, retiring, revision)
        if isinstance(landed, int):
            yield Emit(ClaimRetired(claim=claim_id, node=claim.node))
            return
        yield Pause(tries)
    raise Contended(f"claim {claim_id}")
