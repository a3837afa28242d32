"""Bad requests get one line that names the value, and a stable code (V10)."""

from __future__ import annotations

from typing import Any

import pytest

from openrl_common.errors import Rejected
from openrl_common.wire import SampleRequest, SamplingParams
from openrl_sampler.admission import Limits, check_request

LIMITS = Limits(max_model_len=16, vocabulary_size=10, sequences_max=8)


def _check(params: SamplingParams, **changes: Any) -> None:
    fields = {"prompts": [[1, 2, 3]]} | changes
    check_request(
        SampleRequest(request="r", tenant="t", job="j", incarnation=1, params=params, deadline=1.0, **fields), LIMITS
    )


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"n": 0}, "n=0"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_k": -1}, "top_k=-1"),
        ({"min_p": 2.0}, "min_p=2.0"),
        ({"seed": -5}, "seed=-5"),
        ({"stop": [""]}, "0 characters"),
        ({"stop_token_ids": [10]}, "stop id 10"),
        ({"stop": ["x"] * 17}, "17 stop strings"),
        ({"n": 9}, "9 sequences"),
    ],
)
def test_v10_parameters_outside_their_range_are_named(params: dict[str, Any], says: str) -> None:
    with pytest.raises(Rejected, match=says) as caught:
        _check(SamplingParams(**{"max_tokens": 4} | params))
    assert caught.value.code == "bad-params"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompts": []}, "prompts is empty"),
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"prompts": [[1, 10]]}, "token 10"),
        ({"at_least": 1, "exact": 2}, "give one"),
        ({"exact": -1}, "exact=-1"),
    ],
)
def test_v10_requests_that_cannot_be_meant_are_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(Rejected, match=says) as caught:
        _check(SamplingParams(max_tokens=4), **changes)
    assert caught.value.code == "bad-params"


def test_v10_too_long_says_both_numbers() -> None:
    _check(SamplingParams(max_tokens=13))
    with pytest.raises(Rejected, match=r"that is 17: the model length is 16") as caught:
        _check(SamplingParams(max_tokens=14))
    assert caught.value.code == "too-long"


def test_v10_a_prompt_may_be_scored_without_a_completion() -> None:
    _check(SamplingParams(max_tokens=0, prompt_logprobs=True))
