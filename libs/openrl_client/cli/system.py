"""``openrl up`` and ``openrl down``: the whole system on this host."""

from __future__ import annotations

import os
import shlex
import signal
from pathlib import Path
from typing import Any

import click

from openrl_common import settings
from openrl_common.variables import unknown_variables

# What the services read from the environment: each flag here becomes its OPEN_RL_* variable there.
SERVICE_SETTINGS = (
    settings.DEVICES,
    settings.HOST_MEMORY_BYTES,
    settings.WARM_START,
    settings.MAX_SEATS_PER_CLAIM,
    settings.PLACEMENT_STRATEGY,
    settings.OWNER_AFFINITY,
    settings.PLACEMENT_TIMEOUT_S,
    settings.WEDGE_GRACE_S,
    settings.LORA_JOBS_PER_RUNTIME,
    settings.LORA_IDLE_S,
    settings.TRAINER_HOST_BASE_BYTES,
    settings.SAMPLER_HOST_BASE_BYTES,
    settings.LOG_LEVEL,
)
NATS_PORT = settings.setting(
    "--nats-port",
    type=click.IntRange(0, 65535),
    default="0",
    help="Port of the embedded NATS; 0 = as last time, or a free one.",
)


@click.command()
@settings.settings(settings.HOME, *SERVICE_SETTINGS, NATS_PORT)
@click.option("--foreground", is_flag=True, help="Stay in the foreground; Ctrl-C stops the system.")
def up(home: Path, nats_port: int, foreground: bool, **parameters: Any) -> None:
    """Start embedded NATS, ledger, placement and launcher on this host, and return when they are ready."""
    from openrl_client.supervisor import down as stop
    from openrl_client.supervisor import up as start

    for line in unknown_variables(os.environ):
        click.echo(f"openrl: {line}", err=True)
    try:
        info = start(
            home,
            environment=environment_of(parameters),
            nats_port=nats_port,
            progress=click.echo,
            foreground=foreground,
        )
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is up, and this says so: too late for a Ctrl-C
    except KeyboardInterrupt:
        if not foreground:
            stop(home, progress=lambda line: None)  # it may have become ready in the same moment
        raise
    if not foreground:
        click.echo(f"up: {info.nats_url} (stop it with `openrl down{_home_flag(home)}`)")


@click.command()
@settings.settings(settings.HOME)
def down(home: Path) -> None:
    """Stop the system on this host and its workers. Jobs, seats and state stay; the next `openrl up` goes on."""
    from openrl_client.supervisor import down as stop

    stopped = stop(home, progress=click.echo)
    click.echo(f"down: {stopped} processes ended" if stopped else f"down: nothing ran on {home}")


def environment_of(parameters: dict[str, Any]) -> dict[str, str]:
    """Validated settings as the services' variables."""
    environment = {}
    for setting in SERVICE_SETTINGS:
        value = parameters[setting.name]
        if setting is settings.DEVICES:
            value = ",".join(f"1x{size}" for size in value)
        elif isinstance(value, bool):
            value = "on" if value else "off"
        environment[setting.variable] = str(value)
    return environment


def _home_flag(home: Path) -> str:
    usual = Path(os.environ.get("OPEN_RL_HOME", "~/.openrl")).expanduser()
    return "" if home == usual else f" --home {shlex.quote(str(home))}"
