"""Weight updates of the torch engine (V5, V7, V8). Needs torch.

Full: every file is verified and every tensor matched to a parameter by name, shape and kind before the first write;
then tensor by tensor into the resident parameters, from the mapped file, so the extra memory is about one tensor on a
GPU and none on a CPU. The result is bit-identical to a fresh load. Tied parameters are one parameter with two names:
it is written once.

LoRA: a version is a new adapter beside the old one, so what serves is never written to.

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

_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


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


# --- LoRA --------------------------------------------------------------------------------------------------------


class Adapters:
    """The adapters of one base model, by name; at most one is active. Wraps peft, which patches the model in place."""

    def __init__(self, model: Any, max_rank: int) -> None:
        self._model = model
        self._max_rank = max_rank
        self._peft: Any = None
        self._layers: list[Any] = []
        self._active: str | None = ""
        """Name of the active adapter, empty for the base, None when not known."""

    def load(self, name: str, manifest: WeightsManifest, directory: Path) -> None:
        """Add an adapter that nobody uses yet. Raises Rejected and leaves the others as they were."""
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        config = self._config(manifest, directory)
        self._active = None
        try:
            self._add(name, config)
            self._check_tensors(name, manifest, directory)
            state = load_file(directory / _ADAPTER_FILES[1])
            set_peft_model_state_dict(self._peft, state, adapter_name=name, low_cpu_mem_usage=True)
        except Exception as error:
            self.drop(name)
            if isinstance(error, Rejected):
                raise
            raise Rejected(f"adapter {directory} does not fit the model: {error}", code="weights-shape") from error
        device = self._model.device
        for layer in self._layers:
            layer.eval()
            layer.to(device)

    def _config(self, manifest: WeightsManifest, directory: Path) -> Any:
        from peft import LoraConfig

        for file in _ADAPTER_FILES:
            if file not in manifest.files:
                raise Rejected(f"adapter {directory} lists no {file}", code="weights-manifest")
        try:
            config = LoraConfig.from_pretrained(str(directory))
        except Exception as error:
            raise Rejected(
                f"adapter {directory}/{_ADAPTER_FILES[0]} is not usable: {error}", code="weights-manifest"
            ) from error
        rank = max([config.r, *config.rank_pattern.values()])
        if self._max_rank and rank > self._max_rank:
            raise Rejected(
                f"adapter {directory} has rank {rank}, this runtime holds at most {self._max_rank}",
                code="weights-shape",
            )
        config.inference_mode = True
        return config

    def _add(self, name: str, config: Any) -> None:
        from peft import PeftModel
        from peft.tuners.tuners_utils import BaseTunerLayer

        if self._peft is None:
            self._peft = PeftModel(self._model, config, adapter_name=name, low_cpu_mem_usage=True)
        else:
            self._peft.add_adapter(name, config, low_cpu_mem_usage=True)
        self._layers = [module for module in self._model.modules() if isinstance(module, BaseTunerLayer)]

    def _check_tensors(self, name: str, manifest: WeightsManifest, directory: Path) -> None:
        from peft import get_peft_model_state_dict

        wanted = {
            key: tuple(value.shape)
            for key, value in get_peft_model_state_dict(
                self._peft, adapter_name=name, save_embedding_layers=False
            ).items()
        }
        found = {tensor.name: tuple(tensor.shape) for tensor in manifest.tensors}
        for key in sorted(wanted.keys() | found.keys()):
            if wanted.get(key) != found.get(key):
                raise Rejected(
                    f"adapter {directory}: tensor {key!r} has shape {found.get(key)}, the model's is {wanted.get(key)}",
                    code="weights-shape",
                )

    def drop(self, name: str) -> None:
        if self._peft is not None and name in self._peft.peft_config:
            self._active = None
            self._peft.delete_adapter(name)

    def activate(self, name: str) -> None:
        """Use this adapter from the next forward on; empty = the base model alone."""
        if name == self._active:
            return
        for layer in self._layers:
            layer.enable_adapters(bool(name))
            if name:
                layer.set_adapter(name, inference_mode=True)
        self._active = name
