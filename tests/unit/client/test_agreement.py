"""V12: how far apart two lists of log-probabilities are."""

from __future__ import annotations

import math

import pytest

from openrl_client.agreement import differences
from openrl_client.errors import Rejected


def test_v12_mean_and_maximum_are_of_sizes_and_the_kl_is_never_negative() -> None:
    sampled, trained = [-1.0, -2.0, -0.5], [-1.1, -1.8, -0.5]
    num_tokens, mean, largest, kl = differences(sampled, trained)
    assert num_tokens == 3
    assert mean == pytest.approx(0.1)
    assert largest == pytest.approx(0.2)
    assert kl == pytest.approx(sum(math.exp(d) - 1 - d for d in (-0.1, 0.2, 0.0)) / 3)
    assert differences(sampled, sampled) == (3, 0.0, 0.0, 0.0)


def test_v12_a_token_that_the_trainer_finds_impossible_is_no_overflow() -> None:
    assert differences([-2000.0], [-0.1])[3] > 1e300


def test_v12_there_must_be_something_to_compare() -> None:
    with pytest.raises(Rejected, match="no token"):
        differences([], [])
    with pytest.raises(Rejected, match="differ"):
        differences([-1.0], [])
