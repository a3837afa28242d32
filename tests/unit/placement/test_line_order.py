"""What is offered to whom when several things happen at once, or answers are late (W1, W2, S7).

Each of these was found by ``test_line_plays``, which says the rule; these say the case.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from openrl_common.events import SeatReleaseRequested, SeatRequested
from openrl_common.quantities import GIB
from openrl_common.records import (
    Avoid,
    NodeBudget,
    NodeEntry,
    Reason,
    Standing,
)
from openrl_placement.fleet import CANDIDATES_MAX, Fleet
from unit.placement.desk import Desk, allocated, entry, node
from unit.placement.test_waiting import queue, sampler, trainer


def wait(it: Desk, *jobs: str, **fields: object) -> None:
    """Jobs whose two workers stand in the line, each with a pending claim of its own."""
    queue(it, *jobs, **fields)
    it.take(SeatRequested)


def avoid(it: Desk, workload: str, claim: str) -> None:
    record = it.workload(workload)
    it.state.put_workload(msgspec.structs.replace(record, avoid=(Avoid(claim=claim, until=1e9, why="failed there"),)))


def asked(it: Desk) -> list[tuple[str, tuple[str, ...]]]:
    return [(each.workload, each.candidates) for each in it.take(SeatRequested) if each.candidates]


def test_W1_of_several_claims_offered_at_once_a_later_waiter_is_not_offered_what_the_one_before_it_is_due() -> None:
    """``first`` takes one seat of two on c1; with the other the third got c2, which the second waits for."""
    it = Desk(limit=2)
    it.node(node(devices=2))
    it.claim("c1", allocated({}))
    it.claim("c2", allocated({"x": entry("w")}))
    it.budget("n1", NodeBudget(standing=Standing.SUSPECT))
    wait(it, "a", "b")
    first, second, third = sampler("a"), trainer("a"), sampler("b")
    avoid(it, first, "c2")
    avoid(it, second, "c1")
    avoid(it, trainer("b"), "c1")
    it.budget("n1", NodeBudget())
    assert asked(it) == [(first, ("c1",)), (second, ("c2",)), (third, ("c1",))]


def test_W1_who_was_promised_less_is_not_offered_the_claim_that_its_founder_has_just_got() -> None:
    """A claim is allocated, with room for one more: its founder's own promise was handed on first, and with it this."""
    it = Desk(limit=2)
    it.node(node(devices=3))
    it.claim("c1", allocated({"x": entry("w"), "y": entry("v")}))
    wait(it, "founder", "a", "b")
    founder, first, second = sampler("founder"), sampler("a"), trainer("a")
    for workload in (trainer("founder"), first):
        avoid(it, workload, "c1")
    it.claim("c1", allocated({"x": entry("w")}))
    assert asked(it) == [(founder, ("c1",))]
    record = it.workload(founder)
    it.claim(record.claim, allocated({record.assignment: entry(founder)}))
    got = asked(it)
    assert got[0] == (trainer("founder"), (record.claim,))
    assert (second, ("c1",)) in got


def test_W1_what_fits_one_that_joins_the_line_while_it_asks_is_kept_for_it() -> None:
    """It asks for an own claim anew, and is put in the line meanwhile: a newcomer got what it would be offered next."""
    it = Desk(limit=2)
    it.node(node(devices=1))
    it.submit("a")
    for request in it.take(SeatRequested):
        it.book(request, allocate=False)
    it.node(node("n2", devices=1, gib=23))  # a shape that would do: its claims are founded anew
    it.repair(5.0)
    anew = it.take(SeatRequested)
    assert {each.candidates for each in anew} == {()}
    it.state.fleet.set_claim("c1", allocated({"x": entry("w")}))  # had room before anybody waited
    it.unschedulable(sampler("a"))
    assert it.state.line.promised_to(sampler("a")).claims == ("c1",)
    it.submit("late")
    assert asked(it) == []


def test_W2_room_beside_a_founder_is_offered_although_its_claim_was_heard_of_before_its_seat() -> None:
    """Nothing of the claim changes any more when its founder's seat is heard of: that must wake the line."""
    it = Desk(limit=2)
    it.submit("founder")
    it.node(node(devices=2))
    (founding,) = [each for each in it.take(SeatRequested) if each.workload == sampler("founder")]
    avoid(it, trainer("founder"), "own")
    wait(it, "a")
    it.claim("own", allocated({"a9": entry(founding.workload)}))
    assert asked(it) == []
    it.held(founding.workload, founding.incarnation, "a9", "own", founding.attempt)
    assert asked(it) == [(sampler("a"), ("own",))]


def test_W2_P6_what_a_booking_leaves_of_its_claim_and_node_is_offered_to_those_who_went_without() -> None:
    """Host memory: who was passed over while another might take it is told once that one has its seat."""
    it = Desk(limit=3)
    it.node(node(devices=1, host_gib=10))
    it.claim("c1", allocated({"x": entry("w")}))
    used = {"x": NodeEntry(workload="w", claim="c1", host_bytes=10 * GIB)}
    it.budget("n1", NodeBudget(entries=used))
    wait(it, "a", host_gib=6)
    wait(it, "b", host_gib=5)
    wait(it, "c", host_gib=1)
    it.budget("n1", NodeBudget(entries={}))
    (move,) = it.take(SeatRequested)
    assert move.workload == sampler("a")
    seats = {"x": entry("w"), "a50": entry(move.workload, host_gib=6)}
    it.budget("n1", NodeBudget(entries={"a50": NodeEntry(workload=move.workload, claim="c1", host_bytes=6 * GIB)}))
    it.claim("c1", allocated(seats))
    it.held(move.workload, move.incarnation, "a50", "c1", move.attempt)
    assert asked(it) == [(sampler("c"), ("c1",))], "4 GiB are left: too little for the others, enough for this one"


def test_W1_a_request_that_is_repeated_does_not_take_what_somebody_goes_without_for_it() -> None:
    """Host memory: while ``asking`` may take it, ``first`` goes without, and whoever is smaller waits behind that."""
    it = Desk(limit=0)
    it.node(node(devices=2, host_gib=10))
    it.node(node("n2", devices=1, gib=23, host_gib=1))
    it.claim("c1", allocated({"x": entry("w")}))
    it.submit("asking", host_gib=4)
    asking, _ = it.take(SeatRequested)
    assert asking.candidates == ("c1",)
    it.submit("first", sequence=0, host_gib=8)
    for request in it.take(SeatRequested):
        it.book(request, allocate=False)
        it.unschedulable(request.workload)
    it.take(SeatRequested)
    assert it.state.line.is_short("n1")
    it.claim("c2", allocated({"y": entry("v", gib=1)}))
    it.repair(11.0)
    again = {each.workload: each.candidates for each in it.take(SeatRequested)}
    assert again[asking.workload] == ("c1",), "c2 has come since, and the first in line fits it"


def test_W1_a_refusal_that_comes_after_the_claim_came_free_does_not_cost_the_place_in_line() -> None:
    """The node was suspect when the ledger refused, and is back when its answer arrives."""
    it = Desk(limit=2)
    it.node(node(devices=1))
    it.claim("c1", allocated({"x": entry("w"), "y": entry("v")}))
    wait(it, "a", "b")
    it.claim("c1", allocated({"x": entry("w")}))
    (move,) = it.take(SeatRequested)
    it.claim("c1", allocated({"x": entry("w"), "z": entry("u")}))
    it.claim("c1", allocated({"x": entry("w")}))
    assert asked(it) == []
    it.refuse(move)
    assert asked(it) == [(move.workload, ("c1",))]


def test_W1_who_was_refused_is_asked_once_what_refused_it_has_more_room_and_not_before() -> None:
    """S7. A claim or a node that only became fuller is no reason to ask again, nor to be passed over then."""
    it = Desk(limit=3)
    it.node(node(devices=1, host_gib=100))
    it.claim("c1", allocated({"x": entry("w"), "y": entry("v"), "z": entry("u")}))
    it.budget("n1", NodeBudget(entries={}))
    wait(it, "a")
    it.claim("c1", allocated({"x": entry("w")}))
    while requests := it.take(SeatRequested):
        for request in requests:
            it.refuse(request)
    changes = it.state.fleet.changes("c1")
    it.budget("n1", NodeBudget(entries={"x": NodeEntry(workload="w", claim="c1", host_bytes=GIB)}))
    it.claim("c1", allocated({"x": entry("w"), "k": entry("t")}))
    assert it.state.fleet.changes("c1") == changes
    assert asked(it) == []
    it.claim("c1", allocated({"x": entry("w")}))
    assert asked(it)[0] == (sampler("a"), ("c1",))


def test_W4_who_waits_for_its_predecessor_asks_once_it_is_gone_not_after_every_answer() -> None:
    """What it had been promised was offered to itself: request and refusal went round as fast as the bus carries."""
    for code in ("predecessor", "releasing"):
        it = Desk()
        it.node(node())
        it.claim("c1", allocated({"x": entry("w")}))
        it.submit("a", sequence=5)
        request, _ = it.take(SeatRequested)
        assert request.candidates == ("c1",)
        it.refuse(request, code)
        assert request.workload not in {workload for workload, _ in asked(it)}
        assert it.workload(request.workload).reason is Reason.WAITING_FOR_PREDECESSOR
        it.release(request.workload, "old", "c-old", 2)
        assert [each.attempt for each in it.take(SeatRequested) if each.workload == request.workload] == [2]


def test_W1_E6_a_late_refusal_of_what_another_replica_has_founded_puts_nobody_in_the_line() -> None:
    it = Desk()
    it.node(node(devices=2))
    it.submit("a")
    request, _ = it.take(SeatRequested)
    it.book(request, allocate=False)
    it.refuse(request)
    assert it.workload(request.workload).reason is None
    assert request.workload not in it.state.line


def test_W1_what_refused_a_waiter_is_remembered_when_it_only_founds_a_claim_of_its_own() -> None:
    """It was forgotten without a word to the line, and the next request of a later waiter named that claim."""
    it = Desk()
    it.submit("a")
    it.claim("c1", allocated({"x": entry("w")}))
    it.node(node(devices=2))
    requests = {each.workload: each for each in it.take(SeatRequested)}
    first = requests[sampler("a")]
    it.refuse(first)
    it.repair()
    for request in it.take(SeatRequested):
        if request.workload == first.workload:
            it.held(first.workload, first.incarnation, "a7", "own", request.attempt)
    assert it.workload(first.workload).claim == "own"
    assert first.workload in it.state.line
    assert "c1" in it.state.refused_at[first.workload]


def test_W2_a_wake_up_looks_at_few_however_many_wait_and_however_many_are_asking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each kind of waiter, and each that was promised all it may be, was looked at for every claim that came free."""
    it = Desk(limit=1)
    claims = [f"c{index:03}" for index in range(8 * CANDIDATES_MAX)]
    it.node(node(devices=len(claims)))
    for claim in claims:
        it.claim(claim, allocated({claim: entry(f"w-{claim}")}))
    for number in range(40):
        wait(it, f"j{number:02}", gib=10 + number)
    looked_at: list[str] = []
    refusal = Fleet.refusal

    def counted(fleet: Fleet, claim: str, *rest: Any) -> str:
        looked_at.append(claim)
        return refusal(fleet, claim, *rest)

    monkeypatch.setattr(Fleet, "refusal", counted)
    for claim in claims:
        it.claim(claim, allocated({}))
    assert len(looked_at) <= 4 * len(claims)
    asked_now = it.take(SeatRequested)
    assert len(asked_now) == 8
    looked_at.clear()
    it.claim(claims[0], allocated({"seat": entry(asked_now[0].workload)}))
    it.held(asked_now[0].workload, asked_now[0].incarnation, "seat", claims[0], asked_now[0].attempt)
    assert len(looked_at) <= 4 * CANDIDATES_MAX


def test_W2_who_is_refused_is_offered_what_its_request_did_not_name() -> None:
    """Asked before placement began anew, or before a claim had room: it joined the line without a word to it."""
    it = Desk()
    it.node(node(devices=2))
    it.submit("a")
    request, _ = it.take(SeatRequested)
    assert request.candidates == ()
    it.claim("c1", allocated({"x": entry("w")}))
    it.refuse(request)
    assert asked(it) == [(request.workload, ("c1",))]


def test_W1_nobody_gives_a_seat_up_for_one_that_is_offered_another() -> None:
    """Its request is under way, and unanswered while the ledger is away: younger jobs lost seats for it."""
    it = Desk(limit=2)
    it.node(node(devices=1))
    it.submit("a")
    a_trainer, a_sampler = it.take(SeatRequested)
    it.submit("b")
    b_trainer, b_sampler = it.take(SeatRequested)
    it.book(a_trainer, "")
    it.book(b_trainer, f"c-{trainer('a')}")
    for request in (a_sampler, b_sampler):
        it.book(request, allocate=False)
        it.unschedulable(request.workload)
    it.take(SeatRequested)
    it.claim("free", allocated({"x": entry("w")}))
    assert asked(it) == [(sampler("a"), ("free",))]
    it.repair(60.0)
    assert it.take(SeatReleaseRequested) == []


def allocate(it: Desk, workload: str, *, gib: float = 80.0) -> None:
    record = it.workload(workload)
    it.claim(record.claim, allocated({record.assignment: entry(workload)}, gib=gib))


def test_W1_a_claim_that_is_allocated_before_an_earlier_waiters_is_counted() -> None:
    """Among pending claims of a cluster kube-scheduler decides."""
    it = Desk()
    it.node(node(devices=4))
    it.node(node("n2", devices=4, gib=24))
    wait(it, "a", "b", "c", gib=20)
    allocate(it, sampler("a"))
    assert it.state.overtakings == 0, "it was the first"
    allocate(it, sampler("c"), gib=24)
    assert it.state.overtakings == 1
    allocate(it, sampler("c"), gib=24)
    allocate(it, trainer("c"))
    assert it.state.overtakings == 1, "told twice, or a job's second worker, which goes before others' first"


def test_W1_a_claim_on_a_device_that_no_earlier_waiter_could_have_had_overtakes_nobody() -> None:
    it = Desk()
    it.node(node(devices=4))
    it.node(node("n2", devices=4, gib=24))
    wait(it, "large", gib=30)
    wait(it, "small", gib=20)
    allocate(it, sampler("small"), gib=24)
    assert it.state.overtakings == 0
    it = Desk()
    it.node(node(devices=4))
    wait(it, "failed-there", "last")
    for role in (sampler, trainer):
        record = it.workload(role("failed-there"))
        it.state.put_workload(msgspec.structs.replace(record, avoid=(Avoid(node="n1", until=1e9, why="there"),)))
    allocate(it, sampler("last"))
    assert it.state.overtakings == 0
    it = Desk()
    it.node(node("n2", devices=1, gib=24))
    wait(it, "founded-narrow", gib=20)
    it.node(node(devices=4))
    it.submit("last", gib=20)
    it.book(next(each for each in it.take(SeatRequested) if each.workload == sampler("last")))
    assert it.state.overtakings == 0
