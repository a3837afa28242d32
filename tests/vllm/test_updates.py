"""What only vLLM has: fused and packed weights, its prefix cache, its memory, its ranks (V4, V6-V8, V12, V13)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sampler_conformance import JOB, PROMPTS, apply, call, finish, run, tokens_of
from sampler_support import LENGTH_MAX, save_delta_version, save_full_version
from vllm.platforms import current_platform

from openrl_common.errors import Bug, Rejected
from openrl_common.quantities import GIB
from openrl_common.records import JobKind
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
    """V5: a prompt of more than one block, which the cache would keep; also of a call that runs over the update, whose
    keys and values are computed anew."""
    longer = {"max_position_embeddings": 512}
    engine = new_engine(save_tiny_model(tmp_path / "base", **longer))
    prompt = [(7 * index) % 50 + 5 for index in range(300)]
    asked = {"max_tokens": 4, "temperature": 0.0}
    old = run(engine, [prompt], **asked)
    record = save_full(1, **longer)
    engine.add(call([prompt], max_tokens=12, temperature=0.0, stop_token_ids=[]))
    for _ in range(5):
        engine.step()
    apply(engine, record)
    fresh = new_engine(Path(record.manifest).parent)
    over = finish(engine).sequences[0][0]
    assert over.versions == [0] * 5 + [1] * (len(over.tokens) - 5)
    scores = run(fresh, [prompt + over.tokens], max_tokens=1, prompt_logprobs=True).prompt_logprobs
    assert scores is not None
    assert over.logprobs[5:] == pytest.approx(scores[0][len(prompt) + 5 :], abs=1e-4)
    assert over.logprobs[:5] != pytest.approx(scores[0][len(prompt) : len(prompt) + 5], abs=1e-2)
    assert (
        run(engine, [prompt], **asked).sequences[0][0].logprobs
        == run(fresh, [prompt], **asked).sequences[0][0].logprobs
    )
    assert tokens_of(old)


def test_v7_vllms_own_loaders_are_there_too_and_give_the_same(
    new_engine: Callable[..., Any], save_full: Callable[..., Any], tmp_path: Path
) -> None:
    """V7, V8: reload and the patch loader; what does not fit is found before they write, for what they write is lost
    when they break off."""
    streamed, reload, patch = (new_engine(update_method=method) for method in ("streamed", "reload", "patch"))
    assert (reload.weights_formats, patch.weights_formats) == ("full", "full,delta")
    asked = {"n": 2, "max_tokens": 8, "seed": 3}
    first = save_full(1)
    second = save_delta_version(tmp_path, first, 2)
    for engine in (streamed, reload, patch):
        apply(engine, first)
    assert digests(streamed) == digests(reload) == digests(patch)
    for engine in (reload, patch):
        with pytest.raises(Rejected, match="do not fit the model"):
            apply(engine, save_full(3 + (engine is patch), intermediate_size=32))
        assert digests(engine) == digests(streamed)
    for engine in (streamed, patch):
        assert 0.05 < apply(engine, second).touched_share < 0.2
    assert digests(streamed) == digests(patch)
    assert tokens_of(run(streamed, PROMPTS, **asked)) == tokens_of(run(patch, PROMPTS, **asked))
    with pytest.raises(Rejected, match="reload takes whole ones"):
        apply(reload, second)
    third = save_full(5)
    for engine in (streamed, reload):
        apply(engine, third)
    assert digests(streamed) == digests(reload)
    assert tokens_of(run(streamed, PROMPTS, **asked)) == tokens_of(run(reload, PROMPTS, **asked))
    late = new_engine(update_method="patch")
    apply(late, second)
    assert digests(late) == digests(patch)
    with pytest.raises(Bug, match="broke off"):
        apply(late, save_delta_version(tmp_path, second, 6, fill=float("nan")))


def test_v4_the_seat_decides_how_many_tokens_are_kept(new_engine: Callable[..., Any]) -> None:
    """V4: never more than the sequences that may run at once can fill; a smaller seat keeps fewer."""
    roomy = new_engine(device_bytes=8 * GIB, max_num_seqs=8)
    assert roomy.kv_tokens_max == 9 * LENGTH_MAX
    per_token = 2 * 2 * 2 * 32 * 4
    assert roomy.rpc("openrl_free_bytes", 8 * GIB)[0] <= 8 * GIB - 9 * LENGTH_MAX * per_token, "what the seat has left"
    tight_bytes = GIB // 2 + (4 << 20)
    tight = new_engine(device_bytes=tight_bytes, max_num_seqs=10_000, prefill_tokens=2048)
    assert LENGTH_MAX + CPU_BLOCK_TOKENS <= tight.kv_tokens_max <= (4 << 20) // per_token
    tight.close()
    total = current_platform.get_device_total_memory()
    by_share = new_engine(
        device_bytes=8 * GIB, memory_share=(tight_bytes + 1) / total, max_num_seqs=10_000, prefill_tokens=2048
    )
    assert by_share.kv_tokens_max == tight.kv_tokens_max, "an explicit share wins"
    with pytest.raises(Rejected, match="the seat declares"):
        new_engine(device_bytes=tight_bytes, memory_share=min(1.0, 2 * tight_bytes / total))


@pytest.mark.timeout(900)
def test_v13_two_ranks_serve_a_version_together_or_not_at_all(
    new_engine: Callable[..., Any], save_tiny_model: Callable[..., Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """V13: two processes give the logprobs of one; both ranks get a version, or neither where it is bad or torn.
    V11: the death of one is noticed within 5 s, also while nothing runs."""
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
    assert (pair.failure, single.failure) == ("", "")
    os.kill(pair._engine.model_executor.workers[1].proc.pid, signal.SIGKILL)
    until = time.monotonic() + 5
    while not pair.failure and time.monotonic() < until:
        time.sleep(0.02)
    assert pair.failure == "a process of the vLLM engine has died"
    pair.add(call(PROMPTS, **asked))
    with pytest.raises(RuntimeError):
        pair.step()


def test_v9_more_adapters_in_use_than_vllm_has_slots_all_answer_and_nothing_is_read_again(
    new_engine: Callable[..., Any], save_lora: Callable[..., Any]
) -> None:
    """V9: the files of a version that still runs may be gone: its trainer keeps the newest ones only."""
    engine = new_engine(kind=JobKind.LORA, max_adapters=1, adapter_slots=1)
    asked = {"max_tokens": 10, "seed": 3}
    records, alone = {}, {}
    for name in ("a", "b", "c", "d", "e"):
        records[f"t.{name}.1"] = save_lora(1, job=name)
        apply(engine, records[f"t.{name}.1"])
        alone[f"t.{name}.1"] = tokens_of(run(engine, PROMPTS, job=f"t.{name}.1", **asked))
    for key, record in records.items():
        engine.add(call(PROMPTS, request=key, job=key, **asked))
        Path(record.manifest).parent.rename(Path(record.manifest).parent.with_name("gone"))
    found = {}
    while engine.num_sequences:
        found |= {one.request: tokens_of(one) for one in engine.step()}
    assert found == alone
    with pytest.raises(Rejected) as caught:
        engine.add(call(PROMPTS, request="late", job="t.a.1", **asked))
    assert caught.value.code == "weights-missing"


def test_v3_the_capture_of_device_graphs_is_stamped(new_engine: Callable[..., Any]) -> None:
    """V3: by what times vLLM's own capture, which has nothing to capture on a CPU."""
    engine = new_engine()
    assert "capture" not in engine.load_parts
    engine._engine.model_executor.driver_worker.worker.model_runner.capture_model()
    engine._prepare()
    assert 0 < engine.load_parts["capture"] < 1
