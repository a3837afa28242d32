"""``openrl bench prefetch``: reading a cold checkpoint, from a slow FUSE mount and from a plain disk, by several ways.

Every measurement is a process of its own (``openrl_trainer/load_timings.py`` says what is timed), so that no import and
no cache of one helps the next. The mount is the same for all: its latency for each read, one link, read requests of at
most 256 KiB, the kernel's own read-ahead; its source lies in memory. A way that does not run here is listed with the
reason and no figure.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from openrl_client.bench.machine import Machine, StorePlace, describe, store_place
from openrl_client.bench.mounts import slow_mount, why_no_fuse
from openrl_client.home import Progress
from openrl_common.errors import Rejected
from openrl_common.page_cache import read_ahead_bytes

METHODS = ("mmap", "warm", "openrl", "vllm", "runai", "fastsafetensors")
DISK_METHODS = ("mmap", "warm", "openrl", "openrl-always", "vllm", "runai", "fastsafetensors")
_MIB = 1 << 20
_ONE_S = 900.0
_MEMORY = Path("/dev/shm")


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    """The same for every method. ``max_background``: page cache reads that the kernel keeps under way at most."""

    max_read_bytes: int
    bytes_per_s: int
    max_background: int
    read_ahead_bytes: int


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement, cold (but for ``warm``). ``latency_ms`` 0 = the disk. ``skipped``: why there is no figure."""

    mount: str
    latency_ms: float
    method: str
    seconds: float | None = None
    mib_per_s: float | None = None
    detail: str = ""
    skipped: str = ""


class PrefetchReport(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes:
    ratio_vs_mmap: latency in ms → seconds of mmap over seconds of openrl, loading included.
    waiting_ratio_vs_mmap: the same of what each takes longer than with a warm page cache (``warm``).
    disk_ratio_vs_mmap: of openrl on ``auto`` and of ``always``, on the disk.
    """

    ratio_vs_mmap: dict[str, float]
    waiting_ratio_vs_mmap: dict[str, float]
    disk_ratio_vs_mmap: dict[str, float]
    runs: list[Run]
    checkpoint_bytes: int
    cache_emptied_by: str
    mount: Mount
    disk: StorePlace
    disk_read_ahead_bytes: int
    load_average: tuple[float, float]
    machine: Machine


def measure(
    store: Path | None,
    *,
    latencies_ms: Sequence[float],
    num_times: int,
    max_background: int,
    vllm_python: Path | None,
    progress: Progress,
) -> PrefetchReport:
    """Make a checkpoint, read it all ways at all latencies and from the disk, the best of ``num_times`` each.

    Raises:
        Rejected: the disk's directory is in memory, or there is no room in memory for the mount's source.
    """
    load_before = os.getloadavg()[0]
    place = store_place(store)
    with ExitStack() as stack:
        disk = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="openrl-bench-", dir=place.path)))
        ways = _Ways(vllm_python, num_times, progress)
        progress("making a checkpoint")
        ways.make(disk / "model")
        size = sum(path.stat().st_size for path in (disk / "model").glob("*.safetensors"))
        runs = [ways.run(disk / "model", "disk", 0.0, method) for method in DISK_METHODS]
        mount_read_ahead = 0
        if why_no_fuse():
            runs += [Run(mount="fuse", latency_ms=each, method="mmap", skipped=why_no_fuse()) for each in latencies_ms]
        else:
            source = _in_memory(stack, disk / "model", size)
            point = disk / "mount"
            point.mkdir()
            for latency_ms in latencies_ms:
                options = ("--latency-ms", str(latency_ms), "--max-background", str(max_background))
                with slow_mount(source, point, *options):
                    mount_read_ahead = _read_ahead(point)
                    runs += [ways.run(point, "fuse", latency_ms, method) for method in METHODS]
        return PrefetchReport(
            ratio_vs_mmap={f"{each:g}": _ratio(runs, "fuse", each, "openrl") for each in latencies_ms},
            waiting_ratio_vs_mmap={f"{each:g}": _waiting_ratio(runs, "fuse", each) for each in latencies_ms},
            disk_ratio_vs_mmap={each: _ratio(runs, "disk", 0.0, each) for each in ("openrl", "openrl-always")},
            runs=runs,
            checkpoint_bytes=size,
            cache_emptied_by=ways.emptied_by,
            mount=Mount(
                max_read_bytes=256 * 1024,
                bytes_per_s=1 << 30,
                max_background=max_background,
                read_ahead_bytes=mount_read_ahead,
            ),
            disk=place,
            disk_read_ahead_bytes=_read_ahead(disk),
            load_average=(round(load_before, 2), round(os.getloadavg()[0], 2)),
            machine=describe(),
        )


class _Ways:
    """Runs one measurement in the interpreter that has what it needs."""

    def __init__(self, vllm_python: Path | None, num_times: int, progress: Progress) -> None:
        spec = importlib.util.find_spec("openrl_trainer.load_timings")
        if spec is None or spec.origin is None:
            raise Rejected(
                "the trainer is not installed here: pip install -e '.[trainer]' in the repository", code="usage"
            )
        self._script = spec.origin
        self._vllm_python = vllm_python
        self._num_times = num_times
        self._progress = progress
        self.emptied_by = ""

    def make(self, directory: Path) -> None:
        done = self._call(sys.executable, "make", directory)
        if done.returncode != 0:
            raise Rejected(f"no checkpoint could be made: {_last_line(done.stderr)}", code="no-checkpoint")

    def run(self, directory: Path, mount: str, latency_ms: float, method: str) -> Run:
        found: dict[str, Any] | None = None
        for _ in range(self._num_times):
            try:
                done = self._call(self._python(method), method, directory)
            except subprocess.TimeoutExpired:
                return self._skipped(mount, latency_ms, method, f"took longer than {_ONE_S:g} s")
            if done.returncode != 0:
                return self._skipped(mount, latency_ms, method, _last_line(done.stderr))
            this = json.loads(done.stdout.splitlines()[-1])
            self.emptied_by = this["cache_emptied_by"] or self.emptied_by
            found = this if found is None or this["seconds"] < found["seconds"] else found
        assert found is not None
        size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        seconds = float(found["seconds"])
        rate = size / _MIB / seconds
        self._progress(f"{mount} {latency_ms:g} ms {method}: {seconds:.2f} s, {rate:.0f} MiB/s {found['detail']}")
        return Run(
            mount=mount,
            latency_ms=latency_ms,
            method=method,
            seconds=round(seconds, 3),
            mib_per_s=round(rate, 1),
            detail=found["detail"],
        )

    def _skipped(self, mount: str, latency_ms: float, method: str, why: str) -> Run:
        self._progress(f"{mount} {latency_ms:g} ms {method}: not run: {why}")
        return Run(mount=mount, latency_ms=latency_ms, method=method, skipped=why)

    def _python(self, method: str) -> str:
        return str(self._vllm_python) if method == "vllm" and self._vllm_python is not None else sys.executable

    def _call(self, python: str, method: str, directory: Path) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [python, self._script, method, str(directory)]
        return subprocess.run(command, capture_output=True, text=True, timeout=_ONE_S, check=False, env=environment)


def _in_memory(stack: ExitStack, model: Path, size: int) -> Path:
    if not _MEMORY.is_dir() or shutil.disk_usage(_MEMORY).free < 2 * size:
        raise Rejected(f"{_MEMORY} has no room for the mount's source of {size} bytes", code="no-room")
    source = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="openrl-bench-", dir=_MEMORY))) / "model"
    return shutil.copytree(model, source)


def _read_ahead(directory: Path) -> int:
    fd = os.open(directory, os.O_RDONLY)
    try:
        return read_ahead_bytes(fd)
    finally:
        os.close(fd)


def _seconds(runs: list[Run], mount: str, latency_ms: float, method: str) -> float:
    """NaN where there is no figure."""
    for run in runs:
        if (run.mount, run.latency_ms, run.method) == (mount, latency_ms, method) and run.seconds is not None:
            return run.seconds
    return float("nan")


def _ratio(runs: list[Run], mount: str, latency_ms: float, method: str) -> float:
    return round(_seconds(runs, mount, latency_ms, "mmap") / _seconds(runs, mount, latency_ms, method), 2)


def _waiting_ratio(runs: list[Run], mount: str, latency_ms: float) -> float:
    warm = _seconds(runs, mount, latency_ms, "warm")
    waited = max(1e-3, _seconds(runs, mount, latency_ms, "openrl") - warm)
    return round((_seconds(runs, mount, latency_ms, "mmap") - warm) / waited, 2)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no word was said"
