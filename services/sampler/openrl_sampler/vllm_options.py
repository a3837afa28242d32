"""What a vLLM engine is made with: the process's environment, then vLLM's own arguments. Imports vllm only inside
functions.

Fixed here, and why:
- one process (no engine-core process): the sampler already is a process of its own, and the engine thread drives steps;
- the old model runner and its sampler: the one whose logprobs are adapted (``vllm_worker``);
- no asynchronous scheduling: a token must be of the weights that are resident when its step is asked for (V5);
- no tokenizer inside vLLM, no sampling defaults of the model's generation config: requests say what they want;
- ``max_model_len`` comes from the runtime, never from a job: each new value would be a cold compilation (V1);
- nothing is looked up on a hub, no usage is reported.
"""

from __future__ import annotations

import secrets
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrl_common.errors import Rejected
from openrl_common.records import JobKind
from openrl_common.tensors import Checkpoint
from openrl_sampler.compile_cache import CompileCache
from openrl_sampler.memory_share import ModelSizes, capture_sizes

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Maximum ranks that vLLM knows."""
CPU_BLOCK_TOKENS = 32
EXTENSION = "openrl_sampler.vllm_worker.WorkerExtension"
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_PLUGINS": "",
}
_DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several workers share a host's cores: OMP_NUM_THREADS says how many
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """``device_bytes``: what the seat declares for each of ``num_devices`` devices, 0 = not known; ``memory_share``,
    ``headroom_bytes``, ``max_model_len`` 0 = derived. ``compile``: None = where the device is a GPU."""

    model_path: Path
    kind: JobKind
    dtype: str = "auto"
    max_model_len: int = 0
    max_rank: int = 0
    device_bytes: int = 0
    num_devices: int = 1
    max_num_seqs: int = 256
    prefill_tokens: int = 8192
    max_adapters: int = 32
    adapter_slots: int = 8
    update_method: str = "streamed"
    chunk_bytes: int = 256 << 20
    headroom_bytes: int = 0
    keeps_running: bool = True
    memory_share: float = 0.0
    capture_sizes: str = ""
    compile: bool | None = None
    cache: CompileCache | None = None

    @property
    def lora_rank(self) -> int:
        """The smallest rank that vLLM knows and that holds ``max_rank``."""
        wanted = self.max_rank or 16
        rank = next((rank for rank in LORA_RANKS if rank >= wanted), None)
        if rank is None:
            raise Rejected(f"LoRA rank {wanted}: vLLM holds at most {LORA_RANKS[-1]}", code="bad-rank")
        return rank


def set_environment(environment: MutableMapping[str, str], cache: Path | None = None) -> None:
    """What vLLM and torch read when they are imported. ``cache``: where everything compiled goes; None = their
    places."""
    environment.update(_ENVIRONMENT)
    for name, value in _DEFAULTS.items():
        environment.setdefault(name, value)
    if cache is not None:
        environment["VLLM_CACHE_ROOT"] = str(cache / "vllm")
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(cache / "inductor")
        environment["TRITON_CACHE_DIR"] = str(cache / "triton")


def compile_facts(options: VllmOptions, *, device: str, versions: dict[str, str]) -> dict[str, object]:
    """Everything that compiled code depends on (V1): LoRA and FFT samplers, models, devices warm separately."""
    return {
        "config": (options.model_path / "config.json").read_text(),
        "kind": options.kind,
        "dtype": options.dtype,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "prefill_tokens": options.prefill_tokens,
        "num_devices": options.num_devices,
        "rank": options.lora_rank if options.kind is JobKind.LORA else 0,
        "adapter_slots": min(options.adapter_slots, options.max_adapters) if options.kind is JobKind.LORA else 0,
        "capture_sizes": options.capture_sizes,
        "compile": options.compile,
        "device": device,
        "versions": versions,
    }


def engine_arguments(options: VllmOptions, checkpoint: Checkpoint, *, on_cpu: bool) -> dict[str, Any]:
    """Keyword arguments of vLLM's ``EngineArgs``. Raises Rejected for settings that vLLM cannot be given."""
    compiled = options.compile if options.compile is not None else not on_cpu
    arguments: dict[str, Any] = {
        "model": str(options.model_path),
        "dtype": _dtype(options.dtype, on_cpu),
        "load_format": "safetensors",
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": max(options.prefill_tokens, options.max_num_seqs),
        "tensor_parallel_size": options.num_devices,
        "enable_prefix_caching": True,
        "enforce_eager": not compiled,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "async_scheduling": False,
        "disable_log_stats": True,
        "seed": secrets.randbits(31),
        "worker_extension_cls": EXTENSION,
        "enable_sleep_mode": not on_cpu,
    }
    if on_cpu:  # vLLM's own are 128 there: samples of a prompt share whole blocks, and prompts are often shorter
        arguments["block_size"] = CPU_BLOCK_TOKENS
    if options.num_devices > 1:
        arguments["distributed_executor_backend"] = "mp"
    if options.max_model_len:
        arguments["max_model_len"] = options.max_model_len
    if compiled and not on_cpu and (sizes := capture_sizes(options.capture_sizes, options.max_num_seqs)):
        arguments["cudagraph_capture_sizes"] = sizes
    if options.kind is JobKind.LORA:
        slots = min(options.adapter_slots, options.max_adapters)
        arguments |= {
            "enable_lora": True,
            "max_loras": slots,
            # Held on the host at most: what the shelf keeps, and what running calls keep from being dropped. Beyond it
            # vLLM would drop one by itself, and read it again from files that may be gone by then.
            "max_cpu_loras": options.max_adapters + slots + options.max_num_seqs,
            "max_lora_rank": options.lora_rank,
            "lora_target_modules": sorted({name.split(".")[-2] for name in _layer_matrices(checkpoint)}),
        }
    return arguments


def _dtype(dtype: str, on_cpu: bool) -> str:
    if dtype == "auto":
        return "float32" if on_cpu else "bfloat16"
    return dtype


def _layer_matrices(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Shapes of what adapters may change: every matrix of a layer. Not the head: vLLM's adapted head cannot score
    prompts (its kernels expect one row a sequence), and the trainer leaves it alone too."""
    return {n: t.shape for n, t in checkpoint.tensors.items() if len(t.shape) == 2 and ".layers." in n}


def sizes_of(checkpoint: Checkpoint, options: VllmOptions, *, value_bytes: int, kv_bytes_per_token: int) -> ModelSizes:
    """One device's share, from the headers (V6). Adapter slots: both factors of every matrix of a layer."""
    parameters = checkpoint.num_elements // options.num_devices
    slots = 0
    if options.kind is JobKind.LORA:
        slots = min(options.adapter_slots, options.max_adapters) * options.lora_rank * value_bytes
        slots *= sum(rows + columns for rows, columns in _layer_matrices(checkpoint).values())
    return ModelSizes(
        parameters=parameters,
        weights_bytes=parameters * value_bytes,
        largest_tensor_bytes=checkpoint.largest.num_elements * value_bytes // options.num_devices,
        kv_bytes_per_token=kv_bytes_per_token,
        slots_bytes=slots,
    )
