"""C3: the client and every ``--help`` stay light. Each check is a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

import click

from openrl_client.cli import cli

HEAVY = ("torch", "vllm", "transformers", "peft", "reasoning_gym", "matplotlib", "numpy", "rich", "structlog", "nats")
CONTEXT = click.Context(cli)


def loaded_after(code: str) -> list[str]:
    """Which heavy packages are loaded after ``code`` ran in a new interpreter."""
    script = f"import sys\n{code}\nprint('LOADED', *[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.splitlines()[-1].split()[1:]


def paths() -> list[tuple[str, ...]]:
    """Every command and subcommand."""
    found: list[tuple[str, ...]] = [()]
    for name in cli.list_commands(CONTEXT):
        command = cli.get_command(CONTEXT, name)
        found.append((name,))
        if isinstance(command, click.Group):
            found += [(name, sub) for sub in command.list_commands(CONTEXT)]
    return found


def test_importing_the_client_loads_nothing_heavy() -> None:
    """C3: no torch, no vllm; numpy and nats only when first used."""
    assert loaded_after("import openrl_client, openrl_client.tasks, openrl_client.recipes, openrl_client.sync") == []


def test_connecting_loads_no_framework() -> None:
    """C3: the bus itself is light: no torch, no transformers, no structlog."""
    heavy = loaded_after("import openrl_client.connection, openrl_common.bus")
    assert set(heavy) <= {"nats", "numpy"}


def test_help_loads_nothing_heavy() -> None:
    """C3: ``--help`` of every command imports neither torch nor vllm nor transformers: each in a fork of one process
    that has read the command line's modules and nothing else."""
    code = f"""
import os
from openrl_client.cli import run
for path in {paths()!r}:
    child = os.fork()
    if not child:
        failed = run([*path, "--help"])
        found = [name for name in {HEAVY!r} if name in sys.modules]
        print("HELP", path, failed, found, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}"], capture_output=True, text=True, timeout=60, check=True
    )
    told = [line for line in done.stdout.splitlines() if line.startswith("HELP")]
    assert told == [f"HELP {path} 0 []" for path in paths()], done.stderr
