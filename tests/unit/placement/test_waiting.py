"""Booking, waiting, waking: P8, P11, S4, S5, W1-W6, F1, L5, E5."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from openrl_common.errors import Rejected
from openrl_common.events import (
    JobEnded,
    JobFailed,
    SeatRefused,
    SeatReleased,
    SeatReleaseRequested,
    SeatRequested,
    WorkerLaunched,
    WorkerUnschedulable,
)
from openrl_common.quantities import GIB
from openrl_common.queries import ExplainQuery, ListQuery
from openrl_common.records import (
    ClaimState,
    NodeBudget,
    NodeEntry,
    Reason,
    Role,
    SeatRecord,
    SeatState,
    WorkloadPhase,
)
from openrl_placement import core, explain
from openrl_placement.fleet import CANDIDATES_MAX, Fleet
from openrl_placement.pairs import HALF_SEATED_S
from openrl_placement.state import State
from unit.placement.desk import Desk, Policy, allocated, entry, node


def trainer(job: str) -> str:
    return f"default--{job}--trainer"


def sampler(job: str) -> str:
    return f"default--{job}--sampler"


def full_house(limit: int = 2, devices: int = 1, **fields: object) -> Desk:
    """One device, taken to the seat limit by job ``first``; job ``a`` waits on its own pending claims."""
    it = Desk(limit=limit, **fields)  # type: ignore[arg-type]
    it.node(node(devices=devices))
    it.submit("first")
    requests = it.take(SeatRequested)
    it.book(requests[0], "")
    it.book(requests[1], f"c-{trainer('first')}")
    return it


def queue(it: Desk, *jobs: str, **fields: object) -> None:
    for job in jobs:
        it.submit(job, **fields)  # type: ignore[arg-type]
        for request in it.take(SeatRequested):
            it.book(request, allocate=False)
        for workload in (trainer(job), sampler(job)):
            it.unschedulable(workload)


def free_one(it: Desk) -> None:
    """One of the two seats of the shared claim comes free."""
    claim = "c-" + trainer("first")
    it.claim(claim, allocated(dict(list(it.state.fleet.claims[claim].entries.items())[1:])))


def refuse_all(it: Desk) -> list[SeatRequested]:
    """A ledger with a lower limit refuses whoever asks, until nobody does; what was asked first."""
    first = asked = it.take(SeatRequested)
    while asked:
        it.refuse(asked[0], why="all 1 seats are taken")
        asked = it.take(SeatRequested)
    return first


def test_W1_of_two_jobs_with_one_seat_each_the_younger_gives_way_and_the_older_begins() -> None:
    """One device with two seats, each taken by one worker of another job: without this both wait for ever (P11, W1)."""
    it = Desk(limit=2)
    it.node(node(devices=1))
    it.submit("a")
    a_trainer, a_sampler = it.take(SeatRequested)
    it.submit("b")
    b_trainer, b_sampler = it.take(SeatRequested)
    claim = f"c-{trainer('a')}"
    it.book(a_trainer, "")
    seat = it.book(b_trainer, claim)
    for request in (a_sampler, b_sampler):
        it.book(request, allocate=False)
        it.unschedulable(request.workload)
    it.repair(HALF_SEATED_S - 1)
    assert it.take(SeatReleaseRequested) == [], "seats of jobs that end come free meanwhile"
    it.repair(1)
    (release,) = it.take(SeatReleaseRequested)
    assert (release.workload, release.assignment, release.close) == (trainer("b"), seat, False)
    it.take(SeatRequested)
    it.release(trainer("b"), seat, claim, it.workload(trainer("b")).incarnation)
    moves = [request for request in it.take(SeatRequested) if claim in request.candidates]
    assert [request.workload for request in moves] == [sampler("a")], "the older one gets it"
    it.book(moves[0], claim)
    it.repair(60)
    assert it.take(SeatReleaseRequested) == [], "a whole job gives way to nobody"


def test_P8_binpack_names_candidates_and_may_found() -> None:
    it = Desk()
    it.node(node())
    it.submit("a")
    first, second = it.take(SeatRequested)
    assert first.candidates == ()
    claim = "c-" + first.workload
    it.book(first)
    it.book(second)
    it.submit("b")
    request = it.take(SeatRequested)[0]
    assert request.candidates[0] == "c-default--a--sampler"
    assert claim in request.candidates
    assert request.may_found
    assert [tier.ceiling_gib for tier in request.tiers] == [80]


def test_P8_spread_founds_first_and_shares_only_after_unschedulable() -> None:
    it = full_house(limit=0, policy=Policy(strategy="spread"))
    it.submit("b")
    request = it.take(SeatRequested)[0]
    assert request.candidates == ()
    assert request.may_found
    it.book(request, allocate=False)
    it.unschedulable(trainer("b"))
    (move,) = it.take(SeatRequested)
    assert move.candidates == ("c-" + trainer("first"),)
    assert not move.may_found
    assert move.move_from == it.workload(trainer("b")).assignment


def test_P8_spread_founds_first_again_after_a_lost_placement_and_after_a_predecessor() -> None:
    it = Desk(policy=Policy(strategy="spread"))
    it.node(node(devices=4))
    it.submit("a")
    it.book_all()
    record = it.workload(trainer("a"))
    it.release(record.workload, record.assignment, record.claim, record.incarnation)
    (request,) = it.take(SeatRequested)
    assert (request.workload, request.candidates, request.may_found) == (trainer("a"), (), True)

    it.submit("b", sequence=5)
    request, _ = it.take(SeatRequested)
    it.refuse(request, "predecessor")
    assert it.workload(trainer("b")).reason is Reason.WAITING_FOR_PREDECESSOR
    it.release(request.workload, "old", "c-old", 2)
    (again,) = it.take(SeatRequested)
    assert (again.workload, again.candidates, again.may_found) == (trainer("b"), (), True)


def test_P8_E5_spread_repeats_its_unanswered_request_as_it_was() -> None:
    it = Desk(policy=Policy(strategy="spread"))
    it.node(node(devices=4))
    it.claim("c1", allocated({"x": entry("w")}))
    it.submit("a")
    asked = {request.message_id for request in it.take(SeatRequested)}
    it.repair(11)
    repeated = it.take(SeatRequested)
    assert {request.message_id for request in repeated} == asked
    assert [(request.candidates, request.may_found) for request in repeated] == [((), True), ((), True)]


def test_S4_a_workload_that_finds_every_claim_full_waits_pending_on_its_own_and_moves_to_the_freed_seat() -> None:
    it = full_house()
    queue(it, "a")
    record = it.workload(trainer("a"))
    assert (record.phase, record.reason) == (WorkloadPhase.PENDING, Reason.WAITING_FOR_SEAT)
    free_one(it)
    (move,) = it.take(SeatRequested)
    assert (move.workload, move.move_from) == (sampler("a"), it.workload(sampler("a")).assignment)
    assert move.candidates == ("c-" + trainer("first"),)
    it.book(move, "c-" + trainer("first"))
    assert it.workload(sampler("a")).phase is WorkloadPhase.PLACED
    assert it.workload(sampler("a")).reason is None
    assert it.take(SeatRequested) == [], "one seat wakes one waiter"


def test_S4_a_freed_device_ends_the_wait_as_well() -> None:
    it = full_house()
    queue(it, "a")
    record = it.workload(trainer("a"))
    it.claim(record.claim, allocated({record.assignment: entry(record.workload)}))
    assert it.workload(trainer("a")).phase is WorkloadPhase.PLACED
    assert trainer("a") not in it.state.line


def test_W1_the_line_is_by_priority_then_submission() -> None:
    it = full_house()
    queue(it, "a", "b")
    queue(it, "c", priority=5)
    positions = [it.state.line.position(trainer(job)) for job in "abc"]
    assert positions == [4, 6, 2]
    free_one(it)
    assert it.take(SeatRequested)[0].workload == sampler("c")


def test_W1_a_seat_promised_to_an_earlier_waiter_is_left_out_of_later_requests_until_it_is_settled() -> None:
    it = full_house()
    queue(it, "a")
    free_one(it)
    (move,) = it.take(SeatRequested)
    it.submit("late")
    assert all(request.candidates == () for request in it.take(SeatRequested))
    it.refuse(move, why="gone")
    (second,) = it.take(SeatRequested)
    assert second.workload == trainer("a"), "what the first could not take goes to the next in line"


def node_short_of_memory(*, limit: int) -> tuple[Desk, Callable[[], None], Callable[[], None]]:
    """Of 10 GiB of host memory two seats of claim ``c`` take 8 and 1; the larger one leaves in two steps."""
    it = Desk(limit=limit)
    it.node(node(devices=1, host_gib=10))
    leaving, staying = entry("w1", host_gib=8), entry("w2", host_gib=1)
    host = {
        "x": NodeEntry(workload="w1", claim="c", host_bytes=8 * GIB),
        "y": NodeEntry(workload="w2", claim="c", host_bytes=GIB),
    }
    it.claim("c", allocated({"x": leaving, "y": staying}))
    it.budget("n1", NodeBudget(entries=host))

    def seat_leaves() -> None:
        it.claim("c", allocated({"y": staying}))

    def memory_is_free() -> None:
        it.budget("n1", NodeBudget(entries={"y": host["y"]}))

    return it, seat_leaves, memory_is_free


def test_W1_a_seat_is_offered_once_its_host_memory_is_free_too() -> None:
    """The ledger takes a seat off its claim first, off its node next (L4): in between only a smaller waiter fits."""
    it, seat_leaves, memory_is_free = node_short_of_memory(limit=2)
    queue(it, "large", host_gib=8)
    queue(it, "small", host_gib=1)
    seat_leaves()
    it.submit("late", host_gib=1)
    assert [each for each in it.take(SeatRequested) if "c" in each.candidates] == []
    memory_is_free()
    (move,) = it.take(SeatRequested)
    assert (move.workload, move.candidates) == (sampler("large"), ("c",))


def test_W1_host_memory_promised_to_an_earlier_waiter_is_not_offered_to_a_later_one() -> None:
    """The claim has seats for both, its node has memory for one: the later request must not get there first."""
    it, seat_leaves, memory_is_free = node_short_of_memory(limit=4)
    queue(it, "first", host_gib=8)
    queue(it, "second", host_gib=8)
    seat_leaves()
    memory_is_free()
    (move,) = it.take(SeatRequested)
    assert (move.workload, move.candidates) == (sampler("first"), ("c",))
    it.submit("late", host_gib=8)
    assert [each for each in it.take(SeatRequested) if "c" in each.candidates] == []


def test_W1_host_memory_promised_on_one_claim_is_not_offered_on_another_of_its_node() -> None:
    """Claims of one node share its memory; what is given back goes to the next in line, on whichever claim it fits."""
    it = Desk(limit=2)
    it.node(node(devices=2, host_gib=10))
    host = {"x": NodeEntry(workload="w1", claim="large", host_bytes=9 * GIB)}
    it.claim("large", allocated({"x": entry("w1", host_gib=9)}))
    it.claim("small", allocated({"y": entry("w2")}, gib=23))
    it.budget("n1", NodeBudget(entries=host))
    queue(it, "big", gib=70, host_gib=8)
    queue(it, "tiny", gib=5, host_gib=8)
    it.claim("large", allocated({}))
    it.budget("n1", NodeBudget(entries={}))
    for workload in (sampler("big"), trainer("big")):
        (move,) = it.take(SeatRequested)
        assert (move.workload, move.candidates) == (workload, ("large",))
        it.refuse(move, why="gone")
    (move,) = it.take(SeatRequested)
    assert (move.workload, move.candidates) == (sampler("tiny"), ("small", "large"))


def two_full_claims(*, host_gib: float = 0) -> Desk:
    """Claims ``c1`` and ``c2`` of one node, one seat each; ``first`` and ``second`` wait, in this order."""
    it = Desk(limit=1)
    it.node(node(devices=2, host_gib=host_gib))
    for claim, seated_gib in (("c1", 8), ("c2", 2)):
        it.claim(claim, allocated({claim: entry(f"w-{claim}", host_gib=seated_gib)}))
    queue(it, "first", host_gib=8)
    queue(it, "second", host_gib=8)
    return it


def test_W1_what_comes_free_while_the_first_in_line_is_asking_is_kept_in_case_its_claim_has_gone() -> None:
    """Its claim went away before its request came there; the other came free meanwhile, and a later waiter got it."""
    it = two_full_claims()
    it.claim("c1", allocated({}))
    (move,) = it.take(SeatRequested)
    assert (move.workload, move.candidates) == (sampler("first"), ("c1",))
    it.claim("c2", allocated({}))
    it.submit("late")
    assert [each for each in it.take(SeatRequested) if each.candidates] == []
    it.claim("c1", None)
    it.refuse(move)
    (again,) = it.take(SeatRequested)
    assert (again.workload, again.candidates) == (sampler("first"), ("c2",))


def test_W1_what_was_kept_goes_to_the_next_in_line_once_the_first_has_its_seat() -> None:
    it = two_full_claims()
    it.claim("c1", allocated({}))
    (move,) = it.take(SeatRequested)
    it.claim("c2", allocated({}))
    it.book(move, "c1")
    (second,) = it.take(SeatRequested)
    assert second.workload == trainer("first")
    assert "c2" in second.candidates


def test_W1_P6_one_nodes_memory_is_promised_once_to_one_waiter_on_however_many_of_its_claims() -> None:
    it = two_full_claims(host_gib=10)
    it.budget("n1", NodeBudget(entries={}))
    it.claim("c1", allocated({}))
    (move,) = it.take(SeatRequested)
    it.claim("c2", allocated({}))
    assert it.state.line.promised_to(move.workload).claims == ("c1", "c2")
    assert it.state.line.promised_bytes("n1") == 8 * GIB
    it.refuse(move)
    (again,) = it.take(SeatRequested)
    assert (again.workload, again.candidates) == (sampler("first"), ("c2",)), "its own promise is in nobody's way"
    it.refuse(again)
    assert it.state.line.promised_bytes("n1") == 8 * GIB, "it went to the next in line"


def test_W1_at_most_as_many_claims_as_a_request_names_are_kept_for_one_waiter() -> None:
    """Or every answer to a waiter would go through all that came free in a great burst."""
    it = Desk(limit=1)
    claims = [f"c{index:02}" for index in range(CANDIDATES_MAX + 1)]
    it.node(node(devices=len(claims)))
    for claim in claims:
        it.claim(claim, allocated({claim: entry(f"w-{claim}")}))
    queue(it, "first")
    for claim in claims:
        it.claim(claim, allocated({}))
    asked = [(each.workload, each.candidates) for each in it.take(SeatRequested)]
    assert asked == [(sampler("first"), ("c00",)), (trainer("first"), (claims[-1],))]


def test_W1_a_large_waiter_at_the_head_does_not_stop_a_small_one() -> None:
    it = Desk(limit=2)
    it.node(node("n1", gib=80, devices=1))
    it.node(node("n2", gib=23, devices=1))
    it.claim("small", allocated({"x": entry("w1"), "y": entry("w2")}, node="n2", gib=23))
    it.claim("large", allocated({"z": entry("w3", exclusive=True)}, node="n1"))
    queue(it, "big", gib=70)
    queue(it, "tiny", gib=5)
    it.claim("small", allocated({"x": entry("w1")}, node="n2", gib=23))
    (move,) = it.take(SeatRequested)
    assert move.workload == sampler("tiny")


def test_W1_a_newcomer_to_the_line_does_not_get_ahead_of_an_earlier_waiter() -> None:
    it = full_house()
    queue(it, "a")
    it.submit("b")
    for request in it.take(SeatRequested):
        it.book(request, allocate=False)
    claim = "c-" + trainer("first")
    standing = it.state.fleet.claims[claim]
    it.state.fleet.set_claim(claim, allocated(dict(list(standing.entries.items())[:1])))  # the wake-up was missed
    it.unschedulable(trainer("b"))
    (move,) = it.take(SeatRequested)
    assert move.workload == sampler("a")


def test_W2_booking_wakes_nobody_and_a_refusal_is_not_repeated_while_the_claim_looks_the_same() -> None:
    it = full_house()
    queue(it, "a")
    free_one(it)
    for _ in range(2):
        (move,) = it.take(SeatRequested)
        it.refuse(move, why="all 2 seats are taken")
    assert it.take(SeatRequested) == []
    it.repair()
    assert it.take(SeatRequested) == []
    claim = "c-" + trainer("first")
    it.claim(claim, allocated({"other": entry("w9")}))
    assert len(it.take(SeatRequested)) == 1, "it looks different: asked again"


def test_W1_a_claim_that_refused_is_offered_again_once_it_has_changed_although_it_looks_as_it_did() -> None:
    """S7: an old limit refused it; another seat came and went since, and a later waiter would get the room."""
    it = full_house(limit=2)
    queue(it, "a")
    free_one(it)
    claim = "c-" + trainer("first")
    before = it.state.fleet.claims[claim]
    first = refuse_all(it)[0]
    assert first.candidates[0] == claim
    it.claim(claim, msgspec.structs.replace(before, entries=before.entries | {"other": entry("w9")}))
    assert it.take(SeatRequested) == []
    it.claim(claim, before)
    assert [request.workload for request in it.take(SeatRequested)] == [first.workload]


def test_W2_a_claim_that_refused_for_its_nodes_labels_is_offered_again_once_they_are_back() -> None:
    """P1, P3: the ledger saw it go before this view did; the claim itself never changes."""
    it = full_house(limit=2)
    queue(it, "a")
    free_one(it)
    first = refuse_all(it)[0]
    it.node(msgspec.structs.replace(node(devices=1), enabled=False))
    assert it.take(SeatRequested) == []
    it.node(node(devices=1))
    assert first.workload in {request.workload for request in it.take(SeatRequested)}


def test_S7_a_claim_that_refused_and_looks_the_same_is_offered_again_a_minute_later() -> None:
    """A replica of the ledger that still has a lower limit refuses what the view cannot explain."""
    it = full_house(limit=2)
    queue(it, "a")
    free_one(it)
    refuse_all(it)
    it.repair(50.0)
    assert it.take(SeatRequested) == []
    it.repair(11.0)
    assert len(it.take(SeatRequested)) == 1


def test_L5_a_move_that_came_too_late_leaves_the_workload_to_its_own_claim() -> None:
    it = full_house()
    queue(it, "a")
    free_one(it)
    (move,) = it.take(SeatRequested)
    it.refuse(move, "started")
    assert not it.state.line.busy(move.workload)
    assert it.take(SeatRequested)[0].workload == trainer("a"), "the seat goes to the next"


def test_W3_the_deadline_covers_waiting_for_a_seat_and_fails_with_the_last_reason() -> None:
    it = full_house(policy=Policy(placement_timeout_s=100))
    it.tick(50)
    queue(it, "a")
    it.tick(99)
    assert it.take(JobFailed) == []
    it.tick(2)
    (failed,) = it.take(JobFailed)
    assert failed.code == "placement-timeout"
    assert "WaitingForSeat" in failed.message
    assert len(it.take(SeatReleaseRequested)) == 2, "the standing claims are withdrawn"
    assert len(it.state.line) == 0


def test_W3_an_allocation_wins_over_the_deadline_and_time_placed_does_not_count() -> None:
    it = full_house(policy=Policy(placement_timeout_s=100))
    queue(it, "a")
    record = it.workload(trainer("a"))
    it.state.fleet.set_claim(record.claim, allocated({record.assignment: entry(record.workload)}))  # not heard yet
    record = it.workload(sampler("a"))
    it.claim(record.claim, allocated({record.assignment: entry(record.workload)}))
    it.tick(101)
    assert it.take(JobFailed) == []
    assert it.workload(trainer("a")).phase is WorkloadPhase.PLACED
    it.tick(10_000)
    assert it.take(JobFailed) == []


def test_W3_zero_means_never() -> None:
    it = full_house(policy=Policy(placement_timeout_s=0))
    queue(it, "a")
    it.tick(1e9)
    assert it.take(JobFailed) == []


def test_W4_an_empty_fleet_is_a_wait_and_the_first_node_ends_it_or_says_impossible() -> None:
    it = Desk()
    it.submit("a")
    it.submit("huge", gib=500)
    assert it.take(SeatRequested) == []
    assert it.workload(trainer("a")).reason is Reason.WAITING_FOR_DEVICE
    it.node(node())
    assert {request.workload for request in it.take(SeatRequested)} == {trainer("a"), sampler("a")}
    it.tick(4)
    assert it.take(JobFailed) == [], "a larger node may be on its way"
    it.tick(2)
    (failed,) = it.take(JobFailed)
    assert (failed.job, failed.code) == ("huge", "impossible")
    assert {ended.job for ended in it.take(JobEnded)} == {"huge"}


def test_W4_a_role_no_node_accepts_is_a_wait_that_a_label_ends() -> None:
    it = Desk()
    it.node(node(roles=(Role.SAMPLER,)))
    it.submit("a")
    assert [request.workload for request in it.take(SeatRequested)] == [sampler("a")]
    assert it.workload(trainer("a")).reason is Reason.ROLE_NOT_ACCEPTED
    it.node(node())
    assert [request.workload for request in it.take(SeatRequested)] == [trainer("a")]


def test_W4_a_reason_without_numbers_is_looked_at_again_a_second_later() -> None:
    """A launcher has given its last device away, and says no to the next claim before that is heard of here."""
    it = Desk(limit=1)
    it.node(node(devices=2))
    it.submit("a")
    first, second = it.take(SeatRequested)
    it.submit("late")
    late, _ = it.take(SeatRequested)
    for request in (first, second, late):
        it.book(request, allocate=False)
    it.unschedulable(late.workload, "no device is free")
    assert it.workload(late.workload).reason is Reason.UNSCHEDULABLE
    for request in (first, second):
        record = it.workload(request.workload)
        it.claim(record.claim, allocated({record.assignment: entry(record.workload)}))
    it.tick(1.0)
    assert it.workload(late.workload).reason is Reason.WAITING_FOR_SEAT
    written = len(it.written)
    it.tick(1.0)
    assert len(it.written) == written, "once is enough"


def test_W5_waits_are_kept_with_reason_and_times_the_standing_one_last() -> None:
    it = full_house()
    queue(it, "a")
    it.now += 30
    record = it.workload(trainer("a"))
    assert record.waits[-1].until is None
    it.claim(record.claim, allocated({record.assignment: entry(record.workload)}))
    (wait,) = it.workload(trainer("a")).waits
    assert wait.reason is Reason.WAITING_FOR_SEAT
    assert wait.until is not None
    assert wait.until - wait.since == 30


def test_W5_explain_says_why_where_in_line_until_when_and_who_holds_what_it_needs() -> None:
    it = full_house(policy=Policy(placement_timeout_s=100))
    queue(it, "a")
    it.now += 10
    answer = explain.explain(it.state, ExplainQuery(workload="a/trainer"), it.now)
    assert "WaitingForSeat" in answer.sentence
    assert (answer.position, answer.line_length, answer.deadline_in_s) == (2, 2, 90)
    (row,) = [row for row in answer.candidates if row.claim == "c-" + trainer("first")]
    assert row.refused == "all 2 seats are taken"
    assert row.held_by == (sampler("first"), trainer("first"))
    assert any("unknown and was not checked" in note for note in answer.notes)


def test_W5_explain_says_why_the_ledger_refused_a_claim_until_it_has_changed_or_a_minute_has_passed() -> None:
    """The view of a claim is behind, or a replica of the ledger has another limit (S7): here it shows a free seat."""
    it = full_house()
    queue(it, "a")
    free_one(it)
    (move,) = it.take(SeatRequested)
    it.refuse(move, why="all 1 seats are taken")

    def refused(seconds: float = 0.0) -> str:
        answer = explain.explain(it.state, ExplainQuery(workload=move.workload), it.now + seconds)
        return next(row.refused for row in answer.candidates if row.claim == move.candidates[0])

    assert refused() == "all 1 seats are taken"
    assert refused(61.0) == ""
    it.claim(move.candidates[0], allocated({}))
    assert refused() == ""


def test_W5_explain_says_of_a_refused_job_why_it_has_no_workload() -> None:
    it = Desk()
    it.node(node(gib=80))
    it.submit("big", gib=500)
    with pytest.raises(Rejected, match=r"job 'big' was refused and has no workload: .*500 GiB"):
        explain.explain(it.state, ExplainQuery(workload="big/trainer"), it.now)


def test_P12_explain_of_a_lora_job_that_has_ended_says_that_the_runtime_outlives_it() -> None:
    it = Desk()
    it.node(node(devices=2))
    it.submit("lora", "lora", gib=60)
    it.book_all()
    it.ready_all()
    query = ExplainQuery(workload="lora/trainer")
    assert not any("job lora" in note for note in explain.explain(it.state, query, it.now).notes)
    it.finish("lora")
    notes = explain.explain(it.state, query, it.now).notes
    assert notes[0] == "job lora is Finished: this is the runtime that served it, which is kept for others"


def test_P12_explain_says_of_a_runtime_without_a_job_until_when_it_holds_what_is_waited_for() -> None:
    it = Desk(policy=Policy(lora_idle_s=600))
    it.node(node(devices=2))
    it.submit("lora", "lora", gib=60)
    it.book_all()
    it.ready_all()
    it.submit("a", gib=60)
    for request in it.take(SeatRequested):
        it.book(request, allocate=False)
        it.unschedulable(request.workload)
    runtime = it.state.jobs["default.lora"].runtime
    assert not any(
        runtime in note for note in explain.explain(it.state, ExplainQuery(workload="a/trainer"), it.now).notes
    )
    it.finish("lora")
    it.now += 60
    notes = explain.explain(it.state, ExplainQuery(workload="a/trainer"), it.now).notes
    assert [note for note in notes if runtime in note] == [
        f"{runtime} serves no job: what it holds is free in 9m, unless a job attaches (--lora-idle)"
    ]


def test_queries_join_claims_with_their_seats_and_the_limit_in_force() -> None:
    it = full_house()
    queue(it, "a")
    rows = {row.claim: row for row in explain.claims(it.state).claims}
    shared = rows["c-" + trainer("first")]
    assert (len(shared.seats), shared.limit) == (2, 2)
    assert {seat.state for seat in shared.seats} == {"held"}
    assert rows["c-" + trainer("a")].state is ClaimState.PENDING
    (job,) = explain.jobs(it.state, ListQuery(job="a")).jobs
    assert job.reason is Reason.WAITING_FOR_SEAT
    assert len(explain.workloads(it.state, ListQuery(tenant="other"), it.now).workloads) == 0
    assert explain.nodes(it.state).nodes[0].devices_claimed == 1


def test_a_verdict_that_overtakes_its_booking_is_not_lost() -> None:
    it = full_house()
    it.submit("a")
    request = it.take(SeatRequested)[0]
    it.event(
        WorkerUnschedulable(
            tenant="default", workload=request.workload, assignment="a3", claim="c", cause="no device is free"
        )
    )
    it.book(request, allocate=False)
    assert it.workload(request.workload).assignment == "a3"
    assert it.workload(request.workload).reason is Reason.WAITING_FOR_SEAT


def test_E6_late_duplicates_of_bookings_and_releases_change_nothing() -> None:
    it = full_house()
    queue(it, "a")
    old = it.workload(sampler("a"))
    free_one(it)
    (move,) = it.take(SeatRequested)
    it.book(move, "c-" + trainer("first"))
    moved = it.workload(sampler("a"))
    it.held(old.workload, old.incarnation, old.assignment, old.claim)
    it.event(
        SeatReleased(
            tenant="default", workload=old.workload, incarnation=old.incarnation, assignment=old.assignment,
            claim=old.claim,
        )
    )  # fmt: skip
    assert it.workload(sampler("a")) == moved


def test_a_lost_placement_asks_again_at_once_under_a_new_deadline() -> None:
    it = full_house(policy=Policy(placement_timeout_s=100))
    it.now += 500
    record = it.workload(trainer("first"))
    it.release(record.workload, record.assignment, record.claim, record.incarnation)
    record = it.workload(trainer("first"))
    assert (record.phase, record.reason, record.deadline) == (WorkloadPhase.PENDING, Reason.RETRYING, it.now + 100)
    (request,) = it.take(SeatRequested)
    assert (request.workload, request.attempt, request.may_found) == (trainer("first"), 2, True)


def test_a_claim_over_the_host_budget_is_asked_for_again_by_the_pass_not_in_a_loop() -> None:
    it = full_house()
    it.submit("a")
    request = it.take(SeatRequested)[0]
    assignment = it.book(request, allocate=False)
    it.release(request.workload, assignment, "c-" + request.workload, request.incarnation)
    assert [each for each in it.take(SeatRequested) if each.workload == request.workload] == []
    assert it.workload(request.workload).phase is WorkloadPhase.PENDING
    it.repair()
    assert [each.attempt for each in it.take(SeatRequested) if each.workload == request.workload] == [2]


def test_a_predecessor_is_waited_for_and_its_release_ends_the_wait() -> None:
    it = Desk()
    it.node(node())
    it.submit("a", sequence=5)
    request = it.take(SeatRequested)[0]
    it.event(
        SeatRefused(
            tenant="default", workload=request.workload, incarnation=5, attempt=1, code="predecessor",
            message="incarnation 2 still holds the seat",
        )
    )  # fmt: skip
    assert it.workload(request.workload).reason is Reason.WAITING_FOR_PREDECESSOR
    it.release(request.workload, "old", "c-old", 2)
    assert it.take(SeatRequested)[0].attempt == 2


# --- what events failed to deliver ------------------------------------------------------------------------------


def test_E5_a_booking_is_taken_from_the_ledgers_bucket() -> None:
    it = Desk()
    it.node(node())
    it.submit("a")
    (request, _) = it.take(SeatRequested)
    it.held(request.workload, request.incarnation, "a9", "c9")
    it.claim("c9", allocated({"a9": entry(request.workload)}))
    assert (it.workload(request.workload).assignment, it.workload(request.workload).phase) == (
        "a9",
        WorkloadPhase.PLACED,
    )


def test_E5_a_release_that_no_event_told_ends_the_workload() -> None:
    it = Desk()
    it.node(node())
    it.submit("a")
    it.book_all()
    it.finish("a")
    for request in it.take(SeatReleaseRequested):
        seat = SeatRecord(state=SeatState.EMPTY, incarnation=request.incarnation, closed=request.incarnation)
        it.apply(core.seat_changed(it.state, request.workload, seat, it.now))
    assert [ended.outcome for ended in it.take(JobEnded)] == ["Finished"]


def test_E5_an_unanswered_request_is_repeated_under_the_same_id() -> None:
    it = Desk()
    it.node(node())
    it.submit("a")
    first = {request.message_id for request in it.take(SeatRequested)}
    it.repair(5)
    assert it.take(SeatRequested) == []
    it.repair(6)
    assert {request.message_id for request in it.take(SeatRequested)} == first


def test_E5_a_pending_claim_that_no_launcher_speaks_of_gets_a_reason() -> None:
    it = Desk()
    it.node(node())
    it.submit("a")
    for request in it.take(SeatRequested):
        it.book(request, allocate=False)
    it.repair(11)
    assert it.workload(trainer("a")).reason is Reason.UNSCHEDULABLE
    assert "no launcher" in it.workload(trainer("a")).message


def test_E4_state_rebuilt_from_the_buckets_has_the_same_line_deadlines_and_runtimes() -> None:
    it = full_house()
    queue(it, "a", "b")
    it.submit("l", "lora")
    rebuilt = State(Fleet(limit=2), it.policy)
    for job in it.state.jobs.values():
        rebuilt.put_job(job)
    for record in it.state.workloads.values():
        rebuilt.put_workload(record)
    assert list(rebuilt.line.waiting()) == list(it.state.line.waiting())
    assert rebuilt.deadlines == it.state.deadlines
    assert rebuilt.runtimes == it.state.runtimes
    assert rebuilt.living.keys() == it.state.living.keys()


def test_records_of_what_ended_are_forgotten_after_a_while() -> None:
    it = full_house(policy=Policy(keep_ended_s=100))
    it.finish("first")
    it.release_all()
    it.tick(99)
    assert "default.first" in it.state.jobs
    it.tick(2)
    assert it.state.jobs == {}
    assert it.state.workloads == {}


def test_a_launched_event_before_ready_and_after_gives_the_same_phase() -> None:
    it = full_house()
    record = it.workload(trainer("first"))
    it.ready(trainer("first"))
    launched = WorkerLaunched(
        tenant="default", workload=record.workload, assignment=record.assignment, claim=record.claim, node="n1"
    )
    it.event(launched)
    assert it.workload(trainer("first")).phase is WorkloadPhase.READY


def test_P11_a_burst_is_spread_over_the_claims_that_have_room_and_founds_only_when_they_are_spoken_for() -> None:
    it = Desk(limit=2)
    it.node(node(devices=8))
    for number in range(3):
        it.claim(f"c{number}", allocated({f"x{number}": entry(f"w{number}")}))
    for job in "ab":
        it.submit(job)
    first = [request.candidates[:1] for request in it.take(SeatRequested)]
    assert sorted(first) == [(), ("c0",), ("c1",), ("c2",)]


def test_E11_without_a_limit_requests_under_way_do_not_meet_on_one_claim() -> None:
    it = Desk(limit=0)
    it.node(node(devices=8))
    for number in range(4):
        it.claim(f"c{number}", allocated({f"x{number}": entry(f"w{number}")}))
    for job in "ab":
        it.submit(job)
    requests = it.take(SeatRequested)
    assert {request.candidates[0] for request in requests} == {"c0", "c1", "c2", "c3"}
    assert all(len(request.candidates) == 4 for request in requests)
