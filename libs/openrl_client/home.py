"""A home directory of one system: who holds it, what runs there, what is written down about it.

``up.lock`` is held for as long as a system runs (the kernel releases it when the holder dies), ``up.json`` says where
that system answers. Ending what a killed holder left behind is here too.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shlex
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec
import psutil

from openrl_client import processes
from openrl_common import nats_server
from openrl_common.errors import Rejected
from openrl_common.process_name import is_running

WORKERS_GRACE_S = 25.0
SERVICE_GRACE_S = 12.0
_ROOM_LOOK_S = 2.0
_ROOM_BYTES = 16 * 1024 * 1024
_LOG_BYTES_MAX = 16 * 1024 * 1024

Progress = Callable[[str], None]


class UpInfo(msgspec.Struct, frozen=True, kw_only=True):
    """``<home>/up.json``: where the running system answers. ``pids`` has ``nats`` and every service."""

    pid: int
    process: str = ""
    """The supervisor's ``process_name``; "" in what an older release wrote."""
    started: float
    nats_url: str
    node: str
    health_ports: dict[str, int]
    pids: dict[str, int]


def read_up(home: Path) -> UpInfo | None:
    """The system that runs on ``home``, or last ran there if it was killed; None when there is none."""
    try:
        return msgspec.json.decode((real_home(home) / "up.json").read_bytes(), type=UpInfo)
    except (OSError, msgspec.DecodeError, msgspec.ValidationError):
        return None


def real_home(home: Path) -> Path:
    return Path(os.path.realpath(Path(home).expanduser()))


def make_directories(home: Path) -> None:
    try:
        for directory in (home, home / "logs", home / "state", home / "weights"):
            directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Rejected(
            f"home {home} cannot be written: {error.strerror}; choose another --home", code="home-unwritable"
        ) from error


def lock_home(home: Path) -> IO[str]:
    """Take the home for this process. Raises Rejected, naming who has it."""
    make_directories(home)
    try:
        lock = (home / "up.lock").open("a+")
    except OSError as error:
        raise Rejected(f"home {home} cannot be written: {error.strerror}", code="home-unwritable") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        pid = lock.read().strip() or "unknown"
        lock.close()
        raise Rejected(
            f"home {home} is in use by pid {pid}: stop it with `openrl down --home {shlex.quote(str(home))}` "
            "or choose another --home",
            code="home-in-use",
        ) from None
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock


def is_deleted(home: Path, lock: IO[str]) -> bool:
    """The home of whoever holds ``lock`` is not there any more: deleted, moved away, or another one by now."""
    try:
        return not os.path.samestat((home / "up.lock").stat(), os.fstat(lock.fileno()))
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:  # a file system that does not answer has not lost it
        return False


def deleted_under(home: Path) -> str:
    """What to say when services run on a home that was deleted; empty when none do.

    Whoever is killed leaves the lock's file behind: where that is missing too, the directory was taken away.
    """
    home = real_home(home)
    if (home / "up.lock").exists() or not processes.services_of(home):
        return ""
    return f"a system runs on {home}, but that directory was deleted: what it had stored is lost"


def deleted_remedy(home: Path) -> str:
    return f"end what still runs with `openrl down --home {shlex.quote(str(home))}`, then `openrl up`"


def is_locked(home: Path) -> bool:
    try:
        with (home / "up.lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def running_supervisor(info: UpInfo | None) -> psutil.Process | None:
    if info is None or not is_running(info.process):
        return None
    with contextlib.suppress(psutil.Error):
        return psutil.Process(info.pid)
    return None


def end_leftovers(home: Path, *, progress: Progress = lambda line: None) -> None:
    """End what a killed supervisor left on this home: services first, so that nobody starts workers again."""
    left = processes.services_of(home)
    workers = processes.workers_of(home)
    if left or workers:
        progress(f"ending {len(left)} services and {len(workers)} workers that were left on {home}")
    processes.end(left, grace_s=SERVICE_GRACE_S)
    processes.end(processes.workers_of(home), grace_s=WORKERS_GRACE_S)
    nats_server.stop_running(home / "nats")
    processes.end(processes.nats_of(home), grace_s=nats_server.STOP_GRACE_S)  # its lock went with a deleted home


class RoomWatch:
    """Notices a disk that was full and has room again: the server must then be started anew to write on."""

    def __init__(self, server: nats_server.NatsServer, home: Path, progress: Progress) -> None:
        self._server = server
        self._home = home
        self._progress = progress
        self._next = 0.0
        self._told = False

    async def is_back(self) -> bool:
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + _ROOM_LOOK_S
        if not await asyncio.to_thread(self._server.write_failed):
            self._told = False
            return False
        if shutil.disk_usage(self._home).free >= _ROOM_BYTES:
            self._progress("nats       could not write, there is room now: starting it again")
            return True
        if not self._told:
            self._told = True
            self._progress(
                f"nats       cannot write: the disk of {self._home} is full, nothing is stored until it is not"
            )
        return False


def last_nats_port(home: Path) -> int:
    """The port that this home's NATS had last time, if it is free: clients that still look for it find it. Else 0."""
    try:
        port = int((home / "nats" / "port").read_text())
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    except (OSError, ValueError, OverflowError):
        return 0
    return port


def note_nats_port(home: Path, port: int) -> None:
    with contextlib.suppress(OSError):  # a full disk costs the next start's port, nothing else
        (home / "nats" / "port").write_text(f"{port}\n")


def rotate(log: Path) -> None:
    with contextlib.suppress(OSError):
        if log.stat().st_size > _LOG_BYTES_MAX:
            log.replace(log.with_suffix(".log.1"))


def last_line(log: Path) -> str:
    """What a service said last, and where the rest is."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    return f"{lines[-1].removeprefix('Error: ')} (see {log})" if lines else f"see {log}"
