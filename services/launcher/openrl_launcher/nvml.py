"""NVIDIA devices as the driver reports them (NVML). Imported only where a driver may be; never needed without GPUs.

Device ids are made from the device's UUID, so that they survive a reboot that renumbers the cards.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

from openrl_common.records import Device

_IDLE_MARGIN_BYTES = 512 * 1024 * 1024
"""What an idle device may hold beyond what it held when the launcher started (driver, display)."""


@dataclass(frozen=True, slots=True)
class Gpu:
    device: Device
    uuid: str
    handle: Any
    used_at_start_bytes: int


class Nvml:
    """The devices of this host, restricted to the launcher's own CUDA_VISIBLE_DEVICES when it is set."""

    def __init__(self) -> None:
        """Raises OSError when there is no driver or no NVML binding."""
        try:
            import pynvml
        except ImportError as error:
            raise OSError("the package nvidia-ml-py is not installed") from error
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise OSError(str(error)) from error
        self.gpus: dict[str, Gpu] = {}
        visible = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid = str(pynvml.nvmlDeviceGetUUID(handle))
            if visible and not any(name == str(index) or uuid.startswith(name) for name in visible):
                continue
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            device_id = "gpu-" + uuid.removeprefix("GPU-").split("-")[0].lower()
            device = Device(
                device=device_id, memory_bytes=int(memory.total), model=str(pynvml.nvmlDeviceGetName(handle))
            )
            self.gpus[device_id] = Gpu(device, uuid, handle, int(memory.used))

    def present(self) -> tuple[Device, ...]:
        """The devices that still answer: one that fell off the bus does not."""
        found = []
        for gpu in self.gpus.values():
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlDeviceGetMemoryInfo(gpu.handle)
                found.append(gpu.device)
        return tuple(found)

    def visible(self, devices: tuple[str, ...]) -> str:
        """The value of CUDA_VISIBLE_DEVICES for these device ids."""
        return ",".join(self.gpus[device].uuid for device in devices if device in self.gpus)

    def leaked(self, devices: tuple[str, ...], *, expect_idle: bool) -> str | None:
        """See ``Backend.leaked``: memory of processes that are no more, or of nobody on an idle device."""
        for device_id in devices:
            gpu = self.gpus.get(device_id)
            if gpu is None:
                continue
            if (why := self._held(gpu, expect_idle)) is not None:
                return why
        return None

    def _held(self, gpu: Gpu, expect_idle: bool) -> str | None:
        """``leaked`` of one device. That it does not say how much is in use is a reason too: not seen free (B4)."""
        nvml, device_id = self._nvml, gpu.device.device
        try:
            processes = nvml.nvmlDeviceGetComputeRunningProcesses(gpu.handle)
        except nvml.NVMLError:
            processes = ()  # MIG, vGPU and some containers never say: there the bytes in use decide alone
        for process in processes:
            if expect_idle or not os.path.exists(f"/proc/{process.pid}"):
                held_bytes = int(process.usedGpuMemory or 0)
                return f"process {process.pid} still holds {held_bytes} bytes of device {device_id}"
        try:
            used_bytes = int(nvml.nvmlDeviceGetMemoryInfo(gpu.handle).used)
        except nvml.NVMLError as error:
            return f"device {device_id} does not say how many bytes are in use: {error}"
        if expect_idle and used_bytes > gpu.used_at_start_bytes + _IDLE_MARGIN_BYTES:
            return f"device {device_id} has no worker but {used_bytes} bytes are in use"
        return None
