"""Requests by which a person, through the command line, steers a service (``openrl.q.<service>.…``)."""

from __future__ import annotations

import msgspec

from openrl_common.records import WorkerRecord


class StopWorkers(msgspec.Struct, frozen=True, kw_only=True):
    """To a launcher: stop every worker of the node, keep their seats, start nothing any more (``openrl down``)."""


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """To a launcher: which workers of its node have a process now? It answers before it has read the ledger."""


class RunningAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """``workers``: as recorded; one that was never recorded has no ``entry``."""

    workers: list[WorkerRecord]


class LedgerState(msgspec.Struct, frozen=True, kw_only=True):
    """To a ledger: does it handle events? (It does not while its bucket is lost, L7.)"""


class LedgerStateAnswer(msgspec.Struct, frozen=True, kw_only=True):
    active: bool
    identity: str = ""
    seat_limit: int = 0


class WorkersStopped(msgspec.Struct, frozen=True, kw_only=True):
    """All are seen gone; ``stopped`` had a process."""

    stopped: int
