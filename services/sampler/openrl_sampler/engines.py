"""Which engine serves a workload. The engine's module is imported only when it is made (torch takes seconds)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from openrl_common.errors import Rejected
from openrl_common.records import WorkloadRecord
from openrl_sampler.engine import Engine

ENGINES = ("auto", "torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """``device_bytes``: what the seat declares, 0 = not known; the others are the settings of the same name."""

    device_bytes: int
    max_num_seqs: int
    prefill_tokens: int
    max_adapters: int


def check_workload(workload: WorkloadRecord) -> None:
    """Raise Rejected for what is known to fail before seconds of imports: engine name and model path."""
    if workload.engine not in ENGINES:
        raise Rejected(
            f"engine {workload.engine!r} is not available: use one of {', '.join(ENGINES)}", code="unknown-engine"
        )
    if not (Path(workload.base_model) / "config.json").is_file():
        raise Rejected(
            f"base model {workload.base_model} has no config.json: give a Hugging Face model directory",
            code="bad-model",
        )


def import_engine() -> None:
    """The ``imports`` phase of the start. On a CPU the number of threads is OMP_NUM_THREADS, 1 without it."""
    import torch

    import openrl_sampler.preload  # noqa: F401

    if not torch.cuda.is_available():
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "") or 1))


def make_engine(workload: WorkloadRecord, settings: EngineSettings) -> Engine:
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
        )
    )
