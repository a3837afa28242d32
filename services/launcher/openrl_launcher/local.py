"""The backend of this host: workers are child processes in sessions of their own, their output goes to files.

Invariants:
- A worker outlives the launcher (B1, E17): own session, no pipe, nothing inherited. It is found again by what its
  environment says (home, node, assignment), never by a list that could be lost.
- Only processes whose environment names the very assignment are ever signalled, so that a reused pid is safe.

It does not decide who runs where and does not write records.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import psutil

from openrl_common.errors import Rejected
from openrl_common.records import Device, Role
from openrl_common.zygote import Order
from openrl_launcher.backend import Inventory, Launch, Process
from openrl_launcher.nvml import Nvml
from openrl_launcher.warm import Forked, WarmStart

MODULES = {Role.TRAINER: "openrl_trainer", Role.SAMPLER: "openrl_sampler"}
_CHILDREN: dict[int, subprocess.Popen[bytes] | Forked] = {}
"""Workers whose parent this process is, kept until they are waited for, whatever becomes of the backend."""
_POLL_S = 0.2
_LOG_TAIL_BYTES = 16 * 1024
_ERROR_LINE = re.compile(r"^\s*[\w.]*(?:Error|Exception|Interrupt)\b|\berror\b|\bkilled\b", re.IGNORECASE)
_NOT_FOR_WORKERS = {"OPEN_RL_SERVICE", "OPEN_RL_HEALTH_PORT", "OPEN_RL_NODE_NAME", "OPEN_RL_DEVICES"}
_OF_ONE_WORKER = {"OPEN_RL_WORKLOAD", "OPEN_RL_ASSIGNMENT", "OPEN_RL_DEVICE_BYTES", "CUDA_VISIBLE_DEVICES"}


class LocalBackend:
    """This host's devices: from NVML, or as declared (B2).

    Args:
        home: shared directory; logs go to ``<home>/logs``.
        declared: bytes of each declared device; empty = ask NVML.
        host_memory_bytes: what workers may be promised; 0 = what this machine has.
        logs_kept: newest log files kept per workload.
    """

    def __init__(
        self,
        *,
        home: Path,
        node: str,
        nats_url: str,
        declared: tuple[int, ...] = (),
        host_memory_bytes: int = 0,
        logs_kept: int = 10,
    ) -> None:
        self._home = home
        self._node = node
        self._nats_url = nats_url
        self._logs_kept = logs_kept
        self.warm: WarmStart | None = None
        self._nvml: Nvml | None = None
        if declared:
            devices = tuple(Device(device=f"dev{index}", memory_bytes=size) for index, size in enumerate(declared))
        else:
            try:
                self._nvml = Nvml()
                devices = tuple(gpu.device for gpu in self._nvml.gpus.values())
                why = "NVML lists none"
            except OSError as error:
                devices, why = (), str(error)
            if not devices:
                raise Rejected(
                    f"no GPU on this host ({why}) and no device declared: "
                    "set --devices or OPEN_RL_DEVICES, for example 2x8GiB",
                    code="no-devices",
                )
        self._inventory = Inventory(
            devices=devices,
            host_allocatable_bytes=host_memory_bytes or int(psutil.virtual_memory().total),
            declared=bool(declared),
        )

    def warm_start(self, modules: tuple[str, ...]) -> WarmStart:
        """From here on workers are forked from a process that has imported ``modules``, while somebody keeps it."""
        self.warm = WarmStart(
            environment=self.common_environment(),
            modules=modules,
            cwd=self._home,
            log_path=self._home / "logs" / "warm-start.log",
        )
        return self.warm

    def inventory(self) -> Inventory:
        if self._nvml is None:
            return self._inventory
        return dataclasses.replace(self._inventory, devices=self._nvml.present())

    def running(self) -> dict[str, Process]:
        found: dict[str, Process] = {}
        for process, environment in self._ours():
            with contextlib.suppress(psutil.Error, OSError):
                if os.getsid(process.pid) == process.pid:
                    assignment = environment["OPEN_RL_ASSIGNMENT"]
                    found[assignment] = Process(
                        assignment, environment.get("OPEN_RL_WORKLOAD", ""), process.pid, process.create_time()
                    )
        return found

    async def launch(self, launch: Launch) -> Process:
        path = self.log_path(launch)
        path.parent.mkdir(parents=True, exist_ok=True)
        own = self._own_environment(launch)
        module = MODULES[launch.role]
        with path.open("ab") as log:
            child: subprocess.Popen[bytes] | Forked | None = None
            if self.warm is not None:
                child = await self.warm.launch(Order(module=module, environment=own), log.fileno())
            if child is None:
                child = self._start_plainly(module, own, log)
        _CHILDREN[child.pid] = child
        self._prune_logs(launch.workload, path)
        return Process(launch.assignment, launch.workload, child.pid, psutil.Process(child.pid).create_time())

    def _start_plainly(self, module: str, own: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=self._home,
            env={**self.common_environment(), **own},
            start_new_session=True,
        )

    def log_path(self, launch: Launch) -> Path:
        return self._home / "logs" / f"{launch.workload}.{launch.assignment}.log"

    async def wait(self, process: Process) -> int | None:
        child = _CHILDREN.get(process.pid)
        try:
            descriptor = os.pidfd_open(process.pid)
        except (OSError, AttributeError):
            while self._alive(process):  # noqa: ASYNC110 (no descriptor to wait on)
                await asyncio.sleep(_POLL_S)
        else:
            try:
                # the descriptor pins one process: look whether it is the right one only after opening it
                if child is not None or self._alive(process):
                    await _readable(descriptor)
            finally:
                os.close(descriptor)
        if child is None:
            return None
        _CHILDREN.pop(process.pid, None)
        return child.wait()

    def terminate(self, process: Process) -> None:
        if self._alive(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)

    def kill(self, process: Process) -> None:
        if self._alive(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    def sweep(self, assignment: str) -> int:
        left = [process for process, environment in self._ours() if environment["OPEN_RL_ASSIGNMENT"] == assignment]
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        _, alive = psutil.wait_procs(left, timeout=2.0)
        return sum(not _is_zombie(process) for process in alive)

    def leaked(self, devices: tuple[str, ...], *, expect_idle: bool) -> str | None:
        return None if self._nvml is None else self._nvml.leaked(devices, expect_idle=expect_idle)

    def last_error(self, log_path: str) -> str:
        try:
            with open(log_path, "rb") as log:
                log.seek(max(0, os.path.getsize(log_path) - _LOG_TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        recent = [line.strip() for line in deque(lines, maxlen=60) if line.strip()]
        chosen = next((line for line in reversed(recent) if _ERROR_LINE.search(line)), recent[-1] if recent else "")
        return chosen[:400]

    # --- internals -------------------------------------------------------------------------------------------------

    def common_environment(self) -> dict[str, str]:
        """What every worker of this launcher gets."""
        not_common = _OF_ONE_WORKER if self._nvml is not None else _OF_ONE_WORKER - {"CUDA_VISIBLE_DEVICES"}
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_WORKERS | not_common}
        environment |= {
            "OPEN_RL_NATS_URL": self._nats_url,
            "OPEN_RL_HOME": str(self._home),
            "OPEN_RL_NODE": self._node,
            "PYTHONUNBUFFERED": "1",
        }
        if self._nvml is None:
            # declared devices are CPU workers: a card that happens to be there is not theirs
            environment["CUDA_VISIBLE_DEVICES"] = ""
            # without this every worker starts a thread per core and they trample on each other
            devices = len(self._inventory.devices)
            environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // max(1, devices))))
        return environment

    def _own_environment(self, launch: Launch) -> dict[str, str]:
        environment = {
            "OPEN_RL_WORKLOAD": launch.workload,
            "OPEN_RL_ASSIGNMENT": launch.assignment,
            "OPEN_RL_DEVICE_BYTES": str(launch.device_bytes),
        }
        if self._nvml is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self._nvml.visible(launch.devices)
        return environment

    def _ours(self) -> Iterator[tuple[psutil.Process, Mapping[str, str]]]:
        """Live processes of this home and node that carry an assignment."""
        for process in psutil.process_iter():
            try:
                if process.pid == os.getpid() or _is_zombie(process):
                    continue
                environment = process.environ()
            except (psutil.Error, OSError):
                continue
            if (
                environment.get("OPEN_RL_ASSIGNMENT")
                and environment.get("OPEN_RL_HOME") == str(self._home)
                and environment.get("OPEN_RL_NODE") == self._node
            ):
                yield process, environment

    def _alive(self, process: Process) -> bool:
        child = _CHILDREN.get(process.pid)
        if child is not None:
            return child.returncode is None
        try:
            found = psutil.Process(process.pid)
            # Not by its start: that is told in the system's time, and a step of the clock would end what runs.
            return not _is_zombie(found) and found.environ().get("OPEN_RL_ASSIGNMENT") == process.assignment
        except (psutil.Error, OSError):
            return False

    def _prune_logs(self, workload: str, newest: Path) -> None:
        with contextlib.suppress(OSError):
            logs = sorted(newest.parent.glob(f"{workload}.*.log"), key=lambda path: path.stat().st_mtime)
            for path in logs[: -self._logs_kept] if self._logs_kept else []:
                if path != newest:
                    path.unlink(missing_ok=True)


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def on_end() -> None:
        if not ended.done():
            ended.set_result(None)

    loop.add_reader(descriptor, on_end)
    try:
        await ended
    finally:
        loop.remove_reader(descriptor)
