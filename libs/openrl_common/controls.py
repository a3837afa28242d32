"""Requests by which a person, through the command line, steers a service (``openrl.q.<service>.…``)."""

from __future__ import annotations

import msgspec


class StopWorkers(msgspec.Struct, frozen=True, kw_only=True):
    """To a launcher: stop every worker of the node, keep their seats, start nothing any more (``openrl down``)."""


class WorkersStopped(msgspec.Struct, frozen=True, kw_only=True):
    """All are seen gone; ``stopped`` had a process."""

    stopped: int
