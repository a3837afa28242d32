"""Turns on a shared device, decided purely: who is let in, asked, fenced (T1-T4, T6, T7)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openrl_common.events import TurnGranted, TurnYieldAsked
from openrl_common.liveness import Pulses
from openrl_common.records import ClaimEntry, ClaimRecord, ClaimState, Residency, Role, TurnRecord
from openrl_ledger.core.turns import LAPSE_S, TurnPolicy, double_hold, load, release, request, settle, told

POLICY = TurnPolicy(reserve_bytes=1, max_turn_s=120.0, grace_s=30.0)
STRICT = TurnPolicy(coresidency=False, reserve_bytes=1, max_turn_s=120.0, grace_s=30.0)


def claim(device_bytes: int = 10, **workers: tuple[str, int]) -> ClaimRecord:
    """A claim whose seats are ``assignment=(owner, device bytes)``."""
    return ClaimRecord(
        state=ClaimState.ALLOCATED,
        node="n1",
        device_bytes=device_bytes,
        entries={
            name: ClaimEntry(
                workload=f"t--{name}--trainer", tenant="t", owner=owner, role=Role.TRAINER, device_bytes=size,
                host_bytes=0, exclusive=False, incarnation=1, reserved_at=0.0,
            )
            for name, (owner, size) in workers.items()
        },
    )  # fmt: skip


class Desk:
    """One claim's record under a clock of the test's own."""

    def __init__(self, seats: ClaimRecord, policy: TurnPolicy = POLICY) -> None:
        self.seats, self.policy = seats, policy
        self.record = TurnRecord()
        self.now = 1000.0
        self.events: list[object] = []

    def settle(self, dead: Iterable[str] = ()) -> None:
        before = self.record
        self.record = settle(before, self.seats, self.policy, self.now, frozenset(dead))
        self.events.extend(told(before, self.record, "c-1", self.seats))
        assert not double_hold(self.record, self.seats, self.policy)
        again = settle(self.record, self.seats, self.policy, self.now, frozenset(dead))
        assert again == self.record, "a second look at the same instant changed something"

    def asks(self, *names: str) -> None:
        for name in names:
            self.record = request(self.record, name, self.now)
            self.settle()

    def says(self, name: str, *, loading: bool, epoch: int | None = None) -> None:
        held = self.record.residents.get(name)
        epoch = epoch if epoch is not None else held.epoch if held else 0
        self.record = load(self.record, name, epoch, loading, self.policy, self.now)
        self.settle()

    def leaves(self, name: str, epoch: int | None = None) -> None:
        held = self.record.residents.get(name)
        self.record = release(self.record, name, epoch if epoch is not None else held.epoch if held else 0)
        self.settle()

    def passes(self, seconds: float, dead: Iterable[str] = ()) -> None:
        self.now += seconds
        self.settle(dead)

    def without(self, name: str) -> None:
        entries = {key: entry for key, entry in self.seats.entries.items() if key != name}
        self.seats = ClaimRecord(
            state=self.seats.state, node="n1", device_bytes=self.seats.device_bytes, entries=entries
        )
        self.settle()

    @property
    def on(self) -> set[str]:
        return set(self.record.residents)

    def asked(self, name: str) -> bool:
        return self.record.residents[name].asked_at is not None


def test_t1_a_single_seat_is_let_in_at_once_and_never_asked_to_leave() -> None:
    """T1: also when it declares more than the device less the reserve: it was seated there."""
    desk = Desk(claim(a=("one", 10)))
    desk.asks("a")
    desk.passes(10_000)
    assert desk.on == {"a"}
    assert not desk.asked("a")
    assert [type(event) for event in desk.events] == [TurnGranted]


def test_t2_workers_whose_sum_fits_are_resident_together_and_nobody_is_pressed() -> None:
    """T2: 4 + 5 of 10 less 1."""
    desk = Desk(claim(a=("one", 4), b=("two", 5)))
    desk.asks("a", "b")
    desk.passes(10_000)
    assert desk.on == {"a", "b"}
    assert all(residency.pressed_at is None for residency in desk.record.residents.values())


def test_t2_one_byte_over_the_reserve_makes_turns() -> None:
    desk = Desk(claim(a=("one", 5), b=("two", 5)))
    desk.asks("a", "b")
    assert desk.on == {"a"}
    assert desk.record.residents["a"].pressed_at is not None
    assert not desk.asked("a")


def test_t2_co_residency_off_is_strictly_one_at_a_time() -> None:
    desk = Desk(claim(a=("one", 1), b=("two", 1)), STRICT)
    desk.asks("a", "b")
    assert desk.on == {"a"}
    desk.leaves("a")
    assert desk.on == {"b"}


def test_t3_a_holder_is_pressed_at_once_asked_when_its_turn_ends_and_the_next_comes_when_it_left() -> None:
    desk = Desk(claim(a=("one", 8), b=("two", 8)))
    desk.asks("a", "b")
    desk.passes(119)
    assert not desk.asked("a")
    desk.passes(1)
    assert desk.asked("a")
    assert [event.now for event in desk.events if isinstance(event, TurnYieldAsked)] == [False, True]
    desk.leaves("a")
    assert desk.on == {"b"}
    assert desk.record.residents["b"].until == desk.now + 120


def test_t3_who_held_it_long_before_anybody_came_is_asked_as_soon_as_somebody_comes() -> None:
    desk = Desk(claim(a=("one", 8), b=("two", 8)))
    desk.asks("a")
    desk.passes(500)
    desk.asks("b")
    assert desk.asked("a")


def test_t3_an_ask_is_withdrawn_when_nobody_waits_any_more() -> None:
    desk = Desk(claim(a=("one", 8), b=("two", 8)))
    desk.asks("a", "b")
    desk.passes(120)
    assert desk.asked("a")
    desk.without("b")
    assert not desk.asked("a")
    desk.passes(10_000)
    assert desk.record.residents["a"].fenced_at is None


def test_t3_a_hung_holder_is_fenced_after_the_grace_and_counts_until_its_process_is_gone() -> None:
    desk = Desk(claim(a=("one", 8), b=("two", 8)))
    desk.asks("a", "b")
    desk.passes(120)
    desk.passes(29.9)
    assert desk.record.residents["a"].fenced_at is None
    desk.passes(0.1)
    assert "grace" in desk.record.residents["a"].why
    desk.passes(10_000)
    assert desk.on == {"a"}, "regranted before the fenced worker was gone"
    desk.without("a")
    assert desk.on == {"b"}


def test_t3_who_loads_is_neither_asked_nor_fenced_and_its_turn_counts_from_when_it_can_yield() -> None:
    """T3, F2: a load of 15 minutes inside the first turn, beside a waiter; it cannot yield before it has loaded."""
    desk = Desk(claim(a=("one", 8), b=("two", 8)))
    desk.asks("a", "b")
    desk.says("a", loading=True)
    for _ in range(30):
        desk.passes(30)
        assert not desk.asked("a")
    desk.says("a", loading=False)
    residency = desk.record.residents["a"]
    assert residency.until == desk.now + 120
    assert residency.pressed_at is not None, "it is not told that somebody waits"
    desk.passes(119)
    assert not desk.asked("a")
    desk.passes(1)
    assert desk.asked("a")
    assert desk.record.residents["a"].fenced_at is None
    desk.leaves("a")
    assert desk.on == {"b"}


def test_t3_a_load_without_end_is_asked_and_fenced_after_its_own_bound() -> None:
    """T3: no holder blocks a claim for ever."""
    desk = Desk(claim(a=("one", 8), b=("two", 8)))
    desk.asks("a", "b")
    desk.says("a", loading=True)
    desk.passes(POLICY.load_grace_s - 1)
    assert not desk.asked("a")
    desk.passes(1)
    assert desk.asked("a")
    desk.passes(30)
    assert "grace" in desk.record.residents["a"].why


def test_t3_t6_who_dies_while_it_loads_is_fenced() -> None:
    desk = Desk(claim(a=("one", 8), b=("two", 8)))
    desk.asks("a", "b")
    desk.says("a", loading=True)
    desk.passes(1, dead=["a"])
    assert "lapsed" in desk.record.residents["a"].why


def test_t3_an_ask_that_was_made_before_it_was_heard_that_it_loads_is_withdrawn() -> None:
    desk = Desk(claim(a=("one", 8), b=("two", 8)))
    desk.asks("a")
    desk.passes(500)
    desk.asks("b")
    assert desk.asked("a")
    desk.says("a", loading=True)
    assert not desk.asked("a")
    desk.passes(POLICY.load_grace_s - 501)
    assert not desk.asked("a")


def test_t3_t4_words_of_a_load_that_come_twice_late_or_in_the_wrong_order_change_nothing() -> None:
    desk = Desk(claim(a=("one", 8), b=("two", 8)))
    desk.asks("a", "b")
    desk.says("a", loading=True)
    desk.passes(200)
    desk.says("a", loading=False)
    loaded = desk.record
    desk.now += 50
    for loading in (True, False, True):
        desk.says("a", loading=loading)
        assert desk.record == loaded, "it loads again, or has another turn"
    desk.leaves("a", epoch=1)
    left = desk.record
    desk.says("a", loading=True, epoch=1)
    assert desk.record == left, "who has left asks for the device, or its neighbour loads"
    desk.asks("a")
    desk.leaves("b")
    again = desk.record
    desk.says("a", loading=True, epoch=1)
    assert desk.record == again, "the word is about an older turn"


def test_t3_t4_that_it_has_loaded_is_the_last_word_although_it_is_heard_first() -> None:
    desk = Desk(claim(a=("one", 8), b=("two", 8)))
    desk.asks("a", "b")
    desk.says("a", loading=False)
    desk.says("a", loading=True)
    desk.passes(120)
    assert desk.asked("a")


def test_t2_t3_nobody_leaves_for_a_waiter_that_cannot_come_before_a_load_has_ended() -> None:
    desk = Desk(claim(a=("one", 4), b=("two", 4), big=("three", 8)))
    desk.asks("a", "b")
    desk.says("a", loading=True)
    desk.asks("big")
    desk.passes(300)
    assert desk.record.residents["b"].pressed_at is None
    assert not desk.asked("b")
    desk.says("a", loading=False)
    assert desk.asked("b")
    assert desk.record.residents["a"].pressed_at is not None


def test_t2_t3_who_holds_the_device_beside_a_load_leaves_for_a_waiter_that_fits_beside_it() -> None:
    desk = Desk(claim(a=("one", 4), b=("two", 5), c=("three", 5)))
    desk.asks("a", "b")
    desk.says("a", loading=True)
    desk.asks("c")
    desk.passes(120)
    assert desk.asked("b")
    assert not desk.asked("a")


@pytest.mark.parametrize(("policy", "sizes", "double"), [
    (POLICY, (5, 5), True),
    (POLICY, (4, 5), False),
    (POLICY, (11,), False),
    (STRICT, (1, 1), True),
    (STRICT, (1,), False),
])  # fmt: skip
def test_t7_a_double_hold_is_seen(policy: TurnPolicy, sizes: tuple[int, ...], double: bool) -> None:
    """T7: one byte over the reserve, or two where only one may be. One alone never is."""
    seats = claim(**{f"w{i}": (f"o{i}", size) for i, size in enumerate(sizes)})
    record = TurnRecord(residents={name: Residency(epoch=1, granted_at=0.0, until=9.0) for name in seats.entries})
    assert double_hold(record, seats, policy) is double


def test_t3_an_owner_with_two_workers_has_one_place_in_the_line() -> None:
    """T3: the least recently *served owner* is next, though its rival's second worker has waited longer."""
    desk = Desk(claim(a1=("a", 8), a2=("a", 8), b1=("b", 8)))
    desk.asks("a1")
    desk.passes(1)
    desk.asks("a2")
    desk.passes(1)
    desk.asks("b1")
    desk.leaves("a1")
    assert desk.on == {"b1"}
    desk.leaves("b1")
    assert desk.on == {"a2"}


def test_t3_a_big_workload_is_not_starved_by_small_ones_that_would_fit() -> None:
    desk = Desk(claim(big=("b", 9), s1=("one", 3), s2=("two", 3), s3=("three", 3)))
    desk.asks("s1", "big", "s2", "s3")
    assert desk.on == {"s1"}, "somebody was let in before the big one that waits longer"
    desk.leaves("s1")
    assert desk.on == {"big"}


def test_t3_only_as_many_as_needed_are_asked_to_leave() -> None:
    desk = Desk(claim(s1=("one", 3), s2=("two", 3), s3=("three", 3), n=("four", 3)))
    desk.asks("s1", "s2", "s3")
    desk.passes(200)
    desk.asks("n")
    assert [name for name in sorted(desk.on) if desk.asked(name)] == ["s1"]


def test_t4_epochs_of_an_assignment_rise_and_a_late_release_takes_nothing_away() -> None:
    desk = Desk(claim(a=("one", 8), b=("two", 8)))
    desk.asks("a", "b")
    desk.leaves("a")
    desk.asks("a")
    desk.leaves("b")
    assert desk.record.residents["a"].epoch == 2
    desk.leaves("a", epoch=1)
    assert desk.on == {"a"}


def test_t4_requests_said_twice_change_nothing() -> None:
    desk = Desk(claim(a=("one", 8), b=("two", 8)))
    desk.asks("a", "b")
    before = desk.record
    desk.asks("a", "b")
    assert desk.record == before


def test_t6_a_dead_holder_is_fenced_only_when_somebody_waits_for_it() -> None:
    desk = Desk(claim(a=("one", 8), b=("two", 8)))
    desk.asks("a")
    desk.passes(1, dead=["a"])
    assert desk.record.residents["a"].fenced_at is None
    desk.asks("b")
    desk.passes(1, dead=["a"])
    assert "lapsed" in desk.record.residents["a"].why
    assert desk.on == {"a"}


def test_t6_leases_are_judged_by_the_readers_own_clock_and_not_over_an_outage() -> None:
    """T6, E13: revisions say alive; what they contain says nothing."""
    pulses = Pulses()
    assert not pulses.lapsed("a", 5, 0.0, limit_s=LAPSE_S)
    assert not pulses.lapsed("a", 5, LAPSE_S - 0.1, limit_s=LAPSE_S)
    assert not pulses.lapsed("a", 6, LAPSE_S, limit_s=LAPSE_S)
    assert pulses.lapsed("a", 6, 2 * LAPSE_S, limit_s=LAPSE_S)
    pulses.cut_off()
    assert not pulses.lapsed("a", 6, 100.0, limit_s=LAPSE_S)


def test_t6_a_dead_holder_is_known_within_ten_seconds_of_its_last_renewal() -> None:
    """T6: it is looked at every second; the first look after the renewal may come a second late."""
    pulses, renewed_at = Pulses(), 0.0
    looks = [renewed_at + 0.9 + tick for tick in range(12)]
    assert min(at for at in looks if pulses.lapsed("a", 1, at, limit_s=LAPSE_S)) <= 10.0


def test_a_claim_that_is_gone_leaves_an_empty_record() -> None:
    desk = Desk(claim(a=("one", 8), b=("two", 8)))
    desk.asks("a", "b")
    gone = settle(desk.record, None, POLICY, desk.now)
    assert not gone.residents
    assert not gone.waiting


@pytest.mark.parametrize("policy", [POLICY, STRICT])
@settings(max_examples=60, deadline=None)
@given(
    owners=st.lists(st.integers(1, 3), min_size=2, max_size=4),
    order=st.randoms(use_true_random=False),
)
def test_t3_owners_that_always_want_the_device_get_equal_turns(
    policy: TurnPolicy, owners: list[int], order: object
) -> None:
    """T3: whatever the order of requests and however many workers an owner has, its turns differ by one at most."""
    names = {f"w{o}{i}": (f"owner{o}", 8) for o, count in enumerate(owners) for i in range(count)}
    desk = Desk(claim(**names), policy)
    shuffled = sorted(names)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    desk.asks(*shuffled)
    for _ in range(12 * len(owners)):
        (holder,) = desk.on
        desk.passes(policy.max_turn_s)
        assert desk.asked(holder)
        desk.leaves(holder)
        desk.asks(holder)
    counts = Counter(desk.record.turns)
    assert max(counts.values()) - min(counts.values()) <= 1
    assert len(counts) == len(owners)


_ACTS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "leave", "late", "pass", "gone", "dead", "load", "loaded"]),
        st.integers(0, 5),
        st.floats(0, 200),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(sizes=st.lists(st.integers(1, 10), min_size=1, max_size=6), acts=_ACTS, coresidency=st.booleans())
def test_t2_t7_never_more_resident_than_the_device_holds_whatever_happens(
    sizes: list[int], acts: list[tuple[str, int, float]], coresidency: bool
) -> None:
    """T2, T3, T7: no double hold; who waits is let in once everybody who was asked has left or is gone."""
    policy = TurnPolicy(coresidency=coresidency, reserve_bytes=1)
    desk = Desk(claim(**{f"w{i}": (f"o{i % 3}", size) for i, size in enumerate(sizes)}), policy)
    epochs: Counter[str] = Counter()
    for act, index, seconds in acts:
        name = f"w{index % len(sizes)}"
        if name not in desk.seats.entries:
            continue
        match act:
            case "ask":
                desk.asks(name)
            case "leave":
                desk.leaves(name)
            case "late":
                desk.leaves(name, epoch=desk.record.epochs.get(name, 0) - 1)
            case "load" | "loaded":
                desk.says(name, loading=act == "load")
            case "pass":
                desk.passes(seconds)
            case "gone":
                desk.without(name)
            case "dead":
                desk.passes(seconds, dead=[name])
        for holder, residency in desk.record.residents.items():
            assert residency.epoch >= epochs[holder], "an epoch went back"
            epochs[holder] = residency.epoch
        fenced = [n for n, r in desk.record.residents.items() if r.fenced_at is not None]
        assert all(n in desk.seats.entries for n in fenced)
    desk.now += policy.load_grace_s
    for _ in range(len(sizes) * 3):  # settles: who is asked or fenced goes, so that nobody waits for ever
        desk.passes(policy.max_turn_s)
        desk.passes(policy.grace_s)
        for holder in [n for n, r in desk.record.residents.items() if r.fenced_at is not None]:
            desk.without(holder)
        if not desk.record.waiting:
            break
    assert not desk.record.waiting


def test_requests_are_partial_functions_of_the_record_only() -> None:
    """E6: what a handler applies is the same function however often the compare-and-swap is lost."""
    change = partial(request, assignment="a", now=5.0)
    assert change(change(TurnRecord())) == change(TurnRecord())
