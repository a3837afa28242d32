"""The life of a service process: settings → logs → bus → health → body → drain (E16, E17). Shared by all five services.

    start      logs and traces set up; the bus connects (deadline); /livez answers from here on
    body       runs until it returns, fails, or SIGTERM/SIGINT sets ``stopping``
    drain      /readyz turns not ready; the body finishes or naks what is in hand, at most ``_DRAIN_S``
    end        the bus is closed, exit 0; an unexpected error ends with exit 1 and one clear line

With NATS away the end is the same, 10 s after the signal at the latest, and says what was not known to be written.

A Bug, or any error that escapes the body, ends the process: its supervisor restarts it and state is re-derived.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector

from openrl_common import settings, telemetry
from openrl_common.bus import Bus
from openrl_common.bus_metrics import export_bus
from openrl_common.errors import Bug, OpenRLError, Rejected, Unreachable
from openrl_common.health import Check, HealthServer, Heartbeat, check
from openrl_common.tenancy import without_password
from openrl_common.variables import unknown_variables

log = logging.getLogger(__name__)

_DRAIN_S, _CANCEL_S, _CLOSE_S = 7.0, 1.0, 2.0
"""Together what a launcher gives its workers before it kills them (--stop-grace), a third of what Kubernetes gives."""
_LOOP_STUCK_S = 10.0

SERVICE_SETTINGS = (
    settings.NATS_URL,
    settings.HOME,
    settings.LOG_LEVEL,
    settings.LOG_FORMAT,
    settings.HEALTH_HOST,
    settings.HEALTH_PORT,
)
"""What every service takes, as click options: ``@settings.settings(*SERVICE_SETTINGS, …)``."""


@dataclass(frozen=True)
class ServiceSettings:
    """The values of SERVICE_SETTINGS; a service's own dataclass extends it."""

    nats_url: str
    home: Path
    log_level: str
    log_format: str
    health_host: str
    health_port: int


@dataclass
class ServiceContext:
    """What a body gets. ``checks`` are the named readiness conditions; add to it before long work."""

    bus: Bus
    stopping: asyncio.Event
    registry: CollectorRegistry
    checks: dict[str, Check]
    health_port: int = 0

    def require(self, name: str, why: str) -> asyncio.Event:
        """A readiness condition: not ready, for ``why``, until the returned event is set."""
        event = asyncio.Event()
        self.checks[name] = check(event.is_set, why)
        return event


Body = Callable[[ServiceContext], Awaitable[None]]

_COLLECTIONS = (20_000, 10, 1_000)


def collect_seldom() -> None:
    """For services that hold records by the thousand; not for workers, whose old garbage may hold tensors.

    A full collection looks at every record: 80 ms with 10,000 workloads waiting. Young garbage is nearly all there is,
    so the old is looked at seldom.
    """
    gc.set_threshold(*_COLLECTIONS)


def run(service: str, config: ServiceSettings, body: Body, *, instance: str = "") -> int:
    """Run ``body`` as a service process; returns the exit code (0 ended or asked to, 1 failed, 2 usage, 5 no NATS)."""
    telemetry.configure_logging(service, level=config.log_level, log_format=config.log_format)
    for line in unknown_variables(os.environ):
        log.warning("%s", line)
    stop_tracing: Callable[[], None] = lambda: None  # noqa: E731
    try:
        stop_tracing = telemetry.configure_tracing(service, instance=instance)
        return asyncio.run(_serve(service, config, body))
    except OpenRLError as error:
        log.error("%s", error)
        print(f"openrl {service}: {error}", file=sys.stderr)
        if isinstance(error, Rejected) and error.code == "usage":
            return 2
        return 5 if isinstance(error, Unreachable) else 1
    finally:
        stop_tracing()


async def _serve(service: str, config: ServiceSettings, body: Body) -> int:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopping.set)
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    heartbeat = Heartbeat("event loop", limit_s=_LOOP_STUCK_S)
    checks: dict[str, Check] = {"draining": check(lambda: not stopping.is_set(), "the service is stopping")}
    health = HealthServer(
        registry, live={"loop": heartbeat.check}, ready=checks, host=config.health_host, port=config.health_port
    )
    port = health.start()
    beat = asyncio.create_task(heartbeat.follow_loop())
    try:
        connecting = asyncio.create_task(Bus.connect(config.nats_url, name=f"openrl-{service}"))
        await _first(connecting, stopping)
        if not connecting.done():
            connecting.cancel()
            return 0
        bus = connecting.result()
        export_bus(bus, registry)
        checks["bus"] = check(lambda: bus.connected, "not connected to NATS")
        context = ServiceContext(bus, stopping, registry, checks, health_port=port)
        log.info("service started health_port=%d nats_url=%s", port, without_password(config.nats_url))
        try:
            await _run_body(context, body)
        finally:
            await bus.close(within_s=_CLOSE_S)
            if unwritten := str(bus.unwritten):
                log.warning("writes not confirmed by NATS: %s; what caused them is seen again", unwritten)
        log.info("service stopped")
        return 0
    finally:
        beat.cancel()
        health.stop()


async def _run_body(context: ServiceContext, body: Body) -> None:
    """Run the body; on ``stopping`` give it ``_DRAIN_S`` to end by itself, then cancel it, and wait no longer than
    ``_CANCEL_S`` for that: whatever is left is cancelled once more when the loop ends.

    Raises Bug when the bus has failed meanwhile: the service goes on from the store in its next life, not from a view
    that nobody keeps up to date.
    """

    async def relay() -> None:
        await context.stopping.wait()
        context.bus.stopping.set()

    relaying = asyncio.create_task(relay())
    task = asyncio.ensure_future(body(context))
    try:
        await _first(task, context.stopping, context.bus.failed)
        if context.bus.failed.is_set() and not task.done():
            await _cancelled(task)
            raise Bug("something that the service lives by has ended, the log says what")
        if not task.done():
            context.bus.stopping.set()
            await asyncio.wait({task}, timeout=_DRAIN_S)
        if not task.done():
            log.warning("not done with what is in hand after %g s: it is given up", _DRAIN_S)
            await _cancelled(task)
            return
        task.result()
    except BaseExceptionGroup as group:
        raise _root(group) from group
    finally:
        relaying.cancel()


async def _cancelled(task: asyncio.Future[Any]) -> None:
    """Cancel the body. Raises what it ends with instead, when it ends in time."""
    task.cancel()
    await asyncio.wait({task}, timeout=_CANCEL_S)
    if task.done() and not task.cancelled():
        task.result()


def _root(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error inside nested groups: one line for the person instead of a tree."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _first(task: asyncio.Future[Any], *events: asyncio.Event) -> None:
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait({task, *waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()


async def until_stopped(stopping: asyncio.Event, *parts: Coroutine[Any, Any, None]) -> None:
    """Run every part until ``stopping``, then let each end by itself: the usual body of a service.

    A part that returns or fails before ``stopping`` is a fault: the others are cancelled and the error is raised.
    """

    async def guarded(part: Coroutine[Any, Any, None]) -> None:
        await part
        if not stopping.is_set():
            raise Bug(f"a task that runs for ever has ended: {part!r}")

    async with asyncio.TaskGroup() as group:
        for part in parts:
            group.create_task(guarded(part))
