"""Whether a device is seen free, with a driver that is played: what it says, refuses, and cannot say (B4)."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from openrl_common.quantities import GIB
from openrl_launcher.nvml import Nvml

DEVICE = "gpu-0a1b2c3d"
AT_START_BYTES = GIB


class NVMLError(Exception):
    pass


class NotSupported(NVMLError):
    pass


class Driver:
    """The part of ``pynvml`` that is used. ``refused``: queries by name, each with what it raises."""

    NVMLError = NVMLError

    def __init__(self) -> None:
        self.used_bytes = AT_START_BYTES
        self.pids: list[int] = []
        self.refused: dict[str, NVMLError] = {}

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, _: int) -> str:
        return "GPU-0A1B2C3D-4455-6677-8899-aabbccddeeff"

    def nvmlDeviceGetName(self, _: int) -> str:
        return "H100"

    def nvmlDeviceGetMemoryInfo(self, _: int) -> Any:
        if error := self.refused.get("memory"):
            raise error
        return SimpleNamespace(total=80 * GIB, used=self.used_bytes)

    def nvmlDeviceGetComputeRunningProcesses(self, _: int) -> list[Any]:
        if error := self.refused.get("processes"):
            raise error
        return [SimpleNamespace(pid=pid, usedGpuMemory=GIB) for pid in self.pids]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return made


def leaked(driver: Driver, *, expect_idle: bool, **later: Any) -> str | None:
    """``later``: what the driver says once the launcher has started."""
    nvml = Nvml()
    for name, value in later.items():
        setattr(driver, name, value)
    return nvml.leaked((DEVICE,), expect_idle=expect_idle)


def test_b4_a_device_whose_memory_came_back_is_free(driver: Driver) -> None:
    assert leaked(driver, expect_idle=True) is None
    assert leaked(driver, expect_idle=False, pids=[os.getpid()]) is None, "a partner that lives holds what is its own"


def test_b4_a_process_that_is_no_more_and_holds_memory_is_named(driver: Driver) -> None:
    gone = 2**30  # above any pid_max
    said = leaked(driver, expect_idle=False, pids=[os.getpid(), gone])
    assert said == f"process {gone} still holds {GIB} bytes of device {DEVICE}"


def test_b4_a_process_on_a_device_that_has_no_worker_left_is_named_although_it_lives(driver: Driver) -> None:
    said = leaked(driver, expect_idle=True, pids=[os.getpid()])
    assert said == f"process {os.getpid()} still holds {GIB} bytes of device {DEVICE}"


@pytest.mark.parametrize("error", [NotSupported("Not Supported"), NVMLError("Insufficient Permissions")])
def test_b4_where_the_driver_names_no_processes_the_bytes_in_use_decide(driver: Driver, error: NVMLError) -> None:
    """Neither given away while they are in use, nor held for ever once they are back (MIG, vGPU, containers)."""
    said = leaked(driver, expect_idle=True, refused={"processes": error}, used_bytes=AT_START_BYTES + 2 * GIB)
    assert said == f"device {DEVICE} has no worker but {3 * GIB} bytes are in use"
    driver.used_bytes, driver.refused = AT_START_BYTES, {}
    assert leaked(driver, expect_idle=True, refused={"processes": error}) is None


@pytest.mark.parametrize("expect_idle", [True, False])
def test_b4_a_device_that_does_not_answer_is_not_seen_free(driver: Driver, expect_idle: bool) -> None:
    lost = NVMLError("GPU is lost")
    said = leaked(driver, expect_idle=expect_idle, refused={"processes": lost, "memory": lost})
    assert said == f"device {DEVICE} does not say how many bytes are in use: GPU is lost"
