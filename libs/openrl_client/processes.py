"""Finding and ending the processes of one home, whoever started them: their environment names it, NATS' command line.

Nothing is ever signalled by name or by a remembered number alone: the very process must say that it belongs to this
home, so that a reused pid, another home or the user's own shell is never touched.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from openrl_common import zygote

SERVICE_MARK = "OPEN_RL_SERVICE"
WORKER_MARK = "OPEN_RL_ASSIGNMENT"


def services_of(home: Path) -> list[psutil.Process]:
    """Control services, a warm parent of workers, and a detached supervisor, of this home."""
    return list(_marked(home, SERVICE_MARK))


def warm_parents_of(home: Path) -> list[psutil.Process]:
    """What workers of this home are forked from (openrl_common.zygote); it ends with its launcher by itself."""
    return list(_marked(home, SERVICE_MARK, zygote.MARK_VALUE))


def workers_of(home: Path) -> list[psutil.Process]:
    """Trainers and samplers of this home, with everything they started."""
    return list(_marked(home, WORKER_MARK))


def nats_of(home: Path) -> list[psutil.Process]:
    """The embedded NATS server of this home, also when its files, and with them its lock, were deleted."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.cmdline()[1:] == ["--config", str(home / "nats" / "nats.conf")]:
                found.append(process)
    return found


def end(processes: Iterable[psutil.Process], *, grace_s: float) -> int:
    """SIGTERM, the grace, SIGKILL; returns when all are gone: how many there were."""
    waiting = list(processes)
    for process in waiting:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, stubborn = psutil.wait_procs(waiting, timeout=grace_s)
    for process in stubborn:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(stubborn, timeout=5.0)
    return len(waiting)


def _marked(home: Path, mark: str, value: str = "") -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            environment = process.environ()
            found = environment.get(mark, "").rstrip()
            if found and value in ("", found) and environment.get("OPEN_RL_HOME") == str(home):
                yield process
