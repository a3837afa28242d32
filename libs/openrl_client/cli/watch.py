"""``openrl logs``, ``events``, ``dlq``: what happened."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from pathlib import Path
from typing import Any

import click
import msgspec

from openrl_client.cli.common import Where, clock, connection, machine_readable, run_async, table
from openrl_client.cli.pod_logs import kubectl_logs, show
from openrl_client.errors import OpenRLError, Rejected
from openrl_common.names import check_job, short_workload

SERVICES = ("placement", "ledger", "launcher", "nats", "supervisor")
POLL_INTERVAL_S = 0.2
REQUEUED = ("OPENRL_EVENTS", "OPENRL_SAMPLE")
"""Streams in which a message may come once more. Not the training log: its order is what is trained (R4)."""
_KEPT = ("ce-", "traceparent", "tracestate")
_HIDDEN = frozenset({"type", "tenant", "job", "workload", "submission", "spec", "shape", "weights", "record", "tiers"})


# --- logs -------------------------------------------------------------------------------------------------------


@click.command()
@click.argument("workload")
@click.option("-f", "--follow", is_flag=True, help="Go on with new lines, also of a restarted worker.")
@click.option("-n", "--lines", type=click.IntRange(0), default=200, show_default=True, help="Last lines first.")
@connection
def logs(where: Where, workload: str, follow: bool, lines: int) -> None:
    """Print the log of WORKLOAD (<job>/trainer, <job>/sampler, a full id) or of a service: placement, ledger, launcher,
    nats, supervisor.

    A worker on a Kubernetes cluster: its pod's log, through kubectl.
    """
    command = run_async(_logs(where, workload, follow, lines))
    if command is not None and (exit_code := show(command)) != 0:
        raise SystemExit(exit_code)


async def _logs(where: Where, workload: str, follow: bool, num_lines: int) -> list[str] | None:
    """Print the newest file; without one, the command that shows a pod's log."""
    pattern = await _log_pattern(where, workload)
    directory = where.home / ("nats" if workload == "nats" else "logs")
    path = newest(directory, pattern)
    if path is None:
        with contextlib.suppress(OpenRLError, TimeoutError):
            async with asyncio.timeout(5), where.connect() as client:
                workers = [entry.value for entry in (await client.bus.store.workers.list()).values()]
                full = pattern.removesuffix(".*.log")
                if command := kubectl_logs(workers, full, follow=follow, num_lines=num_lines):
                    return command
        raise Rejected(
            f"no log of {workload!r} in {directory}: it has not started yet, or the log is on its node "
            "(`openrl get workloads -o wide`)",
            code="unknown",
        )
    while True:
        with path.open("r", errors="replace") as file:
            for line in deque(file, maxlen=num_lines):
                click.echo(line, nl=False)
            while follow:
                if line := file.readline():
                    click.echo(line, nl=False)
                    continue
                if (later := newest(directory, pattern)) not in (None, path):
                    break
                await asyncio.sleep(POLL_INTERVAL_S)
        if not follow or later is None:
            return None
        path = later
        num_lines = 1_000_000


async def _log_pattern(where: Where, workload: str) -> str:
    """The file name pattern of a workload's logs; a LoRA job's are those of its runtime."""
    if workload in SERVICES:
        return f"{workload}*.log"
    if "--" in workload:
        return f"{workload}.*.log"
    job, slash, role = workload.partition("/")
    if not slash or role not in ("trainer", "sampler"):
        raise click.UsageError(
            f"{workload!r} is not a workload: write <job>/trainer, <job>/sampler or a service's name"
        )
    check_job(job)
    with contextlib.suppress(OpenRLError):
        async with asyncio.timeout(5), where.connect() as client:
            entry = await client.bus.store.jobs.get(f"{where.tenant}.{job}")
            if entry is not None:
                return f"{getattr(entry.value, role)}.*.log"
    return f"*--{job}--{role}.*.log"


def newest(directory: Path, pattern: str) -> Path | None:
    """The file of ``pattern`` that was made last."""
    found = sorted(directory.glob(pattern), key=lambda path: path.stat().st_ctime)
    return found[-1] if found else None


# --- events -----------------------------------------------------------------------------------------------------


@click.command()
@click.option("--job", help="Only what concerns this job and its workloads.")
@click.option("--all", "from_start", is_flag=True, help="From the oldest event kept, not from now on.")
@click.option("--no-follow", is_flag=True, help="With --all or --job: stop at the newest one.")
@click.option("-o", "--output", type=click.Choice(["json"]), help="One JSON object a line.")
@connection
def events(where: Where, job: str | None, from_start: bool, no_follow: bool, output: str | None) -> None:
    """Follow what happens, one line an event."""
    if no_follow and not from_start and job is None:
        raise click.UsageError("--no-follow stops at the newest event that is kept: say --all or --job with it")
    run_async(_events(where, job, from_start or job is not None, no_follow, output))


async def _events(where: Where, job: str | None, from_start: bool, no_follow: bool, output: str | None) -> None:
    async with where.connect() as client:
        wanted: set[str] | None = None
        if job is not None:
            handle = await client.attach(job)
            wanted = {job, handle.record.trainer, handle.record.sampler}
        last = await client.bus.last(stream="OPENRL_EVENTS", subject="openrl.ev.>") if no_follow else None
        if no_follow and last is None:
            return
        tail = client.bus.tail(stream="OPENRL_EVENTS", subject="openrl.ev.>", from_now=not from_start)
        async with contextlib.aclosing(tail) as deliveries:
            async for delivery in deliveries:
                parts = delivery.subject.split(".")
                if wanted is None or (len(parts) == 7 and parts[5] in wanted):
                    if output:
                        click.echo(delivery.body.decode(errors="replace"))
                    else:
                        click.echo(event_line(delivery.subject, delivery.body, delivery.published_at))
                if last is not None and delivery.sequence >= last.sequence:
                    return


def event_line(subject: str, body: bytes, published_at: float) -> str:
    """``17:02:31.204 ledger    seat demo-fft/trainer booked claim=… assignment=…``"""
    stamp = f"{clock(published_at)}.{int(published_at % 1 * 1000):03d}"
    parts = subject.split(".")
    if len(parts) != 7:
        return f"{stamp} {subject}"
    _, _, source, _, entity, name, fact = parts
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.MsgspecError:
        return f"{stamp} {source:<9} {entity} {name} {fact} (not readable)"
    if isinstance(beside := fields.get("beside"), dict):
        fields["beside"] = short_workload(str(beside.get("workload", "")))  # a request like this one: whose is enough
    shown = " ".join(f"{key}={_short(value)}" for key, value in fields.items() if key not in _HIDDEN and key != entity)
    return f"{stamp} {source:<9} {entity} {short_workload(name)} {fact} {shown}".rstrip()


def _short(value: Any) -> str:
    if isinstance(value, dict):
        text = "{" + ", ".join(f"{key}: {_short(item)}" for key, item in value.items() if key not in _HIDDEN) + "}"
    elif isinstance(value, list):
        text = ",".join(_short(item) for item in value) or "none"
    elif isinstance(value, bool):
        text = "yes" if value else "no"
    else:
        text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 120 else text[:117] + "…"


# --- dead letters -----------------------------------------------------------------------------------------------


@click.group()
def dlq() -> None:
    """Messages that could not be handled."""


@dlq.command("list")
@click.option("-o", "--output", type=click.Choice(["json", "yaml"]), help="Machine-readable.")
@connection
def dlq_list(where: Where, output: str | None) -> None:
    """List dead letters, oldest first."""
    letters = run_async(_dead_letters(where))
    if output:
        for letter in letters:
            letter["body"] = letter["body"].encode(errors="surrogateescape").decode(errors="replace")
        click.echo(machine_readable(letters, output))
        return
    rows = [
        [str(letter["sequence"]), letter["at"], letter["subject"], letter["consumer"], letter["error"]]
        for letter in letters
    ]
    click.echo(table(["SEQUENCE", "AT", "SUBJECT", "CONSUMER", "ERROR"], rows) if rows else "no dead letters")


@dlq.command("show")
@click.argument("sequence", type=int)
@connection
def dlq_show(where: Where, sequence: int) -> None:
    """Print one dead letter with its body."""
    for letter in run_async(_dead_letters(where)):
        if letter["sequence"] == sequence:
            shown = letter["body"].encode(errors="surrogateescape").decode(errors="replace")
            click.echo(machine_readable({**letter, "body": shown}, "json"))
            return
    raise Rejected(f"dead letter {sequence} is not known: see `openrl dlq list`", code="unknown")


@dlq.command("requeue", short_help="Have dead letters handled again.")
@click.argument("sequences", type=click.IntRange(min=1), nargs=-1)
@click.option("--all", "every", is_flag=True, help="Every dead letter.")
@connection
def dlq_requeue(where: Where, sequences: tuple[int, ...], every: bool) -> None:
    """Publish dead letters again, on the subject where they were, and take them off the list.

    Whoever consumes that subject handles them once more, as if they had just come; handlers bear that.
    """
    if bool(sequences) == every:
        raise click.UsageError("name dead letters (`openrl dlq list`), or --all")
    for letter in run_async(_requeue(where, sequences)):
        click.echo(f"{letter['sequence']}: published again on {letter['subject']}")


async def _requeue(where: Where, sequences: tuple[int, ...]) -> list[dict[str, Any]]:
    letters = await _dead_letters(where)
    known = {letter["sequence"]: letter for letter in letters}
    if missing := [number for number in sequences if number not in known]:
        raise Rejected(f"dead letter {missing[0]} is not known: see `openrl dlq list`", code="unknown")
    chosen = [known[number] for number in sequences] or letters
    for letter in chosen:
        if letter["stream"] not in REQUEUED:
            raise Rejected(
                f"dead letter {letter['sequence']} is of {letter['stream']}, whose order must stay: leave it there",
                code="not-requeued",
            )
    async with where.connect() as client:
        for letter in chosen:
            # Under an id of its own: the first one may still be in the window in which it would count as a duplicate.
            await client.bus.publish_raw(
                letter["subject"],
                letter["body"].encode(errors="surrogateescape"),
                message_id=f"requeued:{letter['sequence']}:{letter['at']}",
                headers=letter["headers"],
            )
            request = msgspec.json.encode({"seq": letter["sequence"], "no_erase": True})
            await client.bus.jetstream_api("STREAM.MSG.DELETE.OPENRL_DLQ", request)
    return chosen


async def _dead_letters(where: Where) -> list[dict[str, Any]]:
    letters: list[dict[str, Any]] = []
    async with where.connect() as client:
        last = await client.bus.last(stream="OPENRL_DLQ", subject="openrl.dlq.>")
        if last is None:
            return letters
        async with contextlib.aclosing(client.bus.tail(stream="OPENRL_DLQ", subject="openrl.dlq.>")) as deliveries:
            async for delivery in deliveries:
                headers = delivery.headers
                letters.append(
                    {
                        "sequence": delivery.sequence,
                        "at": time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(delivery.published_at)),
                        "subject": headers.get("openrl-dlq-subject", ""),
                        "stream": headers.get("openrl-dlq-stream", ""),
                        "consumer": headers.get("openrl-dlq-consumer", ""),
                        "deliveries": headers.get("openrl-dlq-deliveries", ""),
                        "error": headers.get("openrl-dlq-error", ""),
                        "headers": {
                            key: value for key, value in headers.items() if key.startswith(_KEPT) and key != "ce-id"
                        },
                        "body": delivery.body.decode(errors="surrogateescape"),
                    }
                )
                if delivery.sequence >= last.sequence:
                    return letters
    return letters
