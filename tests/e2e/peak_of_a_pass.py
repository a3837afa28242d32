"""Measures passes of a trainer on this CPU and prints one line of JSON; its memory must be its own (test_memory_peak).

Peaks are of resident memory, with an allocator that gives everything back at once.
"""

from __future__ import annotations

import ctypes
import gc
import json
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from openrl_common.records import LoraSpec
from openrl_common.wire import AdamParams, Datum, ForwardBackward, OptimStep
from openrl_trainer.engine import EngineSettings, JobSettings, TrainEngine
from openrl_trainer.model import BaseModel, prepare_torch

# hidden, intermediate, layers, heads, vocabulary, rows, length, dtype, lora, architecture
SHAPES = [
    (256, 768, 4, 4, 2_000, 16, 128, "float32", False, "Qwen3"),
    (128, 384, 2, 4, 50_000, 8, 128, "float32", False, "Qwen3"),
    (64, 192, 8, 2, 512, 64, 64, "float32", False, "Qwen3"),
    (256, 768, 4, 4, 2_000, 2, 1024, "bfloat16", False, "Qwen3"),
    (256, 768, 4, 4, 2_000, 16, 128, "float32", True, "Qwen3"),
    (128, 384, 2, 4, 50_000, 8, 128, "float32", False, "Gemma2"),  # caps its logits
    (128, 384, 2, 4, 20_000, 8, 128, "float32", False, "HyperCLOVAX"),  # its logits come whole
]
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def new_engine(home: Path, shape: tuple[Any, ...]) -> TrainEngine:
    hidden, intermediate, layers, heads, vocabulary, rows, length, dtype, lora, architecture = shape
    config = getattr(transformers, f"{architecture}Config")(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, head_dim=64, vocab_size=vocabulary, tie_word_embeddings=True,
    )  # fmt: skip
    if architecture == "HyperCLOVAX":
        config.logits_scaling = 4.0
    made: Any = transformers.AutoModelForCausalLM.from_config(config)
    made.save_pretrained(str(home / "model"))
    base = BaseModel(str(home / "model"), dtype=dtype, device=prepare_torch(1, 0), frozen=lora)
    job = JobSettings(tenant="t", job="j", incarnation=1, lora=LoraSpec(rank=16) if lora else None)
    return TrainEngine(base, job, EngineSettings(home=home, token_budget=rows * length))


def learn(engine: TrainEngine, rows: int, length: int) -> dict[str, float]:
    data = [Datum(tokens=[(7 * row + column) % 500 for column in range(length)]) for row in range(rows)]
    request = ForwardBackward(seq=1, incarnation=1, data=data, loss="cross_entropy", normalizer=1.0)
    result = engine.apply(request).result
    return {"code": result.error.code} if result.error else result.metrics  # type: ignore[dict-item]


def measured(shape: tuple[Any, ...]) -> dict[str, Any]:
    rows, length = shape[5], shape[6]
    with tempfile.TemporaryDirectory() as home:
        engine = new_engine(Path(home), shape)
        learn(engine, 1, 3)
        engine.apply(OptimStep(seq=2, incarnation=1, adam=AdamParams(learning_rate=1e-4)))
        learn(engine, 1, 3)  # gradients of an earlier request are held
        gc.collect()
        held = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        learn(engine, rows, length)
        peak = status("VmHWM") - held
        predicted = engine.memory.peak_bytes(rows * length) - engine.memory.resident_bytes
    return {"shape": shape, "peak_bytes": peak, "predicted_bytes": predicted}


def short_of_memory() -> dict[str, Any]:
    """A pass of 32 rows under a limit that leaves room for half of what it needs and some more."""
    shape = (*SHAPES[0][:5], 32, 128, "float32", False, "Qwen3")
    with tempfile.TemporaryDirectory() as home:
        engine = new_engine(Path(home), shape)
        learn(engine, 1, 3)
        free = engine.memory.peak_bytes(32 * 128) - engine.memory.resident_bytes
        gc.collect()
        resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + int(0.75 * free), -1))
        metrics = learn(engine, 32, 128)
        return {"metrics": metrics, "token_budget": engine.token_budget}


def main() -> None:
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 16)
    libc.mallopt(_M_TRIM_THRESHOLD, 0)
    cast_progress: Any = transformers.utils.logging
    cast_progress.disable_progress_bar()
    torch.manual_seed(1)
    print(json.dumps(short_of_memory() if sys.argv[1] == "short" else [measured(shape) for shape in SHAPES]))


if __name__ == "__main__":
    main()
