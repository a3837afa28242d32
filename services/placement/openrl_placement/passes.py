"""What happens by time alone: deadlines (W3), idle LoRA runtimes (P12), forgetting, and the pass that repairs (E5).

``tick`` is cheap and runs every second: sorted indexes say what is due. ``rederive`` compares every living workload
with the ledger's seats and the workers' ready records, and repairs what an event failed to deliver; it runs every
ten seconds.

Invariants: a mismatch is acted on only when it was seen twice in a row, because mirrors lag and events are under way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import islice, takewhile

import msgspec

from openrl_common.events import SeatReleaseRequested
from openrl_common.names import short_workload
from openrl_common.quantities import format_seconds
from openrl_common.records import (
    ClaimEntry,
    ClaimState,
    JobPhase,
    Reason,
    SeatRecord,
    SeatState,
    WorkloadPhase,
    WorkloadRecord,
)
from openrl_placement.core import (
    booked,
    claim_changed,
    exit_is_due,
    fail_impossible,
    ready_is_due,
    seat_is_over,
    seat_lost,
)
from openrl_placement.endings import drop_stray, end_if_gone, fail_job, fail_workload, gone, release, runtime_idle
from openrl_placement.pairs import give_way
from openrl_placement.state import Effects, State, alive, job_key, placed, release_request, waits
from openrl_placement.waiting import ask, found_anew, join_line, repeat_request, settle, wake_seatless
from openrl_placement.wedge import give_up, is_wedged

UNANSWERED_S = 10.0
"""A request, or a pending claim, that nobody has answered for this long is looked at again."""
STRAY_S = 600.0
"""Time in which whoever lost placement's buckets may put them back, before workers of which they knew are ended."""
_REASONS_MAX = 256
_NOT_YET = (WorkloadPhase.PENDING, WorkloadPhase.PLACED, WorkloadPhase.STARTING)
_REASONS_SLICE = 16
_SLICE = 64


def overdue(state: State, now: float) -> list[str]:
    """Workloads whose deadline has passed."""
    return [workload for _, workload in takewhile(lambda due: due[0] <= now, state.deadlines)]


def tick(state: State, now: float, read: Collection[str] | None = None) -> Effects:
    """Do what is due by now.

    Args:
        read: of the overdue, whose seat and claim were read once more: only those fail (W3). None: the view is current.
    """
    fx = Effects()
    if state.sweep_at is not None and state.sweep_at <= now:
        fail_impossible(state, now, fx)
    for workload in overdue(state, now):
        record = state.workloads[workload]  # the end of another may have been its own
        if record.deadline is not None and record.deadline <= now and (read is None or workload in read):
            _deadline_passed(state, record, now, fx)
    while state.idle and state.idle[0][0] + state.policy.lora_idle_s <= now:
        _, workload = state.idle[0]
        runtime_idle(state, state.workloads[workload], now, fx)
    if state.seatless_after is not None:
        wake_seatless(state, now, fx, after=state.seatless_after)
    unexplained, state.unexplained = state.unexplained, set()
    for workload in islice(sorted(unexplained), _REASONS_MAX):
        _refresh_reason(state, workload, now, fx)
    while state.ended and state.ended[0][0] + state.policy.keep_ended_s <= now:
        _, key = state.ended[0]
        _forget(state, key, fx)
    return fx


def _deadline_passed(state: State, record: WorkloadRecord, now: float, fx: Effects) -> None:
    """W3: state is read once more, an allocation wins; otherwise the workload fails with its last reason.

    A LoRA job that came to a runtime which waited already has its time too: only those fail that had theirs.
    """
    claim = state.fleet.claims.get(record.claim)
    if claim is not None and claim.state is ClaimState.ALLOCATED and record.assignment in claim.entries:
        fx.add(claim_changed(state, record.claim, claim, now))
        if placed(state.workloads[record.workload]):
            return
    timeout = format_seconds(state.policy.placement_timeout_s)
    last = f": {record.reason}, {record.message}" if record.reason is not None else ""
    message = f"{short_workload(record.workload)} was not placed within {timeout} (--placement-timeout){last}"
    deadlines = {job_key(job): job.submitted_at + state.policy.placement_timeout_s for job in state.jobs_of(record)}
    later = [deadline for deadline in deadlines.values() if deadline > now]
    if not later:
        fail_workload(state, record, "placement-timeout", message, now, fx)
        return
    for key, deadline in deadlines.items():
        if deadline <= now:
            fail_job(state, state.jobs[key], "placement-timeout", message, now, fx)
    state.put_workload(msgspec.structs.replace(state.workloads[record.workload], deadline=min(later)))
    fx.workloads[record.workload] = None


def _forget(state: State, key: str, fx: Effects) -> None:
    job = state.jobs[key]
    for record in state.pair(job):
        if not alive(record) and record.phase is not WorkloadPhase.RELEASING and record.incarnation <= job.incarnation:
            state.forget_workload(record.workload)
            fx.workloads[record.workload] = None
    state.forget_job(key)
    fx.jobs[key] = None


class Pass:
    """The repairing pass. It remembers what it saw last time, nothing else."""

    def __init__(self) -> None:
        self._seen: dict[str, object] = {}

    def rederive(self, state: State, now: float) -> Effects:
        """The whole pass at once."""
        fx = Effects()
        for part in self.slices(state, lambda: now):
            fx.add(part)
        return fx

    def slices(self, state: State, clock: Callable[[], float]) -> Iterator[Effects]:
        """The same pass in parts, so that a caller with thousands of workloads can see to other things in between.

        Each part is decided at its own time: what came in between is not judged by an older one.
        """
        seen: dict[str, object] = {}
        living = list(state.living)
        for start in range(0, len(living), _SLICE):
            fx, now = Effects(), clock()
            for workload in living[start : start + _SLICE]:
                self._look_at(state, workload, seen, now, fx)
            yield fx
        self._seen = seen
        fx, now = Effects(), clock()
        for key, job in list(state.jobs.items()):
            if job.phase is JobPhase.FINISHING and any(alive(record) for record in state.pair(job)):
                fail_job(state, job, job.reason, job.message, now, fx)  # whoever began it was killed before the rest
            elif job.phase is JobPhase.FINISHING:
                end_if_gone(state, key, now, fx)
        yield fx
        yield from _refresh_reasons(state, clock)
        fx, now = Effects(), clock()
        wake_seatless(state, now, fx)
        give_way(state, now, fx)
        yield fx

    def _look_at(self, state: State, workload: str, seen: dict[str, object], now: float, fx: Effects) -> None:
        record = state.workloads.get(workload)
        if record is None:
            return
        drop_stray(state, record, now, fx)
        record = state.workloads[workload]
        mismatch = _mismatch(state, record)
        if mismatch is not None:
            if self._seen.get(workload) == mismatch:
                _repair(state, record, now, fx)
                return
            seen[workload] = mismatch
        _look_again(state, record, now, fx)


class Strays:
    """Seats of incarnations that do not exist (L6): with placement's records lost, they and their workers are for ever.

    A record is written before its seat is asked for: what has a seat and no record is not about to get one, unless the
    submissions are read from the stream again. ``look`` is told when that is over.
    """

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def look(self, state: State, monotonic_s: float, *, caught_up: bool) -> list[SeatReleaseRequested]:
        """What to ask the ledger for, of seats that have been seen so for ``STRAY_S``."""
        served = {
            workload for job in state.jobs.values() if not job.phase.ended for workload in (job.trainer, job.sampler)
        }
        found: dict[str, tuple[str, SeatRecord, ClaimEntry]] = {}
        for workload, seat in state.seats.items() if caught_up else ():
            record = state.workloads.get(workload)
            if seat.state is not SeatState.HELD or (record is not None and record.incarnation >= seat.incarnation):
                continue
            claim = state.fleet.claims.get(seat.claim)
            entry = None if claim is None else claim.entries.get(seat.assignment)
            if entry is not None and workload not in served:  # one that its claim does not list is the janitor's
                found[seat.assignment] = workload, seat, entry
        self._since = {assignment: self._since.get(assignment, monotonic_s) for assignment in found}
        return [
            _request_back(*found[assignment])
            for assignment, since in self._since.items()
            if monotonic_s - since >= STRAY_S
        ]


def _request_back(workload: str, seat: SeatRecord, entry: ClaimEntry) -> SeatReleaseRequested:
    return SeatReleaseRequested(
        tenant=entry.tenant,
        workload=workload,
        incarnation=seat.incarnation,
        assignment=seat.assignment,
        attempt=seat.attempt,
        why="placement has no record of it",
    )


def _mismatch(state: State, record: WorkloadRecord) -> object | None:
    """What the ledger's seat says that the record does not."""
    seat = state.seats.get(record.workload)
    held = seat is not None and seat.state is SeatState.HELD and seat.incarnation == record.incarnation
    if alive(record) and held and seat is not None and seat.assignment != record.assignment:
        return ("booked", seat.assignment)
    empty = seat is None or seat.state is SeatState.EMPTY or seat.incarnation != record.incarnation
    if alive(record) and record.assignment and empty:
        return ("lost", record.assignment)
    return None


def _repair(state: State, record: WorkloadRecord, now: float, fx: Effects) -> None:
    seat = state.seats.get(record.workload)
    if seat is not None and seat.state is SeatState.HELD and seat.incarnation == record.incarnation:
        booked(state, record, seat.assignment, seat.claim, now, fx)
    else:
        seat_lost(state, record, now, fx)


def _look_again(state: State, record: WorkloadRecord, now: float, fx: Effects) -> None:
    """Things that are true in the buckets and that an event should have said."""
    seat = state.seats.get(record.workload)
    if record.phase is WorkloadPhase.RELEASING:
        if seat is not None and seat_is_over(seat, record):
            gone(state, record, now, fx)
        else:
            release(state, record, now, fx, why=record.message)
        return
    exit_is_due(state, record, now, fx)
    record = state.workloads[record.workload]
    if not alive(record):
        return
    claim = state.fleet.claims.get(record.claim)
    if record.phase is WorkloadPhase.PENDING and claim is not None and claim.state is ClaimState.ALLOCATED:
        fx.add(claim_changed(state, record.claim, claim, now))
    if claim is not None and claim.state is ClaimState.QUARANTINED and record.phase in _NOT_YET:
        # Nothing is started there any more, it would wait for ever: the seat is given up, not the incarnation (L3).
        why = "its claim is quarantined and its worker does not run"
        fx.events.append(release_request(record, close=False, why=why))
        return
    found_anew(state, state.workloads[record.workload], now, fx)
    ready_is_due(state, state.workloads[record.workload], now, fx)
    if is_wedged(state, state.workloads[record.workload], now):
        give_up(state, state.workloads[record.workload], now, fx)
    record = state.workloads[record.workload]  # as all this has left it
    asked_at = state.requested_at.get(record.workload)
    if asked_at is None and record.phase is WorkloadPhase.SUBMITTED:
        state.requested_at[record.workload] = now  # after a restart: give the answer its time
    elif asked_at is not None and now - asked_at >= UNANSWERED_S and record.attempt > 0:
        _unanswered(state, record, now, fx)
    elif (
        record.phase is WorkloadPhase.PENDING
        and not waits(record)
        and now - record.submitted_at >= state.policy.verdict_wait_s
    ):
        join_line(state, record, now, fx, cause="no launcher has said anything about its claim yet")


def _unanswered(state: State, record: WorkloadRecord, now: float, fx: Effects) -> None:
    seat = state.seats.get(record.workload)
    if record.phase not in (WorkloadPhase.SUBMITTED, WorkloadPhase.PENDING):
        settle(state, record.workload, now, fx)
    elif seat is not None and seat.incarnation == record.incarnation and seat.attempt >= record.attempt:
        settle(state, record.workload, now, fx)  # it was booked and released again, and both answers were missed
        if not state.line.busy(record.workload):
            ask(state, state.workloads[record.workload], now, fx)
    else:
        repeat_request(state, record, now, fx)


def _refresh_reasons(state: State, clock: Callable[[], float]) -> Iterator[Effects]:
    """Reasons change without an event that says so (another job took the last seat): the first in line are told."""
    fx, now = Effects(), clock()
    for count, workload in enumerate(islice(state.line.waiting(), _REASONS_MAX), start=1):
        _refresh_reason(state, workload, now, fx)
        if count % _REASONS_SLICE == 0:
            yield fx
            fx, now = Effects(), clock()
    yield fx


def _refresh_reason(state: State, workload: str, now: float, fx: Effects) -> None:
    record = state.workloads.get(workload)
    if record is not None and waits(record) and record.assignment and not state.line.busy(workload):
        told = record.reason in (Reason.UNSCHEDULABLE, Reason.WAITING_FOR_HOST_MEMORY)
        join_line(state, record, now, fx, cause=record.message if told else "")
