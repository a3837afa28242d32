"""Answers to the questions of ``openrl get`` and ``openrl explain`` (W5). Pure and read-only.

Placement's records joined with its view of the ledger and the launchers: a snapshot that may lag by a moment.
"""

from __future__ import annotations

from collections.abc import Iterator

from openrl_common.errors import Rejected
from openrl_common.names import DEFAULT_TENANT, SHARED, short_workload, workload_id
from openrl_common.quantities import format_bytes, format_seconds
from openrl_common.queries import (
    CandidateRow,
    ClaimRow,
    ClaimsAnswer,
    ExplainAnswer,
    ExplainQuery,
    JobRow,
    JobsAnswer,
    ListQuery,
    NodeRow,
    NodesAnswer,
    SeatRow,
    WorkloadRow,
    WorkloadsAnswer,
)
from openrl_common.records import ClaimRecord, JobRecord, SeatRecord, SeatState, WorkloadRecord
from openrl_common.seating import usable
from openrl_placement.state import State, ended, need, waits
from openrl_placement.waiting import refused_because

CANDIDATES_SHOWN = 64


def jobs(state: State, query: ListQuery) -> JobsAnswer:
    return JobsAnswer(jobs=[_job_row(state, job) for job in _jobs(state, query)])


def _jobs(state: State, query: ListQuery) -> Iterator[JobRecord]:
    for job in sorted(state.jobs.values(), key=lambda each: (each.submitted_at, each.tenant, each.job)):
        if query.tenant in ("", job.tenant) and query.job in ("", job.job) and (query.ended or not job.phase.ended):
            yield job


def _job_row(state: State, job: JobRecord) -> JobRow:
    trainer, sampler = state.workloads.get(job.trainer), state.workloads.get(job.sampler)
    waiting = [each for each in (trainer, sampler) if each is not None and waits(each)] if not job.phase.ended else []
    return JobRow(
        record=job,
        trainer_phase=str(trainer.phase) if trainer is not None else "",
        sampler_phase=str(sampler.phase) if sampler is not None else "",
        reason=waiting[0].reason if waiting else None,
        message=waiting[0].message if waiting else job.message,
    )


def workloads(state: State, query: ListQuery, now: float) -> WorkloadsAnswer:
    """Workloads of the jobs asked for; a shared runtime is shown to every tenant whose job it serves."""
    rows = [
        WorkloadRow(
            record=record,
            position=state.line.position(record.workload),
            waited_s=now - record.since if record.since is not None else None,
        )
        for record in sorted(state.workloads.values(), key=lambda each: (each.submitted_at, each.workload))
        if (query.ended or not ended(record)) and _concerns(record, query)
    ]
    return WorkloadsAnswer(workloads=rows)


def _concerns(record: WorkloadRecord, query: ListQuery) -> bool:
    if not query.tenant and not query.job:
        return True
    if query.tenant == record.tenant and query.job in ("", record.owner_name):
        return True
    names = [key.partition(".") for key in record.jobs]
    return any(query.tenant in ("", tenant) and query.job in ("", job) for tenant, _, job in names)


def claims(state: State) -> ClaimsAnswer:
    """Every claim that is not gone, with its seats; the limit is the one in force (S6)."""
    rows = [_claim_row(state, claim, record) for claim, record in state.fleet.claims.items()]
    return ClaimsAnswer(claims=sorted(rows, key=lambda row: (row.founded_at, row.claim)))


def _claim_row(state: State, claim: str, record: ClaimRecord) -> ClaimRow:
    return ClaimRow(
        claim=claim,
        state=record.state,
        node=record.node,
        devices=record.devices,
        device_bytes=record.device_bytes,
        seats=[
            SeatRow(
                assignment=assignment,
                workload=entry.workload,
                owner=entry.owner,
                role=entry.role,
                device_bytes=entry.device_bytes,
                host_bytes=entry.host_bytes,
                exclusive=entry.exclusive,
                state=_seat_state(state.seats.get(entry.workload), assignment, claim),
            )
            for assignment, entry in sorted(record.entries.items(), key=lambda item: (item[1].reserved_at, item[0]))
        ],
        limit=state.fleet.limit,
        seats_peak=record.seats_peak,
        founded_at=record.founded_at,
        tiers=record.tiers,
    )


def _seat_state(seat: SeatRecord | None, assignment: str, claim: str) -> str:
    if seat is None or seat.state is SeatState.EMPTY or (seat.assignment, seat.claim) != (assignment, claim):
        return "reserved"
    return str(seat.state)


def nodes(state: State) -> NodesAnswer:
    return NodesAnswer(
        nodes=[
            NodeRow(
                record=record,
                devices_claimed=state.fleet.devices_claimed(node),
                host_seats_bytes=state.fleet.host_used_bytes(node),
                usable=usable(record),
            )
            for node, record in sorted(state.fleet.nodes.items())
        ]
    )


# --- explain ----------------------------------------------------------------------------------------------------


def find(state: State, query: ExplainQuery) -> WorkloadRecord:
    """The workload of a full id, or of ``<job>/<role>`` or ``<runtime>/<role>``.

    Raises:
        Rejected: code ``unknown-workload``.
    """
    found = state.workloads.get(query.workload)
    owner, slash, role = query.workload.rpartition("/")
    if found is None and slash:
        job = state.jobs.get(f"{query.tenant or DEFAULT_TENANT}.{owner}")
        if job is not None and not job.trainer:
            raise Rejected(f"job {owner!r} was refused and has no workload: {job.message}", code="unknown-workload")
        if job is not None:
            found = state.workloads.get(job.trainer if role == "trainer" else job.sampler if role == "sampler" else "")
        else:
            found = state.workloads.get(workload_id(SHARED, owner, role))
    if found is None:
        raise Rejected(
            f"there is no workload {query.workload!r}: write <job>/trainer or <job>/sampler (`openrl get workloads`)",
            code="unknown-workload",
        )
    return found


def explain(state: State, query: ExplainQuery, now: float) -> ExplainAnswer:
    """Why a workload is where it is."""
    record = find(state, query)
    wanted = need(record, now)
    rows = []
    for claim in state.fleet.looked_at(wanted, CANDIDATES_SHOWN) if not ended(record) else []:
        standing = state.fleet.claims[claim]
        refused = "its own claim" if claim == record.claim else state.fleet.refusal(claim, wanted)
        refused = refused or refused_because(state, record.workload, claim, now)
        rows.append(
            CandidateRow(
                claim=claim,
                node=standing.node,
                device_bytes=standing.device_bytes,
                seats=len(standing.entries),
                limit=state.fleet.limit,
                refused=refused,
                held_by=tuple(sorted(entry.workload for entry in standing.entries.values())),
            )
        )
    return ExplainAnswer(
        record=record,
        sentence=_sentence(state, record, now),
        position=state.line.position(record.workload),
        line_length=len(state.line),
        deadline_in_s=record.deadline - now if record.deadline is not None else None,
        candidates=rows,
        tiers=state.fleet.tiers(record.shape),
        notes=_job_notes(state, query, record) + _notes(state, record, now) + _idle_notes(state, record, rows, now),
    )


def _sentence(state: State, record: WorkloadRecord, now: float) -> str:
    name = short_workload(record.workload)
    if waits(record) and record.since is not None:
        return f"{name} waits ({record.reason}, {format_seconds(max(0.0, now - record.since))}): {record.message}"
    if record.claim and record.node:
        return f"{name} is {record.phase} on claim {record.claim}, node {record.node}"
    if record.claim:
        return f"{name} is {record.phase}: its own claim {record.claim} has no device yet"
    failed = [job for job in (state.jobs.get(key) for key in record.jobs) if job is not None and job.reason]
    why = record.message or (failed[0].message if failed else "")
    return f"{name} is {record.phase}" + (f": {why}" if why else "")


def _job_notes(state: State, query: ExplainQuery, record: WorkloadRecord) -> list[str]:
    """A runtime outlives the jobs it served: who asks of such a job is told so (P12)."""
    owner = query.workload.rpartition("/")[0]
    key = f"{query.tenant or DEFAULT_TENANT}.{owner}"
    job = state.jobs.get(key)
    if job is None or key in record.jobs or record.tenant != SHARED:
        return []
    kept = "" if ended(record) else ", which is kept for others"
    return [f"job {owner} is {job.phase}: this is the runtime that served it{kept}"]


def _notes(state: State, record: WorkloadRecord, now: float) -> list[str]:
    notes = []
    unknown = sorted(node for node, each in state.fleet.nodes.items() if each.host_allocatable_bytes == 0)
    if unknown:
        shown = ", ".join(unknown[:4]) + (" …" if len(unknown) > 4 else "")
        notes.append(f"host memory of {shown} is unknown and was not checked")
    if record.shape.exclusive:
        notes.append("it is exclusive: it never shares a device, and no seat limit concerns it")
    tiers = state.fleet.tiers(record.shape)
    if tiers:
        ceilings = ", ".join(f"{tier.ceiling_gib} GiB" for tier in tiers)
        need_text = format_bytes(record.shape.device_bytes)
        notes.append(f"it needs {need_text} of device memory; shapes that fit, smallest first: {ceilings}")
    notes.extend(f"it avoids {each.claim or each.node}: {each.why}" for each in record.avoid if each.until > now)
    return notes


def _idle_notes(state: State, record: WorkloadRecord, rows: list[CandidateRow], now: float) -> list[str]:
    """Which devices are held by LoRA runtimes that serve nobody, and until when (P12)."""
    holders = {workload for row in rows for workload in row.held_by} if waits(record) else set()
    held = [state.workloads[workload] for workload in holders if workload in state.workloads]
    since = {each.owner_name: each.idle_since for each in held if each.idle_since is not None}
    return [
        f"{runtime} serves no job: what it holds is free in "
        f"{format_seconds(max(0.0, idle_since + state.policy.lora_idle_s - now))}, unless a job attaches (--lora-idle)"
        for runtime, idle_since in sorted(since.items())
    ]
