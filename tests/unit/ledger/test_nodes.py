"""Nodes that fall silent, decided purely: suspect, lost, back; and what becomes of their seats (B5, F3, E13)."""

from __future__ import annotations

from typing import Any

import pytest

from openrl_common.events import ClaimFreed, NodeLost, NodeRecovered, NodeSuspect, SeatBooked, SeatRefused, SeatReleased
from openrl_common.records import ClaimState, LeaseRecord, LeaseState, NodeRecord, SeatState, Standing
from openrl_common.store import Entry
from openrl_ledger.core import nodes
from openrl_ledger.core.nodes import NodePolicy, NodeWatch
from openrl_ledger.core.ops import Table, Write
from unit.ledger.test_booking import allocated, gone, release, request
from unit.ledger.world import Handler, World

POLICY = NodePolicy()
"""As shipped: the times below are those that docs/failures.md and docs/kubernetes.md state."""
Leases = dict[str, Entry[LeaseRecord] | None]


def beat(revision: int, **fields: Any) -> Entry[NodeRecord]:
    return Entry("n1", NodeRecord(**{"node": "n1", "devices": (), "beat": revision, **fields}), revision)


def lease(revision: int, state: LeaseState = LeaseState.LIVE, found: str = "") -> Entry[LeaseRecord]:
    return Entry("a", LeaseRecord(state=state, found=found), revision)


class Judge:
    """A watch that looks twice a second; ``lasts`` lets time pass and gives the last verdict."""

    def __init__(self) -> None:
        self.seen = NodeWatch(POLICY)
        self.now = 0.0

    def look(self, node: Entry[NodeRecord], leases: Leases) -> Standing:
        if node.key not in self.seen.silent({node.key: node}, self.now):
            return Standing.LIVE
        return self.seen.judge(node, leases, self.now)

    def lasts(self, seconds: float, node: Entry[NodeRecord], leases: Leases | None = None) -> Standing:
        verdict, end = Standing.LIVE, self.now + seconds
        while self.now <= end:
            verdict = self.look(node, leases or {})
            self.now += 0.5
        return verdict

    def renewing(self, seconds: float, node: Entry[NodeRecord]) -> Standing:
        """A silent node whose worker renews every 2 s."""
        verdict, end = Standing.LIVE, self.now + seconds
        while self.now <= end:
            verdict = self.look(node, {"a": lease(100 + int(self.now / 2))})
            self.now += 0.5
        return verdict


def test_b5_a_node_is_suspect_after_three_missed_beats_and_not_before() -> None:
    """B5: beats come every 2 s."""
    judge = Judge()
    assert judge.lasts(6.0, beat(1)) is Standing.LIVE
    assert judge.lasts(1.0, beat(1)) is Standing.SUSPECT
    assert judge.lasts(0.5, beat(2)) is Standing.LIVE


def test_f3_a_dead_launcher_is_no_dead_node_while_its_workers_renew() -> None:
    """F3: suspect for as long as it takes, never lost."""
    judge = Judge()
    assert judge.renewing(120.0, beat(1)) is Standing.SUSPECT


def test_f3_a_node_is_lost_within_15_s_of_its_last_sign_of_life() -> None:
    """F3: beats and leases stopped at 0; the first look comes half a second later."""
    judge = Judge()
    judge.now = 0.5
    assert judge.lasts(9.5, beat(1), {"a": lease(7)}) is Standing.SUSPECT
    assert judge.lasts(3.0, beat(1), {"a": lease(7)}) is Standing.LOST
    assert judge.now < 15.0


def test_f3_one_worker_that_renews_keeps_the_node_from_being_lost() -> None:
    judge = Judge()
    verdict = Standing.LIVE
    for tick in range(120):
        judge.now = tick / 2
        verdict = judge.look(beat(1), {"a": lease(7), "b": lease(100 + tick // 4)})
    assert verdict is Standing.SUSPECT


def test_f3_a_start_under_way_is_given_its_time_unless_live_workers_fell_silent_beside_it() -> None:
    starting = lease(8, LeaseState.STARTING)
    judge = Judge()
    assert judge.lasts(50.0, beat(1), {"s": starting}) is Standing.SUSPECT
    assert judge.lasts(15.0, beat(1), {"s": starting}) is Standing.LOST
    beside = Judge()
    assert beside.lasts(14.0, beat(1), {"s": starting, "a": lease(7)}) is Standing.LOST


def test_e13_a_judge_that_was_cut_off_begins_again() -> None:
    """E13, F3: an outage of the bus expires nobody, however long it lasts."""
    judge = Judge()
    assert judge.lasts(6.0, beat(1), {"a": lease(7)}) is Standing.LIVE
    judge.now += 3600.0
    judge.seen.cut_off()
    assert judge.lasts(6.0, beat(1), {"a": lease(7)}) is Standing.LIVE


def test_b5_a_node_that_nobody_beats_for_is_judged_by_nobody() -> None:
    """B5: records made by hand have beat 0."""
    assert Judge().lasts(100.0, beat(5, beat=0)) is Standing.LIVE


def test_f3_a_reported_node_is_suspect_at_once_and_lost_only_with_its_leases() -> None:
    """F3: the launcher's report alone is not enough, and the leases of a node that nobody beats for are looked at from
    the report on, half a second late at most: 12 s with the writes."""
    reported = beat(3, beat=0, lost=True)
    judge = Judge()
    judge.now = 0.5
    assert judge.look(reported, {"a": lease(7)}) is Standing.SUSPECT
    assert judge.lasts(9.5, reported, {"a": lease(7)}) is Standing.SUSPECT
    assert judge.lasts(0.5, reported, {"a": lease(7)}) is Standing.LOST
    assert judge.now < 12.0


def test_b5_only_a_beat_that_was_seen_brings_a_node_back() -> None:
    """B5: a judge that has just begun knows nothing of it yet."""
    watch = NodeWatch(POLICY)
    watch.silent({"n1": beat(4)}, 0.0)
    assert not watch.heard(beat(4))
    assert watch.heard(beat(5))


# --- what follows ----------------------------------------------------------------------------------------------------


def seated(world: World) -> SeatBooked:
    (booked,) = world.handle(request("w"))
    assert isinstance(booked, SeatBooked)
    world.handle(allocated(booked.claim))
    world.put(Table.LEASES, booked.assignment, LeaseRecord(state=LeaseState.LIVE, renewals=3))
    return booked


def declare(world: World, standing: Standing) -> list[Any]:
    before = len(world.published)
    world.finish(Handler(None, nodes.declare("n1", standing, "it missed heartbeats", world.environment)))
    return world.published[before:]


def release_lost(world: World, **revisions: int) -> list[Any]:
    before = len(world.published)
    world.finish(Handler(None, nodes.release_lost("n1", revisions)))
    return world.published[before:]


@pytest.mark.parametrize("standing", [Standing.SUSPECT, Standing.LOST])
def test_f3_nobody_joins_a_suspect_node_and_the_write_itself_says_so(standing: Standing) -> None:
    """F3, S2: checked inside the reservation, so a request decided before the verdict is refused too."""
    world = World(limit=0, devices=2, host_gib=100)
    booked = seated(world)
    newcomer = world.deliver(request("late", booked.claim, found=False))
    for _ in range(4):
        world.step(newcomer)
    assert [type(event) for event in declare(world, standing)] == [
        NodeSuspect if standing is Standing.SUSPECT else NodeLost
    ]
    world.finish(newcomer)
    (refused,) = [event for event in world.published if isinstance(event, SeatRefused)]
    assert "missed heartbeats" in refused.refusals[booked.claim]
    assert declare(world, standing) == []
    assert [type(event) for event in declare(world, Standing.LIVE)] == [NodeRecovered]
    assert isinstance(world.handle(request("late", booked.claim, attempt=2, found=False))[0], SeatBooked)


def test_f3_seats_of_a_lost_node_are_fenced_and_released() -> None:
    """F3, invariant 6: the tombstone first, from the revision that lapsed; then the seat, and the workload may book."""
    world = World(limit=0, devices=2, host_gib=100)
    booked = seated(world)
    declare(world, Standing.LOST)
    events = release_lost(world, **{booked.assignment: world.tables[Table.LEASES][booked.assignment].revision})
    assert any(isinstance(event, SeatReleased) and event.assignment == booked.assignment for event in events)
    assert world.seats()["w"].state is SeatState.EMPTY
    assert world.tables[Table.LEASES][booked.assignment].value.found == "lapsed"
    assert not world.tables[Table.BUDGETS]["n1"].value.entries
    again = world.handle(request("w", attempt=2))
    assert isinstance(again[0], SeatBooked)
    assert again[0].claim != booked.claim


def test_f3_a_worker_that_renewed_at_the_last_moment_keeps_its_seat() -> None:
    """F3, E12: the fence is a compare-and-swap from the very revision that lapsed."""
    world = World(limit=0, devices=2, host_gib=100)
    booked = seated(world)
    declare(world, Standing.LOST)
    lapsed = world.tables[Table.LEASES][booked.assignment].revision
    world.put(Table.LEASES, booked.assignment, LeaseRecord(state=LeaseState.LIVE, renewals=4))
    assert release_lost(world, **{booked.assignment: lapsed}) == []
    assert world.seats()["w"].state is SeatState.HELD
    assert world.tables[Table.LEASES][booked.assignment].value.state is LeaseState.LIVE


def test_f3_nothing_is_released_on_a_node_that_came_back_meanwhile() -> None:
    world = World(limit=0, devices=2, host_gib=100)
    booked = seated(world)
    declare(world, Standing.LOST)
    declare(world, Standing.LIVE)
    assert release_lost(world, **{booked.assignment: world.tables[Table.LEASES][booked.assignment].revision}) == []
    assert world.seats()["w"].state is SeatState.HELD


def stopped_before_the_seat_is_emptied() -> tuple[World, SeatBooked]:
    """A lost node's seat: off its claim, off its node, and there the judge died. No message will say it again."""
    world = World(limit=0, devices=2, host_gib=100)
    booked = seated(world)
    declare(world, Standing.LOST)
    revision = world.tables[Table.LEASES][booked.assignment].revision
    dying = Handler(None, nodes.release_lost("n1", {booked.assignment: revision}))
    while not (isinstance(dying.pending, Write) and getattr(dying.pending.value, "state", "") is SeatState.EMPTY):
        world.step(dying)
    assert world.seats()["w"].state is SeatState.RELEASING
    assert booked.assignment not in world.claims()[booked.claim].entries
    assert not world.tables[Table.BUDGETS]["n1"].value.entries
    assert not [event for event in world.published if isinstance(event, SeatReleased)]
    return world, booked


@pytest.mark.parametrize("freed", [False, True])
def test_L6_F3_a_releasing_seat_that_its_claim_no_longer_lists_is_finished_by_the_janitor(freed: bool) -> None:
    """Whatever its fence found, and also when the launcher has freed the claim meanwhile; placement is told (L4)."""
    world, booked = stopped_before_the_seat_is_emptied()
    if freed:
        world.handle(ClaimFreed(claim=booked.claim, node="n1"))
        assert world.claims()[booked.claim].state is ClaimState.GONE
    assert {leftover.kind for leftover in world.sightings()} == {"unlisted-seat"}
    world.settle()
    assert world.seats()["w"].state is SeatState.EMPTY
    (released,) = [event for event in world.published if isinstance(event, SeatReleased)]
    assert (released.assignment, released.incarnation) == (booked.assignment, booked.incarnation)
    assert world.sightings() == set()
    declare(world, Standing.LIVE)
    assert isinstance(world.handle(request("w", attempt=2))[0], SeatBooked)


def test_L4_F3_a_release_asked_for_again_finishes_a_seat_that_its_claim_no_longer_lists() -> None:
    """A cancellation, or a resubmission that finds its predecessor there, need not wait for the janitor."""
    world, booked = stopped_before_the_seat_is_emptied()
    events = world.handle(release("w", booked.assignment, close=False))
    assert [event.assignment for event in events if isinstance(event, SeatReleased)] == [booked.assignment]
    assert world.seats()["w"].state is SeatState.EMPTY


def test_L6_a_releasing_seat_whose_claim_record_is_missing_waits_until_its_worker_is_gone() -> None:
    """Deleted by hand it tells nothing: a worker may still be at work there."""
    world = World(limit=0, devices=2, host_gib=100)
    booked = seated(world)
    world.handle(release("w", booked.assignment, close=False))
    del world.tables[Table.CLAIMS][booked.claim]
    assert "unlisted-seat" not in {leftover.kind for leftover in world.sightings()}
    world.handle(release("w", booked.assignment, close=False))
    assert world.seats()["w"].state is SeatState.RELEASING
    world.handle(gone(booked))
    assert world.seats()["w"].state is SeatState.EMPTY
