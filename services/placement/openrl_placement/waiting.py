"""Asking for seats: the first request, wake-ups of the line, moves to a freed seat (P8, P11, W1, W2, F1, S4).

One rule for everything that frees room: ``wake_claim`` offers a claim to the first waiters in line that fit it, as
many as it has room for. A workload that joins the line wakes the claims that would take it, so it cannot get ahead
of an earlier one.

Not here: why a workload waits (``fleet.why``), ends and failures (``endings``).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import msgspec

from openrl_common.events import SeatRequested
from openrl_common.records import ClaimState, Reason, WorkloadPhase, WorkloadRecord
from openrl_placement.fleet import CANDIDATES_MAX, Need
from openrl_placement.line import Group, Place, Promise
from openrl_placement.state import Effects, State, alive, need, order, waits, with_reason, without_reason
from openrl_placement.wedge import nodes_avoided

PROMISES_MAX = 16
"""Requests under way for one claim that has no seat limit."""
_LOOKED_AT_MAX = 64
"""Claims that are looked at for what else a waiter may be offered: of a great burst nearly all are promised already."""
REFUSED_S = 60.0
_UNEXPLAINED = (Reason.UNSCHEDULABLE, Reason.RETRYING)
SEATLESS_MAX = 64
"""Waiters without any claim that one wake-up asks for; those after them are asked for a tick later."""


def ask(state: State, record: WorkloadRecord, now: float, fx: Effects) -> None:
    """Send a workload's request: the first, or a renewed one of a waiter that holds no claim at all.

    ``binpack`` names every candidate and may found; ``spread`` founds first and shares only from the line (P8): it
    leaves that to found, and is back at its launcher's verdict. When nothing in the fleet could take it now or be
    founded for it, it joins the line instead.
    """
    tiers = state.fleet.tiers(record.shape)
    candidates: tuple[str, ...] = ()
    if state.policy.strategy == "binpack" or not tiers:
        candidates = _candidates(state, record, now)
    elif waits(record):
        record = msgspec.structs.replace(without_reason(record, now), phase=WorkloadPhase.SUBMITTED)
    if candidates or tiers:
        _request(state, record, candidates, now, fx)
    else:
        join_line(state, record, now, fx)


def send_together(records: list[WorkloadRecord], fx: Effects) -> None:
    """The first requests of one job's workloads go in one message, when both of them ask at once."""
    names = [record.workload for record in records]
    asked = [event for event in fx.events if isinstance(event, SeatRequested) and event.workload in names]
    if len(asked) == 2:
        first, second = asked
        fx.events[fx.events.index(first)] = msgspec.structs.replace(first, beside=second)
        fx.events.remove(second)


def join_line(state: State, record: WorkloadRecord, now: float, fx: Effects, *, cause: str = "") -> None:
    """Put a workload in the line with its reason, or bring the reason of one that stands there up to date (W4, W5)."""
    wanted = need(record, now)
    reason, message = state.fleet.why(wanted, cause)
    if record.reason is not reason or record.message != message or not waits(record):
        record = with_reason(record, reason, message, now)
        state.put_workload(record)
        fx.workloads[record.workload] = None
        if reason in _UNEXPLAINED:
            state.unexplained.add(record.workload)
    offer_fitting(state, record, now, fx)


def offer_fitting(state: State, record: WorkloadRecord, now: float, fx: Effects) -> None:
    """What this one, which has joined the line, would take is offered: to those before it first."""
    fitting = state.fleet.candidates(need(record, now))
    wake_claims(state, [claim for claim in fitting if not _was_refused(state, record.workload, claim, now)], now, fx)


def wake_claim(state: State, claim: str, now: float, fx: Effects) -> None:
    """Offer the room of a claim to the first in line that it fits, never to a later one before them."""
    wake_claims(state, (claim,), now, fx)


def wake_claims(state: State, claims: Iterable[str], now: float, fx: Effects) -> None:
    """Offer the room of several claims at once, to one waiter after the other in the order of the line.

    A request names all that is not promised: a later waiter would be offered with its claim the one that an earlier
    waiter is to be offered next.
    """
    heads = [
        (first, claim, walk)
        for claim in dict.fromkeys(claims)
        if (first := next(walk := _takers(state, claim, now), None))
    ]
    heapq.heapify(heads)
    while heads:
        place, claim, walk = heads[0]
        following = next(walk, None) if _offer(state, claim, place[2], now, fx) and _is_left(state, claim) else None
        if following is None:
            heapq.heappop(heads)
        else:
            heapq.heapreplace(heads, (following, claim, walk))


def _takers(state: State, claim: str, now: float) -> Iterator[Place]:
    """Waiters that a claim may be offered to, or kept for, first in line first. The line may change meanwhile."""
    record = state.fleet.claims.get(claim)
    if record is None or record.state is not ClaimState.ALLOCATED or not len(state.line):
        return
    if state.fleet.is_leaving(claim) or not _is_left(state, claim):  # what changes the node's budget wakes the line
        return

    def fits(group: Group) -> bool:
        return state.fleet.refusal(claim, Need(group.shape, "")) == ""

    for workload in state.line.waiting(fits, laden=False):
        waiter = state.workloads[workload]
        if waiter.reason is Reason.WAITING_FOR_PREDECESSOR or _was_refused(state, workload, claim, now):
            continue
        if not waiter.avoid or not state.fleet.refusal(claim, need(waiter, now)):
            yield state.line.place(workload)


def _is_left(state: State, claim: str) -> bool:
    """Has a claim room that is promised to nobody?"""
    free = state.fleet.seats_free(claim)
    return state.line.promised(claim) < (PROMISES_MAX if free is None else free)


def _offer(state: State, claim: str, workload: str, now: float, fx: Effects) -> bool:
    """Offer a claim to one waiter; False: there is no more of it, for whoever comes behind this one.

    It is kept for one whose request under way may be refused, as when a claim goes away in the moment in which this one
    comes free; up to as many as a request names, or each answer would go through all that is free.
    """
    if not _is_left(state, claim):
        return False
    held = state.line.promised_to(workload)
    if claim in held.claims or state.line.is_laden(workload):
        return True
    waiter, node = state.workloads[workload], state.fleet.claims[claim].node
    if node not in held.nodes and not _memory_is_left(state, claim, workload, need(waiter, now)):
        return False
    if state.line.busy(workload):
        state.line.promise_also(workload, claim, node)
        return True
    known = _candidates(state, waiter, now, looked_at_max=_LOOKED_AT_MAX)
    candidates = [each for each in known if not _was_refused(state, workload, each, now)]
    if claim not in candidates:
        candidates = [*candidates[: CANDIDATES_MAX - 1], claim]
    _request(state, waiter, tuple(candidates), now, fx)
    return True


def wake_seatless(state: State, now: float, fx: Effects, *, after: Place | None = None) -> None:
    """Ask again for the first waiters that hold no claim: a node joined, a device came free, or time has passed.

    ``after``: for those behind this place, which are left of an earlier wake-up: who was asked then and got nothing has
    had its turn. A wake-up from the front leaves that place where it is, or many of them would keep the last waiting.
    """
    asked = 0
    further, state.seatless_after = state.seatless_after, None
    for workload in state.line.waiting(partial(_can_found, state), after=after, laden=False):
        if state.line.busy(workload):
            continue
        place = state.line.place(workload)
        ask(state, state.workloads[workload], now, fx)
        asked += 1
        if asked == SEATLESS_MAX:
            state.seatless_after = place if further is None else max(place, further)
            return


def _can_found(state: State, group: Group) -> bool:
    return group.seatless and bool(state.fleet.tiers(group.shape))


def found_anew(state: State, record: WorkloadRecord, now: float, fx: Effects) -> None:
    """Ask for another own claim in place of one that nobody would found like this any more.

    It is a move (L5): the new claim stands before the old one is given up, so the place in line is never empty (W1).
    """
    if _is_outdated(state, record) and not state.line.busy(record.workload):
        _request(state, record, (), now, fx)


def _is_outdated(state: State, record: WorkloadRecord) -> bool:
    """Its own pending claim is not as it would be founded now: a shape that would do has joined the fleet since (P9),
    or a more urgent job has come to its runtime (W1)."""
    claim = state.fleet.claims.get(record.claim)
    if record.phase is not WorkloadPhase.PENDING or claim is None or claim.state is not ClaimState.PENDING:
        return False
    is_narrow = bool(set(state.fleet.tiers(record.shape)) - set(claim.tiers))
    return record.assignment in claim.entries and (is_narrow or claim.order > order(record))


def settle(state: State, workload: str, now: float, fx: Effects, *, booked: str = "") -> None:
    """A request was answered: what it had been promised goes to the next in line.

    ``booked``: a claim that took it and does not list it here yet: that it does wakes the line.
    """
    state.requested_at.pop(workload, None)
    state.asked_of.pop(workload, None)
    _offer_again(state, *state.line.settle(workload), now, fx, booked=booked)


def _offer_again(
    state: State, promise: Promise, short: frozenset[str], now: float, fx: Effects, *, booked: str = ""
) -> None:
    of_nodes = [claim for node in sorted(short) for claim in state.fleet.claims_on(node)]
    freed = [claim for claim in (*promise.claims, *of_nodes) if claim != booked or state.fleet.limit == 0]
    wake_claims(state, freed, now, fx)


def note_refusals(state: State, workload: str, refusals: dict[str, str], now: float) -> None:
    """These claims said no: not offered to this workload again before they have changed, or ``REFUSED_S`` later.

    Changed since it asked, not since the answer came: what came free on its way here is not what was refused (W1).
    What refuses need not show here: while a new limit is rolled out, a replica of the ledger may have the old one (S7).
    """
    asked = state.asked_of.get(workload, {})
    for claim, why in refusals.items():
        state.refused_at[workload][claim] = asked.get(claim) or state.fleet.changes(claim), now, why


def _was_refused(state: State, workload: str, claim: str, now: float) -> bool:
    refused = state.refused_at.get(workload, {}).get(claim)
    return refused is not None and refused[0] == state.fleet.changes(claim) and now - refused[1] < REFUSED_S


def refused_because(state: State, workload: str, claim: str, now: float) -> str:
    """Why the ledger refused it, as long as that keeps the claim from being offered again; empty otherwise (W5)."""
    return state.refused_at[workload][claim][2] if _was_refused(state, workload, claim, now) else ""


def _request(state: State, record: WorkloadRecord, candidates: tuple[str, ...], now: float, fx: Effects) -> None:
    """One SeatRequested (P11). Who has a pending claim asks to move from it, and founds no other like it (L5)."""
    assert alive(record)
    moving = record.assignment != ""
    tiers = state.fleet.tiers(record.shape) if not moving or _is_outdated(state, record) else ()
    record = msgspec.structs.replace(record, attempt=record.attempt + 1)
    state.put_workload(record)
    state.requested_at[record.workload] = now
    # Of the same request, asked again, the first answer may be on its way.
    before = state.asked_of.get(record.workload, {})
    state.asked_of[record.workload] = {each: before.get(each) or state.fleet.changes(each) for each in candidates}
    # A waiter is promised all it was offered. A newcomer counts for its best candidate alone: enough that a burst of
    # submissions is spread over the claims that have room, although the view has not heard of their bookings yet.
    promised = candidates if record.workload in state.line else candidates[:1]
    nodes = frozenset(state.fleet.claims[claim].node for claim in promised)
    state.line.promise(record.workload, Promise(promised, nodes, record.shape.host_bytes))
    if candidates:
        state.line.aim(record.workload, candidates[0])
    fx.workloads[record.workload] = None
    fx.events.append(
        SeatRequested(
            tenant=record.tenant,
            workload=record.workload,
            incarnation=record.incarnation,
            attempt=record.attempt,
            owner=record.owner,
            shape=record.shape,
            candidates=candidates,
            may_found=bool(tiers),
            tiers=tiers,
            order=order(record),
            move_from=record.assignment if moving else "",
            avoid=nodes_avoided(record, now),
        )
    )


def repeat_request(state: State, record: WorkloadRecord, now: float, fx: Effects) -> None:
    """No answer for long: the same request again, under the same id; the ledger adopts what it booked meanwhile."""
    assert record.phase in (WorkloadPhase.SUBMITTED, WorkloadPhase.PENDING)
    record = msgspec.structs.replace(record, attempt=record.attempt - 1)
    state.put_workload(record)
    promise, short = state.line.settle(record.workload)  # what it was promised does not count against itself
    # Nor does it give it what somebody goes without until this very request is settled.
    shares = state.policy.strategy == "binpack" or waits(record)
    may_take = [
        claim
        for claim in (_candidates(state, record, now) if shares else ())
        if claim in promise.claims or state.fleet.claims[claim].node not in short
    ]
    _request(state, record, tuple(may_take), now, fx)
    _offer_again(state, promise, short, now, fx)


def _candidates(
    state: State, record: WorkloadRecord, now: float, *, looked_at_max: int | None = None
) -> tuple[str, ...]:
    """Claims that would take it and are not promised to others, best first."""
    wanted = need(record, now)
    left_out = _promised_away(state, record.workload, wanted)
    aimed = state.line.aimed
    return tuple(state.fleet.candidates(wanted, left_out=left_out, aimed=aimed, looked_at_max=looked_at_max))


def _memory_is_left(state: State, claim: str, workload: str, wanted: Need) -> bool:
    """Does its node hold this one beside all who were promised its memory before?

    Who stands in the line and goes without may need all that is left, once it is known who took the promised: until
    then nobody later gets it (W1).
    """
    node = state.fleet.claims[claim].node
    promised = state.line.promised_bytes(node)
    if promised == 0 or wanted.shape.host_bytes == 0:
        return True
    if not state.line.is_short(node) and state.fleet.host_fits(claim, promised + wanted.shape.host_bytes):
        return True
    if workload in state.line:
        state.line.went_without(node)
    return False


def _promised_away(state: State, workload: str, wanted: Need) -> Callable[[str], bool]:
    """Claims whose free seats, or whose node's memory, are promised to waiters with a request under way (W1)."""

    def left_out(claim: str) -> bool:
        if state.fleet.is_leaving(claim) and len(state.line):
            return True
        free = state.fleet.seats_free(claim)
        if free is not None and state.line.promised(claim) >= free:
            return True
        return not _memory_is_left(state, claim, workload, wanted)

    return left_out
