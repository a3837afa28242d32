"""Tensors off the device and back, in place (T5). Torch itself is handed in: this package imports none.

The storages behind the tensors are emptied, so every view, tied weight and optimizer slot that shares one stays what it
is and finds its values again after ``restore``; the bytes that come back are the bytes that left.

    CUDA   storage ─▶ pinned host copy, storage resized to nothing, cached blocks given back to the driver
    CPU    "device memory" is the process's anonymous memory: storage ─▶ one file, storage resized to nothing, trimmed

The CUDA path needs a GPU to be tested (docs/performance.md says what was run). Pinned memory is what the first park
waits for; it is kept, so later ones run at the speed of the copy. A storage that cannot be resized (a
checkpoint file mapped by safetensors) is replaced by one that can, the first time it is parked; views of it that are
not among the tensors given would keep the old one.

Invariants: nothing of a parked tensor is read or written between ``park`` and ``restore``; a ``park`` that fails leaves
every storage as it was. Blocking; one thread. Not here: which tensors, and when.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_LEAST_BYTES = 4096
"""Storages smaller than this stay: moving them costs more than they hold."""
_PIECE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Left:
    """What one move measured. ``bytes``: of tensors moved; ``freed_bytes``: by which the process's memory on the device
    (CUDA: allocated and cached; CPU: anonymous) really fell or rose; ``held_bytes``: what it holds there now."""

    bytes: int
    seconds: float
    freed_bytes: int
    held_bytes: int


@dataclass(slots=True)
class _Parked:
    storage: Any
    num_bytes: int
    offset: int
    host: Any = None


class Parking:
    """One process's parked tensors. ``path``: the file that holds them on a CPU; unlinked as soon as it is open."""

    def __init__(self, torch: Any, device: Any, path: Path) -> None:
        self._torch = torch
        self._cuda = device.type == "cuda"
        self._device = device
        self._path = path
        self._file: int | None = None
        self._length = 0
        self._parked: list[_Parked] = []

    @property
    def parked_bytes(self) -> int:
        return sum(one.num_bytes for one in self._parked)

    def park(self, tensors: Iterable[Any]) -> Left:
        """Move the storages of ``tensors`` away; may be called again for more of them.

        Raises:
            OSError: the file cannot take them (CPU); every storage is as it was.
        """
        before, started = self.device_bytes(), time.perf_counter()
        tensors = list(tensors)
        moving = self._storages(tensors)
        if self._cuda:
            self._copy_to_host(moving)
        else:
            self._write(moving)
        self._make_resizable(moving, tensors)
        for one in moving:
            one.storage.resize_(0)
        self._parked.extend(moving)
        self._trim()
        seconds, after = time.perf_counter() - started, self.device_bytes()
        return Left(sum(one.num_bytes for one in moving), seconds, before - after, after)

    def restore(self, tensors: Iterable[Any] | None = None) -> Left:
        """Bring back what was parked: everything, or only what stands behind ``tensors``."""
        before, started = self.device_bytes(), time.perf_counter()
        wanted = None if tensors is None else {_key(tensor) for tensor in tensors}
        coming = [one for one in self._parked if wanted is None or one.storage._cdata in wanted]
        for one in coming:
            one.storage.resize_(one.num_bytes)
            if self._cuda:
                self._view(one).copy_(one.host, non_blocking=True)
            else:
                self._read(one)
        if self._cuda:
            self._torch.cuda.synchronize(self._device)
        back = {id(one) for one in coming}
        self._parked = [one for one in self._parked if id(one) not in back]
        if not self._parked and self._file is not None:
            os.close(self._file)
            self._file, self._length = None, 0
        seconds, after = time.perf_counter() - started, self.device_bytes()
        return Left(sum(one.num_bytes for one in coming), seconds, after - before, after)

    def device_bytes(self) -> int:
        """What this process holds on its device, bytes."""
        if self._cuda:
            return int(self._torch.cuda.memory_reserved(self._device))
        memory = psutil.Process().memory_info()
        return int(memory.rss - memory.shared)

    # --- internals -------------------------------------------------------------------------------------------------

    def _storages(self, tensors: Iterable[Any]) -> list[_Parked]:
        """Each storage once, large enough, on the device, not parked yet."""
        seen = {one.storage._cdata for one in self._parked}
        found: list[_Parked] = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device.type != self._device.type or storage._cdata in seen or storage.nbytes() < _LEAST_BYTES:
                continue
            seen.add(storage._cdata)
            found.append(_Parked(storage, storage.nbytes(), 0))
        return found

    def _make_resizable(self, moving: list[_Parked], tensors: list[Any]) -> None:
        """Give the tensors of fixed storages new ones of the same size; that memory is never touched before it goes."""
        fixed = {one.storage._cdata: one for one in moving if not one.storage.resizable()}
        if not fixed:
            return
        fresh = {key: self._torch.UntypedStorage(one.num_bytes, device=self._device) for key, one in fixed.items()}
        for tensor in tensors:
            key = _key(tensor)
            if key in fresh:
                place = (tensor.storage_offset(), tensor.size(), tensor.stride())
                tensor.data = self._torch.empty(0, dtype=tensor.dtype, device=self._device).set_(fresh[key], *place)
        for key, one in fixed.items():
            one.storage = fresh[key]

    def _copy_to_host(self, moving: list[_Parked]) -> None:
        torch = self._torch
        for one in moving:
            one.host = torch.empty(one.num_bytes, dtype=torch.uint8, pin_memory=True)
            one.host.copy_(self._view(one), non_blocking=True)
        torch.cuda.synchronize(self._device)

    def _view(self, one: _Parked) -> Any:
        return self._torch.empty(0, dtype=self._torch.uint8, device=self._device).set_(one.storage)

    def _write(self, moving: list[_Parked]) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            self._path.unlink()  # the kernel removes it with the process, whatever ends that
        end = self._length
        for one in moving:
            one.offset = end
            memory = _memory(one)
            while memory:
                written = os.pwrite(self._file, memory[:_PIECE_BYTES], end)
                memory, end = memory[written:], end + written
        self._length = end

    def _read(self, one: _Parked) -> None:
        assert self._file is not None
        memory, offset = _memory(one), one.offset
        while memory:
            count = os.preadv(self._file, [memory[:_PIECE_BYTES]], offset)
            if count == 0:
                raise OSError(f"the file of parked tensors ends at byte {offset}, {len(memory)} are missing")
            memory, offset = memory[count:], offset + count

    def _trim(self) -> None:
        if self._cuda:
            self._torch.cuda.empty_cache()
            return
        with contextlib.suppress(OSError, AttributeError):  # another C library keeps its free blocks
            ctypes.CDLL(None).malloc_trim(0)


def _key(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def _memory(one: _Parked) -> memoryview:
    """The storage's bytes, not copied; valid until it is resized."""
    return memoryview((ctypes.c_ubyte * one.num_bytes).from_address(one.storage.data_ptr())).cast("B")
