"""``openrl state``: what ``save_state`` kept, on the home that trainers share: list, delete, export."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import click

from openrl_client.cli.common import CONNECTION, age, machine_readable, run_async, table
from openrl_client.errors import Rejected
from openrl_common.quantities import format_bytes
from openrl_common.states import delete_state, list_states, state_path


@click.group()
def state() -> None:
    """Training states that jobs saved under a name. They stay when the job has ended."""


@state.command("list")
@click.argument("job", required=False, default="")
@click.option("-o", "--output", type=click.Choice(["table", "json", "yaml", "name"]), default="table")
@CONNECTION
def list_(job: str, output: str, nats_url: str | None, home: Path, tenant: str) -> None:
    """List the states of JOB, or of every job."""
    found = list_states(home, tenant, job)
    if output in ("json", "yaml"):
        click.echo(machine_readable(found, output))
        return
    if output == "name":
        for one in found:
            click.echo(f"{one.info.job}/{one.name}")
        return
    rows = [
        [
            one.info.job,
            one.name,
            "lora" if one.info.lora else "fft",
            str(one.info.seq or ""),
            format_bytes(one.bytes),
            age(one.saved_at),
            one.info.base_model,
        ]
        for one in found
    ]
    if not rows:
        click.echo(f"no states{f' of job {job}' if job else ''}: `job.save_state(NAME)` saves one", err=True)
        return
    click.echo(table(("JOB", "STATE", "KIND", "ENTRY", "SIZE", "AGE", "BASE MODEL"), rows))


@state.command()
@click.argument("job")
@click.argument("names", nargs=-1, required=True)
@CONNECTION
def delete(job: str, names: tuple[str, ...], nats_url: str | None, home: Path, tenant: str) -> None:
    """Delete states of JOB."""
    for name in names:
        if not delete_state(home, tenant, job, name):
            raise Rejected(f"job {job} has no state {name!r} in {home}: see `openrl state list`", code="state-missing")
        click.echo(f"{job}/{name} deleted")


@state.command(short_help="Write a state as a Hugging Face directory.")
@click.argument("job")
@click.argument("name")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--adapter", is_flag=True, help="LoRA: the adapter alone, in PEFT's layout; without it, merged.")
@CONNECTION
def export(job: str, name: str, out: Path, adapter: bool, nats_url: str | None, home: Path, tenant: str) -> None:
    """Write state NAME of JOB to OUT as a plain Hugging Face directory, for any other program."""
    path = state_path(home, tenant, job, name)
    if not path.is_file():
        raise Rejected(f"job {job} has no state {name!r} in {home}: see `openrl state list`", code="state-missing")
    command = [sys.executable, "-m", "openrl_trainer.export", str(path), str(out), *(["--adapter"] if adapter else [])]

    async def main() -> None:
        if sys.stderr.isatty():
            click.echo(f"loading {job}/{name}{'' if adapter else ' and its base model'}", err=True)
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=dict(os.environ)
        )
        try:
            output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()
        lines = output.decode(errors="replace").strip().splitlines()
        if process.returncode != 0:
            last = lines[-1].removeprefix("Error: ") if lines else f"exit code {process.returncode}"
            raise Rejected(f"state {job}/{name} was not exported: {last}", code="export-failed")
        click.echo(lines[-1])

    run_async(main())
