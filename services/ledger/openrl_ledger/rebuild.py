"""``python -m openrl_ledger.rebuild`` (`openrl ledger rebuild`): write the ledger's bucket anew from what runs (L7).

A dry run unless ``--apply``. It asks every launcher what runs; of one that does not answer, what it last recorded
counts as running, for a dead launcher is no dead node (F3 finds out). It refuses while a ledger handles events, or when
the bucket has seats, unless told. First of all the identity is made empty, and written last: in between nobody acts on
what stands there, nor takes the bucket for a new one. Services that run notice within ``LOOK_S``.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from dataclasses import dataclass
from typing import Any

import click
import msgspec

from openrl_common import settings, streams
from openrl_common.bus import Bus
from openrl_common.controls import LedgerState, LedgerStateAnswer, Running, RunningAnswer
from openrl_common.errors import Conflict, OpenRLError, Rejected, Transient, Unreachable
from openrl_common.identity import KEY, LOOK_S
from openrl_common.names import query_subject
from openrl_common.records import LedgerIdentityRecord, SeatState, WorkerRecord, WorkloadRecord
from openrl_ledger.core.rebuild import Rebuilt, rebuild
from openrl_ledger.founding import LIVE

ASK_S = 3.0
NOTICED_S = LOOK_S + 2.0


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What the command says with ``-o json``. ``silent_nodes``: launchers that did not answer."""

    applied: bool
    held: int
    releasing: int
    claims: int
    nodes: int
    silent_nodes: list[str]
    notes: list[str]
    seats: dict[str, str]
    """Workload → its assignment, of every seat that is held or releasing."""


@dataclass(frozen=True)
class Found:
    rebuilt: Rebuilt
    silent_nodes: list[str]


async def running_workers(bus: Bus) -> tuple[list[WorkerRecord], list[str]]:
    """What has a process, by each launcher's word; and the nodes whose launcher gave none."""
    recorded = [entry.value for entry in (await bus.store.workers.list()).values()]
    nodes = sorted({*(await bus.store.nodes.list()), *(record.node for record in recorded)})

    async def ask(node: str) -> list[WorkerRecord] | None:
        try:
            answer = await bus.request(
                query_subject("launcher", f"{node}.running"), Running(), RunningAnswer, timeout_s=ASK_S
            )
        except (Unreachable, Transient):
            return None
        return answer.workers

    answers = dict(zip(nodes, await asyncio.gather(*(ask(node) for node in nodes)), strict=True))
    silent = [node for node, answer in answers.items() if answer is None]
    said = [worker for answer in answers.values() for worker in answer or ()]
    assumed = [record for record in recorded if record.node in silent and record.state in LIVE]
    return said + assumed, silent


async def workloads_of(bus: Bus) -> dict[str, WorkloadRecord]:
    """Every workload: as its job was admitted, or newer under its own key."""
    found = {}
    for key, entry in (await bus.store.workloads.list()).items():
        found[key] = entry.value
    for job in (await bus.store.jobs.list()).values():
        for record in job.value.workloads:
            if record.workload not in found or found[record.workload].incarnation < record.incarnation:
                found[record.workload] = record
    return found


async def look(bus: Bus) -> Found:
    workers, silent = await running_workers(bus)
    cuts = {key: entry.value for key, entry in (await bus.store.cuts.list()).items()}
    return Found(rebuild(workers, cuts, await workloads_of(bus), time.time()), silent)


async def refuse_while_running(bus: Bus) -> None:
    """Raises Rejected: a ledger handles events.

    Asked before the bucket is made: a ledger that has not noticed yet that it is lost would book into the empty one.
    """
    try:
        state = await bus.request(query_subject("ledger", "state"), LedgerState(), LedgerStateAnswer, timeout_s=1.0)
    except Unreachable:
        state = None
    if state is not None and state.active:
        raise Rejected(
            "a ledger is running and handles events: stop every replica first, or say --while-running", code="in-use"
        )


async def refuse_to_replace(bus: Bus) -> None:
    """Raises Rejected: the bucket has seats."""
    seats = await bus.store.ledger_seats.list()
    held = sum(entry.value.state is not SeatState.EMPTY for entry in seats.values())
    if held:
        raise Rejected(
            f"the ledger's bucket holds {held} seats: it is not lost; say --replace to write over it", code="not-empty"
        )


async def begin(bus: Bus) -> int:
    """Make the identity empty; returns its revision, for ``write``. From here on services end, and wait for another."""
    standing = await bus.store.ledger_meta.get(KEY)
    empty = LedgerIdentityRecord(id="", made_at=time.time(), rebuilt=True)
    return await bus.store.ledger_meta.write(KEY, empty, last=0 if standing is None else standing.revision)


async def write(bus: Bus, rebuilt: Rebuilt, began: int) -> None:
    """Drop what stands there, write claims, budgets and seats, and the identity last. ``began``: what ``begin`` gave.

    By compare-and-swap: a try that was given up as lost must not land on what a ledger has made of it since (E7).
    Raises Conflict: somebody else writes there.
    """
    store = bus.store
    tables: tuple[tuple[Any, dict[str, Any]], ...] = (
        (store.ledger_claims, rebuilt.claims),
        (store.ledger_nodes, rebuilt.budgets),
        (store.ledger_seats, rebuilt.seats),
    )
    for bucket, records in tables:
        standing = {key: entry.revision for key, entry in (await bucket.list()).items()}
        for key in standing.keys() - records.keys():
            await bucket.delete(key, last=standing[key])
        for key, record in records.items():
            await bucket.write(key, record, last=standing.get(key, 0))
    made = LedgerIdentityRecord(id=secrets.token_hex(8), made_at=time.time(), rebuilt=True)
    await store.ledger_meta.write(KEY, made, last=began)


async def main_async(nats_url: str, *, apply: bool, while_running: bool, replace: bool) -> Report:
    bus = await Bus.connect(nats_url, name="ledger-rebuild")
    try:
        if apply and not while_running:
            await refuse_while_running(bus)
        began = None
        if apply:
            await streams.ensure(bus)
            if not replace:
                await refuse_to_replace(bus)
            began = await begin(bus)
            if while_running:
                await asyncio.sleep(NOTICED_S)  # what is looked at next is not changed any more
        found = await look(bus)
        if began is not None:
            await write(bus, found.rebuilt, began)
        seats = found.rebuilt.seats
        return Report(
            applied=apply,
            held=sum(seat.state is SeatState.HELD for seat in seats.values()),
            releasing=sum(seat.state is SeatState.RELEASING for seat in seats.values()),
            claims=len(found.rebuilt.claims),
            nodes=len(found.rebuilt.budgets),
            silent_nodes=found.silent_nodes,
            notes=found.rebuilt.notes,
            seats={key: seat.assignment for key, seat in seats.items() if seat.state is not SeatState.EMPTY},
        )
    except Conflict as error:
        raise Rejected(f"{error} meanwhile: run it again, with --replace", code="in-use") from error
    finally:
        await bus.close()


def text_of(report: Report) -> str:
    done = "rebuilt" if report.applied else "would rebuild (nothing is written without --apply)"
    lines = [f"{done}: {report.held} seats held, {report.releasing} releasing, {report.claims} claims"]
    lines += [f"  seat {workload} = {assignment}" for workload, assignment in sorted(report.seats.items())]
    lines += [f"  node {node}: its launcher does not answer, what it recorded counts" for node in report.silent_nodes]
    lines += [f"  {note}" for note in report.notes]
    return "\n".join(lines)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@settings.settings(settings.NATS_URL)
@click.option("--apply", is_flag=True, help="Write it. Without this flag nothing is changed.")
@click.option("--while-running", is_flag=True, help="Also while a ledger handles events.")
@click.option("--replace", is_flag=True, help="Also when the bucket holds seats.")
@click.option("-o", "--output", type=click.Choice(["json"]), help="Machine-readable.")
def main(nats_url: str, apply: bool, while_running: bool, replace: bool, output: str | None) -> None:
    """Write the ledger's bucket anew from what launchers report as running."""
    try:
        report = asyncio.run(main_async(nats_url, apply=apply, while_running=while_running, replace=replace))
    except OpenRLError as error:
        click.echo(f"openrl: {error}", err=True)
        sys.exit(5 if isinstance(error, Unreachable) else 1)
    click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() if output else text_of(report))


if __name__ == "__main__":
    main()
