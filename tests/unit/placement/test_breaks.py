"""Sequences that once broke a rule: promises that count against themselves, old copies, shapes that join late."""

from __future__ import annotations

from openrl_common.events import ClaimFreed, JobFailed, SeatReleaseRequested, SeatRequested
from openrl_common.quantities import GIB
from openrl_common.records import NodeBudget, NodeEntry, Reason, WorkloadPhase
from openrl_placement.passes import UNANSWERED_S
from unit.placement.desk import Desk, Policy, allocated, entry, node
from unit.placement.test_waiting import free_one, full_house, queue, sampler, trainer


def pending(it: Desk) -> None:
    for request in it.take(SeatRequested):
        it.book(request, allocate=False)
        it.unschedulable(request.workload)


def test_E5_a_request_that_is_repeated_keeps_what_it_was_promised() -> None:
    it = full_house()
    queue(it, "a", "b")
    free_one(it)
    (move,) = it.take(SeatRequested)
    it.repair(11)
    again = it.take(SeatRequested)
    assert [(each.workload, each.attempt, each.candidates) for each in again] == [
        (move.workload, move.attempt, move.candidates)
    ]


def test_F1_the_loss_of_an_own_claim_while_a_move_is_under_way_leaves_one_request_with_its_own_attempt() -> None:
    it = full_house()
    queue(it, "a")
    free_one(it)
    (move,) = it.take(SeatRequested)
    lost = it.workload(move.workload)
    it.release(move.workload, lost.assignment, lost.claim, lost.incarnation)
    asked = [each for each in it.take(SeatRequested) if each.workload == move.workload]
    assert len(asked) == 1
    assert it.workload(move.workload).attempt == asked[0].attempt > move.attempt
    it.refuse(asked[0])
    assert not it.state.line.busy(move.workload), "its answer is taken"


def test_W1_memory_that_somebody_earlier_waits_for_is_not_given_to_a_later_one_before_it_is_known_who_has_it() -> None:
    it = Desk(limit=4)
    it.node(node(devices=1, host_gib=10))
    it.claim("c", allocated({"x": entry("w1", host_gib=10)}))
    it.budget("n1", NodeBudget(entries={"x": NodeEntry(workload="w1", claim="c", host_bytes=10 * GIB)}))
    for job, host_gib in (("b", 3), ("m", 8), ("s", 2)):
        queue(it, job, host_gib=host_gib)
    it.claim("c", allocated({}))
    it.budget("n1", NodeBudget(entries={}))
    asked = it.take(SeatRequested)
    assert [each.workload for each in asked] == [sampler("b"), trainer("b")]
    it.refuse(asked[0])
    it.refuse(asked[1])
    assert [each.workload for each in it.take(SeatRequested)] == [sampler("m")]


def test_P9_a_shape_that_joined_later_ends_the_wait_of_a_claim_that_was_founded_before() -> None:
    it = Desk()
    it.node(node("n1", devices=1, gib=24))
    it.submit("first", gib=20)
    it.book_all()
    it.submit("a", gib=20, exclusive=True)
    requests = it.take(SeatRequested)
    seats = {request.workload: it.book(request, allocate=False) for request in requests}
    for request in requests:
        it.unschedulable(request.workload)
    assert [tier.ceiling_gib for tier in requests[0].tiers] == [24]
    it.node(node("n2", devices=2, gib=80))
    assert it.take(SeatReleaseRequested) == [], "the old claim keeps the place in line until the new one stands (W1)"
    again = it.take(SeatRequested)
    assert {each.workload: each.move_from for each in again} == seats
    assert all(each.may_found and [tier.ceiling_gib for tier in each.tiers] == [24, 80] for each in again)
    it.repair(1)
    assert it.take(SeatRequested) == [], "it is under way"
    for each in again:
        it.book(each, f"new-{each.workload}", allocate=False)
    it.repair(UNANSWERED_S)
    assert it.take(SeatRequested) == []


def test_W1_a_seat_that_comes_free_while_an_own_claim_is_founded_anew_is_kept_for_its_founder() -> None:
    it = Desk(limit=2)
    it.node(node("n1", devices=1, gib=24))
    it.claim("c", allocated({"x": entry("w1"), "y": entry("w2")}, gib=24))
    queue(it, "a", "b", gib=20)
    it.node(node("n2", devices=1, gib=80))
    anew = {each.workload: each for each in it.take(SeatRequested)}
    it.refuse(anew[sampler("b")])
    it.claim("c", allocated({"x": entry("w1")}, gib=24))
    assert it.take(SeatRequested) == [], "the first in line has a request under way that names no claim"
    it.book(anew[sampler("a")], "new", allocate=False)
    (move,) = it.take(SeatRequested)
    assert (move.workload, move.candidates) == (sampler("a"), ("c",))


def test_P9_a_request_that_found_its_own_claim_narrow_is_repeated_as_it_was() -> None:
    """E5: also under a strategy that would not share yet, and of one that no launcher has spoken of."""
    it = Desk(policy=Policy(strategy="spread", verdict_wait_s=100.0))
    it.node(node("n1", devices=1, gib=24))
    it.submit("a", gib=20)
    seats = {request.workload: it.book(request, allocate=False) for request in it.take(SeatRequested)}
    it.node(node("n2", devices=2, gib=80))
    it.repair()
    first = it.take(SeatRequested)
    assert {each.workload: (each.move_from, each.may_found) for each in first} == {
        workload: (assignment, True) for workload, assignment in seats.items()
    }
    it.repair(UNANSWERED_S)
    assert it.take(SeatRequested) == first


def test_W3_a_job_that_joined_a_waiting_runtime_has_its_own_deadline() -> None:
    it = full_house(limit=1, policy=Policy(placement_timeout_s=900))
    it.submit("l1", "lora")
    pending(it)
    it.now += 800
    it.submit("l2", "lora")
    it.tick(101)
    assert [each.job for each in it.take(JobFailed)] == ["l1"]
    runtime = it.state.jobs["default.l2"].trainer
    assert it.workload(runtime).phase is WorkloadPhase.PENDING
    it.tick(798)
    assert it.take(JobFailed) == []
    it.tick(2)
    assert [(each.job, each.code) for each in it.take(JobFailed)] == [("l2", "placement-timeout")]


def test_W3_one_deadline_that_the_loss_of_a_placement_renews_and_that_of_an_unallocated_claim_does_not() -> None:
    it = full_house(limit=1, policy=Policy(placement_timeout_s=900))
    queue(it, "a")
    deadline = it.now + 900
    for losses in (1, 2):
        it.now += 100
        lost = it.workload(trainer("a"))
        it.release(lost.workload, lost.assignment, lost.claim, lost.incarnation)
        assert it.workload(trainer("a")).deadline == deadline, f"loss {losses}"
        it.repair()
        founding = [each for each in it.take(SeatRequested) if each.workload == trainer("a")][-1]
        it.book(founding, f"own-{losses}", allocate=losses == 2)
    placed = it.workload(trainer("a"))
    assert (placed.phase, placed.deadline) == (WorkloadPhase.PLACED, None)
    it.release(placed.workload, placed.assignment, placed.claim, placed.incarnation)
    assert it.workload(trainer("a")).deadline == it.now + 900


def test_W1_a_waiting_runtime_is_as_urgent_as_the_most_urgent_of_its_jobs() -> None:
    it = full_house(limit=1)
    it.submit("l1", "lora")
    pending(it)
    queue(it, "a", priority=1)
    it.submit("l2", "lora", priority=5)
    runtime = it.state.jobs["default.l2"].trainer
    assert it.state.jobs["default.l1"].trainer == runtime
    assert it.state.line.position(runtime) in (1, 2)
    it.repair()
    asked = it.take(SeatRequested)
    assert {each.workload for each in asked} == {runtime, it.state.jobs["default.l2"].sampler}
    assert all(each.may_found and each.order == (-5, 2) and each.move_from for each in asked), "launchers serve by it"
    assert it.take(SeatReleaseRequested) == []
    it.cancel("l2")
    assert it.state.line.position(runtime) in (5, 6, 3, 4)


def test_W2_more_waiters_than_one_wake_up_asks_for_are_not_left_to_the_slow_pass() -> None:
    it = Desk()
    for number in range(50):
        it.submit(f"j{number}")
    assert it.take(SeatRequested) == []
    it.node(node(devices=8))
    asked = len(it.take(SeatRequested))
    for _ in range(3):
        it.tick(1)
        asked += len(it.take(SeatRequested))
    assert asked == 100
    assert it.workload(trainer("j0")).reason is not Reason.IMPOSSIBLE


def test_W2_the_tick_goes_on_behind_those_it_asked_for_also_when_they_got_nothing() -> None:
    it = Desk()
    for number in range(100):
        it.submit(f"j{number}")
    it.node(node(devices=8))
    asked: list[str] = []
    for _ in range(5):
        requests = it.take(SeatRequested)
        asked += [each.workload for each in requests]
        for each in requests:
            it.refuse(each)
        it.take(SeatRequested)
        it.tick(1)
    assert len(asked) == 200
    assert len(set(asked)) == 200
    assert it.take(SeatRequested) == []


def test_W2_wake_ups_from_the_front_do_not_keep_the_tick_from_those_behind() -> None:
    it = Desk()
    for number in range(150):
        it.submit(f"j{number}")
    it.node(node(devices=8))
    asked: set[str] = set()
    for _ in range(6):
        for each in it.take(SeatRequested):
            asked.add(each.workload)
            it.refuse(each)
        it.take(SeatRequested)
        it.event(ClaimFreed(claim="c", node="n1"))
        it.tick(1)
    assert len(asked) == 300


def test_W4_each_part_of_a_long_pass_is_decided_at_its_own_time() -> None:
    it = Desk()
    it.node(node())
    for number in range(40):
        it.submit(f"j{number}")
        for request in it.take(SeatRequested):
            it.book(request, allocate=False)
    began = it.now
    for part in it.repairs.slices(it.state, lambda: it.now):
        it.apply(part)
        it.now += 11
    waiting = [record for record in it.state.workloads.values() if record.reason is not None]
    assert len(waiting) == 16, "those of the second part have heard nothing for long"
    assert {record.since for record in waiting} == {began + 11}


def test_E5_the_pass_that_finds_an_allocation_and_a_ready_worker_leaves_it_ready() -> None:
    """Both were missed. An old copy of the record would stand in the line again, its worker running."""
    it = Desk()
    it.node(node())
    it.submit("a")
    first = it.take(SeatRequested)[0]
    assignment = it.book(first, allocate=False)
    claim = f"c-{first.workload}"
    standing = it.state.fleet.claims[claim]
    it.state.fleet.set_claim(claim, allocated(dict(standing.entries)))
    it.state.ready[assignment] = True
    it.repair(11)
    assert it.workload(first.workload).phase is WorkloadPhase.READY


def test_L5_a_late_refusal_of_a_request_that_another_replica_booked_takes_no_seat_away() -> None:
    """The first handler of a move had fenced its own claim; the second sees that, and says so after the booking."""
    it = full_house()
    queue(it, "a")
    free_one(it)
    (move,) = it.take(SeatRequested)
    it.book(move, move.candidates[0])
    it.ready(move.workload)
    it.refuse(move, "releasing")
    assert it.workload(move.workload).phase is WorkloadPhase.READY
    assert it.workload(move.workload).reason is None
