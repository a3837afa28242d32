"""Which requests are acceptable (V10): pure checks, one clear line and one stable code each.

Codes: ``bad-params`` (a value outside its range), ``too-long`` (prompt and completion exceed the model length).
Not here: whether the job is served (service), whether a version serves (waiting), what the engine can hold (engine).
"""

from __future__ import annotations

from dataclasses import dataclass

from openrl_common.errors import Rejected
from openrl_common.wire import SampleRequest, SamplingParams

STOP_STRINGS_MAX = 16
STOP_CHARACTERS_MAX = 256
STOP_TOKENS_MAX = 128
SEED_MAX = 2**63
TEMPERATURE_LEAST, TEMPERATURE_MOST = 1e-4, 1e4
"""Logits over a smaller one leave what float32 holds; over a larger one all tokens are equal."""
PROMPT_TOP_MAX = 20
"""What vLLM takes unless it is told otherwise; at 20, an answer is 500 bytes for every token of the prompt."""


@dataclass(frozen=True, slots=True)
class Limits:
    """``max_model_len`` in tokens; ``sequences_max`` per request (prompts × n)."""

    max_model_len: int
    vocabulary_size: int
    sequences_max: int


def check_request(request: SampleRequest, limits: Limits) -> None:
    """Raise Rejected naming the first value that is not usable."""
    check_params(request.params, limits.vocabulary_size)
    if request.at_least is not None and request.exact is not None:
        raise _bad(f"at_least={request.at_least} and exact={request.exact} were both given: give one")
    for name, version in (("at_least", request.at_least), ("exact", request.exact)):
        if version is not None and version < 0:
            raise _bad(f"{name}={version} is not a weights version: use 0 or more")
    if not request.prompts:
        raise _bad("prompts is empty: give at least one prompt")
    num_sequences = len(request.prompts) * request.params.n
    if num_sequences > limits.sequences_max:
        raise _bad(
            f"{len(request.prompts)} prompts × n={request.params.n} are {num_sequences} sequences,"
            f" at most {limits.sequences_max} fit one request: split it"
        )
    for index, prompt in enumerate(request.prompts):
        _check_prompt(index, prompt, request.params.max_tokens, limits)


def _check_prompt(index: int, prompt: list[int], max_tokens: int, limits: Limits) -> None:
    if not prompt:
        raise _bad(f"prompt {index} is empty: give at least one token")
    if min(prompt) < 0 or max(prompt) >= limits.vocabulary_size:
        wrong = next(token for token in prompt if not 0 <= token < limits.vocabulary_size)
        raise _bad(f"prompt {index} has token {wrong}: the model knows 0 to {limits.vocabulary_size - 1}")
    if len(prompt) + max_tokens > limits.max_model_len:
        raise Rejected(
            f"prompt {index} has {len(prompt)} tokens, with max_tokens={max_tokens} that is {len(prompt) + max_tokens}:"
            f" the model length is {limits.max_model_len}",
            code="too-long",
        )


def check_params(params: SamplingParams, vocabulary_size: int) -> None:
    """Raise Rejected (``bad-params``) for a value outside its range. ``max_tokens`` 0 only scores the prompt."""
    least = 0 if params.scores_prompt else 1
    if params.n < 1:
        raise _bad(f"n={params.n}: use 1 or more")
    if params.max_tokens < least:
        raise _bad(f"max_tokens={params.max_tokens}: use {least} or more")
    if params.temperature != 0 and not TEMPERATURE_LEAST <= params.temperature <= TEMPERATURE_MOST:
        raise _bad(f"temperature={params.temperature}: use 0 (greedy) or {TEMPERATURE_LEAST:g} to {TEMPERATURE_MOST:g}")
    if not 0 < params.top_p <= 1:
        raise _bad(f"top_p={params.top_p}: use more than 0, at most 1 (1 switches it off)")
    if params.top_k < 0:
        raise _bad(f"top_k={params.top_k}: use 0 (off) or more")
    if not 0 <= params.min_p <= 1:
        raise _bad(f"min_p={params.min_p}: use 0 (off) to 1")
    if not 0 <= params.prompt_top_logprobs <= (most := min(PROMPT_TOP_MAX, vocabulary_size)):
        raise _bad(f"prompt_top_logprobs={params.prompt_top_logprobs}: use 0 (off) to {most}")
    if params.seed is not None and not 0 <= params.seed < SEED_MAX:
        raise _bad(f"seed={params.seed}: use 0 to {SEED_MAX - 1}")
    if len(params.stop) > STOP_STRINGS_MAX or len(params.stop_token_ids) > STOP_TOKENS_MAX:
        raise _bad(
            f"{len(params.stop)} stop strings and {len(params.stop_token_ids)} stop ids:"
            f" at most {STOP_STRINGS_MAX} and {STOP_TOKENS_MAX} are allowed"
        )
    for text in params.stop:
        if not 1 <= len(text) <= STOP_CHARACTERS_MAX:
            raise _bad(f"stop string {text[:20]!r} has {len(text)} characters: use 1 to {STOP_CHARACTERS_MAX}")
    for token in params.stop_token_ids:
        if not 0 <= token < vocabulary_size:
            raise _bad(f"stop id {token}: the model knows 0 to {vocabulary_size - 1}")


def _bad(message: str) -> Rejected:
    return Rejected(message, code="bad-params")
