"""What a rehearsal shows: per job and step when it happened, how many reached the goal, and what the run itself cost.

All times are seconds since kickoff.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from openrl_common.names import DEFAULT_TENANT
from openrl_common.records import JobRecord, Role, WorkloadRecord
from openrl_rehearsal.plan import Plan
from openrl_rehearsal.profile import Rate

if TYPE_CHECKING:
    from openrl_rehearsal.clients import Client
    from openrl_rehearsal.rehearse import Rehearsal

TIMELINES_MAX = 500
"""Jobs whose spans are kept in the report; the counts cover all."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A span of a timeline; ``who`` is the client, the trainer or the sampler."""

    who: str
    name: str
    began_s: float
    ended_s: float


class Waited(msgspec.Struct, frozen=True, kw_only=True):
    role: Role
    reason: str
    seconds: float


class JobReport(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    kind: str
    model: str
    submitted_s: float | None
    placed_s: float | None
    """When the later of its two workers got a seat on a device."""
    ready_s: float | None
    steps_ended_s: list[float]
    ended_s: float | None
    reached: bool
    failure: str = ""
    shared_with: int = 0
    """Most other workloads that sat on a claim together with one of its own."""
    waits: list[Waited] = []
    timeline: list[Row] = []


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What a core cost: calls, processor seconds, mean microseconds."""

    calls: int
    seconds: float
    mean_us: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    plan: Plan
    profile: str
    basis: dict[str, int]
    """How many of the profile's figures are measured, derived, assumed, fitted."""
    num_jobs: int
    reached: int
    """Jobs that reached the goal of the plan."""
    reached_by_kind: dict[str, int]
    failed: int
    settled: bool
    last_ended_s: float
    claims_founded: int
    devices_used_peak: int
    seats_peak: int
    switches: int
    switching_s: float
    device_busy: float
    """Part of the time between kickoff and the last end in which the used devices ran anything."""
    virtual_s: float
    wall_s: float
    processor_s: float
    calls: int
    cores: dict[str, Cost]
    jobs: list[JobReport]


def make_report(rehearsal: Rehearsal, *, settled: bool, wall_s: float, processor_s: float) -> Report:
    plan, control, launcher = rehearsal.plan, rehearsal.control, rehearsal.launcher
    with_timeline = len(rehearsal.clients) <= TIMELINES_MAX
    jobs = [_job(rehearsal, client, with_timeline) for client in rehearsal.clients]
    ends = [job.ended_s for job in jobs if job.ended_s is not None]
    last_ended_s = max(ends, default=0.0)
    used_s = sum(device.used_s for device in rehearsal.devices.values())
    available_s = launcher.devices_used_peak * (rehearsal.kickoff_s + last_ended_s)
    return Report(
        plan=plan,
        profile=rehearsal.profile.name,
        basis=dict(Counter(str(figure.basis) for _, figure in rehearsal.profile.figures())),
        num_jobs=len(jobs),
        reached=sum(job.reached for job in jobs),
        reached_by_kind=dict(Counter(f"{job.kind}:{job.model}" for job in jobs if job.reached)),
        failed=sum(bool(job.failure) for job in jobs),
        settled=settled,
        last_ended_s=_rounded(last_ended_s),
        claims_founded=len(rehearsal.devices),
        devices_used_peak=launcher.devices_used_peak,
        seats_peak=max(rehearsal.seats_peak.values(), default=0),
        switches=sum(device.switches for device in rehearsal.devices.values()),
        switching_s=_rounded(sum(device.switching_s for device in rehearsal.devices.values())),
        device_busy=_rounded(used_s / available_s if available_s else 0.0, 4),
        virtual_s=_rounded(rehearsal.agenda.now - rehearsal.kickoff_s),
        wall_s=_rounded(wall_s),
        processor_s=_rounded(processor_s),
        calls=rehearsal.agenda.num_calls,
        cores={
            name: Cost(
                calls=control.counts[name],
                seconds=_rounded(seconds),
                mean_us=_rounded(seconds / control.counts[name] * 1e6, 1),
            )
            for name, seconds in control.seconds.items()
        },
        jobs=jobs,
    )


def _job(rehearsal: Rehearsal, client: Client, with_timeline: bool) -> JobReport:
    plan, kickoff_s = rehearsal.plan, rehearsal.kickoff_s
    pair = _pair(rehearsal, client)
    placed = [record.placed_at for record in pair.values()]
    steps = [_rounded(moment - kickoff_s) for moment in client.step_ended_s]
    reached = len(steps) >= plan.goal_steps and steps[plan.goal_steps - 1] <= plan.goal_within_s
    return JobReport(
        job=client.job,
        kind=str(client.kind),
        model=client.model_name,
        submitted_s=_since(client.submitted_s, kickoff_s),
        placed_s=_since(max(moment or 0.0 for moment in placed), kickoff_s) if placed and all(placed) else None,
        ready_s=_since(client.ready_s, kickoff_s),
        steps_ended_s=steps,
        ended_s=_since(client.ended_s, kickoff_s),
        reached=reached,
        failure=client.failure,
        shared_with=max((rehearsal.seats_peak.get(record.workload, 1) - 1 for record in pair.values()), default=0),
        waits=_waits(pair, rehearsal.agenda.now),
        timeline=_timeline(rehearsal, client, pair) if with_timeline else [],
    )


def _pair(rehearsal: Rehearsal, client: Client) -> dict[Role, WorkloadRecord]:
    job: JobRecord | None = rehearsal.control.state.jobs.get(f"{DEFAULT_TENANT}.{client.job}")
    if job is None:
        return {}
    found = {Role.TRAINER: job.trainer, Role.SAMPLER: job.sampler}
    workloads = rehearsal.control.state.workloads
    return {role: workloads[name] for role, name in found.items() if name in workloads}


def _waits(pair: dict[Role, WorkloadRecord], now: float) -> list[Waited]:
    return [
        Waited(role=role, reason=str(wait.reason), seconds=_rounded((wait.until or now) - wait.since))
        for role, record in pair.items()
        for wait in record.waits
    ]


def _timeline(rehearsal: Rehearsal, client: Client, pair: dict[Role, WorkloadRecord]) -> list[Row]:
    """The client's spans, and its workers' start (of a LoRA runtime: the same for every job that it serves)."""
    kickoff_s = rehearsal.kickoff_s
    rows = []
    for role, record in pair.items():
        began_s = record.submitted_at
        if record.placed_at is not None and record.placed_at > began_s:
            rows.append(_row(str(role), "waiting", began_s, record.placed_at, kickoff_s))
        worker = rehearsal.launcher.by_workload.get(record.workload)
        spans = worker.spans if worker is not None else []
        rows += [_row(str(role), span.name, span.began_s, span.ended_s, kickoff_s) for span in spans]
    rows += [_row("client", span.name, span.began_s, span.ended_s, kickoff_s) for span in client.spans]
    return sorted(rows, key=lambda row: (row.began_s, row.who, row.ended_s))


def _row(who: str, name: str, began_s: float, ended_s: float, kickoff_s: float) -> Row:
    return Row(who=who, name=name, began_s=_rounded(began_s - kickoff_s), ended_s=_rounded(ended_s - kickoff_s))


def _since(moment: float | None, kickoff_s: float) -> float | None:
    return None if moment is None else _rounded(moment - kickoff_s)


def _rounded(seconds: float, digits: int = 3) -> float:
    return round(seconds, digits)


# --- as text ----------------------------------------------------------------------------------------------------


def header() -> list[str]:
    return ["JOB", "KIND", "SUBMITTED", "PLACED", "READY", "STEPS ENDED", "ENDED", "SHARED WITH", "WAITED FOR", "GOAL"]


def table_rows(report: Report) -> list[list[str]]:
    """One line per job, for a table under ``header()``."""
    rows = []
    for job in report.jobs:
        longest = max(job.waits, key=lambda wait: wait.seconds, default=None)
        rows.append(
            [
                job.job,
                job.kind,
                _text(job.submitted_s),
                _text(job.placed_s),
                _text(job.ready_s),
                " ".join(_text(moment) for moment in job.steps_ended_s),
                _text(job.ended_s),
                str(job.shared_with),
                f"{longest.reason} {longest.seconds:.0f}" if longest is not None else "",
                "failed" if job.failure else "yes" if job.reached else "no",
            ]
        )
    return rows


def summary(report: Report) -> list[str]:
    """The verdict, and what it rests on."""
    plan = report.plan
    kinds = ", ".join(f"{count} {name}" for name, count in report.reached_by_kind.items()) or "none"
    basis = ", ".join(f"{count} {name}" for name, count in sorted(report.basis.items()))
    lines = [
        f"{report.reached} of {report.num_jobs} jobs finished {plan.goal_steps} steps within "
        f"{plan.goal_within_s:g} s of kickoff ({kinds})",
        f"{report.devices_used_peak} of {len(plan.devices)} devices used, most seats on a claim {report.seats_peak}, "
        f"{report.switches} switches of {report.switching_s:.0f} s in all; the last job ended at "
        f"{report.last_ended_s:.0f} s",
        f"times are seconds since kickoff, from profile {report.profile}: {basis}",
        f"rehearsed {report.virtual_s:.0f} s in {report.wall_s:.2f} s",
    ]
    if report.failed:
        lines.insert(1, f"{report.failed} jobs failed, the first: {next(j.failure for j in report.jobs if j.failure)}")
    if not report.settled:
        lines.insert(1, f"not settled: some jobs were not over after {plan.horizon_s:g} s")
    return lines


def _text(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.0f}"


def figures_table(figures: list[tuple[str, object]]) -> list[list[str]]:
    """Every figure of a profile: place, value, basis, why."""
    rows = []
    for place, figure in figures:
        if isinstance(figure, Rate):
            rows.append([place, f"{figure.gib_per_s:g} GiB/s", str(figure.basis), figure.why])
        else:
            seconds = getattr(figure, "seconds", 0.0)
            rows.append([place, f"{seconds:g} s", str(getattr(figure, "basis", "")), str(getattr(figure, "why", ""))])
    return rows
