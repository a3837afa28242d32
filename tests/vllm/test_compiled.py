"""Compiled code of the real engine between starts (V1)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sampler_conformance import PROMPTS, apply, run, tokens_of

from openrl_sampler.compile_cache import CompileCache


def test_v1_a_second_start_compiles_nothing_and_serves_and_updates_the_same(
    new_engine: Callable[..., Any], save_full: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V1, V7: what another node left is loaded; it reads the resident parameters, so that an update reaches it."""
    local, shared = tmp_path / "local", tmp_path / "shared"
    asked = {"max_tokens": 6, "temperature": 0.0}
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))  # vLLM sets it; this gives it back

    def start() -> Any:
        cache = CompileCache(local, shared, "engine")
        monkeypatch.setenv("VLLM_CACHE_ROOT", str(cache.path / "vllm"))
        return new_engine(compile=True, max_num_seqs=8, prefill_tokens=256, cache=cache)

    eager = new_engine(max_num_seqs=8)
    expected = tokens_of(run(eager, PROMPTS, **asked))
    record = save_full(1)
    apply(eager, record)
    later = tokens_of(run(eager, PROMPTS, **asked))
    assert later != expected
    for state in ("cold", "seeded"):
        engine = start()
        assert engine.cache_state == state
        shutil.rmtree(local)
        assert tokens_of(run(engine, PROMPTS, **asked)) == expected
        apply(engine, record)
        assert tokens_of(run(engine, PROMPTS, **asked)) == later
