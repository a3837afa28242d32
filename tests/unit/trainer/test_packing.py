"""Micro-batches (R2)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrl_common.errors import Rejected
from openrl_trainer.packing import check_lengths, pack, padding_limit, share


@given(st.lists(st.integers(2, 100), min_size=1, max_size=60), st.integers(100, 500), st.integers(0, 200))
def test_every_sequence_once_never_more_tokens_than_the_budget_and_no_more_padding_than_allowed_R2(
    lengths: list[int], budget: int, padding_max: int
) -> None:
    batches = pack(lengths, budget, padding_max)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        rows = [lengths[index] for index in batch]
        assert len(rows) * max(rows) <= budget
        assert len(rows) * max(rows) - sum(rows) <= padding_max


def test_sequences_of_one_length_fill_the_budget_R2() -> None:
    assert [len(batch) for batch in pack([10] * 7, 30)] == [3, 3, 1]


def test_short_sequences_get_a_pass_of_their_own_once_padding_would_cost_more_than_a_pass_R2() -> None:
    assert pack([64, 60, 8, 8], 4096, 128) == [[0, 1, 2, 3]]
    assert pack([64, 60, 8, 8], 4096, 100) == [[0, 1, 2], [3]]
    assert padding_limit("cpu", sharded=False) < padding_limit("cuda", sharded=False)
    assert pack([64, 8] * 100, 65_536, padding_limit("cuda", sharded=True)) == pack([64, 8] * 100, 65_536)


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


@given(
    lengths=st.lists(st.integers(2, 50), min_size=1, max_size=60),
    token_budget=st.integers(50, 400),
    count=st.integers(1, 5),
)
def test_ranks_share_every_sequence_once_evenly_and_one_rank_packs_as_ever_R14(
    lengths: list[int], token_budget: int, count: int
) -> None:
    shares = [share(lengths, token_budget, rank=rank, count=count) for rank in range(count)]
    assert sorted(index for batches, _ in shares for batch in batches for index in batch) == list(range(len(lengths)))
    assert {most for _, most in shares} == {max(len(batches) for batches, _ in shares)}
    for batches, _ in shares:
        assert all(len(batch) * max(lengths[index] for index in batch) <= token_budget for batch in batches)
    tokens = [sum(lengths[index] for batch in batches for index in batch) for batches, _ in shares]
    assert max(tokens) - min(tokens) <= max(lengths), "no rank has more than a sequence beyond another"
    assert share(lengths, token_budget)[0] == pack(lengths, token_budget)
