"""The control plane of one host as an ``async with`` block: embedded NATS, ledger, placement, launcher, kept running.

    start   home locked ─▶ NATS ─▶ streams ─▶ ledger, placement, launcher ─▶ every /readyz answers ─▶ up.json
    end     workers stopped through the launcher (seats kept) ─▶ services ─▶ NATS ─▶ up.json removed, home unlocked

Invariants:
- One system per home: an exclusive lock that the kernel releases when its holder dies.
- Interrupted at any moment, by an exception or a signal, it leaves no process: whatever was started is ended, and
  further Ctrl-C do not cut the ending short.
- A service or NATS that dies is started again (back-off, same port); state stays on disk, the next start resumes it.
- A home that is deleted meanwhile is said; nothing is stopped for it, and nothing is started again on an empty one.

It decides nothing about jobs; it only starts, watches and ends processes.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import msgspec

from openrl_client import processes
from openrl_client.home import (
    SERVICE_GRACE_S,
    WORKERS_GRACE_S,
    Progress,
    RoomWatch,
    UpInfo,
    deleted_remedy,
    end_leftovers,
    is_deleted,
    is_locked,
    last_line,
    last_nats_port,
    lock_home,
    note_nats_port,
    real_home,
    rotate,
)
from openrl_client.signals import Signals
from openrl_common import nats_server
from openrl_common.errors import OpenRLError, Rejected, Transient, Unreachable
from openrl_common.process_name import this_process
from openrl_common.telemetry import otlp_endpoint

SERVICES = ("ledger", "placement", "launcher")
READY_DEADLINE_S = 30.0

_POLL_S = 0.02
_WATCH_S = 0.1
_HOME_LOOK_S = 1.0
_BACK_OFF_MOST_S = 5.0
_HEALTHY_S = 30.0
_FAILED_STARTS_MAX = 3


@dataclass
class _Service:
    name: str
    port: int
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    restarts: int = 0
    failures: int = 0
    log: Path = field(default_factory=Path)

    @property
    def pid(self) -> int:
        return 0 if self.process is None else self.process.pid


class LocalSystem:
    """The whole control plane on this host, for as long as the ``async with`` block lasts.

    Args:
        home: state, logs and weights; made when missing.
        environment: settings of the services as ``OPEN_RL_*`` variables.
        nats_port: 0 = the one of the last time on this home when it is free, else a free one.
        progress: gets one line per step, for a person.
        services: which of SERVICES to run (a benchmark stands in for the launcher itself).
        settings: the same as ``environment`` by flag name: ``devices="3x6GiB"``, ``max_seats_per_claim=2``.

    Raises:
        Rejected: the home is in use or cannot be written, a service refused its settings, or the OTLP endpoint in the
            environment is no address.
        Unreachable: a service was not ready in time.
    """

    def __init__(
        self,
        home: Path,
        *,
        environment: Mapping[str, str] | None = None,
        nats_port: int = 0,
        progress: Progress | None = None,
        services: tuple[str, ...] = SERVICES,
        **settings: object,
    ) -> None:
        self.home = real_home(home)
        self._names = services
        self.node = "local"
        self._settings = {**(environment or {}), **{f"OPEN_RL_{k.upper()}": str(v) for k, v in settings.items()}}
        self.node = self._settings.setdefault("OPEN_RL_NODE_NAME", os.environ.get("OPEN_RL_NODE_NAME") or "local")
        self._say = progress or (lambda line: None)
        self._nats = nats_server.NatsServer(self.home / "nats", port=nats_port)
        self._services: dict[str, _Service] = {}
        self._lock: IO[str] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._signals = Signals(self._kill_now)
        self._started = time.time()
        self._stopping = False

    # --- what users of a running system see ------------------------------------------------------------------------

    @property
    def nats_url(self) -> str:
        return self._nats.url

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of ``nats``, ``ledger``, ``placement`` and ``launcher``; 0 while one is being restarted."""
        return {"nats": self._nats.pid or 0, **{name: service.pid for name, service in self._services.items()}}

    @property
    def restarts(self) -> dict[str, int]:
        return {name: service.restarts for name, service in self._services.items()}

    @property
    def health_ports(self) -> dict[str, int]:
        return {name: service.port for name, service in self._services.items()}

    def kill(self, name: str) -> int:
        """``kill -9`` of a service or of ``nats``, as a crash would; it is started again. Returns the pid killed."""
        pid = self.pids[name]
        if pid:
            os.kill(pid, signal.SIGKILL)
        return pid

    def _progress(self, line: str) -> None:
        """Say it, if anybody can hear it: a full disk or a closed terminal must not end the watch."""
        with contextlib.suppress(OSError, ValueError):
            self._say(line)

    async def ready(self, name: str, *, deadline_s: float = READY_DEADLINE_S) -> None:
        """Wait until a service answers /readyz. Raises Unreachable or, when it refuses to start, Rejected."""
        service = self._services[name]
        deadline = time.monotonic() + deadline_s
        while not await _answers(service.port):
            if service.failures >= _FAILED_STARTS_MAX:
                raise Rejected(f"{name} does not start: {last_line(service.log)}", code="no-start")
            if time.monotonic() > deadline:
                raise Unreachable(f"{name} is not ready after {deadline_s:g} s: see {service.log}")
            await asyncio.sleep(_POLL_S)

    # --- life cycle ---------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._signals.install()
        atexit.register(self._kill_now)
        try:
            await self._start()
        except BaseException:
            await self._finish()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._finish()

    async def _start(self) -> None:
        otlp_endpoint()  # the services read it too: said here, once and before anything runs
        began = time.monotonic()
        self._lock = lock_home(self.home)
        await asyncio.to_thread(end_leftovers, self.home, progress=self._progress)
        self._nats.port = self._nats.port or last_nats_port(self.home)
        await self._start_nats()
        note_nats_port(self.home, self._nats.port)
        self._progress(f"nats       ready in {time.monotonic() - began:.2f} s   {self.nats_url}")
        # the services take longer to import than the streams to be made; one that is faster is simply started again
        for name in self._names:
            self._services[name] = _Service(name, _free_port(), log=self.home / "logs" / f"{name}.log")
            self._spawn(self._services[name])
        await self._ensure_streams()
        self._tasks = [asyncio.create_task(self._keep(service)) for service in self._services.values()]
        self._tasks += [asyncio.create_task(self._keep_nats()), asyncio.create_task(self._watch_home())]

        async def report(name: str) -> None:
            await self.ready(name)
            self._progress(f"{name:<10} ready in {time.monotonic() - began:.2f} s   pid {self._services[name].pid}")

        waiting = [asyncio.create_task(report(name)) for name in self._names]
        try:
            await asyncio.gather(*waiting)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        self._write_up()

    async def _start_nats(self) -> None:
        """Start the server in a thread; a cancellation waits for the thread, so that its process is known."""
        starting = asyncio.ensure_future(asyncio.to_thread(self._nats.start))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait({starting})
            if not starting.cancelled():
                starting.exception()
            raise

    async def _ensure_streams(self) -> None:
        from openrl_common import streams
        from openrl_common.bus import Bus

        bus = await Bus.connect(self.nats_url, name="openrl-up")
        try:
            await streams.ensure(bus)
        finally:
            await bus.close()

    async def _finish(self) -> None:
        """End everything, whatever happens meanwhile: cancellations are held back until it is done."""
        self._stopping = self._signals.deaf = True
        if self._lock is not None and self._home_deleted and is_locked(self.home):
            self._lock.close()  # another system has this home's name now: what is marked with it is not ours to end
            self._lock = None
        ending = asyncio.ensure_future(self._stop())
        cancelled = False
        while not ending.done():
            try:
                await asyncio.shield(ending)
            except asyncio.CancelledError:
                cancelled = True
            except Exception:
                break
        self._kill_now()
        atexit.unregister(self._kill_now)
        self._signals.restore()
        if self._lock is not None:
            with contextlib.suppress(OSError):
                (self.home / "up.json").unlink(missing_ok=True)
            self._lock.close()
            self._lock = None
        if not ending.cancelled() and (error := ending.exception()) is not None:
            raise error
        if cancelled and sys.exc_info()[0] is not asyncio.CancelledError:
            raise asyncio.CancelledError

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stop_workers()
        await asyncio.to_thread(self._stop_services)
        if self._lock is not None:
            await asyncio.to_thread(processes.end, processes.workers_of(self.home), grace_s=3.0)
        await asyncio.to_thread(self._nats.stop)

    async def _stop_workers(self) -> None:
        launcher = self._services.get("launcher")
        if (
            launcher is None
            or launcher.process is None
            or launcher.process.poll() is not None
            or not self._nats.running
        ):
            return
        with contextlib.suppress(OpenRLError):
            stopped = await stop_workers(self.nats_url, self.node)
            self._progress(f"workers    stopped: {stopped}")

    def _stop_services(self) -> None:
        running = [s for s in self._services.values() if s.process is not None and s.process.poll() is None]
        for service in running:
            assert service.process is not None
            service.process.terminate()
        deadline = time.monotonic() + SERVICE_GRACE_S
        for service in running:
            assert service.process is not None
            try:
                service.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                service.process.kill()
                service.process.wait()
            self._progress(f"{service.name:<10} stopped")

    def _kill_now(self) -> None:
        """The last resort, synchronous: kill -9 of everything that was started and of every worker of this home."""
        if self._lock is None:
            return
        self._stopping = True
        for service in self._services.values():
            if service.process is not None and service.process.poll() is None:
                service.process.kill()
                service.process.wait()
        processes.end([*processes.warm_parents_of(self.home), *processes.workers_of(self.home)], grace_s=0.0)
        self._nats.kill()

    # --- keeping it running -------------------------------------------------------------------------------------------

    def _spawn(self, service: _Service) -> None:
        rotate(service.log)
        environment = {
            **os.environ,
            **self._settings,
            "OPEN_RL_HOME": str(self.home),
            "OPEN_RL_NATS_URL": self.nats_url,
            "OPEN_RL_HEALTH_PORT": str(service.port),
            processes.SERVICE_MARK: service.name,
        }
        with service.log.open("ab") as log:
            # a session of its own: Ctrl-C at the terminal reaches the supervisor alone, which ends all in order
            service.process = subprocess.Popen(
                [sys.executable, "-m", f"openrl_{service.name}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.home,
                env=environment,
                start_new_session=True,
            )
        service.started_at = time.monotonic()

    async def _keep(self, service: _Service) -> None:
        """Start the service again whenever it ends, with back-off."""
        while True:
            await asyncio.sleep(_WATCH_S)
            if (service.process is not None and service.process.poll() is None) or self._home_deleted:
                continue
            if time.monotonic() - service.started_at > _HEALTHY_S:
                service.failures = 0
            service.failures += 1
            exit_code = service.process.returncode if service.process is not None else None
            if exit_code == 2:  # it refused its settings: trying again changes nothing
                service.failures = _FAILED_STARTS_MAX
                return
            self._progress(f"{service.name:<10} ended with exit code {exit_code}, starting it again: see {service.log}")
            await asyncio.sleep(min(_BACK_OFF_MOST_S, 0.1 * 2 ** min(service.failures - 1, 10)))
            service.restarts += 1
            with contextlib.suppress(OSError):  # tried again when it is seen not to run
                self._spawn(service)
                self._write_up()

    async def _keep_nats(self) -> None:
        failures = 0
        room = RoomWatch(self._nats, self.home, self._progress)
        while True:
            await asyncio.sleep(_WATCH_S)
            running = self._nats.running  # looked at in any case: whoever ended it waits until it is reaped
            if self._home_deleted:
                continue
            if running:
                if await room.is_back():
                    await asyncio.to_thread(self._nats.stop)
                continue
            self._progress("nats       ended, starting it again on its port")
            try:
                await self._start_nats()
                failures = 0
                self._write_up()
            except (Rejected, Transient, OSError) as error:
                failures += 1
                self._progress(f"nats       does not start: {error}")
                await asyncio.sleep(min(_BACK_OFF_MOST_S, 0.2 * 2 ** min(failures, 10)))

    @property
    def _home_deleted(self) -> bool:
        return self._lock is not None and is_deleted(self.home, self._lock)

    async def _watch_home(self) -> None:
        """Say once that the home was deleted: what runs goes on until somebody ends it, but it stores nothing."""
        while not self._home_deleted:  # noqa: ASYNC110 (another process does it)
            await asyncio.sleep(_HOME_LOOK_S)
        self._progress(
            f"home       {self.home} was deleted: what it had stored is lost, nothing is stored or started again; "
            f"{deleted_remedy(self.home)}"
        )

    def _write_up(self) -> None:
        info = UpInfo(
            pid=os.getpid(),
            process=this_process(),
            started=self._started,
            nats_url=self.nats_url,
            node=self.node,
            health_ports=self.health_ports,
            pids=self.pids,
        )
        path = self.home / "up.json"
        temporary = path.with_suffix(".json.new")
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(info), indent=2) + b"\n")
        temporary.replace(path)


async def stop_workers(nats_url: str, node: str) -> int:
    """Ask a launcher to stop its workers and keep their seats; returns how many ran."""
    from openrl_common.bus import Bus
    from openrl_common.controls import StopWorkers, WorkersStopped
    from openrl_common.names import query_subject

    bus = await Bus.connect(nats_url, name="openrl-down", deadline_s=2.0)
    try:
        subject = query_subject("launcher", f"{node}.stop-workers")
        return (await bus.request(subject, StopWorkers(), WorkersStopped, timeout_s=WORKERS_GRACE_S)).stopped
    finally:
        await bus.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _answers(port: int) -> bool:
    """Whether /readyz answers 200."""
    try:
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except (OSError, TimeoutError):
        return False
    try:
        writer.write(b"GET /readyz HTTP/1.0\r\n\r\n")
        async with asyncio.timeout(2.0):
            return b" 200 " in await reader.readline()
    except (OSError, TimeoutError):
        return False
    finally:
        writer.close()
