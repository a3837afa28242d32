"""What clients ask: a job submitted, finished, cancelled (P12, W4).

A submission is answered once and for all: admitted (its workloads exist and have asked for seats) or failed with a
code. The same submission again is answered with the same events; one that the job of that name has replaced changes
nothing; an older one that nobody has answered yet (its delivery came late) is refused.

Codes of JobFailed here: ``bad-name``, ``bad-spec``, ``model-unreadable``, ``duplicate-name``, ``impossible``.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from openrl_common.errors import Rejected
from openrl_common.events import JobAdmitted, JobCancelled, JobFailed, JobFinished, JobSubmitted
from openrl_common.names import SHARED, check_job, check_tenant, workload_id
from openrl_common.records import JobKind, JobPhase, JobRecord, JobSpec, Role, Shape, WorkloadPhase, WorkloadRecord
from openrl_placement.endings import close_job, end_if_gone, failed_event, job_ready
from openrl_placement.estimator import Constants, Model, check_length, check_spec, estimate, max_rank
from openrl_placement.state import Effects, RuntimeKey, State, job_key, waits
from openrl_placement.waiting import ask, repeat_request, send_together

Estimates = dict[Role, tuple[Shape, dict[str, float]]]

ANSWERED_MAX = 32
"""Submissions of one name whose answer is remembered."""


@dataclass(frozen=True)
class Submission:
    """A JobSubmitted with what the shell knows beside it. ``sequence`` is its place in the stream: the incarnation."""

    event: JobSubmitted
    sequence: int
    published_at: float


def wants_model(state: State, submission: Submission) -> bool:
    """Does the decision need the model's sizes? False: it is already answered, stale, or refused without them."""
    event = submission.event
    record = state.jobs.get(f"{event.tenant}.{event.job}")
    if (
        record is not None
        and record.submission != event.submission
        and (not record.phase.ended or record.incarnation > submission.sequence or answered(record, event.submission))
    ):
        return False
    if record is not None and record.submission == event.submission and _complete(state, record):
        return False
    try:
        _check(event)
    except Rejected:
        return False
    return True


def submitted(
    state: State, submission: Submission, model: Model | Rejected | None, constants: Constants, now: float
) -> Effects:
    """Decide about a submission. ``model``: what the estimator read, or why it could not; None when not wanted."""
    fx = Effects()
    event = submission.event
    record = state.jobs.get(f"{event.tenant}.{event.job}")
    if record is not None and record.submission == event.submission:
        if _complete(state, record):
            _answer_again(state, record, now, fx)
            return fx
    elif record is not None and event.submission in record.replaced and event.submission not in record.refused:
        return fx
    elif record is not None and (
        not record.phase.ended or record.incarnation > submission.sequence or event.submission in record.refused
    ):
        _refuse_name(state, record, event, fx)
        return fx
    try:
        _check(event)
        if isinstance(model, Rejected):
            raise model
        assert model is not None, "wants_model said that no model is needed"
        shapes = _possible_shapes(state, event, model, constants)
    except Rejected as error:
        _refuse(state, submission, error, now, fx)
        return fx
    _admit(state, submission, shapes, now, fx)
    early = state.take_cancel(event.submission)
    if isinstance(early, JobCancelled | JobFinished):
        fx.add(closed(state, early, now))
    return fx


def closed(state: State, event: JobFinished | JobCancelled, now: float) -> Effects:
    """JobFinished or JobCancelled. Of an unknown or ended job: nothing changes (its end is said again)."""
    fx = Effects()
    job = state.jobs.get(f"{event.tenant}.{event.job}")
    if job is None or job.submission != event.submission:
        if job is None or not answered(job, event.submission):
            state.keep_cancel(event.submission, event)
        else:
            fx.jobs[job_key(job)] = None  # this end is not acknowledged before what answered its submission is written
        return fx
    if job.phase.ended:
        end_if_gone(state, job_key(job), now, fx)
        return fx
    cancelled = isinstance(event, JobCancelled)
    why = event.why if isinstance(event, JobCancelled) else ""
    close_job(state, job, JobPhase.CANCELLED if cancelled else JobPhase.FINISHED, now, fx, why=why)
    return fx


def _check(event: JobSubmitted) -> None:
    check_tenant(event.tenant)
    check_job(event.job)
    if event.spec.name != event.job:
        raise Rejected(
            f"spec.name {event.spec.name!r} is not the job's name {event.job!r}: use one name", code="bad-spec"
        )
    check_spec(event.spec)


def _possible_shapes(state: State, event: JobSubmitted, model: Model, constants: Constants) -> Estimates:
    """What its workloads need. Raises Rejected when no node could ever hold one of them (W4), or one sequence."""
    check_length(event.spec, model)
    shapes = {role: estimate(event.spec, role, model, constants) for role in Role}
    for role, (shape, _) in shapes.items():
        if sentence := state.fleet.impossible(shape):
            raise Rejected(f"the {role} of job {event.job!r} {sentence}", code="impossible")
    return shapes


def can_never_run(state: State, event: JobSubmitted, model: Model, constants: Constants) -> bool:
    """Would it be refused for what it needs? Of one that wants its model (``wants_model``)."""
    try:
        _possible_shapes(state, event, model, constants)
    except Rejected:
        return True
    return False


def is_decided(state: State, name: str, submission: str) -> bool:
    """Is this submission of ``name`` (``tenant.job``) answered, or being answered?"""
    record = state.jobs.get(name)
    return record is not None and (record.submission == submission or answered(record, submission))


def _complete(state: State, record: JobRecord) -> bool:
    """Was this submission decided in full? (A crash between two writes leaves a job without its workloads.)"""
    return record.phase is not JobPhase.ADMITTED or len(state.pair(record)) == 2


def _answer_again(state: State, record: JobRecord, now: float, fx: Effects) -> None:
    """The same submission once more: the same answer, under the same ids (E6)."""
    if record.outcome is JobPhase.FAILED or record.phase is JobPhase.FAILED:
        fx.events.append(failed_event(record))
    if not record.trainer or record.phase.ended:
        return
    fx.events.append(_admitted(record))
    for workload in state.pair(record):
        if workload.phase is WorkloadPhase.SUBMITTED and workload.attempt > 0:
            repeat_request(state, workload, now, fx)
    send_together(state.pair(record), fx)


def answered(record: JobRecord, submission: str) -> bool:
    """Was this submission of the record's name refused or replaced?"""
    return submission in record.refused or submission in record.replaced


def _refuse_name(state: State, record: JobRecord, event: JobSubmitted, fx: Effects) -> None:
    """The name is in use. Remembered with the job that uses it: told once that it failed, it must never run."""
    what = f"is running: choose another name, or end it with `openrl cancel {event.job}`"
    if record.phase is JobPhase.FINISHING:
        what = "is still finishing: submit again in a moment"
    if record.phase.ended:
        what = "was submitted again later, and that one has run"
    if event.submission not in record.refused:
        refused = (*record.refused, event.submission)[-ANSWERED_MAX:]
        state.put_job(msgspec.structs.replace(record, refused=refused))
    fx.jobs[job_key(record)] = None
    fx.events.append(_refusal(event, "duplicate-name", f"job {event.job!r} {what}"))


def _put_new(state: State, record: JobRecord) -> None:
    """Put in a new record; what was answered under its name before is remembered with it."""
    before = state.jobs.get(job_key(record))
    if before is not None:
        replaced = before.replaced
        if before.submission != record.submission:
            replaced = (*replaced, before.submission)[-ANSWERED_MAX:]
        record = msgspec.structs.replace(record, refused=before.refused, replaced=replaced)
    state.put_job(record)


def _refuse(state: State, submission: Submission, error: Rejected, now: float, fx: Effects) -> None:
    event = submission.event
    fx.events.append(_refusal(event, error.code, str(error)))
    if error.code == "bad-name":
        return
    record = JobRecord(
        tenant=event.tenant,
        job=event.job,
        submission=event.submission,
        incarnation=submission.sequence,
        spec=event.spec,
        phase=JobPhase.FAILED,
        runtime_tenant="",
        runtime="",
        trainer="",
        sampler="",
        submitted_at=submission.published_at,
        reason=error.code,
        message=str(error),
        outcome=JobPhase.FAILED,
        ended_at=now,
    )
    _put_new(state, record)
    fx.jobs[job_key(record)] = None


def _refusal(event: JobSubmitted, code: str, message: str) -> JobFailed:
    return JobFailed(tenant=event.tenant, job=event.job, submission=event.submission, code=code, message=message)


def _admitted(record: JobRecord) -> JobAdmitted:
    return JobAdmitted(
        tenant=record.tenant,
        job=record.job,
        submission=record.submission,
        incarnation=record.incarnation,
        workloads=(record.trainer, record.sampler),
    )


def _admit(state: State, submission: Submission, shapes: Estimates, now: float, fx: Effects) -> None:
    event = submission.event
    spec = event.spec
    key = f"{event.tenant}.{event.job}"
    if spec.kind is JobKind.FFT:
        tenant, runtime, fresh = event.tenant, event.job, True
    else:
        tenant, runtime, fresh = _choose_runtime(state, spec, shapes, key)
    record = JobRecord(
        tenant=event.tenant,
        job=event.job,
        submission=event.submission,
        incarnation=submission.sequence,
        spec=spec,
        phase=JobPhase.ADMITTED,
        runtime_tenant=tenant,
        runtime=runtime,
        trainer=workload_id(tenant, runtime, Role.TRAINER),
        sampler=workload_id(tenant, runtime, Role.SAMPLER),
        submitted_at=submission.published_at,
    )
    fx.jobs[key] = None
    fx.events.append(_admitted(record))
    if fresh:
        workloads = [_workload(state, submission, tenant, runtime, role, *shapes[role]) for role in Role]
        for workload in workloads:
            state.put_workload(workload)
        for workload in workloads:
            ask(state, workload, now, fx)
        workloads = state.pair(record)
        send_together(workloads, fx)
        _put_new(state, msgspec.structs.replace(record, workloads=tuple(workloads)))
        for workload in workloads:
            if not waits(workload):  # the job's record has it; who waits is found under the workload's own key
                fx.workloads.pop(workload.workload, None)
                fx.carried[workload.workload] = key
        return
    _put_new(state, record)
    for workload in state.pair(record):
        if key not in workload.jobs:
            urgent = max(workload.priority, spec.priority)
            joined = msgspec.structs.replace(workload, jobs=(*workload.jobs, key), idle_since=None, priority=urgent)
            state.put_workload(joined)
        fx.workloads[workload.workload] = None
    job_ready(state, state.workloads[record.trainer], now, fx)


def _choose_runtime(state: State, spec: JobSpec, shapes: Estimates, key: str) -> tuple[str, str, bool]:
    """P12: tenant, id and newness of the LoRA runtime that serves this job."""
    runtime_key = RuntimeKey(
        base_model=spec.base_model,
        max_rank=max_rank(spec),
        dtype=spec.dtype,
        engine=spec.engine,
        max_model_len=spec.max_model_len,
        trainer=shapes[Role.TRAINER][0],
        sampler=shapes[Role.SAMPLER][0],
    )
    found = state.runtime_with_room(runtime_key, key)
    return SHARED, found or state.new_runtime(runtime_key), found is None


def _workload(
    state: State,
    submission: Submission,
    tenant: str,
    runtime: str,
    role: Role,
    shape: Shape,
    figures: dict[str, float],
) -> WorkloadRecord:
    event = submission.event
    spec = event.spec
    timeout_s = state.policy.placement_timeout_s
    return WorkloadRecord(
        workload=workload_id(tenant, runtime, role),
        tenant=tenant,
        owner=f"{tenant}/{runtime}" if spec.kind is JobKind.FFT else runtime,
        owner_name=runtime,
        kind=spec.kind,
        jobs=(f"{event.tenant}.{event.job}",),
        incarnation=submission.sequence,
        shape=shape,
        base_model=spec.base_model,
        phase=WorkloadPhase.SUBMITTED,
        submitted_at=submission.published_at,
        dtype=spec.dtype,
        engine=spec.engine,
        seed=spec.seed,
        max_rank=max_rank(spec),
        max_model_len=spec.max_model_len,
        update_method=state.policy.update_method,
        update_chunk_bytes=state.policy.update_chunk_bytes,
        priority=spec.priority,
        deadline=submission.published_at + timeout_s if timeout_s else None,
        estimate=figures,
    )
