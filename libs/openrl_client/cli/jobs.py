"""``openrl run``, ``submit``, ``warm``, ``cancel``, ``wait``: jobs from the command line."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from openrl_client.cli.common import Where, connection, run_async, table, timeout_option
from openrl_client.cli.options import job_options, recipe_options, runtime_options, spec_of
from openrl_client.cli.progress import Reporter
from openrl_client.errors import JobEndedError, OpenRLError, Rejected
from openrl_common.records import JobKind, JobPhase, JobSpec

if TYPE_CHECKING:
    from openrl_client.tokenizer import Tokenizer

CANCEL_S = 30.0


@click.command()
@click.argument("recipe", type=click.Choice(["sft", "grpo", "sft+grpo"]))
@job_options
@recipe_options
@timeout_option(None, "Give up when the job is not ready after this long (and cancel it).")
@click.option("--keep", is_flag=True, help="Leave the job running at the end and on Ctrl-C.")
@connection
def run(where: Where, recipe: str, timeout_s: float | None, keep: bool, **parameters: Any) -> None:
    """Publish a job, run RECIPE on it, finish it. Ctrl-C cancels the job, unless --keep.

    The outcome is printed as a line of JSON; progress goes to stderr.
    """
    from openrl_client.cli.options import recipe_of
    from openrl_client.connection import find_url
    from openrl_client.tasks import load_task
    from openrl_client.tokenizer import Tokenizer

    name = parameters["name"] or default_name(recipe, parameters["task"])
    spec = spec_of({**parameters, "name": name})
    find_url(where.nats_url, where.home)  # what is quickly seen to be wrong first: a task may take long to load
    tokenizer = Tokenizer(spec.base_model)
    task = load_task(
        parameters["task"],
        prompts=parameters["prompts_file"],
        size=parameters["task_size"],
        config=parameters["task_config"],
    )
    out: Path = parameters["out"] or where.home / "runs" / f"{where.tenant}.{name}"
    run_async(_run(where, spec, recipe, task, tokenizer, recipe_of(parameters), out, timeout_s, keep))


def default_name(recipe: str, task: str) -> str:
    """A name that says what runs, unique enough for one tenant."""
    stem = re.sub(r"[^a-z0-9]+", "-", f"{task.rpartition(':')[2]}-{recipe}".lower()).strip("-")[:30].strip("-")
    return f"{stem}-{secrets.token_hex(2)}"


async def _run(
    where: Where,
    spec: JobSpec,
    recipe: str,
    task: Any,
    tokenizer: Tokenizer,
    settings: Any,
    out: Path,
    timeout_s: float | None,
    keep: bool,
) -> None:
    from openrl_client.metrics import Metrics
    from openrl_client.recipes import run_recipe

    submission: list[str] = []
    async with where.connect() as client:
        with Metrics(out / "metrics.jsonl") as metrics, Reporter(spec.name) as report:
            try:
                try:
                    job = await client.submit(spec, on_published=submission.append)
                except Rejected:
                    submission.clear()  # refused: there is nothing to cancel
                    raise
                report.line(f"submitted, incarnation {job.record.incarnation}")
                await job.ready(timeout_s, report.waiting)
                outcome = await run_recipe(
                    job, recipe, task, tokenizer, settings, metrics, on_step=report.step, on_phase=report.phase
                )
            except BaseException as error:
                if submission and not keep and not isinstance(error, JobEndedError):
                    await give_up(client, spec.name, submission[0], report)
                raise
            if not keep:
                await job.finish()
    click.echo(f"metrics: {out / 'metrics.jsonl'}", err=True)  # stdout is the outcome, as JSON
    click.echo(msgspec.json.encode(outcome).decode())


async def give_up(client: Any, name: str, submission: str, report: Reporter) -> None:
    """Cancel what was published, whatever interrupted us; a second interrupt ends at once."""
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()
    report.line("cancelling the job")
    with contextlib.suppress(OpenRLError, TimeoutError):
        async with asyncio.timeout(CANCEL_S):
            await client.cancel_submission(name, submission, why="the client was interrupted")
            job = await client.attach(name, submission=submission)
            await job.wait_ended()


@click.command()
@job_options
@click.option("-f", "--file", type=click.Path(path_type=Path), help="Read the job from a JSON or YAML file.")
@click.option("--wait", "wait_ready", is_flag=True, help="Wait until it is ready.")
@timeout_option(None, "With --wait: give up waiting after this long (the job goes on).")
@connection
def submit(where: Where, file: Path | None, wait_ready: bool, timeout_s: float | None, **parameters: Any) -> None:
    """Publish a job that another program will drive. Prints its name once it is admitted."""
    spec = spec_of(parameters, file)

    async def main() -> None:
        async with where.connect() as client:
            job = await client.submit(spec)
            click.echo(f"job/{job.name}")
            if wait_ready:
                with Reporter(job.name) as report:
                    await job.ready(timeout_s, report.waiting)

    run_async(main())


@click.command()
@click.argument("base_model", metavar="MODEL")
@runtime_options
@timeout_option(None, "Give up when the workers are not ready after this long.")
@connection
def warm(where: Where, base_model: str, timeout_s: float | None, **parameters: Any) -> None:
    """Start the LoRA workers of MODEL ahead of its first job, and wait until they are ready.

    A LoRA job with the same model, rank, dtype, engine and exclusivity then starts at once. Without a job they are
    kept for --lora-idle (`openrl up --help`).
    """
    name = f"warm-{secrets.token_hex(4)}"
    spec = spec_of({**parameters, "name": name, "base_model": base_model, "kind": JobKind.LORA.value})

    async def main() -> str:
        # A job that only looks in: what it leaves behind is the runtime it was given (P12).
        submission: list[str] = []
        async with where.connect() as client:
            with Reporter(name) as report:
                try:
                    job = await client.submit(spec, on_published=submission.append)
                    record = await job.ready(timeout_s, report.waiting)
                except Rejected:
                    raise
                except BaseException:
                    if submission:
                        await give_up(client, name, submission[0], report)
                    raise
            await job.finish()
            return record.runtime

    click.echo(f"runtime/{run_async(main())} warm")


@click.command()
@click.argument("names", nargs=-1, required=True)
@click.option("--no-wait", is_flag=True, help="Do not wait until its seats are free.")
@timeout_option("60s", "Give up waiting after this long.")
@connection
def cancel(where: Where, names: tuple[str, ...], no_wait: bool, timeout_s: float) -> None:
    """End jobs now, and wait until their seats are free. One that cannot be ended keeps no other from it."""

    async def one(client: Any, name: str) -> None:
        await client.cancel(name, why="cancelled from the command line")
        if not no_wait:
            job = await client.attach(name)
            await job.wait_ended(timeout_s)
        click.echo(f"job/{name} {'cancelling' if no_wait else 'cancelled'}")

    async def main() -> list[BaseException]:
        async with where.connect() as client:
            done = await asyncio.gather(*(one(client, name) for name in names), return_exceptions=True)
            return [error for error in done if error is not None]

    if errors := run_async(main()):
        for error in errors[:-1]:
            click.echo(f"openrl: {error}", err=True)
        raise errors[-1]


@click.command()
@click.argument("name")
@click.option("--for", "what", type=click.Choice(["ready", "finished"]), default="ready", show_default=True)
@timeout_option(None, "Exit with code 4 after this long.")
@connection
def wait(where: Where, name: str, what: str, timeout_s: float | None) -> None:
    """Wait until job NAME is ready, or has finished. Fails when the job failed or was cancelled instead."""

    async def main() -> JobPhase:
        async with where.connect() as client:
            job = await client.attach(name)
            if what == "ready":
                with Reporter(name) as report:
                    return (await job.ready(timeout_s, report.waiting)).phase
            record = await job.wait_ended(timeout_s)
            if record.phase is not JobPhase.FINISHED:
                raise await job.ended_error() or Rejected(f"job {name} is {record.phase.value}")
            return record.phase

    click.echo(table((), [[f"job/{name}", run_async(main()).value]], with_header=False))
