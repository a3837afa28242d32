"""``openrl explain`` (W5: why a workload is where it is) and ``openrl status`` (how each worker started)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from openrl_client.cli.common import Where, age, clock, connection, machine_readable, run_async, table
from openrl_common.names import short_workload
from openrl_common.quantities import format_bytes, format_seconds

if TYPE_CHECKING:
    from openrl_common.queries import ExplainAnswer
    from openrl_common.records import ReadyRecord

_OUTPUT = click.option("-o", "--output", type=click.Choice(["json", "yaml"]), help="Machine-readable.")


@click.command()
@click.argument("workload")
@_OUTPUT
@connection
def explain(where: Where, workload: str, output: str | None) -> None:
    """Say why WORKLOAD (<job>/trainer, <job>/sampler, or a full id) is where it is, and what it waits for."""
    answer = run_async(_explain(where, workload))
    click.echo(machine_readable(answer, output) if output else explanation(answer, time.time()))


async def _explain(where: Where, workload: str) -> ExplainAnswer:
    from openrl_common.queries import ExplainAnswer, ExplainQuery

    async with where.connect() as client:
        return await client.query("explain", ExplainQuery(workload=workload, tenant=where.tenant), ExplainAnswer)


def explanation(answer: ExplainAnswer, now: float) -> str:
    """The whole explanation as text."""
    record = answer.record
    lines = [f"{record.workload}: {record.phase.value}", f"  {answer.sentence}" if answer.sentence else ""]
    if record.reason is not None:
        standing = f"  waits {age(record.since, now)}"
        if answer.position:
            standing += f", {answer.position} of {answer.line_length} in line"
        if answer.deadline_in_s is not None:
            standing += f", fails in {format_seconds(max(0.0, answer.deadline_in_s))}"
        lines.append(standing)
    lines.append(f"  owner {record.owner}, {record.kind.value}, serves {', '.join(record.jobs) or 'no job'}")
    if record.claim:
        lines.append(f"  claim {record.claim}, node {record.node or '-'}, assignment {record.assignment or '-'}")
    shape = record.shape
    devices = "a device" if shape.device_count == 1 else f"each of {shape.device_count} devices of one node"
    lines.append(
        f"  needs {format_bytes(shape.device_bytes)} on {devices}, "
        f"{format_bytes(shape.host_bytes)} of host memory{', exclusive' if shape.exclusive else ''}"
    )
    if record.estimate:
        gib = {name: value for name, value in record.estimate.items() if name != "parameters_billion"}
        lines.append(f"  estimate (GiB): {', '.join(f'{name} {value:.3g}' for name, value in gib.items())}")
    if answer.tiers:
        lines.append("  own claim: " + " or ".join(f"{tier.count} x {tier.ceiling_gib} GiB" for tier in answer.tiers))
    if answer.candidates:
        lines.append("  candidates:")
        rows = [
            [
                row.claim,
                row.node,
                format_bytes(row.device_bytes) if row.device_bytes else "",
                f"{row.seats}/{row.limit or '∞'}",
                ",".join(short_workload(workload) for workload in row.held_by),
                row.refused or "would accept",
            ]
            for row in answer.candidates
        ]
        text = table(["CLAIM", "NODE", "MEMORY", "SEATS", "HELD BY", "ANSWER"], rows)
        lines += [f"    {line}" for line in text.splitlines()]
    for wait in record.waits:
        length = format_seconds((wait.until or now) - wait.since)
        lines.append(f"  {clock(wait.since)} {wait.reason.value} for {length}: {wait.message}")
    for avoid in (each for each in record.avoid if each.until > now):
        lines.append(f"  avoids {avoid.node or avoid.claim} until {clock(avoid.until)}: {avoid.why}")
    lines += [f"  note: {note}" for note in answer.notes]
    return "\n".join(line for line in lines if line)


@click.command()
@click.option(
    "-o", "--output", type=click.Choice(["wide", "json", "yaml"]), help="What it said of itself, or machine-readable."
)
@connection
def status(where: Where, output: str | None) -> None:
    """Show every worker's start: seconds in each phase; with -o wide what it said of itself when it was ready."""
    records = run_async(_status(where))
    if output in ("json", "yaml"):
        click.echo(machine_readable(records, output))
    elif records:
        click.echo(status_table(records, wide=output == "wide"))
    else:
        click.echo("no workers", err=True)


async def _status(where: Where) -> list[ReadyRecord]:
    async with where.connect() as client:
        live = await client.bus.store.workloads.list()
        assignments = {entry.value.assignment for entry in live.values()}
        entries = await client.bus.store.ready.list()
        records = [entry.value for entry in entries.values() if entry.value.assignment in assignments]
        return sorted(records, key=lambda record: record.process_started_at)


def status_table(records: list[ReadyRecord], *, wide: bool = False) -> str:
    """One row a worker, one column a phase, in the order in which phases were first seen; ``wide``: DETAIL too."""
    phases: dict[str, None] = {}
    for record in records:
        phases.update(dict.fromkeys(phase.name for phase in record.phases))
    rows: list[list[str]] = []
    for record in records:
        seconds: dict[str, Any] = {}
        for phase in record.phases:
            seconds[phase.name] = seconds.get(phase.name, 0.0) + phase.seconds
        total = "" if record.ready_at is None else f"{record.ready_at - record.process_started_at:.2f}"
        cells = [f"{seconds[name]:.2f}" if name in seconds else "" for name in phases]
        detail = ", ".join(f"{name}={value}" for name, value in record.detail.items())
        rows.append([short_workload(record.workload), "yes" if record.ready else "no", *cells, total, detail])
    header = ["WORKLOAD", "READY", *(name.upper() for name in phases), "TO READY", "DETAIL"]
    num_columns = len(header) - (not wide)
    return table(header[:num_columns], [row[:num_columns] for row in rows])
