"""``openrl get``: tables of jobs, workloads, claims and nodes, from placement's queries (W5, C5)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
import msgspec

from openrl_client.cli.common import OUTPUTS, Where, age, connection, machine_readable, run_async, table
from openrl_client.errors import Rejected
from openrl_common.names import short_workload
from openrl_common.quantities import format_bytes, format_seconds
from openrl_common.records import TurnRecord

if TYPE_CHECKING:
    from openrl_common.queries import ClaimRow, JobRow, NodeRow, WorkloadRow

KINDS = ("jobs", "workloads", "claims", "nodes")
_SINGULAR = {"job": "jobs", "workload": "workloads", "claim": "claims", "node": "nodes"}
WATCH_INTERVAL_S = 1.0


class Kind(click.ParamType[str]):
    """One of KINDS; the singular is accepted."""

    name = "kind"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        kind = _SINGULAR.get(str(value), str(value))
        if kind not in KINDS:
            self.fail(f"{value!r} is not one of {', '.join(KINDS)}", param, ctx)
        return kind

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(kind) for kind in KINDS if kind.startswith(incomplete)]


@click.command()
@click.argument("kind", type=Kind(), metavar="jobs|workloads|claims|nodes")
@click.argument("names", nargs=-1)
@click.option("-o", "--output", type=click.Choice(OUTPUTS), help="More columns, or machine-readable.")
@click.option("-w", "--watch", is_flag=True, help="Go on: print rows again when they change.")
@click.option("--no-headers", is_flag=True, help="Rows only.")
@click.option("-A", "--all-tenants", is_flag=True, help="Jobs and workloads of every tenant.")
@connection
def get(
    where: Where,
    kind: str,
    names: tuple[str, ...],
    output: str | None,
    watch: bool,
    no_headers: bool,
    all_tenants: bool,
) -> None:
    """List what the system knows. NAMES: only these (ids, or <job>/<role> for workloads)."""
    run_async(_get(where, kind, names, output, watch, no_headers, all_tenants))


async def _get(
    where: Where, kind: str, names: tuple[str, ...], output: str | None, watch: bool, no_headers: bool, every: bool
) -> None:
    async with where.connect() as client:
        shown: set[str] = set()
        with_header = not no_headers
        while True:
            rows = await _rows(client, kind, names, "" if every else where.tenant, strict=not watch)
            if output in ("json", "yaml"):
                changed = [machine_readable(rows, output)]
                changed, shown = [text for text in changed if text not in shown], set(changed)
            else:
                keys = [fingerprint(kind, row) for row in rows]
                news = [row for row, key in zip(rows, keys, strict=True) if key not in shown]
                shown = set(keys)
                changed = [render(kind, news, output, with_header=with_header)] if news else []
                with_header = with_header and not rows
            for text in changed:
                click.echo(text)
            if not watch:
                if not rows and output in (None, "wide"):
                    click.echo(nothing(kind, "" if every else where.tenant), err=True)
                return
            await asyncio.sleep(WATCH_INTERVAL_S)


def nothing(kind: str, tenant: str) -> str:
    """What to say of an empty list; shared LoRA runtimes without a job are nobody's, and still hold devices."""
    if kind in ("jobs", "workloads") and tenant:
        return f"no {kind} of tenant {tenant}: -A shows every tenant's"
    return f"no {kind}"


def fingerprint(kind: str, row: Any) -> str:
    """What of a row counts as a change: not that time passes."""
    header, cells = _COLUMNS[kind]
    stable = [cell for name, cell in zip(header, cells(row, 0.0), strict=True) if name not in _TIMES]
    return "\0".join(stable)


async def _rows(client: Any, kind: str, names: tuple[str, ...], tenant: str, *, strict: bool) -> list[Any]:
    from openrl_common import queries

    answer_types: dict[str, Any] = {
        "jobs": queries.JobsAnswer,
        "workloads": queries.WorkloadsAnswer,
        "claims": queries.ClaimsAnswer,
        "nodes": queries.NodesAnswer,
    }
    answer = await client.query(kind, queries.ListQuery(tenant=tenant), answer_types[kind])
    rows: list[Any] = getattr(answer, kind)
    if kind == "claims":
        turns = await client.bus.store.turns.list()
        rows = [with_turns(row, turns[row.claim].value if row.claim in turns else TurnRecord()) for row in rows]
    if not names:
        return rows
    chosen = [row for row in rows if names_of(kind, row) & set(names)]
    known = set().union(*(names_of(kind, row) for row in chosen)) if chosen else set()
    if strict and (missing := [name for name in names if name not in known]):
        raise Rejected(f"{kind[:-1]} {missing[0]!r} is not known: see `openrl get {kind}`", code="unknown")
    return chosen


def with_turns(row: ClaimRow, turns: TurnRecord) -> ClaimRow:
    """The row with who is on its device now and who waits for it."""
    return msgspec.structs.replace(row, resident=tuple(turns.residents), waiting=tuple(turns.waiting))


def names_of(kind: str, row: Any) -> set[str]:
    """Every name under which a row may be asked for."""
    if kind == "jobs":
        return {row.record.job, f"{row.record.tenant}/{row.record.job}"}
    if kind == "workloads":
        return {row.record.workload, short_workload(row.record.workload)}
    return {row.claim} if kind == "claims" else {row.record.node}


def render(kind: str, rows: Sequence[Any], output: str | None, *, with_header: bool = True) -> str:
    """The table of ``rows``; ``output``: None, ``wide`` or ``name``."""
    if output == "name":
        return "\n".join(f"{kind[:-1]}/{_identity(kind, row)}" for row in rows)
    header, cells = _COLUMNS[kind]
    wide = output == "wide"
    now = time.time()
    num_narrow = sum(not name.startswith("+") for name in header)
    num_columns = len(header) if wide else num_narrow
    return table(
        [name.lstrip("+") for name in header[:num_columns]],
        [cells(row, now)[:num_columns] for row in rows],
        with_header=with_header,
    )


def _identity(kind: str, row: Any) -> str:
    return str(row.claim if kind == "claims" else getattr(row.record, kind[:-1]))


def _job_cells(row: JobRow, now: float) -> list[str]:
    record = row.record
    return [
        record.job,
        record.spec.kind.value,
        record.phase.value,
        # A LoRA runtime outlives its jobs: its phase is no longer theirs.
        "" if record.phase.ended else row.trainer_phase,
        "" if record.phase.ended else row.sampler_phase,
        row.reason.value if row.reason else record.reason,
        age(record.submitted_at, record.ended_at or now),  # DURATION: it stands still once the job has ended
        age(record.submitted_at, now),
        record.tenant,
        record.runtime,
        record.spec.base_model,
        row.message or record.message,
    ]


def _workload_cells(row: WorkloadRow, now: float) -> list[str]:
    record = row.record
    return [
        short_workload(record.workload),
        record.phase.value,
        str(row.position or ""),
        "" if row.waited_s is None else format_seconds(row.waited_s),
        record.reason.value if record.reason else "",
        "" if record.deadline is None or record.reason is None else format_seconds(max(0.0, record.deadline - now)),
        record.claim,
        age(record.submitted_at, now),
        record.node,
        record.assignment,
        format_bytes(record.shape.device_bytes),
        record.message,
    ]


def _claim_cells(row: ClaimRow, now: float) -> list[str]:
    return [
        row.claim,
        row.state.value,
        f"{len(row.seats)}/{row.limit or '∞'}",
        str(len(row.resident)) if any(not seat.exclusive for seat in row.seats) else "",  # alone: no turns (T1)
        str(len(row.waiting) or ""),
        row.node,
        ",".join(row.devices),
        format_bytes(row.device_bytes) if row.device_bytes else "",
        ",".join(short_workload(seat.workload) + (" (exclusive)" if seat.exclusive else "") for seat in row.seats),
        age(row.founded_at or None, now),
        str(row.seats_peak),
        " or ".join(f"{tier.count}x{tier.ceiling_gib}GiB" for tier in row.tiers),
    ]


def _node_cells(row: NodeRow, now: float) -> list[str]:
    record = row.record
    sizes = sorted({format_bytes(device.memory_bytes) for device in record.devices})
    host = format_bytes(record.host_allocatable_bytes) if record.host_allocatable_bytes else "unknown"
    return [
        record.node,
        "lost" if record.lost else "suspect" if record.suspect else "not usable" if row.usable else "ready",
        f"{row.devices_claimed}/{len(record.devices)}",
        ",".join(sizes),
        f"{format_bytes(row.host_seats_bytes)}/{host}",
        ",".join(role.value for role in record.roles) or "all",
        row.usable,
    ]


_TIMES = frozenset({"AGE", "DURATION", "WAITED", "DEADLINE"})

# "+": only with -o wide.
_COLUMNS: dict[str, tuple[list[str], Any]] = {
    "jobs": (
        ["NAME", "KIND", "PHASE", "TRAINER", "SAMPLER", "REASON", "DURATION", "AGE"]
        + ["+TENANT", "+RUNTIME", "+MODEL", "+MESSAGE"],
        _job_cells,
    ),
    "workloads": (
        ["NAME", "PHASE", "POSITION", "WAITED", "REASON", "DEADLINE", "CLAIM", "AGE"]
        + ["+NODE", "+ASSIGNMENT", "+DEVICE MEMORY", "+MESSAGE"],
        _workload_cells,
    ),
    "claims": (
        ["CLAIM", "STATE", "SEATS", "RESIDENT", "WAITING", "NODE", "DEVICES", "MEMORY", "HELD BY", "AGE"]
        + ["+PEAK", "+ASKED FOR"],
        _claim_cells,
    ),
    "nodes": (["NAME", "STATE", "CLAIMED", "DEVICE MEMORY", "HOST MEMORY", "ROLES", "+WHY"], _node_cells),
}
