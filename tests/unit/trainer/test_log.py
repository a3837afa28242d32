"""The order of the training log (R4)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from openrl_trainer.log import AHEAD_MAX, Apply, Hold, LogOrder, Refuse, Repeat


def test_entries_in_order_are_applied_one_by_one_R4() -> None:
    order: LogOrder[str] = LogOrder()
    assert order.decide(1, "a") == Apply(("a",))
    assert order.decide(2, "b") == Apply(("b",))


def test_a_gap_waits_for_the_missing_entry_then_all_run_R4() -> None:
    order: LogOrder[str] = LogOrder()
    assert order.decide(3, "c") == Hold(1)
    assert order.decide(2, "b") == Hold(1)
    assert order.decide(1, "a") == Apply(("a", "b", "c"))
    assert order.held == {}


def test_a_repetition_is_answered_not_applied_R4_R6() -> None:
    order: LogOrder[str] = LogOrder()
    order.decide(1, "a")
    assert order.decide(1, "other") == Repeat(1)


def test_of_two_held_entries_with_one_seq_the_first_counts_R4() -> None:
    order: LogOrder[str] = LogOrder()
    order.decide(2, "first")
    order.decide(2, "second")
    assert order.decide(1, "a") == Apply(("a", "first"))


def test_far_ahead_or_impossible_numbers_are_refused_and_stay_free_R6() -> None:
    order: LogOrder[str] = LogOrder()
    assert isinstance(order.decide(2 + AHEAD_MAX, "far"), Refuse)
    assert isinstance(order.decide(0, "zero"), Refuse)
    assert order.decide(1, "a") == Apply(("a",))


@given(st.lists(st.integers(1, 30), max_size=120))
def test_any_order_with_repetitions_applies_each_entry_once_in_order_R4(arrivals: list[int]) -> None:
    order: LogOrder[int] = LogOrder()
    applied: list[int] = []
    for seq in arrivals:
        decision = order.decide(seq, seq)
        if isinstance(decision, Apply):
            applied += decision.entries
    assert applied == list(range(1, len(applied) + 1))
    complete = 0
    while complete + 1 in arrivals:
        complete += 1
    assert len(applied) == complete


def test_what_was_held_for_an_entry_that_never_comes_goes_on_in_order_R4_R6() -> None:
    order: LogOrder[str] = LogOrder(expected=3)
    for seq in (7, 5, 6, 9):
        assert isinstance(order.decide(seq, str(seq)), Hold)
    assert order.give_up() == ("5", "6", "7")
    assert (order.expected, order.held) == (8, {9: "9"})
    assert order.decide(8, "8") == Apply(("8", "9"))
