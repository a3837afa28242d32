"""Generation by the torch engine against plain transformers (V10, V12)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openrl_common.errors import Rejected
from openrl_common.records import JobKind
from openrl_common.wire import SamplingParams
from openrl_sampler.engine import GenerateCall

PROMPTS = [[5, 9, 13], [7, 8, 30, 31, 32, 40, 2], [44, 3]]
TOLERANCE = 2e-5


def test_v12_logprobs_equal_a_plain_forward_pass(
    new_engine: Callable[..., Any], generate: Callable[..., Any], plain_logprobs: Callable[..., Any], model_path: Path
) -> None:
    """V12: prompts of different lengths in one padded batch; the temperature is part of the returned distribution."""
    engine = new_engine()
    for temperature in (1.0, 0.7):
        result = generate(engine, PROMPTS, n=3, max_tokens=12, temperature=temperature)
        for prompt, group in zip(PROMPTS, result.sequences, strict=True):
            assert len(group) == 3
            for sequence in group:
                expected = plain_logprobs(model_path, prompt + sequence.tokens, temperature=temperature)
                assert sequence.logprobs == pytest.approx(expected[len(prompt) - 1 :], abs=TOLERANCE)
                assert sequence.versions == [0] * len(sequence.tokens)


def test_v12_sliding_window_layers_see_their_window_only(
    new_engine: Callable[..., Any],
    generate: Callable[..., Any],
    plain_logprobs: Callable[..., Any],
    save_tiny_model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    path = save_tiny_model(
        tmp_path / "m",
        use_sliding_window=True,
        sliding_window=4,
        layer_types=["full_attention", "sliding_attention"],
    )
    engine = new_engine(path)
    result = generate(engine, PROMPTS, n=2, max_tokens=12)
    for prompt, group in zip(PROMPTS, result.sequences, strict=True):
        for sequence in group:
            expected = plain_logprobs(path, prompt + sequence.tokens)
            assert sequence.logprobs == pytest.approx(expected[len(prompt) - 1 :], abs=TOLERANCE)


def test_v10_prompt_logprobs_equal_a_plain_forward_pass(
    new_engine: Callable[..., Any], generate: Callable[..., Any], plain_logprobs: Callable[..., Any], model_path: Path
) -> None:
    """V10: of the model itself (temperature 1), entry 0 is no prediction; max_tokens 0 only scores."""
    for budget, max_tokens in ((8192, 3), (4, 0)):
        result = generate(
            new_engine(prefill_tokens=budget), PROMPTS, max_tokens=max_tokens, temperature=0.5, prompt_logprobs=True
        )
        for prompt, scores in zip(PROMPTS, result.prompt_logprobs, strict=True):
            assert scores[0] == 0.0
            assert scores[1:] == pytest.approx(plain_logprobs(model_path, prompt), abs=TOLERANCE)
        assert all(len(group) == 1 and len(group[0].tokens) <= max_tokens for group in result.sequences)


def test_v10_a_seeded_request_gives_the_same_tokens_whatever_it_is_batched_with(new_engine: Callable[..., Any]) -> None:
    """V10: alone, with others, joining a running batch, with prefill cut into chunks, with room for few."""
    params = SamplingParams(n=2, max_tokens=16, seed=11)

    def run(engine: Any, *, before: int = 0, together: bool = False) -> Any:
        others = GenerateCall(
            request="o", job="t.j.1", prompts=[[3] * 9, [4]], params=SamplingParams(n=3, max_tokens=40), seed=1
        )
        if before or together:
            engine.add(others)
            for _ in range(before):
                engine.step()
        engine.add(GenerateCall(request="r", job="t.j.1", prompts=PROMPTS, params=params, seed=11))
        while True:
            for ended in engine.step():
                if ended.request == "r":
                    return [[sequence.tokens for sequence in group] for group in ended.sequences]

    alone = run(new_engine())
    assert run(new_engine()) == alone
    assert run(new_engine(), together=True) == alone
    assert run(new_engine(), before=5) == alone
    assert run(new_engine(prefill_tokens=4)) == alone
    assert run(new_engine(max_num_seqs=4)) == alone
    assert len({tuple(tokens) for group in alone for tokens in group}) == 6, "samples of a request are independent"


def test_v4_keys_and_values_stay_within_the_seat(new_engine: Callable[..., Any], model_path: Path) -> None:
    """V4: a seat with memory for few tokens runs few sequences at a time; what never fits is refused."""
    weights = 4 * sum(p.numel() for p in new_engine()._resident.model.parameters())
    per_token = 2 * 2 * 2 * 8 * 4
    update_bytes = 1000
    engine = new_engine(device_bytes=weights + update_bytes + per_token * 60, chunk_bytes=update_bytes)
    engine.add(
        GenerateCall(
            request="r", job="t.j.1", prompts=[[3, 4], [5, 6]], params=SamplingParams(n=4, max_tokens=4), seed=0
        )
    )
    most = 0
    ended: list[Any] = []
    while not ended:
        ended = engine.step()
        most = max(most, sum(len(batch.rows) for batch in engine._batches.values()))
    assert most <= 8, "48 tokens of keys and values hold 8 sequences of 6"
    assert sum(len(group) for group in ended[0].sequences) == 8
    with pytest.raises(Rejected, match="does not fit"):
        engine.check(
            GenerateCall(request="r", job="t.j.1", prompts=[[3] * 50], params=SamplingParams(max_tokens=9), seed=0)
        )
    with pytest.raises(Rejected, match="the seat declares"):
        new_engine(device_bytes=weights + update_bytes, chunk_bytes=update_bytes)


def test_v5_base_of_a_lora_runtime_serves_version_0(
    new_engine: Callable[..., Any], generate: Callable[..., Any]
) -> None:
    """V5: without an adapter a LoRA runtime and a full one generate the same, as version 0."""
    lora = generate(new_engine(kind=JobKind.LORA), PROMPTS, max_tokens=8)
    full = generate(new_engine(), PROMPTS, max_tokens=8)
    assert [g[0].tokens for g in lora.sequences] == [g[0].tokens for g in full.sequences]
    assert lora.sequences[0][0].versions[0] == 0


def test_v4_samples_of_one_prompt_run_together_only_as_far_as_their_keys_and_values_fit(
    new_engine: Callable[..., Any],
) -> None:
    """What does not fit ran all the same: on a GPU one request, within every limit, ended the process, twice."""
    engine = new_engine()
    engine._resident.kv_tokens_max = 100
    params = SamplingParams(n=7, max_tokens=30)
    engine.add(GenerateCall(request="r", job="t.j.1", prompts=[[5, 9, 13], [44, 3]], params=params, seed=7))
    most, ended = 0, []
    while engine.num_sequences:
        ended += engine.step()
        most = max([most, *(len(batch.rows) * batch.final_len for batch in engine._batches.values())])
    assert 0 < most <= 100
    assert [len(group) for group in ended[0].sequences] == [7, 7]
