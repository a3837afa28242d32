"""Weight updates of the torch engine (V5, V7, V8). Needs torch.

Full and delta: every file is verified and every tensor matched to a parameter by name, shape and kind before the first
write; then slice by slice into the resident parameters (``streamed``), so the extra memory is at most the chunk. The
result is bit-identical to a fresh load. Tied parameters are one parameter with two names: it is written once.
Checkpoints whose tensors are named or cut otherwise than the parameters are loaded whole beside them, by transformers.

LoRA adapters: ``torch_adapters``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from openrl_common.errors import Rejected
from openrl_sampler.streamed import NotStreamable, Plan, make_plan, write
from openrl_sampler.weights_layers import Layer


class Meter:
    """Seconds and peak extra bytes of an update: allocated device memory on CUDA, anonymous memory on CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started = time.perf_counter()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._before = self._now()
        self._peak = self._before

    def _now(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        return 0

    def look(self) -> None:
        self._peak = max(self._peak, self._now())

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started

    @property
    def peak_extra_bytes(self) -> int:
        self.look()
        return self._peak - self._before


def free_bytes(device: torch.device, seat_bytes: int, resident: Iterable[Tensor]) -> int:
    """Device memory that an update may take: what the device has free, but no more than the seat has left (V6).

    What others of a shared device declared and do not use is free there and not for this seat (T2). On CUDA free is
    also what torch holds and does not use; on a CPU the host's memory is the device's, and ``resident`` what is held
    of the seat (B2).

    Args:
        seat_bytes: what the seat declares, 0 = not known.
        resident: every tensor on the device, views of one storage as often as one likes.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_allocated(device)
        free += torch.cuda.memory_reserved(device) - held
    else:
        free = psutil.virtual_memory().available
        storages = {storage.data_ptr(): storage.nbytes() for storage in (t.untyped_storage() for t in resident)}
        held = sum(storages.values())
    return max(0, min(free, seat_bytes - held)) if seat_bytes else int(free)


# --- full and delta ----------------------------------------------------------------------------------------------

Loaded = list[tuple[Tensor, Tensor]]
"""Parameters and buffers, each with its new value in memory."""


def plan_update(model: Any, layers: list[Layer]) -> Plan | Loaded:
    """Match every resident tensor with a new one. Reads headers only, where the names are the model's.

    Raises:
        Rejected: naming what does not fit.
    """
    shapes, directory = layers[0].shapes, Path(layers[0].directory)
    resident = dict(_resident(model))
    names_of: dict[int, list[str]] = {}
    for name, tensor in resident.items():
        names_of.setdefault(id(tensor), []).append(name)
    if not all(any(name in shapes for name in names) for names in names_of.values()):
        if len(layers) > 1 or layers[0].delta:
            raise Rejected(f"weights {directory} are named otherwise than the model: no delta", code="weights-shape")
        return _load_beside(model, resident, directory)
    unknown = sorted(shapes.keys() - resident.keys())
    if unknown:
        raise Rejected(f"weights {directory}: tensor {unknown[0]!r} is not in the model", code="weights-shape")
    chosen = {next(name for name in names if name in shapes) for names in names_of.values()}

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            _check_shape(directory, name, tuple(tensor.shape), tuple(resident[name].shape))
            if tensor.is_floating_point() != resident[name].is_floating_point():
                raise Rejected(
                    f"weights {directory}: tensor {name!r} is {tensor.dtype}, the model's is {resident[name].dtype}",
                    code="weights-shape",
                )
            if name in chosen:
                resident[name].copy_(tensor)

    try:
        return make_plan(load, shapes)
    except NotStreamable as error:
        raise Rejected(
            f"weights {directory} cannot be written into the model: {error}", code="weights-shape"
        ) from error


def write_update(planned: Plan | Loaded, layers: list[Layer], *, chunk_bytes: int, meter: Meter) -> float:
    """Copy what was planned; returns the share of elements written.

    An exception in here leaves a mix: the caller rebuilds (V8).
    """
    if isinstance(planned, Plan):
        written = write(planned, layers, chunk_bytes=chunk_bytes, look=meter.look)
        return written / max(1, planned.num_elements)
    with torch.no_grad():
        for target, value in planned:
            target.copy_(value)
            meter.look()
    return 1.0


def _load_beside(model: Any, resident: dict[str, Tensor], directory: Path) -> Loaded:
    try:
        fresh = type(model).from_pretrained(directory, dtype=model.dtype, local_files_only=True)
    except Exception as error:  # whatever transformers raises on a checkpoint that does not fit
        raise Rejected(f"weights {directory} cannot be loaded: {error}", code="weights-shape") from error
    values = dict(_resident(fresh))
    planned, seen = [], set()
    for name, target in resident.items():
        if name not in values:
            raise Rejected(f"weights {directory}: no tensor for {name!r}", code="weights-shape")
        if id(target) not in seen:
            seen.add(id(target))
            _check_shape(directory, name, tuple(values[name].shape), tuple(target.shape))
            planned.append((target, values[name]))
    return planned


def _resident(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers, under every name they have."""
    persistent = model.state_dict().keys()
    yield from model.named_parameters(remove_duplicate=False)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in persistent:
            yield name, buffer


def _check_shape(directory: Path, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise Rejected(
            f"weights {directory}: tensor {name!r} has shape {list(found)}, the model's is {list(wanted)}",
            code="weights-shape",
        )
