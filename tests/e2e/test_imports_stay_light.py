"""The client, every command's help and the control services load neither torch nor vllm (C3)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {"torch", "vllm", "transformers", "peft", "kubernetes", "matplotlib", "reasoning_gym", "aiohttp"}

_IMPORT_CLIENT = """
import json, sys, time
began = time.process_time()
import openrl_client
print(json.dumps({"seconds": time.process_time() - began, "modules": sorted(sys.modules)}))
"""

_EVERY_HELP = """
import contextlib, io, json, sys
import click
from openrl_client import cli

def walk(command, path):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        with contextlib.suppress(click.exceptions.Exit):
            command.main(["--help"], prog_name=" ".join(path), standalone_mode=False)
    assert "Usage: " + " ".join(path) in text.getvalue(), (path, text.getvalue())
    paths.append(" ".join(path))
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            walk(command.get_command(context, name), [*path, name])

paths = []
root = next(value for value in vars(cli).values() if isinstance(value, click.Group))
walk(root, ["openrl"])
print(json.dumps({"paths": paths, "modules": sorted(sys.modules)}))
"""


def run(*arguments: str) -> str:
    answer = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def test_C3_importing_the_client_is_light_and_takes_less_than_300_ms() -> None:
    runs = [json.loads(run("-c", _IMPORT_CLIENT)) for _ in range(3)]
    assert not HEAVY & set(runs[0]["modules"])
    assert "structlog" not in runs[0]["modules"]
    assert min(one["seconds"] for one in runs) < 0.3


def test_C3_the_help_of_every_command_loads_nothing_heavy() -> None:
    answer = json.loads(run("-c", _EVERY_HELP))
    assert len(answer["paths"]) > 10
    assert not HEAVY & set(answer["modules"])


@pytest.mark.parametrize("service", ["placement", "ledger", "launcher", "trainer", "sampler"])
def test_every_service_shows_its_settings_without_loading_anything_heavy(service: str) -> None:
    """E19: each setting is shown with its flag and its variable."""
    script = (
        "import json, runpy, sys\n"
        f"sys.argv = ['openrl_{service}', '--help']\n"
        "try:\n"
        f"    runpy.run_module('openrl_{service}', run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "print('\\n' + json.dumps(sorted(sys.modules)))\n"
    )
    text, _, modules = run("-c", script).rstrip().rpartition("\n")
    assert "--nats-url" in text
    assert "OPEN_RL_NATS_URL" in text
    assert not HEAVY & set(json.loads(modules))
