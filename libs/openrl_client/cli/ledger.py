"""``openrl ledger rebuild``: the ledger's own command, which is not a part of the client."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import click

from openrl_client.cli.common import Where, connection
from openrl_client.connection import find_url
from openrl_client.errors import Rejected


@click.group()
def ledger() -> None:
    """The ledger of seats."""


@ledger.command(short_help="Write the ledger's bucket anew from what runs.")
@click.option("--apply", is_flag=True, help="Write it. Without this flag nothing is changed.")
@click.option("--while-running", is_flag=True, help="Also while a ledger handles events.")
@click.option("--replace", is_flag=True, help="Also when the bucket holds seats.")
@click.option("-o", "--output", type=click.Choice(["json"]), help="Machine-readable.")
@connection
def rebuild(where: Where, apply: bool, while_running: bool, replace: bool, output: str | None) -> None:
    """Write the ledger's bucket anew from what launchers report as running (after its loss)."""
    if importlib.util.find_spec("openrl_ledger") is None:
        raise Rejected("the ledger is not installed here: run this where it is", code="usage")
    flags = [
        flag for flag, on in (("--apply", apply), ("--while-running", while_running), ("--replace", replace)) if on
    ]
    command = [
        sys.executable,
        "-m",
        "openrl_ledger.rebuild",
        "--nats-url",
        find_url(where.nats_url, where.home),
        *flags,
    ]
    if output:
        command += ["-o", output]
    sys.exit(subprocess.run(command, check=False).returncode)
