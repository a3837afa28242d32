"""Write ``deploy/base/settings/*.env``: every setting of every service with its default, or what a cluster needs (K8);
and ``variables.txt`` of openrl_common: the names of all variables, so that one that is none is said (E19).

``--check`` writes nothing and fails when a file differs: a new flag shows in the manifests, or the build says so.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import click

from openrl_client.cli import cli
from openrl_common import variables

FOLDER = Path(__file__).resolve().parent.parent / "deploy" / "base" / "settings"
SERVICES = {
    "ledger": ("openrl_ledger",),
    "placement": ("openrl_placement",),
    "launcher": ("openrl_launcher",),
    "workers": ("openrl_trainer", "openrl_sampler"),
}
COMMON = {
    "OPEN_RL_NATS_URL": "nats://openrl-nats:4222",
    "OPEN_RL_LOG_FORMAT": "json",
    "OPEN_RL_HEALTH_HOST": "0.0.0.0",
    "OPEN_RL_HEALTH_PORT": "8080",
    "OPEN_RL_HOME": "/var/lib/openrl",
}
VALUES = {
    "ledger": COMMON,
    "placement": {**COMMON, "OPEN_RL_VERDICT_WAIT": "2m"},
    "launcher": {**COMMON, "OPEN_RL_HOME": "/tmp/openrl", "OPEN_RL_BACKEND": "kubernetes"},
    "workers": {"OPEN_RL_LOG_FORMAT": "json", "OPEN_RL_VLLM_CACHE_DIR": "/var/lib/openrl/cache/vllm"},
}
LOCAL_ONLY = {
    "OPEN_RL_NODE_NAME", "OPEN_RL_NODE_ROLES", "OPEN_RL_DEVICES", "OPEN_RL_HOST_MEMORY", "OPEN_RL_WORKER_LOGS_KEPT",
    "OPEN_RL_WARM_START", "OPEN_RL_KUBECONFIG",
}  # fmt: skip
"""Of the launcher's local backend; a cluster's launcher reads none of them."""
SET_BY_LAUNCHER = {
    "OPEN_RL_WORKLOAD", "OPEN_RL_ASSIGNMENT", "OPEN_RL_NODE", "OPEN_RL_DEVICE_BYTES", "OPEN_RL_NATS_URL",
    "OPEN_RL_HOME", "OPEN_RL_HEALTH_HOST", "OPEN_RL_HEALTH_PORT", "OPEN_RL_START_GATE_WAIT",
}  # fmt: skip
"""In each worker's pod; a config map that set them would be overruled."""
MARKS = {"OPEN_RL_SERVICE", "OPEN_RL_CLAIM", "OPEN_RL_OWNER"}
"""Not settings: what a process or a pod says of itself to others."""


def text(service: str) -> str:
    """The file of one service, in the order of its ``--help``."""
    whose = "trainers and samplers" if service == "workers" else service
    lines = [
        f"# Settings of {whose}, written by scripts/settings_manifest.py.",
        "# Change values in an overlay (configMapGenerator, behavior: merge), not here.",
    ]
    left_out = SET_BY_LAUNCHER if service == "workers" else LOCAL_ONLY if service == "launcher" else set()
    seen: set[str] = set()
    for package in SERVICES[service]:
        command: click.Command = importlib.import_module(f"{package}.__main__").main
        for parameter in command.params:
            if not isinstance(parameter, click.Option) or not isinstance(parameter.envvar, str):
                continue
            name = parameter.envvar
            if name in left_out or name in seen:
                continue
            seen.add(name)
            default = "" if parameter.default is None else str(parameter.default)
            lines += ["", f"# {parameter.help}", f"{name}={VALUES[service].get(name, default)}"]
    return "\n".join(lines) + "\n"


def known_variables() -> str:
    """Every variable that some service or command reads, or that OpenRL itself sets, one a line."""
    commands = [importlib.import_module(f"{package}.__main__").main for of in SERVICES.values() for package in of]
    return "".join(f"{name}\n" for name in sorted(MARKS.union(*map(_variables_of, [cli, *commands]))))


def _variables_of(command: click.Command) -> set[str]:
    names = {each.envvar for each in command.params if isinstance(each, click.Option) and isinstance(each.envvar, str)}
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            names |= _variables_of(inner)
    return names


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--check", action="store_true")
    check = arguments.parse_args().check
    stale = []
    files = {FOLDER / f"{service}.env": text(service) for service in SERVICES}
    for path, wanted in (files | {variables.FILE: known_variables()}).items():
        if path.exists() and path.read_text() == wanted:
            continue
        if check:
            stale.append(path)
        else:
            path.write_text(wanted)
    for path in stale:
        print(f"{path} is not what the settings say: run python scripts/settings_manifest.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
