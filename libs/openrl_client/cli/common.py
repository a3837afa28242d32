"""What the commands share: connection options, running a coroutine, tables, machine-readable output."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from openrl_client.errors import Rejected
from openrl_common.names import DEFAULT_TENANT
from openrl_common.quantities import format_seconds
from openrl_common.settings import HOME, SECONDS, NatsUrl, setting, settings

if TYPE_CHECKING:
    from openrl_client.connection import Client

T = TypeVar("T")
Command = TypeVar("Command", bound=Callable[..., Any])

NATS_URL = setting(
    "--nats-url", type=NatsUrl(), help="Where NATS answers. Default: the system that `openrl up` started from --home."
)
TENANT = setting("--tenant", default=DEFAULT_TENANT, help="Whose jobs.")
CONNECTION = settings(NATS_URL, HOME, TENANT)

OUTPUTS = ("wide", "json", "yaml", "name")


@dataclass(frozen=True)
class Where:
    """The connection options of a command."""

    nats_url: str | None
    home: Path
    tenant: str

    def connect(self) -> contextlib.AbstractAsyncContextManager[Client]:
        from openrl_client.connection import connect

        return connect(self.nats_url, self.tenant, home=self.home)


def connection(command: Command) -> Command:
    """Add the connection options; the command receives them as one ``where``."""
    import functools

    @functools.wraps(command)
    def wrapper(nats_url: str | None, home: Path, tenant: str, **parameters: Any) -> Any:
        return command(where=Where(nats_url, home, tenant), **parameters)

    return CONNECTION(wrapper)  # type: ignore[return-value]


def timeout_option(default: str | None, help_text: str) -> Callable[[Command], Command]:
    return click.option("--timeout", "timeout_s", type=SECONDS, default=default, show_default=True, help=help_text)


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main``; SIGTERM ends it like Ctrl-C does, so that it can clean up."""

    async def guarded() -> T:
        task = asyncio.current_task()
        assert task is not None
        with contextlib.suppress(NotImplementedError):
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await main

    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


# --- tables -----------------------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, with_header: bool = True) -> str:
    """Columns padded to their widest cell, two blanks apart; empty cells are shown as ``-``."""
    lines = [list(header)] if with_header else []
    lines += [[cell or "-" for cell in row] for row in rows]
    if not lines:
        return ""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def machine_readable(value: Any, output: str) -> str:
    """``value`` as JSON or YAML."""
    plain = msgspec.to_builtins(value)
    if output == "json":
        return msgspec.json.format(msgspec.json.encode(plain), indent=2).decode()
    try:
        return msgspec.yaml.encode(plain).decode().rstrip()
    except ImportError:
        raise Rejected("-o yaml needs PyYAML: pip install pyyaml, or use -o json", code="usage") from None


def age(since: float | None, now: float | None = None) -> str:
    """Time since a Unix moment, ``-`` when there is none."""
    return "" if since is None else format_seconds(max(0.0, (now or time.time()) - since))


def clock(moment: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(moment))
