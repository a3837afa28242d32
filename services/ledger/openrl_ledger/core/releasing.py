"""How a seat ends (E3, L3, L4): releasing → the worker is gone → claim entry, node entry, seat, in this order.

Release is by assignment id, never by name: a late duplicate must not drop a newer booking. The seat is emptied last, so
whoever finds it named but not listed knows that a release was under way and finishes it.
"""

from __future__ import annotations

import msgspec

from openrl_common.events import ClaimRetired, SeatReleased, SeatReleasing
from openrl_common.records import (
    ClaimEntry,
    ClaimRecord,
    ClaimState,
    LeaseRecord,
    LeaseState,
    SeatRecord,
    SeatState,
)
from openrl_ledger.core.ops import (
    TRIES_MAX,
    Contended,
    Emit,
    Lost,
    Pause,
    Steps,
    Table,
    Write,
    drop_claim_entry,
    drop_node_entry,
    names,
    read_claim,
    read_lease,
    read_seat,
)


def clean(workload: str, assignment: str, claim_id: str, *, definite: bool = False) -> Steps[bool]:
    """CLEAN (L3): take a reservation that nobody named off its claim and node. False: it is named, nothing was done.

    The seat is written again unchanged first, so that a stalled replica which still means to name this reservation
    finds its revision gone. ``definite`` skips that for one's own reservation whose naming was answered with a no.
    """
    for tries in range(TRIES_MAX):
        seat, revision = yield from read_seat(workload)
        if names(seat, assignment, claim_id):
            return False
        if definite:
            break
        landed = yield Write(Table.SEATS, workload, seat, revision)
        if isinstance(landed, int):
            break
        yield Pause(tries)
    else:
        raise Contended(f"seat {workload}")
    claim, entry = yield from drop_claim_entry(claim_id, assignment)
    node = "" if claim is None else claim.node
    host_bytes = yield from drop_node_entry(node, assignment)
    if entry is not None:
        yield from _announce(workload, assignment, claim_id, claim, entry.tenant, entry.incarnation, host_bytes)
    return True


def request_release(workload: str, tenant: str, incarnation: int, assignment: str, *, close: bool) -> Steps[SeatRecord]:
    """Held → releasing, for a seat of ``incarnation`` or older (L4); with ``close`` nothing of it may book again.

    ``assignment`` empty releases whatever seat such an incarnation holds. With ``close`` it does not matter: what a
    closed incarnation holds is over, also when SeatBooked is still on its way or a move has booked meanwhile.
    """
    for tries in range(TRIES_MAX):
        seat, revision = yield from read_seat(workload)
        closed = max(seat.closed, incarnation) if close else seat.closed
        mine = (
            seat.state is not SeatState.EMPTY
            and seat.incarnation <= incarnation
            and (close or assignment in ("", seat.assignment))
        )
        state = SeatState.RELEASING if mine else seat.state
        successor = seat.successor
        if successor is not None and successor.incarnation <= closed:
            successor = None
        changed = msgspec.structs.replace(seat, state=state, closed=closed, successor=successor)
        if changed != seat:
            landed = yield Write(Table.SEATS, workload, changed, revision)
            if not isinstance(landed, int):
                yield Pause(tries)
                continue
        if mine:
            yield from _carry_on_releasing(workload, tenant, changed)
        return changed
    raise Contended(f"seat {workload}")


def _carry_on_releasing(workload: str, tenant: str, seat: SeatRecord) -> Steps[None]:
    """Say SeatReleasing; where nothing ever ran (a pending claim, an unlisted seat) fence and finish at once (L4)."""
    claim, _ = yield from read_claim(seat.claim)
    yield Emit(
        SeatReleasing(
            tenant=tenant,
            workload=workload,
            incarnation=seat.incarnation,
            assignment=seat.assignment,
            claim=seat.claim,
            node="" if claim is None else claim.node,
        )
    )
    if claim is not None and seat.assignment not in claim.entries:
        # Entries leave claims only once nothing of them is at work (L4): a crash came before the seat was emptied.
        yield from fence(seat.assignment, "its claim does not list it")
        yield from finish(workload, tenant, seat.assignment, seat.claim)
        return
    if claim is not None and claim.state is not ClaimState.PENDING:
        return
    # The start gate needs a held seat on an allocated claim. This seat is releasing, so no start can begin; the
    # tombstone stops one that had begun, and a lease that is not "none" proves that one had: wait for WorkerGone.
    if (yield from fence(seat.assignment, "released before it started")) == "none":
        yield from finish(workload, tenant, seat.assignment, seat.claim)


def fence(assignment: str, why: str) -> Steps[str]:
    """FENCE (B7): the lease becomes a tombstone; returns what was found (``none``, ``starting``, ``live``).

    A lease that is renewed while we try makes the CAS fail; it is read again and fenced from the new revision.
    """
    for tries in range(TRIES_MAX):
        lease, revision = yield from read_lease(assignment)
        if lease is not None and lease.state is LeaseState.TOMBSTONE:
            return lease.found
        found = "none" if lease is None else str(lease.state.value)
        tombstone = LeaseRecord(state=LeaseState.TOMBSTONE, found=found, why=why)
        landed = yield Write(Table.LEASES, assignment, tombstone, revision)
        if isinstance(landed, int):
            return found
        yield Pause(tries)
    raise Contended(f"lease {assignment}")


def worker_gone(workload: str, tenant: str, assignment: str, claim_id: str) -> Steps[SeatRecord | None]:
    """WorkerGone is final for an assignment: its seat is finished, or its leftover reservation cleaned.

    Returns:
        The seat, releasing, when a successor waits for its place (the caller tries S3 before it calls ``finish``).
    """
    for tries in range(TRIES_MAX):
        seat, revision = yield from read_seat(workload)
        if seat.assignment != assignment or seat.claim != claim_id:
            yield from clean(workload, assignment, claim_id)
            return None
        if seat.state is SeatState.EMPTY:
            # A crash may have come between emptying the seat and publishing: publish again (same ids).
            claim, _ = yield from read_claim(claim_id)
            yield from _announce(workload, assignment, claim_id, claim, tenant, seat.incarnation, 0)
            return None
        if seat.state is SeatState.HELD:
            changed = msgspec.structs.replace(seat, state=SeatState.RELEASING)
            landed = yield Write(Table.SEATS, workload, changed, revision)
            if not isinstance(landed, int):
                yield Pause(tries)
                continue
            seat = changed
        if seat.successor is not None and seat.successor.incarnation > seat.closed:
            return seat
        yield from finish(workload, tenant, assignment, claim_id)
        return None
    raise Contended(f"seat {workload}")


def finish(workload: str, tenant: str, assignment: str, claim_id: str) -> Steps[None]:
    """The entry leaves the claim, then the node, and the seat is emptied last; then SeatReleased, ClaimRetired (L4)."""
    claim, entry = yield from drop_claim_entry(claim_id, assignment)
    host_bytes = yield from drop_node_entry("" if claim is None else claim.node, assignment)
    incarnation = 0 if entry is None else entry.incarnation
    for tries in range(TRIES_MAX):
        seat, revision = yield from read_seat(workload)
        if not names(seat, assignment, claim_id):
            break
        incarnation = seat.incarnation
        empty = msgspec.structs.replace(seat, state=SeatState.EMPTY, successor=None)
        landed = yield Write(Table.SEATS, workload, empty, revision)
        if isinstance(landed, int):
            break
        yield Pause(tries)
    else:
        raise Contended(f"seat {workload}")
    yield from _announce(workload, assignment, claim_id, claim, tenant, incarnation, host_bytes)


def _announce(
    workload: str,
    assignment: str,
    claim_id: str,
    claim: ClaimRecord | None,
    tenant: str,
    incarnation: int,
    host_bytes: int,
) -> Steps[None]:
    yield Emit(
        SeatReleased(
            tenant=tenant,
            workload=workload,
            incarnation=incarnation,
            assignment=assignment,
            claim=claim_id,
            node="" if claim is None else claim.node,
            host_bytes=host_bytes,
            seats_left=0 if claim is None else len(claim.entries),
        )
    )
    if claim is not None and claim.state is ClaimState.RETIRING:
        yield Emit(ClaimRetired(claim=claim_id, node=claim.node))


def drop_claim(claim_id: str, final: ClaimState) -> Steps[None]:
    """ClaimRefused, ClaimFreed: the claim goes to ``final`` in one CAS, its seats are finished (L5)."""
    entries: dict[str, ClaimEntry] = {}
    for tries in range(TRIES_MAX):
        claim, revision = yield from read_claim(claim_id)
        if claim is None or claim.state is ClaimState.GONE:
            break
        entries = dict(claim.entries)
        changed = msgspec.structs.replace(claim, state=final, entries={})
        landed = yield Write(Table.CLAIMS, claim_id, changed, revision)
        if isinstance(landed, int):
            break
        if landed is Lost.UNKNOWN:
            continue
        yield Pause(tries)
    else:
        raise Contended(f"claim {claim_id}")
    for assignment, entry in entries.items():
        yield from fence(assignment, "its claim is gone")
        yield from finish(entry.workload, entry.tenant, assignment, claim_id)


def quarantine(claim_id: str) -> Steps[None]:
    """ClaimQuarantined: its device is not trusted; the claim accepts nobody, its seats end in their own time (L3)."""
    for tries in range(TRIES_MAX):
        claim, revision = yield from read_claim(claim_id)
        if claim is None or claim.state in (ClaimState.GONE, ClaimState.QUARANTINED):
            return
        quarantined = msgspec.structs.replace(claim, state=ClaimState.QUARANTINED)
        landed = yield Write(Table.CLAIMS, claim_id, quarantined, revision)
        if isinstance(landed, int):
            return
        yield Pause(tries)
    raise Contended(f"claim {claim_id}")
