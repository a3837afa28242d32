"""Weight updates of the torch engine (V5, V7, V8). Needs torch.

Full: every file is verified and every tensor matched to a parameter by name, shape and kind before the first write;
then tensor by tensor into the resident parameters, from the mapped file, so the extra memory is about one tensor on a
GPU and none on a CPU. The result is bit-identical to a fresh load. Tied parameters are one parameter with two names:
it is written once.

LoRA adapters: ``torch_adapters``.

Left out: deltas, slices of one tensor.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openrl_common.errors import Rejected
from openrl_common.records import WeightsRecord
from openrl_common.weights import WeightsManifest, verify_files


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


def check_manifest(record: WeightsRecord, manifest: WeightsManifest, directory: Path, weights_format: str) -> None:
    """The manifest is of the version that was announced, and all its files are what it lists. Raises Rejected."""
    announced = (record.tenant, record.job, record.incarnation, record.version)
    held = (manifest.tenant, manifest.job, manifest.incarnation, manifest.version)
    if announced != held:
        raise Rejected(f"weights {directory} hold {held}, announced were {announced}", code="weights-manifest")
    if manifest.format != weights_format:
        raise Rejected(
            f"weights {directory} have format {manifest.format!r}, this sampler takes {weights_format!r}",
            code="weights-format",
        )
    verify_files(manifest, directory)


# --- full --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Write:
    """One parameter or buffer and where its new value lies: a tensor of a file, or one already in memory."""

    target: Tensor
    name: str
    file: str = ""
    value: Tensor | None = None


def plan_full(model: Any, manifest: WeightsManifest, directory: Path) -> list[Write]:
    """Match every resident tensor with a new one. Reads headers only. Raises Rejected, naming what does not fit."""
    held = {tensor.name: tensor for tensor in manifest.tensors}
    names_of: dict[int, list[str]] = {}
    resident = dict(_resident(model))
    for name, tensor in resident.items():
        names_of.setdefault(id(tensor), []).append(name)
    if not all(any(name in held for name in names) for names in names_of.values()):
        return _plan_by_loading(model, resident, directory)
    unknown = sorted(held.keys() - resident.keys())
    if unknown:
        raise Rejected(f"weights {directory}: tensor {unknown[0]!r} is not in the model", code="weights-shape")
    plan = []
    for names in names_of.values():
        source = held[next(name for name in names if name in held)]
        target = resident[names[0]]
        _check_shape(directory, source.name, source.shape, tuple(target.shape))
        plan.append(Write(target=target, name=source.name, file=source.file))
    return plan


def _plan_by_loading(model: Any, resident: dict[str, Tensor], directory: Path) -> list[Write]:
    """Checkpoints whose tensors are named or cut otherwise than the parameters: transformers knows how to convert."""
    try:
        fresh = type(model).from_pretrained(directory, dtype=model.dtype, local_files_only=True)
    except Exception as error:  # whatever transformers raises on a checkpoint that does not fit
        raise Rejected(f"weights {directory} cannot be loaded: {error}", code="weights-shape") from error
    values = dict(_resident(fresh))
    plan, seen = [], set()
    for name, target in resident.items():
        if name not in values:
            raise Rejected(f"weights {directory}: no tensor for {name!r}", code="weights-shape")
        if id(target) not in seen:
            seen.add(id(target))
            _check_shape(directory, name, tuple(values[name].shape), tuple(target.shape))
            plan.append(Write(target=target, name=name, value=values[name]))
    return plan


def _resident(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers, under every name they have."""
    persistent = model.state_dict().keys()
    yield from model.named_parameters(remove_duplicate=False)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in persistent:
            yield name, buffer


def _check_shape(directory: Path, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if tuple(found) != wanted:
        raise Rejected(
            f"weights {directory}: tensor {name!r} has shape {list(found)}, the model's is {list(wanted)}",
            code="weights-shape",
        )


def write_full(plan: list[Write], directory: Path, meter: Meter) -> None:
    """Copy the planned tensors. An exception in here leaves a mix: the caller rebuilds (V8)."""
    with ExitStack() as stack, torch.no_grad():
        files = {name: stack.enter_context(_open(directory / name)) for name in {w.file for w in plan if w.file}}
        for write in plan:
            value = files[write.file].get_tensor(write.name) if write.value is None else write.value
            write.target.copy_(value)
            meter.look()


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        yield file
