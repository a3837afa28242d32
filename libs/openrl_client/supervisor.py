"""``openrl up`` and ``openrl down``: the system of ``local_system`` as a process that lives on, and its end.

``up`` starts this module as a process in a session of its own, relays its progress and returns when it is ready;
``down`` asks that process to end, and ends by itself what a ``kill -9`` of it left behind. Ctrl-C during either leaves
no process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import psutil

from openrl_client import processes
from openrl_client.home import (
    Progress,
    UpInfo,
    end_leftovers,
    is_locked,
    make_directories,
    read_up,
    real_home,
    rotate,
    running_supervisor,
)
from openrl_client.local_system import LocalSystem
from openrl_common.errors import OpenRLError, Rejected, Unreachable

__all__ = ["LocalSystem", "UpInfo", "down", "read_up", "up"]


def up(
    home: Path,
    *,
    environment: Mapping[str, str] | None = None,
    nats_port: int = 0,
    progress: Progress = print,
    foreground: bool = False,
) -> UpInfo:
    """Start the system and return when it is ready; it lives on in a process of its own. With ``foreground`` it runs
    here until Ctrl-C or SIGTERM, and has ended when this returns.

    Raises:
        Rejected: the home is in use (the message names its pid) or a service refused its settings.
        Unreachable: something was not ready in time. KeyboardInterrupt: interrupted; nothing is left running.
    """
    if foreground:
        return asyncio.run(_run(real_home(home), environment or {}, nats_port, progress, lambda info: None))
    return _Detached(real_home(home), environment or {}, nats_port, progress).start()


def down(home: Path, *, progress: Progress = print, deadline_s: float = 60.0) -> int:
    """Stop the system of ``home`` and return how many processes were ended; 0 when none ran. Seats and state stay.

    Also ends what a killed supervisor left behind.
    """
    home = real_home(home)
    info = read_up(home)
    before = processes.services_of(home) + processes.workers_of(home)
    supervisor = running_supervisor(info)
    if supervisor is not None and is_locked(home):
        progress(f"stopping the system on {home} (pid {supervisor.pid})")
        with contextlib.suppress(psutil.Error):
            supervisor.terminate()
        _, alive = psutil.wait_procs([supervisor], timeout=deadline_s)
        for process in alive:
            progress(f"pid {process.pid} did not end within {deadline_s:g} s: killed")
            processes.end(alive, grace_s=0.0)
    end_leftovers(home, progress=progress)
    with contextlib.suppress(OSError):
        (home / "up.json").unlink(missing_ok=True)
    return len(before)


async def _run(
    home: Path, environment: Mapping[str, str], nats_port: int, progress: Progress, on_ready: Callable[[UpInfo], None]
) -> UpInfo:
    info: UpInfo | None = None
    try:
        async with LocalSystem(home, environment=environment, nats_port=nats_port, progress=progress):
            info = read_up(home)
            assert info is not None
            on_ready(info)
            await asyncio.Event().wait()
    except asyncio.CancelledError:
        if info is None:
            raise
    assert info is not None
    return info


class _Order(msgspec.Struct, kw_only=True):
    """What ``openrl up`` tells the process it starts, and what that answers, a JSON line each."""

    home: str = ""
    environment: dict[str, str] = {}
    nats_port: int = 0
    progress: str = ""
    error: str = ""
    code: str = ""
    ready: UpInfo | None = None


class _Detached:
    """Starts this module as a process in a session of its own and relays its progress until it is ready."""

    def __init__(self, home: Path, environment: Mapping[str, str], nats_port: int, progress: Progress) -> None:
        self._order = _Order(home=str(home), environment=dict(environment), nats_port=nats_port)
        self._progress = progress
        self._log = home / "logs" / "supervisor.log"

    def start(self) -> UpInfo:
        make_directories(Path(self._order.home))
        rotate(self._log)
        process: subprocess.Popen[bytes] | None = None
        interrupted: list[int] = []
        main_thread = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, lambda number, _: interrupted.append(number)) if main_thread else None
        try:
            with self._log.open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "openrl_client.supervisor"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                    env={**os.environ, "OPEN_RL_HOME": self._order.home, processes.SERVICE_MARK: "supervisor"},
                )
        finally:
            if main_thread:
                signal.signal(signal.SIGINT, before)
        try:
            if interrupted:
                raise KeyboardInterrupt
            info = self._await_ready(process)
            process.returncode = 0  # not waited for: it lives on
            return info
        except BaseException:
            process.terminate()
            while process.poll() is None:  # it ends what it started; more Ctrl-C do not change that
                with contextlib.suppress(KeyboardInterrupt):
                    process.wait()
            raise

    def _await_ready(self, process: subprocess.Popen[bytes]) -> UpInfo:
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdout, process.stdin:
            process.stdin.write(msgspec.json.encode(self._order) + b"\n")
            process.stdin.flush()
            for line in process.stdout:
                answer = msgspec.json.decode(line, type=_Order)
                if answer.progress:
                    self._progress(answer.progress)
                if answer.error:
                    raise Rejected(answer.error, code=answer.code) if answer.code else Unreachable(answer.error)
                if answer.ready is not None:
                    return answer.ready
        raise Unreachable(f"the supervisor ended before it was ready: see {self._log}")


def main() -> int:
    """The detached supervisor: reads its order from stdin, reports on stdout until ready, runs until SIGTERM."""
    os.environ.pop(processes.SERVICE_MARK, None)  # marks this process, not what it starts
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Order)
    listening = True

    def say(answer: _Order) -> None:
        nonlocal listening
        if listening:
            try:
                sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
                sys.stdout.buffer.flush()
                return
            except OSError:
                listening = False  # who started us is gone; carry on
        if answer.progress:
            print(time.strftime("%FT%TZ", time.gmtime()), answer.progress, file=sys.stderr, flush=True)

    def on_ready(info: UpInfo) -> None:
        nonlocal listening
        say(_Order(ready=info))
        listening = False
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)  # the reader sees the end of the pipe

    try:
        run = _run(
            Path(order.home), order.environment, order.nats_port, lambda line: say(_Order(progress=line)), on_ready
        )
        asyncio.run(run)
    except OpenRLError as error:
        say(_Order(error=str(error), code=error.code if isinstance(error, Rejected) else ""))
        return 1
    except OSError as error:
        what = f"{order.home} cannot be written: {error.strerror or error}"
        say(_Order(error=f"{what}: make room, or choose another --home", code="home-unwritable"))
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
