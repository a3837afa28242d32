"""The launcher's settings: flags and ``OPEN_RL_*`` variables (E19)."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from typing import Any

import click

from openrl_common import settings
from openrl_common.errors import Rejected
from openrl_common.names import check_name
from openrl_common.records import Role
from openrl_common.service import SERVICE_SETTINGS, ServiceSettings


class _Node(click.ParamType[str]):
    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return check_name("node name", str(value), 40)
        except Rejected as error:
            self.fail(str(error), param, ctx)


class _Roles(click.ParamType[tuple[Role, ...]]):
    name = "roles"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Role, ...]:
        if isinstance(value, tuple):
            return value
        roles = [part.strip() for part in str(value).split(",") if part.strip()]
        unknown = [role for role in roles if role not in list(Role)]
        if unknown:
            self.fail(f"{unknown[0]!r} is not a role: write trainer, sampler or both with a comma", param, ctx)
        return tuple(sorted({Role(role) for role in roles}))


def host_slug() -> str:
    """This host's name as a legal token."""
    return re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower())[:40].strip("-") or "node"


NODE_NAME = settings.setting("--node-name", name="node", type=_Node(), default=host_slug(), help="Name of this node.")
NODE_ROLES = settings.setting(
    "--node-roles", name="roles", type=_Roles(), default="", help="Roles this node accepts (P1); empty = both."
)
STOP_GRACE_S = settings.setting(
    "--stop-grace",
    name="stop_grace_s",
    type=settings.SECONDS,
    default="10s",
    help="How long a worker may take to end after SIGTERM before it is killed.",
)
RESTARTS_MAX = settings.setting(
    "--max-restarts",
    name="restarts_max",
    type=settings.WholeNumber(),
    default="3",
    help="Failures in a row after which a worker is not started again (F4).",
)
LOGS_KEPT = settings.setting(
    "--worker-logs-kept",
    name="logs_kept",
    type=settings.WholeNumber(minimum=1),
    default="10",
    help="Log files kept per workload.",
)

ALL = (
    *SERVICE_SETTINGS,
    NODE_NAME,
    NODE_ROLES,
    settings.DEVICES,
    settings.HOST_MEMORY_BYTES,
    STOP_GRACE_S,
    RESTARTS_MAX,
    LOGS_KEPT,
    settings.WARM_START,
)


@dataclass(frozen=True)
class LauncherSettings(ServiceSettings):
    """The values of ALL."""

    node: str
    roles: tuple[Role, ...] = ()
    devices: tuple[int, ...] = ()
    host_memory_bytes: int = 0
    stop_grace_s: float = 10.0
    restarts_max: int = 3
    logs_kept: int = 10
    warm_start: str = "off"
