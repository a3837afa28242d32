"""Micro-batches (R2)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrl_common.errors import Rejected
from openrl_trainer.packing import check_lengths, pack


@given(st.lists(st.integers(2, 100), min_size=1, max_size=60), st.integers(100, 500))
def test_every_sequence_once_and_never_more_tokens_than_the_budget_R2(lengths: list[int], budget: int) -> None:
    batches = pack(lengths, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(len(batch) * max(lengths[index] for index in batch) <= budget for batch in batches)


def test_sequences_of_one_length_fill_the_budget_R2() -> None:
    assert [len(batch) for batch in pack([10] * 7, 30)] == [3, 3, 1]


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ([5, 1], ("datum 1", "1 token", "at least 2")),
        ([5, 90], ("datum 1", "90", "64")),
        ([5, 40], ("datum 1", "40", "32", "OPEN_RL_TRAIN_TOKEN_BUDGET")),
    ],
)
def test_a_sequence_that_does_not_fit_is_refused_by_name_with_both_numbers_R2(
    lengths: list[int], words: tuple[str, ...]
) -> None:
    with pytest.raises(Rejected) as caught:
        check_lengths(lengths, length_max=64, token_budget=32)
    assert all(word in str(caught.value) for word in words)
