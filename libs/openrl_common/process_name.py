"""Names of processes that outlive them: no other process ever has the same, whatever happens to pids and clocks."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import psutil


def this_process() -> str:
    """A holder's name that ``process_is_gone`` understands: the machine's boot, the pid's name space, pid and start."""
    return f"{_where()}/{os.getpid()}/{_started(os.getpid())}"


def is_running(name: str) -> bool:
    """Does the process of this name run here? False where that cannot be told from here."""
    return name.partition("/")[0] == _where() and not process_is_gone(name)


def process_is_gone(holder: str) -> bool:
    """Did ``holder`` run here, and does it no more? False where that cannot be told from here."""
    where, _, rest = holder.partition("/")
    pid, _, created = rest.partition("/")
    if where != _where() or not pid.isdigit():
        return False
    try:
        return _started(int(pid)) != created
    except psutil.NoSuchProcess:
        return True
    except (psutil.Error, OSError):
        return False


def _started(pid: int) -> str:
    """When a process started, by a clock that nobody sets. Raises NoSuchProcess.

    On Linux in ticks since the boot: a start in seconds since 1970 moves with every correction of the system's clock,
    and a process that runs would look like another one, which is to say gone.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return f"{psutil.Process(pid).create_time():.2f}"


def _where() -> str:
    """This boot of this machine, and which pids this process sees. Elsewhere than on Linux: the network card."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"{uuid.getnode():x}"
