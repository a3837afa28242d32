"""``openrl``: the command line. Commands are loaded when they are used, so that every ``--help`` is fast (C3).

Exit codes (C5): 0 ok · 1 failed · 2 usage · 3 impossible · 4 timed out · 5 unreachable · 130 interrupted. An error is
one line on stderr: what, which value, what to do.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any

import click

from openrl_client.errors import EXIT_INTERRUPTED, EXIT_USAGE, OpenRLError, exit_code

# name → (module, attribute, short help). The help stands here too, so that `openrl --help` loads no command.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "up": ("system", "up", "Start the whole system on this host."),
    "down": ("system", "down", "Stop it; its state stays."),
    "run": ("jobs", "run", "Publish a job and run a recipe on it to the end."),
    "submit": ("jobs", "submit", "Publish a job that something else will drive."),
    "warm": ("jobs", "warm", "Start the LoRA workers of a model ahead of its first job."),
    "cancel": ("jobs", "cancel", "End jobs now."),
    "wait": ("jobs", "wait", "Wait until a job is ready or has ended."),
    "get": ("get", "get", "List jobs, workloads, claims or nodes."),
    "explain": ("explain", "explain", "Say why a workload is where it is."),
    "status": ("explain", "status", "Show how each worker started, phase by phase."),
    "logs": ("watch", "logs", "Print the log of a worker or a service."),
    "events": ("watch", "events", "Follow what happens, one line an event."),
    "dlq": ("watch", "dlq", "Look at messages that could not be handled, or have them handled again."),
    "state": ("state", "state", "List, delete or export saved training states."),
    "doctor": ("doctor", "doctor", "Look for what is wrong, with remedies."),
    "ledger": ("ledger", "ledger", "Rebuild the ledger's bucket from what runs."),
    "model": ("model", "model", "Make a tiny model, or one of a GGUF file."),
    "bench": ("bench", "bench", "Measure the system."),
    "drill": ("drill", "drill", "Rehearse many jobs at once."),
    "completion": ("completion", "completion", "Print a shell completion script."),
}


class ReaderGone(Exception):
    """Who read our output went away (``| head``). Click would make exit code 1 of a BrokenPipeError."""


class LazyGroup(click.Group):
    """A group whose commands are imported on use. A command whose module is not installed is not listed."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (BrokenPipeError, ExceptionGroup) as error:
            if isinstance(first_cause(error), BrokenPipeError):
                raise ReaderGone from error
            raise

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, (module, _, _) in COMMANDS.items() if _exists(module)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(f"openrl_client.cli.{module}"), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][2]) for name in self.list_commands(ctx)])


def _exists(module: str) -> bool:
    return importlib.util.find_spec(f"openrl_client.cli.{module}") is not None


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="openrl", message="openrl %(version)s")
def cli() -> None:
    """Reinforcement-learning post-training for many tenants on a shared pool of GPUs.

    \b
    openrl up --devices 2x24GiB         start everything on this host
    openrl run sft+grpo --model DIR --kind lora --task letters:sort
    openrl get jobs                     what runs, what waits, and why
    """


def main(arguments: list[str] | None = None) -> None:
    """The console script: run a command, map what it raised to one line and an exit code."""
    sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    try:
        result = cli.main(arguments, prog_name="openrl", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.Abort:
        return EXIT_INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return EXIT_USAGE
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "openrl"
        return fail(f"{error.format_message()} (see `{path} --help`)", EXIT_USAGE)
    except click.ClickException as error:
        return fail(error.format_message(), error.exit_code)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except ReaderGone:  # nothing more to say, and nothing for the interpreter to flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OpenRLError, OSError, ExceptionGroup) as error:
        cause = first_cause(error)
        if not isinstance(cause, OpenRLError | OSError):
            raise
        if isinstance(cause, OSError) and cause.filename and cause.strerror:
            return fail(f"{cause.filename}: {cause.strerror}", exit_code(cause))
        return fail(str(cause), exit_code(cause))


def first_cause(error: BaseException) -> BaseException:
    """The first error inside nested groups (several tasks fail together when one did)."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def fail(message: str, code: int) -> int:
    text = " ".join(message.split())
    click.echo(f"openrl: {text}", err=True)
    return code
