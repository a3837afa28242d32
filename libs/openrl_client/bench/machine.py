"""What a figure was measured on: the machine, the versions, the file system of the store.

A store in memory would make every figure of the ledger a lie (an acknowledged write is on the disk, E18), so such a
directory is refused.
"""

from __future__ import annotations

import os
import platform
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path

import msgspec
import psutil

from openrl_common.errors import Rejected
from openrl_common.nats_server import find_binary
from openrl_common.page_cache import file_system_of as file_system_of

_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_COMMAND_S = 5.0


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """``cores`` are those this process may use. ``commit`` is empty outside a git checkout."""

    cpu: str
    cores: int
    memory_gib: float
    kernel: str
    python: str
    nats_server: str
    nats_py: str
    openrl: str
    commit: str


class StorePlace(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    file_system: str


def describe() -> Machine:
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        nats_server=_output([str(find_binary()), "--version"]).rpartition(" ")[2].removeprefix("v"),
        nats_py=metadata.version("nats-py"),
        openrl=metadata.version("openrl"),
        commit=_output(["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]),
    )


def store_place(directory: Path | None) -> StorePlace:
    """Where the store will be: ``directory``, else the temporary directory, else the home directory.

    Raises:
        Rejected: the directory lives in memory.
    """
    choices = [directory] if directory is not None else [Path(tempfile.gettempdir()), Path.home()]
    for path in choices:
        file_system = file_system_of(path)
        if file_system not in _IN_MEMORY:
            return StorePlace(path=str(path.absolute()), file_system=file_system)
    raise Rejected(
        f"store {str(choices[-1])!r} is in memory ({file_system_of(choices[-1])}): seats are measured on a disk, "
        "name a directory on one with --store",
        code="usage",
    )


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _output(command: list[str]) -> str:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""
