"""How workloads and jobs end (E3, L4, W3, P12): release, gone, ended; failures; LoRA jobs leaving their runtime.

    job      Admitted → Ready → Finishing ─(every workload gone)→ Finished | Failed | Cancelled
    workload alive → Releasing ─(the ledger says its seat is free and its incarnation closed)→ Finished | Failed

A LoRA job ends at once: its runtime stays for the next job, and is released after ``--lora-idle`` without one.

Invariants: a job is announced as ended only when nothing of it holds a seat; ending twice changes nothing and
publishes the same ids again.
"""

from __future__ import annotations

import msgspec

from openrl_common.events import JobEnded, JobFailed, JobReady
from openrl_common.records import JobKind, JobPhase, JobRecord, WorkloadPhase, WorkloadRecord
from openrl_placement.state import Effects, State, alive, ended, job_key, placed, release_request, without_reason
from openrl_placement.waiting import settle


def close_job(state: State, job: JobRecord, outcome: JobPhase, now: float, fx: Effects, *, why: str = "") -> None:
    """Begin (or go on with) the end of a job. FFT: release both workloads. LoRA: leave the runtime, ended at once."""
    if job.phase.ended:
        fx.events.append(_ended_event(job))
        return
    if job.phase is not JobPhase.FINISHING:
        job = msgspec.structs.replace(job, phase=JobPhase.FINISHING, outcome=outcome, message=why or job.message)
        state.put_job(job)
        fx.jobs[job_key(job)] = None
    if job.spec.kind is JobKind.LORA:
        _leave_runtime(state, job, now, fx)
    else:
        for record in state.pair(job):
            release(state, record, now, fx, why=f"the job is {(job.outcome or outcome).lower()}")
    end_if_gone(state, job_key(job), now, fx)


def fail_job(state: State, job: JobRecord, code: str, message: str, now: float, fx: Effects) -> None:
    """The job cannot go on: tell its client why, then release what it holds.

    Of one that ends already everything is said again: its record may have been written by a process that was killed
    before it said the rest (E6).
    """
    if not job.phase.ended and job.phase is not JobPhase.FINISHING:
        job = msgspec.structs.replace(
            job, phase=JobPhase.FINISHING, outcome=JobPhase.FAILED, reason=code, message=message
        )
        state.put_job(job)
        fx.jobs[job_key(job)] = None
    if job.outcome is JobPhase.FAILED:
        fx.events.append(failed_event(job))
    close_job(state, job, JobPhase.FAILED, now, fx)


def fail_workload(state: State, record: WorkloadRecord, code: str, message: str, now: float, fx: Effects) -> None:
    """Every job that this workload serves fails; a LoRA runtime is released with it."""
    for job in list(state.jobs_of(record)):
        fail_job(state, job, code, message, now, fx)
    standing = state.both_of(record) if record.kind is JobKind.LORA else [state.workloads[record.workload]]
    for each in standing:
        if alive(each):
            release(state, each, now, fx, why=message)


def release(state: State, record: WorkloadRecord, now: float, fx: Effects, *, why: str = "") -> None:
    """Ask the ledger to release the seat and to close the incarnation; a workload that never asked is gone at once."""
    if ended(record):
        return
    if record.phase is not WorkloadPhase.RELEASING:
        if record.attempt == 0:
            gone(state, record, now, fx)
            return
        record = msgspec.structs.replace(
            without_reason(record, now), phase=WorkloadPhase.RELEASING, deadline=None, idle_since=None, message=why
        )
        state.put_workload(record)
        fx.workloads[record.workload] = None
        settle(state, record.workload, now, fx)
    fx.events.append(release_request(record, close=True, why=why))


def gone(state: State, record: WorkloadRecord, now: float, fx: Effects) -> None:
    """Nothing of the workload holds a seat any more, and nothing of this incarnation can book again."""
    if not ended(record):
        failed = any(JobPhase.FAILED in (job.outcome, job.phase) for job in state.jobs_of(record))
        message = record.message if record.phase is WorkloadPhase.RELEASING else ""
        state.note_released(record.assignment)
        state.ready.pop(record.assignment, None)
        state.refused_at.pop(record.workload, None)
        record = msgspec.structs.replace(
            without_reason(record, now),
            phase=WorkloadPhase.FAILED if failed else WorkloadPhase.FINISHED,
            message=message,
            ended_at=now,
            assignment="",
            claim="",
            node="",
            deadline=None,
            idle_since=None,
        )
        state.put_workload(record)
        fx.workloads[record.workload] = None
    for key in record.jobs:
        end_if_gone(state, key, now, fx)


def end_if_gone(state: State, key: str, now: float, fx: Effects) -> None:
    """The job's end, once its workloads are gone; said again when it has ended (the event may not have got out)."""
    job = state.jobs.get(key)
    if job is None:
        return
    if job.phase is JobPhase.FINISHING:
        if job.spec.kind is JobKind.FFT and not all(ended(record) for record in state.pair(job)):
            return
        job = msgspec.structs.replace(job, phase=job.outcome or JobPhase.FINISHED, ended_at=now)
        state.put_job(job)
        fx.jobs[key] = None
    if job.phase.ended and job.trainer:
        fx.events.append(_ended_event(job))


def job_ready(state: State, record: WorkloadRecord, now: float, fx: Effects) -> None:
    """A worker became ready: jobs whose two workers are both ready are announced."""
    for job in list(state.jobs_of(record)):
        pair = state.pair(job)
        if job.phase is JobPhase.ADMITTED and len(pair) == 2 and all(w.phase is WorkloadPhase.READY for w in pair):
            job = msgspec.structs.replace(job, phase=JobPhase.READY, ready_at=now, workloads=())
            state.put_job(job)
            fx.jobs[job_key(job)] = None
            fx.events.append(
                JobReady(tenant=job.tenant, job=job.job, submission=job.submission, incarnation=job.incarnation)
            )


def _leave_runtime(state: State, job: JobRecord, now: float, fx: Effects) -> None:
    """Detach a LoRA job. A runtime without jobs is kept for a while (P12), unless it holds nothing yet."""
    _detach(state, state.pair(job), job_key(job), now, fx)


def drop_stray(state: State, record: WorkloadRecord, now: float, fx: Effects) -> None:
    """Let go of jobs that this workload does not serve any more: a crash came between the two records' writes.

    A job without a record may still come (its submission is delivered again): that one is left alone.
    """
    if not alive(record):
        return
    for key in record.jobs:
        job = state.jobs.get(key)
        if job is None or _serves(record, job):
            continue
        if record.kind is JobKind.LORA:
            _detach(state, state.both_of(record), key, now, fx)
        else:
            release(state, record, now, fx, why="its job is over")


def _serves(record: WorkloadRecord, job: JobRecord) -> bool:
    named = record.workload in (job.trainer, job.sampler) and not job.phase.ended
    return named and (record.kind is JobKind.LORA or record.incarnation == job.incarnation)


def _detach(state: State, pair: list[WorkloadRecord], key: str, now: float, fx: Effects) -> None:
    for record in pair:
        if key in record.jobs:
            left = tuple(each for each in record.jobs if each != key)
            idle = now if not left and alive(record) else None
            urgent = [state.jobs[each].spec.priority for each in left if each in state.jobs]
            priority = max(urgent, default=record.priority)
            state.put_workload(msgspec.structs.replace(record, jobs=left, idle_since=idle, priority=priority))
            fx.workloads[record.workload] = None
    pair = [state.workloads[record.workload] for record in pair]
    if pair and not any(record.jobs for record in pair) and not all(placed(record) for record in pair):
        for record in pair:
            release(state, record, now, fx, why="no job needs it")


def runtime_idle(state: State, record: WorkloadRecord, now: float, fx: Effects) -> None:
    """P12: its time without a job is over."""
    for each in state.both_of(record):
        if not each.jobs:
            release(state, each, now, fx, why="no job for its idle time")


def failed_event(job: JobRecord) -> JobFailed:
    return JobFailed(tenant=job.tenant, job=job.job, submission=job.submission, code=job.reason, message=job.message)


def _ended_event(job: JobRecord) -> JobEnded:
    return JobEnded(tenant=job.tenant, job=job.job, submission=job.submission, outcome=str(job.phase))
