"""Placement's decisions about seats and workers: ``decide(state, event, now) -> Effects``, and what mirrors mean.

    Submitted ─booked on a shared claim─▶ Placed ─▶ Starting ─▶ Ready
        └──────founded an own claim────▶ Pending ──allocated──┘
                                          │  ▲
                     unschedulable (F1) ──┘  └── stands in the line, moves to a freed seat, or gets its device

Pure: state in, effects out; the caller passes the time. Invariants: an event of an older incarnation, attempt or
assignment changes nothing; handling an event twice gives the same records, and the same events again.

The ledger's and launchers' buckets are the truth: their mirrors call ``seat_changed``, ``claim_changed``,
``node_changed``, ``budget_changed`` and ``ready_changed``; events only make things quicker, ``passes`` repairs what
both missed.
"""

from __future__ import annotations

from itertools import islice

import msgspec

from openrl_common.events import (
    AnyEvent,
    ClaimFreed,
    JobCancelled,
    JobFinished,
    SeatRefused,
    SeatReleased,
    WorkerExited,
    WorkerLaunched,
    WorkerUnschedulable,
)
from openrl_common.names import short_workload
from openrl_common.quantities import GIB
from openrl_common.records import (
    ClaimRecord,
    ClaimState,
    NodeBudget,
    NodeRecord,
    ReadyRecord,
    Reason,
    SeatRecord,
    SeatState,
    Standing,
    WorkerRecord,
    WorkerState,
    WorkloadPhase,
    WorkloadRecord,
)
from openrl_placement.endings import end_if_gone, fail_workload, gone, job_ready
from openrl_placement.jobs import closed
from openrl_placement.line import Group
from openrl_placement.state import (
    Effects,
    State,
    alive,
    ended,
    need,
    order,
    placed,
    release_request,
    waits,
    with_reason,
    without_reason,
)
from openrl_placement.waiting import (
    ask,
    found_anew,
    join_line,
    note_refusals,
    offer_fitting,
    settle,
    wake_claim,
    wake_claims,
    wake_seatless,
)

_EARLIER_MAX = 64
"""Earlier waiters that are looked at for one that was overtaken: of those that fit, nearly all count."""
SWEEP_AFTER_S = 5.0
"""Nodes of one fleet come in one after the other: only after this is an early submission called impossible."""


def decide(state: State, event: AnyEvent, now: float) -> Effects:
    """What follows from an event (JobSubmitted aside: ``jobs.submitted``); nothing when it concerns nobody here."""
    fx = Effects()
    match event:
        case JobFinished() | JobCancelled():
            return closed(state, event, now)
        case SeatRefused():
            _refused(state, event, now, fx)
        case SeatReleased():
            _released_event(state, event, now, fx)
        case WorkerUnschedulable() | WorkerLaunched() | WorkerExited():
            _worker_event(state, event, now, fx)
        case ClaimFreed():
            wake_seatless(state, now, fx)
        case _:
            pass
    return fx


# --- seats ------------------------------------------------------------------------------------------------------


def _seat_held(state: State, record: WorkloadRecord, seat: SeatRecord, now: float, fx: Effects) -> None:
    if record.incarnation < seat.incarnation or state.was_released(seat.assignment):
        return
    if not alive(record) or record.incarnation > seat.incarnation:
        _withdraw(state, record, seat, fx)
    elif seat.assignment != record.assignment:
        booked(state, record, seat.assignment, seat.claim, now, fx)


def booked(state: State, record: WorkloadRecord, assignment: str, claim: str, now: float, fx: Effects) -> None:
    """The ledger named a seat. On an allocated claim the workload is placed; on a founded one it is pending.

    A pending one is not written: the seat says it all after a restart, and its allocation follows at once or gives it
    a reason to wait.
    """
    state.note_released(record.assignment)
    waited = waits(record)
    claim_record = state.fleet.claims.get(claim)
    record = msgspec.structs.replace(record, assignment=assignment, claim=claim, node="")
    if claim_record is not None and claim_record.state is ClaimState.ALLOCATED:
        record = _as_placed(record, claim_record.node, now)
        state.refused_at.pop(record.workload, None)
    else:
        record = msgspec.structs.replace(record, phase=WorkloadPhase.PENDING)
    state.put_workload(record)
    if waited or placed(record):
        fx.workloads[record.workload] = None
    is_listed = claim_record is not None and assignment in claim_record.entries
    state.fleet.set_seat(record.workload, claim, assignment, record.shape.host_bytes)
    settle(state, record.workload, now, fx, booked="" if is_listed else claim)
    for event in state.take_early(assignment):
        fx.add(decide(state, event, now))
    if state.ready.get(assignment):
        _became_ready(state, state.workloads[record.workload], now, fx)


def _as_placed(record: WorkloadRecord, node: str, now: float) -> WorkloadRecord:
    return msgspec.structs.replace(
        without_reason(record, now), phase=WorkloadPhase.PLACED, node=node, placed_at=now, deadline=None
    )


def _withdraw(state: State, record: WorkloadRecord, seat: SeatRecord, fx: Effects) -> None:
    """A booking for something that is over: say again that it is to be released."""
    held = msgspec.structs.replace(record, incarnation=seat.incarnation, assignment=seat.assignment)
    fx.events.append(release_request(held, close=True, why="the workload is over"))
    if record.phase is WorkloadPhase.RELEASING and not record.assignment:
        state.put_workload(msgspec.structs.replace(record, assignment=seat.assignment, claim=seat.claim))
        fx.workloads[record.workload] = None


def _refused(state: State, event: SeatRefused, now: float, fx: Effects) -> None:
    record = state.workloads.get(event.workload)
    if (
        record is None
        or record.incarnation != event.incarnation
        or record.attempt != event.attempt
        or not alive(record)
    ):
        return
    note_refusals(state, event.workload, event.refusals, now)
    if event.code == "closed":
        message = f"the ledger has closed this submission of {short_workload(event.workload)}: submit the job again"
        fail_workload(state, record, "closed", message, now, fx)
    elif event.code == "started":
        state.put_workload(without_reason(record, now))  # its own claim was allocated first: out of the line
        fx.workloads[record.workload] = None
        settle(state, event.workload, now, fx)
    else:
        if placed(record) or (record.assignment and not state.line.busy(record.workload)):
            pass  # a late answer: another replica has booked the same request
        elif event.code in ("predecessor", "releasing"):
            record = with_reason(record, Reason.WAITING_FOR_PREDECESSOR, event.message, now)
            state.put_workload(record)
        else:
            cause = record.message if record.reason is Reason.UNSCHEDULABLE else ""
            reason, message = state.fleet.why(need(record, now), cause)
            record = with_reason(record, event.reason or reason, event.message if event.reason else message, now)
            state.put_workload(record)
        fx.workloads[record.workload] = None
        settle(state, event.workload, now, fx)
        if waits(record) and not state.line.busy(record.workload):
            offer_fitting(state, record, now, fx)  # also what its request did not name


def _released_event(state: State, event: SeatReleased, now: float, fx: Effects) -> None:
    state.note_released(event.assignment)
    record = state.workloads.get(event.workload)
    if record is not None:
        if ended(record):
            if record.incarnation == event.incarnation:
                for key in record.jobs:
                    end_if_gone(state, key, now, fx)
        elif record.assignment == event.assignment:
            # (Another assignment of this workload is a reservation that the ledger cleaned: it names no seat.)
            if record.phase is WorkloadPhase.RELEASING:
                gone(state, record, now, fx)
            else:
                seat_lost(state, record, now, fx)
        elif record.reason is Reason.WAITING_FOR_PREDECESSOR and not state.line.busy(record.workload):
            ask(state, record, now, fx)
    wake_claim(state, event.claim, now, fx)


def seat_lost(state: State, record: WorkloadRecord, now: float, fx: Effects) -> None:
    """The seat of a workload that should live is gone.

    One that had been placed asks again at once, under a new deadline (W3); one that never was placed waits its turn in
    the line: its claim was refused or over the host budget.
    """
    was_placed = placed(record)
    timeout_s = state.policy.placement_timeout_s
    deadline = record.deadline if not was_placed else (now + timeout_s if timeout_s else None)
    state.note_released(record.assignment)
    state.ready.pop(record.assignment, None)
    record = msgspec.structs.replace(
        record,
        phase=WorkloadPhase.PENDING,
        assignment="",
        claim="",
        node="",
        placed_at=None,
        ready_at=None,
        deadline=deadline,
    )
    state.put_workload(record)
    fx.workloads[record.workload] = None
    settle(state, record.workload, now, fx)
    record = state.workloads[record.workload]  # what it had been promised may have been offered to itself
    if was_placed:
        record = with_reason(record, Reason.RETRYING, "its seat was lost: asking for another", now)
        state.put_workload(record)
        ask(state, record, now, fx)
    else:
        join_line(state, record, now, fx, cause="its own claim could not be kept: asking again shortly")


# --- workers ----------------------------------------------------------------------------------------------------


def is_early(state: State, event: WorkerUnschedulable | WorkerLaunched | WorkerExited) -> bool:
    """It speaks of a booking that nothing has told of here yet."""
    record = state.workloads.get(event.workload)
    return (
        record is not None
        and alive(record)
        and record.assignment != event.assignment
        and not state.was_released(event.assignment)
    )


def _worker_event(
    state: State, event: WorkerUnschedulable | WorkerLaunched | WorkerExited, now: float, fx: Effects
) -> None:
    record = state.workloads.get(event.workload)
    if record is None or not alive(record) or state.was_released(event.assignment):
        return
    if is_early(state, event):
        state.keep_early(event.assignment, event)
        return
    match event:
        case WorkerUnschedulable():
            if record.phase is WorkloadPhase.PENDING:
                join_line(state, record, now, fx, cause=event.cause)
        case WorkerLaunched():
            if record.phase is not WorkloadPhase.READY:
                record = without_reason(record, now)
                placed_at = now if record.placed_at is None else record.placed_at
                record = msgspec.structs.replace(
                    record,
                    phase=WorkloadPhase.STARTING,
                    placed_at=placed_at,
                    node=event.node or record.node,
                    deadline=None,
                )
                state.put_workload(record)
            fx.workloads[record.workload] = None
            if state.ready.get(event.assignment):
                _became_ready(state, record, now, fx)
        case WorkerExited() if event.will_restart:
            # The launcher has taken its ready record back: that tells when it serves no more, and when it does again.
            # This event may be a late duplicate from before.
            if record.phase is not WorkloadPhase.READY:
                record = msgspec.structs.replace(without_reason(record, now), phase=WorkloadPhase.STARTING)
                state.put_workload(record)
                fx.workloads[record.workload] = None
        case WorkerExited():
            fail_workload(state, record, "worker-failed", _exit_message(state, event), now, fx)


def _exit_message(state: State, event: WorkerExited) -> str:
    log_path = f"{state.policy.logs_directory}/{event.workload}.{event.assignment}.log"
    why = f": {event.why}" if event.why else ""
    return f"{short_workload(event.workload)} exited with code {event.exit_code}{why} (its log: {log_path})"


# --- what mirrors say -------------------------------------------------------------------------------------------


def seat_changed(state: State, workload: str, seat: SeatRecord | None, now: float) -> Effects:
    """``seat.<workload>``: a booking, or the end of a releasing workload, once its incarnation is closed (E5).

    The bucket is the truth and arrives before SeatBooked does: that event is for launchers and people.
    """
    fx = Effects()
    if seat is None:
        state.seats.pop(workload, None)
        return fx
    state.seats[workload] = seat
    if seat.state is not SeatState.HELD:
        state.fleet.drop_seat(workload, seat.claim)
    record = state.workloads.get(workload)
    if record is None:
        return fx
    if seat.state is SeatState.HELD:
        _seat_held(state, record, seat, now, fx)
    elif record.phase is WorkloadPhase.RELEASING and seat_is_over(seat, record):
        gone(state, record, now, fx)
    return fx


def seat_is_over(seat: SeatRecord, record: WorkloadRecord) -> bool:
    return seat.state is SeatState.EMPTY and seat.closed >= record.incarnation


def claim_changed(state: State, claim: str, record: ClaimRecord | None, now: float) -> Effects:
    """``claim.<id>``: its founder is placed once it is allocated (L5); room wakes the line (W2)."""
    fx = Effects()
    before = state.fleet.claims.get(claim)
    may_wake = state.fleet.set_claim(claim, record)
    founders: list[str] = []
    if record is not None and record.state is ClaimState.ALLOCATED:
        for workload in sorted(state.on_claim.get(claim, ())):
            seated = state.workloads[workload]
            if seated.assignment not in record.entries:
                continue
            may_wake |= before is None or seated.assignment not in before.entries  # its seat was heard of first
            if seated.phase is WorkloadPhase.PENDING:
                if before is not None and before.state is ClaimState.PENDING:
                    state.overtakings += _overtakes(state, seated, record, now)
                state.put_workload(_as_placed(seated, record.node, now))
                state.refused_at.pop(workload, None)
                fx.workloads[workload] = None
                founders.append(workload)
    if may_wake:
        wake_claim(state, claim, now, fx)
    for workload in founders:  # after that: whoever is offered what it was promised would be offered this one too (W1)
        settle(state, workload, now, fx)
    return fx


def _overtakes(state: State, record: WorkloadRecord, claim: ClaimRecord, now: float) -> bool:
    """W1: does an earlier waiter's own claim, which these devices would have done for, still wait for some?

    Kube-scheduler decides among them. A job's second worker goes before others' first by the rule: it overtakes nobody.
    """
    if any(placed(each) for each in state.both_of(record)):
        return False

    def fits(group: Group) -> bool:
        shape = group.shape
        return (
            not group.seatless and shape.device_count == len(claim.devices) and shape.device_bytes <= claim.device_bytes
        )

    for workload in islice(state.line.waiting(fits), _EARLIER_MAX):
        waiter = state.workloads[workload]
        if order(waiter) >= order(record):
            return False
        own = state.fleet.claims.get(waiter.claim)
        if own is None or own.state is not ClaimState.PENDING or claim.node in need(waiter, now).avoid:
            continue
        if any(claim.device_bytes <= tier.ceiling_gib * GIB for tier in own.tiers):
            return True
    return False


def node_changed(state: State, node: str, record: NodeRecord | None, now: float) -> Effects:
    """A node joined or changed: its claims, and those who hold no claim, are looked at again (W2, W4)."""
    fx = Effects()
    was_known, kinds = state.fleet.known, state.fleet.kinds
    if not state.fleet.set_node(node, record) or not len(state.line):
        return fx
    if not was_known:
        state.sweep_at = now + SWEEP_AFTER_S
    if state.fleet.kinds - kinds:
        for workload in state.line.waiting(lambda group: not group.seatless):
            found_anew(state, state.workloads[workload], now, fx)
    wake_claims(state, state.fleet.claims_on(node), now, fx)
    wake_seatless(state, now, fx)
    return fx


def budget_changed(state: State, node: str, budget: NodeBudget | None, now: float) -> Effects:
    """``node.<node>`` of the ledger: freed host memory (P6), or a node that is back (F3), may serve a waiter."""
    fx = Effects()
    is_back = state.fleet.set_standing(node, Standing.LIVE if budget is None else budget.standing)
    if (state.fleet.set_budget(node, budget) or is_back) and len(state.line):
        wake_claims(state, state.fleet.claims_on(node), now, fx)
        if is_back:
            wake_seatless(state, now, fx)
    return fx


def ready_changed(state: State, assignment: str, ready: ReadyRecord | None, now: float) -> Effects:
    """A worker's own word that it serves, or that it does not (any more)."""
    fx = Effects()
    if ready is None:
        state.ready.pop(assignment, None)
        state.spoke.pop(assignment, None)
        return fx
    state.ready[assignment] = ready.ready
    state.spoke[assignment] = ready.process_started_at
    record = state.workloads.get(ready.workload)
    if record is None or record.assignment != assignment or not alive(record):
        return fx
    if ready.ready:
        _became_ready(state, record, now, fx)
    elif record.phase is WorkloadPhase.READY:
        state.put_workload(msgspec.structs.replace(record, phase=WorkloadPhase.STARTING, ready_at=None))
        fx.workloads[record.workload] = None
    return fx


def worker_changed(state: State, assignment: str, worker: WorkerRecord | None, now: float) -> Effects:
    """What a launcher says of a worker: nothing to be done at once, its events are quicker. Passes look at it (E5)."""
    if worker is None:
        state.workers.pop(assignment, None)
    else:
        state.workers[assignment] = worker
    return Effects()


def exit_is_due(state: State, record: WorkloadRecord, now: float, fx: Effects) -> None:
    """Its worker has ended for good, as the launcher's record says: as if WorkerExited came (again) now (E4, E5).

    One that the launcher starts again is ``backing-off``, not ``exited`` (F4).
    """
    worker = state.workers.get(record.assignment)
    if worker is None or worker.state is not WorkerState.EXITED or worker.workload != record.workload:
        return
    exited = WorkerExited(
        **worker.who, exit_code=worker.exit_code or 0, restarts=worker.restarts, will_restart=False, why=worker.why
    )
    fx.add(decide(state, exited, now))


def ready_is_due(state: State, record: WorkloadRecord, now: float, fx: Effects) -> None:
    """Take in a ready record that came before its booking was known."""
    if (
        alive(record)
        and record.assignment
        and record.phase is not WorkloadPhase.READY
        and state.ready.get(record.assignment)
    ):
        _became_ready(state, record, now, fx)


def _became_ready(state: State, record: WorkloadRecord, now: float, fx: Effects) -> None:
    if record.phase is not WorkloadPhase.READY:
        placed_at = now if record.placed_at is None else record.placed_at
        record = msgspec.structs.replace(
            without_reason(record, now), phase=WorkloadPhase.READY, ready_at=now, placed_at=placed_at, deadline=None
        )
        state.put_workload(record)
    fx.workloads[record.workload] = None
    job_ready(state, record, now, fx)


def fail_impossible(state: State, now: float, fx: Effects) -> None:
    """W4 for those who waited for a fleet: what no node of it could ever hold is told once the nodes have come in."""
    state.sweep_at = None
    for group in state.line.groups():
        if sentence := state.fleet.impossible(group.shape):
            for workload in state.line.waiting(group.__eq__):
                message = f"{short_workload(workload)} {sentence}"
                fail_workload(state, state.workloads[workload], "impossible", message, now, fx)
