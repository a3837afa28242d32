"""What only vLLM has: fused and packed weights, its prefix cache, its memory, its ranks (V4, V6-V8, V12, V13)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sampler_conformance import JOB, PROMPTS, apply, run, tokens_of
from sampler_support import LENGTH_MAX, save_delta_version, save_full_version

from openrl_common.errors import Rejected
from openrl_common.quantities import GIB
from openrl_sampler.vllm_engine import VllmEngine
from openrl_sampler.vllm_options import CPU_BLOCK_TOKENS

CHUNK_BYTES = 1 << 20
LARGE = {"vocab_size": 40_000, "hidden_size": 64, "max_position_embeddings": 128}
"""Embedding: 10.2 MB in float32, ten times the chunk."""


def digests(engine: VllmEngine) -> list[dict[str, str]]:
    return engine.rpc("openrl_digests")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_v7_every_parameter_equals_a_fresh_load_within_the_chunk(
    tied: bool, dtype: str, new_engine: Callable[..., Any], save_tiny_model: Callable[..., Path],
    save_full: Callable[..., Any], tmp_path: Path,
) -> None:  # fmt: skip
    """V6, V7, V8: also from float32 files into bfloat16 parameters, which go through the buffer."""
    base = save_tiny_model(tmp_path / "base", tied=tied, **LARGE)
    engine = new_engine(base, dtype=dtype, chunk_bytes=CHUNK_BYTES)
    assert engine.update_method == "streamed"
    apply(engine, save_full(1, tied=tied, **LARGE))  # what the first one allocates for good is not the update's
    record = save_full(2, tied=tied, **LARGE)
    applied = apply(engine, record)
    fresh = new_engine(Path(record.manifest).parent, dtype=dtype)
    assert digests(engine) == digests(fresh)
    assert applied.touched_share == pytest.approx(1.0)
    assert applied.peak_extra_bytes <= 1.1 * CHUNK_BYTES
    second = save_delta_version(tmp_path, record, 3)
    applied = apply(engine, second)
    whole = Path(second.manifest).parent
    fresh = new_engine(whole.with_name(f"{whole.name}-whole"), dtype=dtype)
    assert digests(engine) == digests(fresh)
    assert applied.peak_extra_bytes <= 1.1 * CHUNK_BYTES


def test_v5_nothing_of_an_older_version_is_read_from_the_prefix_cache(
    new_engine: Callable[..., Any], save_tiny_model: Callable[..., Path], save_full: Callable[..., Any], tmp_path: Path
) -> None:
    """V5: a prompt of more than one block, which the cache would keep; also of a call that runs over the update."""
    longer = {"max_position_embeddings": 512}
    engine = new_engine(save_tiny_model(tmp_path / "base", **longer))
    prompt = [(7 * index) % 50 + 5 for index in range(300)]
    asked = {"max_tokens": 4, "temperature": 0.0}
    old = run(engine, [prompt], **asked)
    record = save_full(1, **longer)
    apply(engine, record)
    fresh = new_engine(Path(record.manifest).parent)
    assert (
        run(engine, [prompt], **asked).sequences[0][0].logprobs
        == run(fresh, [prompt], **asked).sequences[0][0].logprobs
    )
    assert tokens_of(old)


def test_v7_vllms_own_reload_is_there_too_and_gives_the_same(
    new_engine: Callable[..., Any], save_full: Callable[..., Any]
) -> None:
    engine, streamed = new_engine(update_method="reload"), new_engine(update_method="streamed")
    record = save_full(1)
    apply(engine, record)
    apply(streamed, record)
    assert digests(engine) == digests(streamed)
    asked = {"n": 2, "max_tokens": 8, "seed": 3}
    assert tokens_of(run(engine, PROMPTS, **asked)) == tokens_of(run(streamed, PROMPTS, **asked))


def test_v4_the_seat_decides_how_many_tokens_are_kept(new_engine: Callable[..., Any]) -> None:
    """V4: never more than the sequences that may run at once can fill; a smaller seat keeps fewer."""
    roomy = new_engine(device_bytes=8 * GIB, max_num_seqs=8)
    assert roomy.kv_tokens_max == 9 * LENGTH_MAX
    per_token = 2 * 2 * 2 * 32 * 4
    tight = new_engine(device_bytes=GIB // 2 + (4 << 20), max_num_seqs=10_000, prefill_tokens=2048)
    assert LENGTH_MAX + CPU_BLOCK_TOKENS <= tight.kv_tokens_max <= (4 << 20) // per_token


@pytest.mark.timeout(900)
def test_v13_two_ranks_serve_a_version_together_or_not_at_all(
    new_engine: Callable[..., Any], save_tiny_model: Callable[..., Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """V13: two processes give the logprobs of one; both ranks get a version, or neither where it is bad or torn."""
    shape = {"vocab_size": 64}
    base = save_tiny_model(tmp_path / "base", **shape)
    pair, single = new_engine(base, num_devices=2), new_engine(base)
    asked = {"max_tokens": 8, "temperature": 0.0, "prompt_logprobs": True}

    def same() -> bool:
        left, right = run(pair, PROMPTS, **asked), run(single, PROMPTS, **asked)
        assert left.prompt_logprobs is not None
        assert right.prompt_logprobs is not None
        for ours, theirs in zip(left.prompt_logprobs, right.prompt_logprobs, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)
        return tokens_of(left) == tokens_of(right)

    assert same()
    first = save_full_version(tmp_path, 1, head_dim=32, **shape)
    for engine in (pair, single):
        apply(engine, first)
    assert same()
    before = digests(pair)
    assert len(before) == 2
    assert before[0] != before[1]
    with pytest.raises(Rejected):
        apply(pair, save_full_version(tmp_path, 2, head_dim=32, intermediate_size=32, **shape))
    assert digests(pair) == before
    torn = save_full_version(tmp_path, 3, head_dim=32, **shape)
    planned = pair._plan

    def tear(layers: Any) -> str:
        path = Path(torn.manifest).parent / "model.safetensors"
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)
        monkeypatch.setattr(pair, "_plan", planned)
        return str(planned(layers))

    monkeypatch.setattr(pair, "_plan", tear)
    with pytest.raises(Rejected) as caught:
        apply(pair, torn)
    assert caught.value.code == "weights-torn"
    assert digests(pair) == before
    assert pair.version(JOB) == 1
    delta = save_delta_version(tmp_path, first, 4)
    for engine in (pair, single):
        apply(engine, delta)
    assert same()
