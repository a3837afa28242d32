"""BOOK: reserve, reserve, name (L2). One function for every booking: join, found, adopt, move, replace.

Two keys only *reserve* (the node's host memory, then the claim), one key *names*: ``seat.<workload>`` is written from
the revision read at the very start, so of two replicas that book one workload one loses and cleans up. The seat limit
and exclusivity are tested on what the claim's CAS replaces (S2), never on what a caller believed.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from openrl_common.events import ClaimRetired, SeatBooked, SeatRefused, SeatRequested
from openrl_common.records import (
    ClaimEntry,
    ClaimRecord,
    ClaimState,
    LeaseRecord,
    LeaseState,
    NodeEntry,
    SeatRecord,
    SeatState,
    Shape,
    Successor,
)
from openrl_common.seating import join_refusal
from openrl_ledger.core import releasing
from openrl_ledger.core.ops import (
    TRIES_MAX,
    Contended,
    Emit,
    Environment,
    Lost,
    Pause,
    Steps,
    Table,
    Write,
    add_node_entry,
    drop_claim_entry,
    drop_node_entry,
    read_claim,
    read_lease,
    read_seat,
)


def book(request: SeatRequested, environment: Environment) -> Steps[None]:
    """Handle one SeatRequested: adopt, join the first candidate that accepts, else found, else refuse."""
    for tries in range(TRIES_MAX):
        seat, revision = yield from read_seat(request.workload)
        step = yield from _settle_without_booking(request, seat, environment)
        if step is _Step.ANSWERED:
            return
        # Naming goes from the revision read above: whatever step 0 checked still holds when the CAS lands.
        if step is _Step.BOOK and (yield from _book_from(request, seat, revision, environment)):
            return
        yield Pause(tries)
    raise Contended(f"seat {request.workload}")


class _Step(Enum):
    ANSWERED = "answered"
    BOOK = "book"
    AGAIN = "again"


def _settle_without_booking(request: SeatRequested, seat: SeatRecord, environment: Environment) -> Steps[_Step]:
    """Step 0 of L2: everything that needs no new seat."""
    if request.incarnation <= seat.closed or request.incarnation < seat.incarnation:
        yield _refused(request, "closed", f"incarnation {request.incarnation} was cancelled, finished or replaced")
        return _Step.ANSWERED
    if seat.state is SeatState.EMPTY:
        # A late duplicate of a request whose seat has come and gone since books nothing.
        late = request.incarnation == seat.incarnation and request.attempt <= seat.attempt
        return _Step.ANSWERED if late else _Step.BOOK
    if seat.incarnation < request.incarnation:
        yield from _wait_for_predecessor(request, seat, environment)
        return _Step.ANSWERED
    if seat.state is SeatState.RELEASING:
        yield _refused(request, "releasing", "its former seat is still being released")
        return _Step.ANSWERED
    claim, _ = yield from read_claim(seat.claim)
    if claim is None or seat.assignment not in claim.entries:
        yield from releasing.finish(request.workload, request.tenant, seat.assignment, seat.claim)
        return _Step.AGAIN
    lease, _ = yield from read_lease(seat.assignment)
    if lease is not None and lease.state is LeaseState.TOMBSTONE:
        yield from releasing.request_release(
            request.workload, request.tenant, seat.incarnation, seat.assignment, close=False
        )
        yield _refused(request, "releasing", "its former seat was fenced and is being released")
        return _Step.ANSWERED
    if request.move_from == seat.assignment:
        if claim.state is ClaimState.PENDING:
            return _Step.BOOK
        yield _refused(request, "started", "its own claim was allocated meanwhile")
    yield _booked(request, seat.assignment, seat.claim, claim.node, founded=False, refusals={})
    return _Step.ANSWERED


def _wait_for_predecessor(request: SeatRequested, seat: SeatRecord, environment: Environment) -> Steps[None]:
    """An older incarnation holds the seat: ask for its release and leave our request there for S3.

    Not one for several devices: its place is not one that a predecessor leaves (P10).
    """
    entry = _entry(request, environment)
    successor = Successor(incarnation=request.incarnation, attempt=request.attempt, entry=entry)
    for tries in range(TRIES_MAX if request.shape.device_count == 1 else 0):
        seat, revision = yield from read_seat(request.workload)
        if seat.state is SeatState.EMPTY or seat.incarnation >= request.incarnation:
            break
        if seat.successor is not None and seat.successor.incarnation >= request.incarnation:
            break
        landed = yield Write(
            Table.SEATS, request.workload, msgspec.structs.replace(seat, successor=successor), revision
        )
        if isinstance(landed, int):
            break
        yield Pause(tries)
    yield from releasing.request_release(
        request.workload, request.tenant, request.incarnation - 1, seat.assignment, close=True
    )
    yield _refused(request, "predecessor", f"incarnation {seat.incarnation} still holds the seat and is being stopped")


def _book_from(request: SeatRequested, seat: SeatRecord, revision: int, environment: Environment) -> Steps[bool]:
    """Steps 1 to 3 of L2. False: another writer touched the seat, start again."""
    refusals: dict[str, str] = {}
    for claim_id in request.candidates:
        assignment, why, node = yield from _reserve(request, claim_id, environment)
        if not assignment:
            refusals[claim_id] = why
            continue
        booked = _booked(request, assignment, claim_id, node, founded=False, refusals=refusals)
        return (yield from _take(request, seat, revision, booked))
    if request.may_found and request.tiers:
        return (yield from _found(request, seat, revision, environment, refusals))
    yield _refused(request, "no-candidate", "no candidate accepted", refusals)
    return True


def _take(request: SeatRequested, seat: SeatRecord, revision: int, booked: Emit) -> Steps[bool]:
    """Take what was reserved: name it, and of a move fence the own claim first and retire it last (L5).

    ``booked`` says what was reserved, and is published. False: another writer touched the seat, start again.
    """
    assert isinstance(booked.event, SeatBooked)
    assignment, claim_id = booked.event.assignment, booked.event.claim
    moving = seat.state is SeatState.HELD
    if moving and not (yield from _tombstone_own(request.move_from)):
        yield from releasing.clean(request.workload, assignment, claim_id)
        yield _refused(request, "started", "its own claim was allocated and its worker is starting")
        return True
    if not (yield from _name(request, seat, revision, assignment, claim_id)):
        return False
    if moving:
        yield from _retire_own(seat.claim, request.move_from)
    yield booked
    return True


def _reserve(request: SeatRequested, claim_id: str, environment: Environment) -> Steps[tuple[str, str, str]]:
    """Reserve on the node, then on the claim, under a fresh assignment id: (id, "", node), or ("", why, "") refused.

    The id is kept only across definite conflicts on this claim: after an unknown outcome that is not listed the
    reservation may have been cleaned by another replica already, and naming a cleaned one would seat a ghost.
    """
    for _ in range(TRIES_MAX):
        claim, _revision, refusal = yield from _read_joinable(claim_id, request.shape, environment)
        if claim is None or refusal:
            return "", refusal, ""
        assignment = environment.mint("a")
        node_entry = NodeEntry(workload=request.workload, claim=claim_id, host_bytes=request.shape.host_bytes)
        why = yield from add_node_entry(claim.node, assignment, node_entry, joins_as=request.shape.role)
        if why is not None:
            return "", why, ""
        verdict = yield from _list_on_claim(claim_id, assignment, _entry(request, environment), request, environment)
        if verdict == "":
            return assignment, "", claim.node
        if verdict is None:
            yield from releasing.clean(request.workload, assignment, claim_id)
            continue
        yield from drop_node_entry(claim.node, assignment)
        return "", verdict, ""
    raise Contended(f"claim {claim_id}")


def _read_joinable(claim_id: str, shape: Shape, environment: Environment) -> Steps[tuple[ClaimRecord | None, int, str]]:
    """The claim, its revision and why ``shape`` may not join it. An old copy may say yes (a CAS follows), never no."""
    claim, revision, refusal = None, 0, ""
    for old_copy in (True, False):
        claim, revision = yield from read_claim(claim_id, old_copy=old_copy)
        refusal = "there is no such claim" if claim is None else join_refusal(claim, shape, environment.limit)
        if not refusal:
            break
    return claim, revision, refusal


def _list_on_claim(
    claim_id: str, assignment: str, entry: ClaimEntry, request: SeatRequested, environment: Environment
) -> Steps[str | None]:
    """Add the entry by CAS, every rule re-checked on what is replaced (S2). "" listed, text refused, None unknown."""
    for tries in range(TRIES_MAX):
        if tries == 0:
            claim, revision, refusal = yield from _read_joinable(claim_id, request.shape, environment)
        else:
            claim, revision = yield from read_claim(claim_id)
            refusal = "" if claim is None else join_refusal(claim, request.shape, environment.limit)
        if claim is None:
            return "there is no such claim"
        if assignment in claim.entries:
            return ""
        if refusal:
            return refusal
        entries = {**claim.entries, assignment: entry}
        changed = msgspec.structs.replace(
            claim, entries=entries, limit=environment.limit, seats_peak=max(claim.seats_peak, len(entries))
        )
        landed = yield Write(Table.CLAIMS, claim_id, changed, revision)
        if isinstance(landed, int):
            return ""
        if landed is Lost.UNKNOWN:
            return None
        yield Pause(tries)
    raise Contended(f"claim {claim_id}")


def _found(
    request: SeatRequested, seat: SeatRecord, revision: int, environment: Environment, refusals: dict[str, str]
) -> Steps[bool]:
    """A fresh pending claim with this one entry; ``last=0`` can never resurrect a retired one (E9)."""
    claim_id, assignment = environment.mint("c"), environment.mint("a")
    claim = ClaimRecord(
        state=ClaimState.PENDING,
        tiers=request.tiers,
        entries={assignment: _entry(request, environment)},
        founded_at=environment.now(),
        order=request.order,
        limit=environment.limit,
        seats_peak=1,
        avoid=request.avoid,
    )
    landed = yield Write(Table.CLAIMS, claim_id, claim, 0)
    if not isinstance(landed, int):
        yield from releasing.clean(request.workload, assignment, claim_id)
        return False
    booked = _booked(request, assignment, claim_id, "", founded=True, refusals=refusals)
    return (yield from _take(request, seat, revision, booked))


def _name(request: SeatRequested, seat: SeatRecord, revision: int, assignment: str, claim_id: str) -> Steps[bool]:
    """Step 2 of L2: the seat names the reservation, from the revision read first. False: lost, reservation cleaned."""
    named = SeatRecord(
        state=SeatState.HELD,
        incarnation=request.incarnation,
        assignment=assignment,
        claim=claim_id,
        closed=max(seat.closed, request.incarnation - 1),
        attempt=request.attempt,
    )
    landed = yield Write(Table.SEATS, request.workload, named, revision)
    if isinstance(landed, int):
        return True
    yield from releasing.clean(request.workload, assignment, claim_id, definite=landed is Lost.DEFINITE)
    return False


def _tombstone_own(assignment: str) -> Steps[bool]:
    """L5: a move kills the old assignment before it names the new one. False: its worker is starting; it stays."""
    lease, revision = yield from read_lease(assignment)
    if lease is None:
        tombstone = LeaseRecord(state=LeaseState.TOMBSTONE, found="none", why="moved to another claim")
        landed = yield Write(Table.LEASES, assignment, tombstone, revision)
        if isinstance(landed, int):
            return True
        lease, _ = yield from read_lease(assignment)
    return lease is not None and lease.state is LeaseState.TOMBSTONE and lease.found == "none"


def _retire_own(claim_id: str, assignment: str) -> Steps[None]:
    claim, _ = yield from drop_claim_entry(claim_id, assignment)
    if claim is not None:
        yield from drop_node_entry(claim.node, assignment)
        if claim.state is ClaimState.RETIRING:
            yield Emit(ClaimRetired(claim=claim_id, node=claim.node))


def replace_predecessor(workload: str, tenant: str, seat: SeatRecord, environment: Environment) -> Steps[None]:
    """S3: the predecessor's worker is gone; swap its entry for the successor's in one CAS, or finish the release."""
    successor = seat.successor
    assert successor is not None
    swapped = yield from _swap(workload, seat, successor, environment)
    if swapped:
        yield Emit(
            SeatBooked(
                tenant=tenant, workload=workload, incarnation=successor.incarnation, assignment=swapped[0],
                claim=seat.claim, founded=False, node=swapped[1], attempt=successor.attempt,
            )
        )  # fmt: skip
        return
    yield from releasing.finish(workload, tenant, seat.assignment, seat.claim)


def _swap(
    workload: str, seat: SeatRecord, successor: Successor, environment: Environment
) -> Steps[tuple[str, str] | None]:
    current, seat_revision = yield from read_seat(workload)
    claim, claim_revision = yield from read_claim(seat.claim)
    if current != seat or claim is None or seat.assignment not in claim.entries:
        return None
    entry = successor.entry
    rest = {key: value for key, value in claim.entries.items() if key != seat.assignment}
    # Alone on the claim, an exclusive successor is as welcome as its predecessor was; the limit never refuses (S3).
    shape = Shape(role=entry.role, device_bytes=entry.device_bytes, exclusive=entry.exclusive and bool(rest))
    if join_refusal(msgspec.structs.replace(claim, entries=rest), shape, limit=0):
        return None
    assignment = environment.mint("a")
    # The predecessor's host memory is given back by the same swap: reserve only when ours fits without it.
    node_entry = NodeEntry(workload=workload, claim=seat.claim, host_bytes=entry.host_bytes)
    why = yield from add_node_entry(claim.node, assignment, node_entry, joins_as=entry.role, without=seat.assignment)
    if why is not None:
        return None
    entries = {**rest, assignment: msgspec.structs.replace(entry, reserved_at=environment.now())}
    landed = yield Write(Table.CLAIMS, seat.claim, msgspec.structs.replace(claim, entries=entries), claim_revision)
    if isinstance(landed, int):
        named = SeatRecord(
            state=SeatState.HELD, incarnation=successor.incarnation, assignment=assignment, claim=seat.claim,
            closed=max(seat.closed, successor.incarnation - 1), attempt=successor.attempt,
        )  # fmt: skip
        landed = yield Write(Table.SEATS, workload, named, seat_revision)
        if isinstance(landed, int):
            yield from drop_node_entry(claim.node, seat.assignment)
            return assignment, claim.node
    yield from releasing.clean(workload, assignment, seat.claim)
    return None


def allocate(claim_id: str, node: str, devices: tuple[str, ...], device_bytes: int) -> Steps[None]:
    """ClaimAllocated (L5): reserve the founder's host memory, then pending → allocated. Over budget: retire it."""
    reserved, why = "", None
    for tries in range(TRIES_MAX):
        claim, revision = yield from read_claim(claim_id, old_copy=tries == 0)
        if claim is None or claim.state is not ClaimState.PENDING or not claim.entries:
            if tries == 0:
                continue
            if reserved and (claim is None or claim.state is not ClaimState.ALLOCATED or reserved not in claim.entries):
                yield from drop_node_entry(node, reserved)
            return
        ((assignment, entry),) = claim.entries.items()
        node_entry = NodeEntry(workload=entry.workload, claim=claim_id, host_bytes=entry.host_bytes)
        if why is None:
            why = yield from add_node_entry(node, assignment, node_entry, joins_as=None)
        if why is not None:
            # First of all: its founding may be about to name the seat, and no seat names what its claim let go (L3).
            yield from releasing.fence(assignment, why)
            changed = msgspec.structs.replace(claim, state=ClaimState.RETIRING, node=node, entries={})
        else:
            changed = msgspec.structs.replace(
                claim, state=ClaimState.ALLOCATED, node=node, devices=devices, device_bytes=device_bytes
            )
        landed = yield Write(Table.CLAIMS, claim_id, changed, revision)
        if isinstance(landed, int):
            if why is not None:
                yield from releasing.finish(entry.workload, entry.tenant, assignment, claim_id)
            return
        reserved = assignment  # given back only once the claim can no longer be allocated with it, by whomever
        yield Pause(tries)
    raise Contended(f"claim {claim_id}")


def _entry(request: SeatRequested, environment: Environment) -> ClaimEntry:
    shape = request.shape
    return ClaimEntry(
        workload=request.workload,
        tenant=request.tenant,
        owner=request.owner,
        role=shape.role,
        device_bytes=shape.device_bytes,
        host_bytes=shape.host_bytes,
        exclusive=shape.exclusive or shape.device_count > 1,
        incarnation=request.incarnation,
        reserved_at=environment.now(),
    )


def _booked(
    request: SeatRequested,
    assignment: str,
    claim_id: str,
    node: str,
    *,
    founded: bool,
    refusals: dict[str, str],
) -> Emit:
    return Emit(
        SeatBooked(
            tenant=request.tenant,
            workload=request.workload,
            incarnation=request.incarnation,
            assignment=assignment,
            claim=claim_id,
            founded=founded,
            node=node,
            attempt=request.attempt,
            refusals=refusals,
        )
    )


def _refused(request: SeatRequested, code: str, message: str, refusals: dict[str, str] | None = None) -> Emit:
    return Emit(
        SeatRefused(
            tenant=request.tenant,
            workload=request.workload,
            incarnation=request.incarnation,
            attempt=request.attempt,
            code=code,
            message=message,
            refusals=refusals or {},
        )
    )
