"""``openrl doctor``: looks at the whole system and says what is wrong, each finding with its remedy."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from openrl_client.cli.common import Where, connection, machine_readable, run_async, table
from openrl_client.errors import EXIT_FAILED, Rejected, Unreachable

if TYPE_CHECKING:
    from openrl_client.doctor import Finding


@click.command()
@click.option("--nats-monitor", help="The NATS server's monitoring address, for example http://nats:8222.")
@click.option("-o", "--output", type=click.Choice(["json", "yaml"]), help="Machine-readable.")
@connection
def doctor(where: Where, nats_monitor: str | None, output: str | None) -> None:
    """Look at NATS, the services, the nodes and this host. Exit code 1 when something failed, 0 with warnings only,
    5 when NATS does not answer: then only this host is looked at."""
    unreachable: Unreachable | None = None
    try:
        findings = run_async(_look(where, nats_monitor))
    except Unreachable as error:
        unreachable, findings = error, look_here(where, error)
    click.echo(machine_readable(findings, output) if output else report(findings))
    if unreachable is not None:
        raise unreachable
    if any(finding.level == "failed" for finding in findings):
        sys.exit(EXIT_FAILED)


async def _look(where: Where, nats_monitor: str | None) -> list[Finding]:
    from openrl_client.doctor import look

    async with where.connect() as client:
        return await look(client, where.home, nats_monitor)


def look_here(where: Where, error: Unreachable) -> list[Finding]:
    """What can be told while no system answers."""
    from openrl_client import doctor as judge
    from openrl_common.nats_server import find_binary

    try:
        binary = judge.ok("nats", f"{find_binary()} is there for `openrl up`")
    except Rejected as missing:
        level = judge.Level.NOTE if where.nats_url else judge.Level.FAILED
        binary = judge.Finding(level, "nats", missing.what, missing.remedy)
    remedy = error.remedy or "see `openrl logs nats`, then look again"
    system = judge.Finding(judge.Level.FAILED, "system", error.what, remedy)
    return [system, binary, *judge.look_at_host(where.home)]


def report(findings: list[Finding]) -> str:
    """The findings as a table, and how many of each kind."""
    rows = [[finding.level.value, finding.about, finding.what, finding.remedy] for finding in findings]
    counts = {level: sum(finding.level == level for finding in findings) for level in ("failed", "warning")}
    verdict = ", ".join(f"{count} {level}" for level, count in counts.items() if count) or "all is well"
    return f"{table(['LEVEL', 'ABOUT', 'FOUND', 'REMEDY'], rows)}\n\n{verdict}"
