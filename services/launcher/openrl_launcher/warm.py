"""Warm start (B6): this launcher's zygote, kept running, and workers forked from it.

    keep     zygote started ─▶ it says ready, or why not ─▶ watched, started again with back-off, or given up
    launch   waits until it is ready or given up ─▶ order with log file and gate ─▶ the worker tells its pid ─▶ go

Invariants:
- ``launch`` returns a worker that runs as this process' own child (exit code, zombie), or None and then nothing was
  started and nothing will: the caller starts the worker plainly. A gate given up on ends its worker before it runs.
- The zygote ends with this process, whatever ends that; workers do not.

It chooses neither modules nor environments and does not look for workers: they are found like any other (local.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import psutil

from openrl_common import zygote

log = logging.getLogger(__name__)

_READY_WITHIN_S = 120.0
_STARTED_WITHIN_S = 10.0
_BACK_OFF_S = (1.0, 5.0, 30.0)
_HEALTHY_S = 60.0
_PR_SET_CHILD_SUBREAPER = 36


class Forked:
    """A worker forked by the zygote; what of ``subprocess.Popen`` the backend needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int | None:
        """Blocks until it has ended; its exit code, negative for a signal; None when somebody else took it."""
        if self.returncode is None:
            try:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except ChildProcessError:
                return None
        return self.returncode


class WarmStart:
    """One zygote.

    Args:
        environment: what its workers have in common; their own variables must not be in it.
        modules: imported before the first fork.
        log_path: its own output.
    """

    def __init__(self, *, environment: Mapping[str, str], modules: tuple[str, ...], cwd: Path, log_path: Path) -> None:
        self._environment = dict(environment)
        self._modules = modules
        self._cwd = cwd
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._settled = asyncio.Event()
        """Ready, or not there: no launch waits."""
        self._adopting = 0
        self.ready = False

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    def memory_bytes(self) -> int:
        """Its memory: the share that no worker has in common with it counts whole, shared pages in parts (PSS)."""
        try:
            return int(psutil.Process(self.pid).memory_full_info().pss) if self.pid else 0
        except psutil.Error:
            return 0

    async def keep(self) -> None:
        """Keep the zygote running until cancelled; returns early when it is given up, having said why."""
        failures = 0
        try:
            while failures < len(_BACK_OFF_S):
                began = time.monotonic()
                self._settled.clear()
                try:
                    why, fatal = await self._life()
                except OSError as error:
                    why, fatal = str(error), False
                self._end()
                failures = 1 if time.monotonic() - began > _HEALTHY_S else failures + 1
                if fatal:
                    break
                pause_s = _BACK_OFF_S[failures - 1]
                log.warning("warm start ended (%s): workers start plainly, tried again in %g s", why, pause_s)
                await asyncio.sleep(pause_s)
            log.warning("warm start is given up: %s; workers start plainly", why)
        finally:
            self._end()

    async def _life(self) -> tuple[str, bool]:
        """Start the zygote and wait for its end: why, and whether trying again is pointless."""
        control = self._control = self._start()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_READY_WITHIN_S):
                body = await loop.sock_recv(control, zygote.MESSAGE_BYTES_MAX)
        except TimeoutError:
            return f"not ready after {_READY_WITHIN_S:g} s", False
        if not body:
            return f"it ended while importing, see {self._log_path}", False
        ready = msgspec.json.decode(body, type=zygote.Ready)
        if ready.error:
            return ready.error, True
        self.ready = True
        self._settled.set()
        memory = await asyncio.to_thread(self.memory_bytes)
        log.info(
            "warm start ready: pid %d, %d modules in %.1f s, %.0f MiB",
            self.pid, ready.num_modules, ready.seconds, memory / (1 << 20),
        )  # fmt: skip
        while await loop.sock_recv(control, zygote.MESSAGE_BYTES_MAX):
            pass
        return "it ended", False

    def _start(self) -> socket.socket:
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs, self._log_path.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "openrl_common.zygote", f"--control={theirs.fileno()}"]
                + [f"--parent={os.getpid()}", *self._modules],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._cwd,
                env=self._environment | {zygote.MARK: zygote.mark()},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        return ours

    def _end(self) -> None:
        self.ready = False
        self._settled.set()
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop_waiting(self) -> None:
        """Nobody waits for the warm start any more: what does is started plainly, and can be stopped."""
        self._settled.set()

    # --- workers -----------------------------------------------------------------------------------------------------

    async def launch(self, order: zygote.Order, log_descriptor: int) -> Forked | None:
        """Fork a worker. None, having said why: nothing was started."""
        if not self._settled.is_set():
            log.info("a worker waits for the warm start")
        await self._settled.wait()
        if not self.ready or self._control is None:
            return None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            with ours, self._adopt():
                with theirs:
                    socket.send_fds(self._control, [msgspec.json.encode(order)], [log_descriptor, theirs.fileno()])
                async with asyncio.timeout(_STARTED_WITHIN_S):
                    body = await asyncio.get_running_loop().sock_recv(ours, zygote.MESSAGE_BYTES_MAX)
                started = msgspec.json.decode(body, type=zygote.Started) if body else zygote.Started(pid=0, parent=0)
                if started.error or started.parent != os.getpid():
                    raise ConnectionError(started.error or "the zygote forked nothing")
                ours.send(zygote.GO)
        except (OSError, TimeoutError, msgspec.MsgspecError) as error:
            log.warning("warm start failed, the worker starts plainly: %s", error or type(error).__name__)
            return None
        return Forked(started.pid)

    @contextlib.contextmanager
    def _adopt(self) -> Iterator[None]:
        """While a worker is forked, orphans below this process become its children instead of init's."""
        self._adopting += 1
        _be_subreaper(True)
        try:
            yield
        finally:
            self._adopting -= 1
            _be_subreaper(self._adopting > 0)


def _be_subreaper(wanted: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "this kernel has no subreapers")
