"""What every sampler engine does alike (issue 6): the same requests, fields, seeds, stops, logprobs, updates,
cancellation.

Test modules import everything from here and give the fixtures ``new_engine(path=None, kind=…, **options)``,
``model_path``, ``save_tiny_model``, ``save_full``, ``save_lora`` and ``tolerance``: tests/unit/sampler for torch,
tests/vllm for vLLM.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import transformers
from sampler_support import (
    flip_a_byte,
    plain_logprobs,
    plain_top_logprobs,
    remove,
    save_delta_version,
    truncate,
)

from openrl_common.errors import Rejected
from openrl_common.quantities import GIB
from openrl_common.records import JobKind, LoraSpec
from openrl_common.wire import (
    AdamParams,
    Datum,
    Forward,
    ForwardBackward,
    OptimStep,
    SampleRequest,
    SamplingParams,
    SaveWeights,
)
from openrl_sampler import streamed
from openrl_sampler.admission import TEMPERATURE_LEAST, TEMPERATURE_MOST, Limits, check_request
from openrl_sampler.engine import GenerateCall, Generated
from openrl_sampler.weights_keeper import apply as apply_record
from openrl_trainer.engine import EngineSettings, JobSettings, TrainEngine
from openrl_trainer.model import BaseModel, prepare_torch

PROMPTS = [[5, 9, 13], [7, 8, 30, 31, 32, 40, 2], [44, 3]]
JOB = "t.j.1"


def call(prompts: list[list[int]], *, request: str = "r", job: str = JOB, seed: int = 7, exact: int | None = None,
         **params: Any) -> GenerateCall:  # fmt: skip
    return GenerateCall(
        request=request, job=job, prompts=prompts, params=SamplingParams(seed=seed, **params), seed=seed, exact=exact
    )


def finish(engine: Any, *, request: str = "r") -> Generated:
    for _ in range(500):
        for ended in engine.step():
            if ended.request == request:
                return ended
    raise AssertionError("it does not end")


def run(engine: Any, prompts: list[list[int]], **params: Any) -> Generated:
    engine.add(call(prompts, **params))
    return finish(engine)


def apply(engine: Any, record: Any) -> Any:
    return apply_record(engine, f"{record.tenant}.{record.job}.{record.incarnation}", record)


def tokens_of(result: Generated) -> list[list[list[int]]]:
    return [[sequence.tokens for sequence in group] for group in result.sequences]


# --- requests ----------------------------------------------------------------------------------------------------


def test_v10_fields_of_an_answer(new_engine: Callable[..., Any]) -> None:
    result = run(new_engine(), PROMPTS, n=3, max_tokens=6)
    assert result.error is None
    assert result.prompt_logprobs is None
    assert [len(group) for group in result.sequences] == [3, 3, 3]
    for group in result.sequences:
        for one in group:
            assert 1 <= len(one.tokens) == len(one.logprobs) == len(one.versions) <= 6
            assert one.finish_reason in ("stop", "length")
            assert all(logprob <= 0 for logprob in one.logprobs)
            assert set(one.versions) == {0}


def test_v12_logprobs_are_those_after_the_temperature_whatever_the_filters(
    new_engine: Callable[..., Any], model_path: Path, tolerance: float
) -> None:
    """V10, V12: also with top-k, top-p and min-p, which choose among tokens and leave the reported distribution; also
    with temperatures that vLLM's own validation would change (below 0.01) or refuse (above 2)."""
    engine = new_engine()
    asked: tuple[dict[str, float], ...] = (
        {}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 3}, {"top_p": 0.5, "min_p": 0.05}, {"temperature": 5.0},
        {"temperature": TEMPERATURE_MOST},
    )  # fmt: skip
    for settings in asked:
        result = run(engine, PROMPTS, n=2, max_tokens=10, **settings)
        for prompt, group in zip(PROMPTS, result.sequences, strict=True):
            for one in group:
                temperature = float(settings.get("temperature", 1.0))
                expected = plain_logprobs(model_path, prompt + one.tokens, temperature=temperature)
                assert one.logprobs == pytest.approx(expected[len(prompt) - 1 :], abs=tolerance)


def test_v10_greedy_among_random_requests_takes_the_most_likely_token(
    new_engine: Callable[..., Any], model_path: Path, tolerance: float
) -> None:
    engine = new_engine()
    alone = run(engine, [PROMPTS[0]], n=2, max_tokens=10, temperature=0.0)
    assert alone.sequences[0][0].tokens == alone.sequences[0][1].tokens
    engine.add(call(PROMPTS, request="random", n=2, max_tokens=10, temperature=2.0))
    engine.add(call([PROMPTS[0]], max_tokens=10, temperature=0.0))
    (greedy,) = finish(engine).sequences[0]
    assert greedy.tokens == alone.sequences[0][0].tokens
    expected = plain_logprobs(model_path, PROMPTS[0] + greedy.tokens)
    assert greedy.logprobs == pytest.approx(expected[len(PROMPTS[0]) - 1 :], abs=tolerance)


def test_v10_filters_keep_only_what_they_allow(new_engine: Callable[..., Any], model_path: Path) -> None:
    engine = new_engine()
    assert tokens_of(run(engine, PROMPTS, max_tokens=8, top_k=1)) == tokens_of(
        run(engine, PROMPTS, max_tokens=8, temperature=0.0)
    )
    for settings in ({"top_p": 1e-6}, {"min_p": 1.0}):
        assert tokens_of(run(engine, PROMPTS, max_tokens=8, **settings)) == tokens_of(
            run(engine, PROMPTS, max_tokens=8, temperature=0.0)
        )


def test_v10_prompt_logprobs_are_the_models_own(
    new_engine: Callable[..., Any], model_path: Path, tolerance: float
) -> None:
    """V10: at temperature 1 whatever the request's; entry 0 is no prediction; max_tokens 0 only scores."""
    engine = new_engine()
    for max_tokens in (3, 0):
        prompts = [*PROMPTS, [9]]
        result = run(engine, prompts, n=2, max_tokens=max_tokens, temperature=0.5, prompt_logprobs=True)
        for prompt, scores in zip(prompts, result.prompt_logprobs or [], strict=True):
            assert scores[0] == 0.0
            assert scores[1:] == pytest.approx(plain_logprobs(model_path, prompt), abs=tolerance)
        assert all(len(group) == 2 for group in result.sequences)
        assert all(len(one.tokens) <= max_tokens for group in result.sequences for one in group)
        assert max_tokens or {one.finish_reason for group in result.sequences for one in group} == {"length"}


def test_v10_a_temperature_near_zero_takes_the_likeliest_token_and_is_sure_of_it(
    new_engine: Callable[..., Any],
) -> None:
    engine = new_engine()
    greedy = tokens_of(run(engine, PROMPTS, max_tokens=8, temperature=0.0))
    result = run(engine, PROMPTS, max_tokens=8, temperature=TEMPERATURE_LEAST)
    assert tokens_of(result) == greedy
    assert all(logprob == pytest.approx(0.0, abs=1e-6) for (one,) in result.sequences for logprob in one.logprobs)


def test_v10_prompt_top_logprobs_are_the_likeliest_tokens_at_every_place(
    new_engine: Callable[..., Any], model_path: Path, tolerance: float
) -> None:
    """V10: prompt logprobs with top-k, with and without the prompt's own, beside calls that want others or none."""
    engine = new_engine()
    prompts = [*PROMPTS, [9]]
    engine.add(call(prompts, request="plain", max_tokens=2))
    engine.add(call(prompts, request="two", max_tokens=2, prompt_top_logprobs=2, prompt_logprobs=True))
    engine.add(call(prompts, n=2, max_tokens=0, temperature=0.5, prompt_top_logprobs=5))
    ended: dict[str, Generated] = {}
    while engine.num_sequences:
        ended |= {one.request: one for one in engine.step()}
    assert ended["plain"].prompt_top_logprobs is None
    assert ended["r"].prompt_logprobs is None
    for request, top in (("two", 2), ("r", 5)):
        for prompt, places in zip(prompts, ended[request].prompt_top_logprobs or [], strict=True):
            expected = plain_top_logprobs(model_path, prompt, top)
            assert [[token for token, _ in place] for place in places] == [
                [], *([token for token, _ in place] for place in expected)
            ]  # fmt: skip
            for place, wanted in zip(places[1:], expected, strict=True):
                assert [value for _, value in place] == pytest.approx([value for _, value in wanted], abs=tolerance)
    scores = ended["two"].prompt_logprobs or []
    assert scores[0][1:] == pytest.approx(plain_logprobs(model_path, PROMPTS[0]), abs=tolerance)


def test_v10_whatever_is_accepted_can_be_run(new_engine: Callable[..., Any]) -> None:
    """V10: requests at the edges of every range, many at once; none breaks the engine, each gets its answer."""
    engine, randomness = new_engine(max_num_seqs=16), random.Random(5)
    limits = Limits(max_model_len=engine.max_model_len, vocabulary_size=engine.vocabulary_size, sequences_max=64)
    edges: dict[str, list[Any]] = {
        "n": [1, 2, 9], "max_tokens": [0, 1, 2, 30], "temperature": [0.0, TEMPERATURE_LEAST, 1.0, TEMPERATURE_MOST],
        "top_p": [5e-324, 1e-9, 0.5, 1.0], "top_k": [0, 1, 60, 2**62], "min_p": [0.0, 5e-324, 0.5, 1.0],
        "stop_token_ids": [[], [0], list(range(engine.vocabulary_size))], "prompt_logprobs": [False, True],
        "prompt_top_logprobs": [0, 20], "seed": [0, 2**63 - 1],
    }  # fmt: skip
    names = []
    for index in range(150):
        params = {name: randomness.choice(values) for name, values in edges.items()}
        prompts = [[randomness.randrange(engine.vocabulary_size)] * randomness.choice([1, 2, 34, 64]) for _ in range(2)]
        asked = call(prompts, request=f"r{index}", **params)
        request = SampleRequest(
            request="r", tenant="t", job="j", incarnation=1, prompts=prompts, params=asked.params, deadline=1.0
        )
        with suppress(Rejected):
            check_request(request, limits)
            engine.check(asked)
            names.append(asked.request)
            engine.add(asked)
    assert len(names) > 40
    ended: dict[str, Generated] = {}
    while engine.num_sequences:
        ended |= {one.request: one for one in engine.step()}
    assert sorted(ended) == sorted(names)
    assert [one.request for one in ended.values() if one.error] == []


def test_v10_a_seeded_request_gives_the_same_tokens_whatever_it_is_batched_with(new_engine: Callable[..., Any]) -> None:
    engine = new_engine()
    seeded = {"n": 2, "max_tokens": 16, "seed": 11}
    alone = tokens_of(run(engine, PROMPTS, **seeded))
    assert tokens_of(run(engine, PROMPTS, **seeded)) == alone
    for steps in (0, 5):
        engine.add(call([[3] * 9, [4]], request=f"other{steps}", n=3, max_tokens=40))
        for _ in range(steps):
            engine.step()
        assert tokens_of(run(engine, PROMPTS, **seeded)) == alone
        engine.abort(f"other{steps}")
    assert tokens_of(run(engine, PROMPTS, **{**seeded, "seed": 12})) != alone
    assert len({tuple(tokens) for group in alone for tokens in group}) == 6, "samples of a request are independent"


def test_v10_a_completion_ends_at_eos_or_a_stop_id_and_includes_it(new_engine: Callable[..., Any]) -> None:
    engine = new_engine()
    free = run(engine, [PROMPTS[0]], n=32, max_tokens=30, seed=5).sequences[0]
    assert {one.finish_reason for one in free} == {"stop", "length"}
    for one in free:
        assert (one.tokens[-1] == 1) == (one.finish_reason == "stop")
        assert 1 not in one.tokens[:-1]
    longest = max(free, key=lambda one: len(one.tokens))
    wanted = longest.tokens[3]
    stopped = run(engine, [PROMPTS[0]], n=32, max_tokens=30, seed=5, stop_token_ids=[wanted]).sequences[0]
    for one, whole in zip(stopped, free, strict=True):
        place = whole.tokens.index(wanted) + 1 if wanted in whole.tokens else len(whole.tokens)
        assert one.tokens == whole.tokens[:place]
        assert (one.finish_reason == "stop") == (one.tokens[-1] in (1, wanted))


def test_v10_a_completion_ends_at_a_stop_string_of_the_real_tokenizer(
    new_engine: Callable[..., Any], save_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """V10: found across token borders; the completion is the seeded one, cut after the token that completes it."""
    import tokenizers

    path = save_tiny_model(tmp_path / "m")
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456"
    vocabulary = {"<pad>": 0, "<eos>": 1} | {letter: index + 2 for index, letter in enumerate(letters)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges=[]))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(str(path))
    engine = new_engine(path)
    seed, free = next(
        (seed, one)
        for seed in range(30)
        for one in run(engine, [[5, 9]], max_tokens=30, seed=seed).sequences[0]
        if len(one.tokens) > 12
    )
    text = "".join(letters[token - 2] for token in free.tokens[4:6])
    whole = "".join(letters[token - 2] if token > 1 else "" for token in free.tokens)
    asked = {"max_tokens": 30, "stop": ["??", text], "seed": seed}
    engine.check(call([[5, 9]], **asked))
    stopped = run(engine, [[5, 9]], **asked).sequences[0][0]
    assert stopped.tokens == free.tokens[: whole.index(text) + 2]
    assert stopped.finish_reason == "stop"
    assert engine.num_sequences == 0


def test_v10_stop_strings_need_a_tokenizer_and_say_so(new_engine: Callable[..., Any]) -> None:
    with pytest.raises(Rejected, match="stop strings need a tokenizer") as caught:
        new_engine().check(call([[3]], max_tokens=3, stop=["x"]))
    assert caught.value.code == "bad-params"


def test_v10_an_aborted_call_leaves_and_the_others_go_on_unchanged(new_engine: Callable[..., Any]) -> None:
    engine = new_engine()
    asked = {"n": 2, "max_tokens": 20, "seed": 3}
    alone = tokens_of(run(engine, PROMPTS, **asked))
    engine.add(call(PROMPTS, request="leaves", **asked))
    engine.add(call(PROMPTS, request="stays", **asked))
    for _ in range(4):
        engine.step()
    engine.abort("leaves")
    engine.abort("never came")
    ended: list[Generated] = []
    while not ended:
        ended = engine.step()
    assert [one.request for one in ended] == ["stays"]
    assert tokens_of(ended[0]) == alone
    assert engine.num_sequences == 0


def test_v10_a_call_can_be_aborted_before_it_started(new_engine: Callable[..., Any]) -> None:
    """V10: cancelled while it waits for room, all of it or the rest; what runs goes on unchanged."""
    engine = new_engine(max_num_seqs=4)
    asked = {"n": 4, "max_tokens": 12, "seed": 3}
    alone = tokens_of(run(engine, PROMPTS[:1], **asked))
    engine.add(call(PROMPTS[:1], request="stays", **asked))
    engine.add(call(PROMPTS, request="leaves", **asked))
    engine.step()
    engine.abort("leaves")
    assert engine.num_sequences <= 4
    assert tokens_of(finish(engine, request="stays")) == alone
    assert engine.num_sequences == 0
    assert tokens_of(run(engine, PROMPTS[:1], **asked)) == alone


def test_v10_more_sequences_than_run_at_once_all_come_back(new_engine: Callable[..., Any]) -> None:
    engine = new_engine(max_num_seqs=4)
    engine.add(call(PROMPTS, n=5, max_tokens=6))
    assert engine.room == 0
    result = finish(engine)
    assert [len(group) for group in result.sequences] == [5, 5, 5]
    assert engine.room == 4


def test_v4_a_seat_too_small_for_the_model_is_refused_with_numbers(new_engine: Callable[..., Any]) -> None:
    with pytest.raises(Rejected, match="the seat declares") as caught:
        new_engine(device_bytes=1000)
    assert caught.value.code == "too-small"


def test_a_base_model_that_cannot_serve_is_named_in_one_line(new_engine: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(Rejected, match=str(tmp_path / "broken")):
        new_engine(tmp_path / "broken")


# --- full weights ------------------------------------------------------------------------------------------------


def _fresh(new_engine: Callable[..., Any], record: Any) -> Any:
    return new_engine(Path(record.manifest).parent)


@pytest.mark.parametrize("tied", [True, False])
def test_v8_after_an_update_it_serves_what_a_fresh_load_serves(
    tied: bool, new_engine: Callable[..., Any], save_tiny_model: Callable[..., Path], save_full: Callable[..., Any],
    tmp_path: Path,
) -> None:  # fmt: skip
    """V5, V8: fused modules, tied and untied heads; logprobs equal to the last bit, nothing from an old prefix."""
    engine = new_engine(save_tiny_model(tmp_path / "base", tied=tied))
    record = save_full(3, tied=tied)
    asked = {"n": 2, "max_tokens": 12, "seed": 4, "prompt_logprobs": True}
    before = run(engine, PROMPTS, **asked)
    applied = apply(engine, record)
    assert applied.seconds > 0
    assert engine.version(JOB) == 3
    after, fresh = run(engine, PROMPTS, **asked), run(_fresh(new_engine, record), PROMPTS, **asked)
    assert after.prompt_logprobs == fresh.prompt_logprobs
    assert tokens_of(after) == tokens_of(fresh) != tokens_of(before)
    assert [one.logprobs for group in after.sequences for one in group] == [
        one.logprobs for group in fresh.sequences for one in group
    ]
    assert {version for group in after.sequences for one in group for version in one.versions} == {3}


def test_v8_a_version_that_cannot_be_applied_leaves_the_one_before(
    new_engine: Callable[..., Any], save_full: Callable[..., Any]
) -> None:
    """V8: bad digest, missing or short file, another version than announced, tensors of other shapes or names."""
    engine = new_engine()
    apply(engine, save_full(1))
    asked = {"max_tokens": 8, "temperature": 0.0}
    expected = run(engine, PROMPTS, **asked)
    for version, damage in enumerate((flip_a_byte, remove, truncate), start=2):
        record = save_full(version)
        damage(Path(record.manifest).parent)
        with pytest.raises(Rejected, match=r"model\.safetensors"):
            apply(engine, record)
    with pytest.raises(Rejected, match="announced were"):
        apply(engine, msgspec.structs.replace(save_full(5), version=6))
    for version, change in enumerate(
        ({"intermediate_size": 32}, {"num_hidden_layers": 3}, {"num_hidden_layers": 1}, {"vocab_size": 63}), start=7
    ):
        with pytest.raises(Rejected) as caught:
            apply(engine, save_full(version, **change))
        assert caught.value.code == "weights-shape"
    assert engine.version(JOB) == 1
    assert run(engine, PROMPTS, **asked).sequences == expected.sequences


def test_v5_every_token_says_the_version_that_made_it(
    new_engine: Callable[..., Any], save_full: Callable[..., Any]
) -> None:
    """V5: a running request is kept over an update at a step boundary; its tokens tell both versions."""
    engine = new_engine()
    engine.add(call([[5, 9]], n=16, max_tokens=12, seed=1))
    for _ in range(5):
        engine.step()
    apply(engine, save_full(4))
    ended = finish(engine)
    longest = max(ended.sequences[0], key=lambda one: len(one.tokens))
    assert longest.versions == [0] * 5 + [4] * (len(longest.tokens) - 5)
    assert all(one.versions == longest.versions[: len(one.tokens)] for one in ended.sequences[0])


def test_v5_by_setting_an_update_ends_what_runs_and_never_for_a_version_that_is_refused(
    new_engine: Callable[..., Any], save_full: Callable[..., Any]
) -> None:
    """V5: in flight aborted, by setting: answered at the next step; an exact call does not hold the update up."""
    engine = new_engine(keeps_running=False)
    asked = {"n": 2, "max_tokens": 30, "stop_token_ids": [], "temperature": 5.0}
    engine.add(call(PROMPTS, request="runs", **asked))
    engine.add(call(PROMPTS, request="insists", exact=0, **asked))
    engine.step()
    assert not engine.pinned(JOB)
    bad = save_full(3)
    flip_a_byte(Path(bad.manifest).parent)
    with pytest.raises(Rejected):
        apply(engine, bad)
    with pytest.raises(Rejected):
        apply(engine, save_full(4, intermediate_size=32))
    assert engine.step() == []
    apply(engine, save_full(5))
    ended = engine.step()
    assert [(one.request, one.error.code if one.error else "") for one in ended] == [
        ("runs", "superseded"), ("insists", "superseded"),
    ]  # fmt: skip
    assert engine.num_sequences == 0
    after = run(engine, PROMPTS, max_tokens=4)
    assert {version for group in after.sequences for one in group for version in one.versions} == {5}


def test_v6_an_update_that_does_not_fit_is_rejected_with_numbers(
    new_engine: Callable[..., Any], save_full: Callable[..., Any]
) -> None:
    engine = new_engine(headroom_bytes=100_000 * GIB)
    with pytest.raises(
        Rejected, match=r"a streamed update needs 100000\.000 GiB of device memory, \d+\.\d+ GiB are"
    ) as caught:
        apply(engine, save_full(1))
    assert caught.value.code == "no-room"
    assert engine.version(JOB) == 0
    assert run(engine, PROMPTS, max_tokens=3).error is None


@pytest.mark.parametrize("tied", [True, False])
def test_v8_a_delta_on_its_parent_equals_the_whole_version(
    tied: bool, new_engine: Callable[..., Any], save_tiny_model: Callable[..., Path], save_full: Callable[..., Any],
    tmp_path: Path,
) -> None:  # fmt: skip
    """V7, V8: one after another, and over versions that were skipped, from the baseline."""
    base = save_tiny_model(tmp_path / "base", tied=tied)
    engine, late = new_engine(base), new_engine(base)
    records = [save_full(1, tied=tied)]
    apply(engine, records[0])
    asked = {"n": 2, "max_tokens": 10, "seed": 4, "prompt_logprobs": True}
    for version in (2, 3, 5):
        records.append(save_delta_version(tmp_path, records[-1], version))
        applied = apply(engine, records[-1])
        assert 0.05 < applied.touched_share < 0.2
        assert engine.version(JOB) == version
        directory = Path(records[-1].manifest).parent
        whole = run(new_engine(directory.with_name(f"{directory.name}-whole")), PROMPTS, **asked)
        delta = run(engine, PROMPTS, **asked)
        assert delta.prompt_logprobs == whole.prompt_logprobs
        assert tokens_of(delta) == tokens_of(whole)
    assert apply(late, records[-1]).touched_share > 1.0
    assert run(late, PROMPTS, **asked).prompt_logprobs == delta.prompt_logprobs
    apply(engine, records[-2])
    assert apply(engine, records[-1]).touched_share < 0.2, "the parent is resident again"
    assert run(engine, PROMPTS, **asked).prompt_logprobs == delta.prompt_logprobs


def test_v8_a_delta_that_cannot_be_applied_leaves_the_one_before(
    new_engine: Callable[..., Any], save_full: Callable[..., Any], tmp_path: Path
) -> None:
    """V8: a parent of another digest, one that is gone, positions outside a tensor, a changed file."""
    engine = new_engine()
    first = save_full(1)
    apply(engine, first)
    asked = {"max_tokens": 8, "temperature": 0.0}
    expected = run(engine, PROMPTS, **asked).sequences

    def refuse(record: Any, code: str) -> None:
        with pytest.raises(Rejected) as caught:
            apply(engine, record)
        assert caught.value.code == code
        assert engine.version(JOB) == 1
        assert run(engine, PROMPTS, **asked).sequences == expected

    refuse(save_delta_version(tmp_path, msgspec.structs.replace(first, digest="0" * 64), 2), "weights-parent")
    second = save_delta_version(tmp_path, first, 3)
    third = save_delta_version(tmp_path, second, 4)
    second_directory = Path(second.manifest).parent
    second_directory.rename(tmp_path / "gone")
    refuse(third, "weights-parent")
    (tmp_path / "gone").rename(second_directory)
    body = bytearray((second_directory / "delta.safetensors").read_bytes())
    body[-1] ^= 1
    (second_directory / "delta.safetensors").write_bytes(bytes(body))
    refuse(third, "weights-digest")
    refuse(save_delta_version(tmp_path, first, 5, outside=True), "weights-shape")


@pytest.mark.parametrize("delta", [False, True])
def test_v8_an_update_that_breaks_off_at_any_read_never_serves_a_mix(
    delta: bool, new_engine: Callable[..., Any], save_full: Callable[..., Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """V8: whatever was written by then is undone, bit for bit, and the same version is applied when it can be read."""
    engine = new_engine()
    first = save_full(1)
    second = save_delta_version(tmp_path, first, 2) if delta else save_full(2)
    asked = {"max_tokens": 6, "seed": 3, "prompt_logprobs": True}
    apply(engine, second)
    wanted = run(engine, PROMPTS, **asked)
    apply(engine, first)
    expected = run(engine, PROMPTS, **asked)
    real, reads = streamed._read, [0]

    def counted(*arguments: Any) -> None:
        reads[0] -= 1
        if reads[0] == 0:
            raise OSError("the share went away")
        real(*arguments)

    monkeypatch.setattr(streamed, "_read", counted)
    apply(engine, second)
    apply(engine, first)
    num_reads = (-reads[0]) // 2
    assert num_reads > 10
    for fatal in (1, 2, num_reads // 2, num_reads - 1):
        reads[0] = fatal
        with pytest.raises(Rejected, match="the share went away") as caught:
            apply(engine, second)
        assert caught.value.code == "weights-torn"
        assert engine.version(JOB) == 1
        again = run(engine, PROMPTS, **asked)
        assert (again.sequences, again.prompt_logprobs) == (expected.sequences, expected.prompt_logprobs)
    apply(engine, second)
    assert run(engine, PROMPTS, **asked).prompt_logprobs == wanted.prompt_logprobs


def test_v10_an_exact_call_pins_its_version_until_it_ends(new_engine: Callable[..., Any]) -> None:
    engine = new_engine()
    engine.add(call([[5, 9]], max_tokens=5, temperature=0.0, exact=0))
    engine.step()
    assert engine.pinned(JOB)
    finish(engine)
    assert not engine.pinned(JOB)


def test_weights_that_are_not_finite_fail_the_call_and_not_the_engine(
    new_engine: Callable[..., Any], save_full: Callable[..., Any]
) -> None:
    engine = new_engine()
    apply(engine, save_full(1, fill=float("nan")))
    for asked in (
        {"max_tokens": 8},
        {"max_tokens": 0, "prompt_logprobs": True},
        {"max_tokens": 0, "prompt_top_logprobs": 2},
    ):
        error = run(engine, PROMPTS, **asked).error
        assert error is not None, asked
        assert error.code == "bad-weights"
    apply(engine, save_full(2))
    assert run(engine, PROMPTS, max_tokens=8).error is None


# --- adapters ----------------------------------------------------------------------------------------------------


def test_v9_adapter_versions_replace_each_other_and_the_base_stays(
    new_engine: Callable[..., Any], save_lora: Callable[..., Any], model_path: Path, tolerance: float
) -> None:
    """V9, V12: each version answers as plain peft does, the same prompt never out of an older version's cache."""
    engine = new_engine(kind=JobKind.LORA)
    base = run(engine, PROMPTS, max_tokens=8)
    seen = [tokens_of(base)]
    for version in (1, 2, 5):
        record = save_lora(version)
        apply(engine, record)
        result = run(engine, PROMPTS, max_tokens=8, prompt_logprobs=True)
        for prompt, (one,) in zip(PROMPTS, result.sequences, strict=True):
            expected = plain_logprobs(model_path, prompt + one.tokens, adapter=Path(record.manifest).parent)
            assert one.logprobs == pytest.approx(expected[len(prompt) - 1 :], abs=3 * tolerance)
            assert set(one.versions) == {version}
        seen.append(tokens_of(result))
    assert all(left != right for left, right in pairwise(seen))
    assert tokens_of(run(engine, PROMPTS, max_tokens=8, exact=0)) == tokens_of(base)
    assert engine.serves(JOB, 5)
    assert not engine.serves(JOB, 2)


def test_v9_adapters_of_several_jobs_do_not_touch_each_other(
    new_engine: Callable[..., Any], save_lora: Callable[..., Any]
) -> None:
    """V9: jobs in one batch, with other ranks, give what each gives alone; a dropped job falls back to the base."""
    engine = new_engine(kind=JobKind.LORA)
    base = tokens_of(run(engine, PROMPTS, n=2, max_tokens=8, seed=7))
    for record in (save_lora(1, job="a"), save_lora(1, job="b", rank=8)):
        apply(engine, record)
    keys = ("t.a.1", "t.b.1", "t.c.1")
    alone = {key: tokens_of(run(engine, PROMPTS, n=2, max_tokens=8, seed=7, job=key)) for key in keys}
    assert alone["t.c.1"] == base
    assert alone["t.a.1"] != alone["t.b.1"] != base
    for key in keys:
        engine.add(call(PROMPTS, request=key, job=key, n=2, max_tokens=8))
    results: dict[str, Any] = {}
    while engine.num_sequences:
        results |= {ended.request: tokens_of(ended) for ended in engine.step()}
    assert results.keys() == alone.keys()
    engine.drop_lora("t.a.1")
    assert engine.version("t.a.1") == 0
    assert tokens_of(run(engine, PROMPTS, n=2, max_tokens=8, seed=7, job="t.a.1")) == base
    assert tokens_of(run(engine, PROMPTS, n=2, max_tokens=8, seed=7, job="t.b.1")) == alone["t.b.1"]


def test_v9_a_job_without_an_adapter_is_the_base_beside_any_number_of_adapters(
    new_engine: Callable[..., Any], save_lora: Callable[..., Any]
) -> None:
    """V9: with every adapter slot taken, too, a call on the base gets nothing of anybody's adapter."""
    engine = new_engine(kind=JobKind.LORA, max_adapters=2)
    asked = {"n": 2, "max_tokens": 8, "prompt_logprobs": True}
    base = run(engine, PROMPTS, **asked)
    for record in (save_lora(1, job="a"), save_lora(1, job="b")):
        apply(engine, record)
    for key in ("t.a.1", "t.c.1", "t.b.1"):
        engine.add(call(PROMPTS, request=key, job=key, **asked))
    beside = finish(engine, request="t.c.1")
    assert tokens_of(beside) == tokens_of(base)
    for scores, alone in zip(beside.prompt_logprobs or [], base.prompt_logprobs or [], strict=True):
        assert scores == pytest.approx(alone, abs=1e-4)


def test_v9_running_calls_keep_their_adapter_over_an_update(
    new_engine: Callable[..., Any], save_lora: Callable[..., Any]
) -> None:
    engine = new_engine(kind=JobKind.LORA)
    apply(engine, save_lora(1))
    undisturbed = tokens_of(run(engine, PROMPTS, max_tokens=12, seed=7))
    engine.add(call(PROMPTS, max_tokens=12, seed=7))
    engine.step()
    engine.step()
    apply(engine, save_lora(2))
    ended = finish(engine)
    assert tokens_of(ended) == undisturbed
    assert {version for group in ended.sequences for one in group for version in one.versions} == {1}
    assert engine.version(JOB) == 2


def test_v9_an_evicted_adapter_is_loaded_again(new_engine: Callable[..., Any], save_lora: Callable[..., Any]) -> None:
    engine = new_engine(kind=JobKind.LORA, max_adapters=1)
    expected = {}
    for job in ("a", "b", "c"):
        apply(engine, save_lora(1, job=job))
        expected[job] = tokens_of(run(engine, PROMPTS, max_tokens=8, seed=7, job=f"t.{job}.1"))
    assert len({str(tokens) for tokens in expected.values()}) == 3
    for job in ("a", "c", "b"):
        assert tokens_of(run(engine, PROMPTS, max_tokens=8, seed=7, job=f"t.{job}.1")) == expected[job]


def test_v9_an_adapter_that_does_not_fit_leaves_the_served_one(
    new_engine: Callable[..., Any], save_lora: Callable[..., Any]
) -> None:
    """V8, V9: too large a rank, a damaged file."""
    engine = new_engine(kind=JobKind.LORA, max_rank=8)
    apply(engine, save_lora(1))
    expected = tokens_of(run(engine, PROMPTS, max_tokens=8, seed=7))
    with pytest.raises(Rejected) as caught:
        apply(engine, save_lora(2, rank=16))
    assert caught.value.code == "weights-shape"
    record = save_lora(3)
    (Path(record.manifest).parent / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(Rejected):
        apply(engine, record)
    assert engine.version(JOB) == 1
    assert tokens_of(run(engine, PROMPTS, max_tokens=8, seed=7)) == expected


# --- with the trainer --------------------------------------------------------------------------------------------


def _train(trainer: TrainEngine, seq: int) -> Any:
    """One step of SFT on fixed data, then a weights version; returns its record."""
    data = [Datum(tokens=[5, 9, 13, 20, 21, 22]), Datum(tokens=[44, 3, 17, 18])]
    requests = (
        ForwardBackward(seq=seq, incarnation=1, data=data, loss="cross_entropy"),
        OptimStep(seq=seq + 1, incarnation=1, adam=AdamParams(learning_rate=0.02)),
        SaveWeights(seq=seq + 2, incarnation=1),
    )
    for request in requests:
        outcome = trainer.apply(request)
        assert outcome.result.error is None, outcome.result.error
    return outcome.weights


@pytest.mark.parametrize("kind", [JobKind.FFT, JobKind.LORA])
def test_v12_trainer_and_sampler_give_the_same_logprobs(
    kind: JobKind, new_engine: Callable[..., Any], model_path: Path, tmp_path: Path, tolerance: float
) -> None:
    """V12: float32 on one device: nothing but the order of sums may differ; FFT versions may be deltas."""
    lora = LoraSpec(rank=4) if kind is JobKind.LORA else None
    base = BaseModel(str(model_path), dtype="float32", device=prepare_torch(1, 0), frozen=lora is not None)
    trainer = TrainEngine(
        base,
        JobSettings(tenant="t", job="j", incarnation=1, seed=0, lora=lora),
        EngineSettings(home=tmp_path, token_budget=1024, keep_weights=4),
    )
    trainer.deltas = lora is None
    engine = new_engine(kind=kind)
    previous: list[list[int]] = []
    for step in range(3):
        record = _train(trainer, 10 * step + 1)
        apply(engine, record)
        result = run(engine, PROMPTS, max_tokens=10)
        sequences = [group[0] for group in result.sequences]
        assert {version for one in sequences for version in one.versions} == {record.version}
        data = [Datum(tokens=prompt + one.tokens) for prompt, one in zip(PROMPTS, sequences, strict=True)]
        theirs = trainer.apply(Forward(seq=10 * step + 9, incarnation=1, data=data)).result.logprobs
        assert theirs is not None
        for prompt, one, logprobs in zip(PROMPTS, sequences, theirs, strict=True):
            assert one.logprobs == pytest.approx(logprobs[len(prompt) :], abs=3 * tolerance)
        assert [one.tokens for one in sequences] != previous
        previous = [one.tokens for one in sequences]
