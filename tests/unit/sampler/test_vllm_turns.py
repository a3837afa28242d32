"""A vLLM sampler that leaves its GPU: the order of calls that vLLM documents (T5, V5).

vLLM's sleep mode needs a GPU; a recorder stands where its engine would be, so this says what is called, not what it
does.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sampler_support import save_full_version, save_model

from openrl_common.errors import Bug
from openrl_common.records import JobKind
from openrl_common.tensors import read_checkpoint
from openrl_sampler.memory_share import ModelSizes
from openrl_sampler.service import Sampler
from openrl_sampler.vllm_engine import VllmEngine
from openrl_sampler.vllm_options import VllmOptions
from openrl_sampler.weights_keeper import apply


class Recorder:
    """Where vLLM's LLMEngine would be."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def sleep(self, level: int, mode: str) -> None:
        self.calls.append(f"sleep {level} {mode}")

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {' '.join(tags)}")

    def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        self.calls.append(f"reset prefix cache, running {reset_running_requests}")
        return True

    def collective_rpc(self, method: str, args: Any = (), kwargs: Any = None) -> list[Any]:
        if method in ("openrl_free_bytes", "openrl_held_bytes"):
            return [1 << 40]
        self.calls.append(method)
        return [_Written()] if method == "openrl_write" else [""]


class _Written:
    error, elements, peak_extra_bytes = "", 10, 0


@pytest.fixture
def engine(tmp_path: Path) -> VllmEngine:
    path = save_model(tmp_path / "m")
    engine = VllmEngine(VllmOptions(model_path=path, kind=JobKind.FFT))
    engine._engine, engine._num_planned, engine.can_park = Recorder(), 10, True
    engine._checkpoint, engine._streamable = read_checkpoint(path), True
    engine._sizes = ModelSizes(parameters=1, weights_bytes=1, largest_tensor_bytes=1, kv_bytes_per_token=1)
    return engine


async def test_v5_t5_weights_wake_first_then_the_update_then_keys_and_values(
    engine: VllmEngine, tmp_path: Path
) -> None:
    record = save_full_version(tmp_path, 1)

    class Weights:
        async def apply_due(self) -> None:
            apply(engine, "t.j.1", record)

    with ThreadPoolExecutor(max_workers=1) as thread:
        sampler = Sampler.__new__(Sampler)
        sampler._engine, sampler._thread, sampler._weights = engine, thread, Weights()  # type: ignore[assignment]
        engine.park(tmp_path)
        await sampler._resume()
    assert engine._engine.calls == [
        "sleep 1 keep", "wake weights", "openrl_plan", "openrl_write", "reset prefix cache, running True",
        "wake kv_cache",
    ]  # fmt: skip
    assert engine.version("t.j.1") == 1


def test_t5_an_engine_that_cannot_leave_says_so(engine: VllmEngine, tmp_path: Path) -> None:
    engine.can_park = False
    with pytest.raises(Bug, match="no sleep mode on a CPU"):
        engine.park(tmp_path)
    assert engine._engine.calls == []
