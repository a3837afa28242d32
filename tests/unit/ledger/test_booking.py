"""What the ledger answers, one rule at a time. The interleavings are in test_ledger_properties.py."""

from __future__ import annotations

import msgspec
import pytest

from openrl_common.events import (
    ClaimAllocated,
    ClaimFreed,
    ClaimQuarantined,
    ClaimRefused,
    ClaimRetired,
    SeatBooked,
    SeatRefused,
    SeatReleased,
    SeatReleaseRequested,
    SeatReleasing,
    SeatRequested,
    WorkerGone,
)
from openrl_common.records import (
    Avoid,
    ClaimState,
    LeaseRecord,
    LeaseState,
    Role,
    SeatState,
    Shape,
    Tier,
)
from openrl_ledger.core import janitor
from openrl_ledger.core.ops import Table
from unit.ledger.world import GIB, Handler, World

TIERS = (Tier(count=1, floor_bytes=10 * GIB, ceiling_gib=80),)


def request(
    workload: str,
    *candidates: str,
    incarnation: int = 1,
    attempt: int = 1,
    exclusive: bool = False,
    found: bool = True,
    host_gib: int = 10,
    move_from: str = "",
) -> SeatRequested:
    return SeatRequested(
        tenant="t",
        workload=workload,
        incarnation=incarnation,
        attempt=attempt,
        owner=workload,
        shape=Shape(role=Role.TRAINER, device_bytes=10 * GIB, host_bytes=host_gib * GIB, exclusive=exclusive),
        candidates=candidates,
        may_found=found,
        tiers=TIERS,
        move_from=move_from,
    )


def release(workload: str, assignment: str = "", incarnation: int = 1, *, close: bool = True) -> SeatReleaseRequested:
    return SeatReleaseRequested(
        tenant="t", workload=workload, incarnation=incarnation, assignment=assignment, close=close
    )


def gone(booked: SeatBooked) -> WorkerGone:
    return WorkerGone(tenant="t", workload=booked.workload, assignment=booked.assignment, claim=booked.claim, node="n1")


def allocated(claim: str, device: str = "d0") -> ClaimAllocated:
    return ClaimAllocated(claim=claim, node="n1", devices=(device,), device_bytes=80 * GIB, tier="t1x80")


def booked(world: World, event: SeatRequested) -> SeatBooked:
    (answer,) = world.handle(event)
    assert isinstance(answer, SeatBooked), answer
    return answer


def founded(world: World, workload: str, device: str = "d0", **options: object) -> SeatBooked:
    answer = booked(world, request(workload, **options))  # type: ignore[arg-type]
    world.handle(allocated(answer.claim, device))
    return answer


def with_limit(world: World, limit: int) -> World:
    """The same bucket under another limit, as after a restart of the ledger (S6)."""
    other = World(limit=limit, devices=4, host_gib=100)
    other.tables, other.revision, other.counter = world.tables, world.revision, world.counter
    return other


@pytest.fixture
def world() -> World:
    return World(limit=2, devices=4, host_gib=100)


def test_a_workload_without_candidates_founds_a_pending_claim_of_its_own(world: World) -> None:
    """L2, P8."""
    answer = booked(world, request("w1"))
    assert answer.founded
    claim = world.claims()[answer.claim]
    assert claim.state is ClaimState.PENDING
    assert list(claim.entries) == [answer.assignment]
    assert world.seats()["w1"].state is SeatState.HELD


def test_an_allocation_reserves_the_founders_host_memory(world: World) -> None:
    """L5."""
    answer = founded(world, "w1")
    assert world.claims()[answer.claim].state is ClaimState.ALLOCATED
    assert world.tables[Table.BUDGETS]["n1"].value.entries[answer.assignment].host_bytes == 10 * GIB


def test_a_joiner_takes_the_first_candidate_that_accepts_in_the_same_handling(world: World) -> None:
    """P11: a refused claim is dropped and the next is tried; no claim is cut while another has room."""
    full, room = founded(world, "w1"), founded(world, "w2", "d1")
    booked(world, request("w3", full.claim))
    answer = booked(world, request("w4", full.claim, room.claim))
    assert answer.claim == room.claim
    assert not answer.founded
    assert "2 seats" in answer.refusals[full.claim]


def test_the_seat_limit_holds_on_join_whatever_the_request_believed(world: World) -> None:
    """S2: the write is tested, not the caller."""
    first = founded(world, "w1")
    booked(world, request("w2", first.claim))
    (answer,) = world.handle(request("w3", first.claim, found=False))
    assert isinstance(answer, SeatRefused)
    assert answer.code == "no-candidate"
    assert len(world.claims()[first.claim].entries) == 2


def test_limit_one_leaves_every_founder_alone() -> None:
    """S1."""
    world = World(limit=1, devices=4, host_gib=100)
    first = founded(world, "w1")
    assert booked(world, request("w2", first.claim)).founded


def test_limit_zero_is_no_limit() -> None:
    """S1."""
    world = World(limit=0, devices=1, host_gib=1000)
    first = founded(world, "w0")
    for index in range(1, 20):
        assert booked(world, request(f"w{index}", first.claim)).claim == first.claim


@pytest.mark.parametrize(("holder", "newcomer"), [(True, False), (False, True)])
def test_an_exclusive_workload_never_joins_and_is_never_joined(world: World, holder: bool, newcomer: bool) -> None:
    """P7."""
    first = founded(world, "w1", exclusive=holder)
    (answer,) = world.handle(request("w2", first.claim, exclusive=newcomer, found=False))
    assert isinstance(answer, SeatRefused)
    assert "exclusive" in answer.refusals[first.claim]


def test_host_memory_refuses_a_join_and_equality_passes(world: World) -> None:
    """P6."""
    first = founded(world, "w1", host_gib=60)
    (answer,) = world.handle(request("w2", first.claim, found=False, host_gib=41))
    assert isinstance(answer, SeatRefused)
    assert "host memory" in answer.refusals[first.claim]
    assert booked(world, request("w3", first.claim, host_gib=40)).claim == first.claim
    assert world.tables[Table.BUDGETS]["n1"].value.entries.keys() == world.claims()[first.claim].entries.keys()


def test_an_allocation_over_the_host_budget_retires_the_claim_and_frees_the_seat(world: World) -> None:
    """L5: over budget the release is finished and the workload waits for host memory."""
    founded(world, "w1", host_gib=95)
    answer = booked(world, request("w2"))
    events = world.handle(allocated(answer.claim, "d1"))
    assert [type(event) for event in events] == [SeatReleased, ClaimRetired]
    assert world.claims()[answer.claim].state is ClaimState.RETIRING
    assert world.seats()["w2"].state is SeatState.EMPTY


def test_booking_again_adopts_the_seat_and_adds_none(world: World) -> None:
    """S3, invariant 10: adopting is never refused by the limit."""
    first = founded(world, "w1")
    again = booked(world, request("w1", first.claim, attempt=2))
    assert (again.assignment, again.claim) == (first.assignment, first.claim)
    assert len(world.claims()) == 1


def test_a_late_duplicate_of_a_finished_request_books_nothing(world: World) -> None:
    """L4, invariant 10."""
    first = founded(world, "w1")
    world.handle(release("w1", first.assignment, close=False))
    world.handle(gone(first))
    assert world.handle(request("w1")) == []
    assert world.seats()["w1"].state is SeatState.EMPTY
    assert booked(world, request("w1", attempt=2)).founded


def test_a_release_counts_until_the_worker_is_gone_and_the_last_one_retires_the_claim(world: World) -> None:
    """L4, E3: releasing still counts; the seat is emptied last."""
    first = founded(world, "w1")
    (event,) = world.handle(release("w1", first.assignment))
    assert isinstance(event, SeatReleasing)
    assert len(world.claims()[first.claim].entries) == 1
    events = world.handle(gone(first))
    assert [type(event) for event in events] == [SeatReleased, ClaimRetired]
    assert world.claims()[first.claim].state is ClaimState.RETIRING
    assert world.tables[Table.BUDGETS]["n1"].value.entries == {}
    world.handle(ClaimFreed(claim=first.claim, node="n1"))
    assert world.claims()[first.claim].state is ClaimState.GONE


def test_a_late_release_of_an_old_assignment_does_not_drop_a_newer_booking(world: World) -> None:
    """L4: by assignment id, never by name."""
    first = founded(world, "w1")
    world.handle(release("w1", first.assignment, close=False))
    world.handle(gone(first))
    second = founded(world, "w1", "d1", attempt=2)
    assert world.handle(release("w1", first.assignment, close=False)) == []
    world.handle(gone(first))
    assert world.seats()["w1"].assignment == second.assignment
    assert world.seats()["w1"].state is SeatState.HELD


def test_a_seat_on_a_pending_claim_is_fenced_and_freed_at_once(world: World) -> None:
    """L4: nothing ran there, so nobody has to confirm."""
    answer = booked(world, request("w1"))
    events = world.handle(release("w1", answer.assignment))
    assert [type(event) for event in events] == [SeatReleasing, SeatReleased, ClaimRetired]
    assert world.tables[Table.LEASES][answer.assignment].value.state is LeaseState.TOMBSTONE
    world.handle(allocated(answer.claim))
    assert world.claims()[answer.claim].state is ClaimState.RETIRING


def test_a_cancellation_before_the_booking_closes_the_incarnation(world: World) -> None:
    """L4: nothing in flight books behind a cancellation; a resubmission may."""
    assert world.handle(release("w1")) == []
    (answer,) = world.handle(request("w1"))
    assert isinstance(answer, SeatRefused)
    assert answer.code == "closed"
    assert booked(world, request("w1", incarnation=2)).founded


def test_a_cancellation_that_names_the_assignment_before_a_move_releases_the_new_seat(world: World) -> None:
    """L4: it closes the incarnation, so whatever that incarnation holds is over."""
    first = founded(world, "w1")
    own = booked(world, request("w2"))
    _, moved = world.handle(request("w2", first.claim, attempt=2, found=False, move_from=own.assignment))
    assert isinstance(moved, SeatBooked)
    (event,) = world.handle(release("w2", own.assignment))
    assert isinstance(event, SeatReleasing)
    assert event.assignment == moved.assignment


def test_the_janitor_looks_once_more_before_it_frees_a_seat_that_its_old_copy_does_not_list(world: World) -> None:
    """L6: mirrors lag, and a worker may be running on that seat."""
    first = founded(world, "w1")
    lagging = janitor.Leftover("unlisted-seat", "w1", first.assignment, first.claim, "", "t")
    world.finish(Handler(None, janitor.repair(lagging, "t", 1)))
    assert world.seats()["w1"].state is SeatState.HELD
    assert first.assignment in world.claims()[first.claim].entries
    assert first.assignment not in world.tables[Table.LEASES]


def test_a_late_cancellation_never_hits_a_newer_incarnation(world: World) -> None:
    """L4."""
    newer = founded(world, "w1", incarnation=5)
    assert world.handle(release("w1", "", incarnation=4)) == []
    assert world.seats()["w1"].assignment == newer.assignment


def test_a_newer_incarnation_takes_its_predecessors_place_when_it_is_gone(world: World) -> None:
    """S3: one CAS swaps the entries, although the claim is full."""
    first = founded(world, "w1")
    booked(world, request("w2", first.claim))
    refused = world.handle(request("w1", incarnation=2))
    assert [type(event) for event in refused] == [SeatReleasing, SeatRefused]
    (answer,) = world.handle(gone(first))
    assert isinstance(answer, SeatBooked)
    assert (answer.claim, answer.incarnation) == (first.claim, 2)
    assert len(world.claims()[first.claim].entries) == 2
    assert world.sightings() == set()


def test_P10_a_successor_that_needs_two_devices_does_not_take_the_place_on_one(world: World) -> None:
    """S3: its entry alone does not say how many it needs; it books as a newcomer once the release is finished."""
    first = founded(world, "w1")
    newer = request("w1", incarnation=2)
    world.handle(msgspec.structs.replace(newer, shape=msgspec.structs.replace(newer.shape, device_count=2)))
    events = world.handle(gone(first))
    assert [type(event) for event in events] == [SeatReleased, ClaimRetired]
    assert world.seats()["w1"].state is SeatState.EMPTY


def relabel(world: World, **fields: object) -> None:
    world.put(Table.NODES, "n1", msgspec.structs.replace(world.tables[Table.NODES]["n1"].value, **fields))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"roles": (Role.SAMPLER,)}, "node n1 does not accept the role trainer"),
        ({"enabled": False}, "node n1 is not enabled"),
        ({"complete": False}, "node n1 has no complete inventory"),
    ],
)
@pytest.mark.parametrize("lag", [0, 1])
def test_P1_P3_a_node_that_was_labelled_anew_since_placement_looked_is_not_joined(
    world: World, fields: dict[str, object], why: str, lag: int
) -> None:
    """What sits there stays; an own claim is the launcher's to judge."""
    first = founded(world, "w1")
    before = world.tables[Table.NODES]["n1"].value
    relabel(world, **fields)
    handler = world.deliver(request("w2", first.claim, found=False))
    world.finish(handler)
    refused = world.published[-1]
    assert isinstance(refused, SeatRefused)
    assert refused.refusals == {first.claim: why}
    assert world.seats()["w1"].state is SeatState.HELD
    world.put(Table.NODES, "n1", before)
    handler = world.deliver(request("w2", first.claim, attempt=2, found=False))
    world.finish(handler, lag=lag)  # an old copy that says no is read again
    assert isinstance(world.published[-1], SeatBooked)
    assert world.sightings() == set()


def test_S3_a_node_that_was_labelled_anew_is_not_taken_over_from_the_predecessor(world: World) -> None:
    """P1: it books as a newcomer once the release is finished, where its role is welcome."""
    first = founded(world, "w1")
    world.handle(request("w1", incarnation=2))
    relabel(world, roles=(Role.SAMPLER,))
    events = world.handle(gone(first))
    assert [type(event) for event in events] == [SeatReleased, ClaimRetired]
    assert world.sightings() == set()


def test_a_cancelled_successor_does_not_take_the_place(world: World) -> None:
    """S3, L4."""
    first = founded(world, "w1")
    world.handle(request("w1", incarnation=2))
    world.handle(release("w1", "", incarnation=2))
    events = world.handle(gone(first))
    assert isinstance(events[0], SeatReleased)
    assert world.seats()["w1"].state is SeatState.EMPTY


def test_a_waiter_moves_from_its_own_pending_claim_to_a_freed_seat(world: World) -> None:
    """L5, S4: the own claim retires, its device demand is withdrawn."""
    first = founded(world, "w1")
    own = booked(world, request("w2"))
    events = world.handle(request("w2", first.claim, attempt=2, found=False, move_from=own.assignment))
    assert [type(event) for event in events] == [ClaimRetired, SeatBooked]
    assert world.seats()["w2"].claim == first.claim
    assert world.claims()[own.claim].state is ClaimState.RETIRING
    assert world.tables[Table.LEASES][own.assignment].value.found == "none"


def test_P9_W1_an_own_claim_is_founded_anew_before_the_old_one_retires(world: World) -> None:
    """L5: at every write the workload has a pending claim, so no later one is served in its place."""
    own = booked(world, request("w1"))
    handler = world.deliver(request("w1", attempt=2, move_from=own.assignment))
    while not handler.done:
        assert [claim for claim in world.claims().values() if claim.state is ClaimState.PENDING and claim.entries]
        world.step(handler)
    retired, answer = world.published[-2:]
    assert isinstance(retired, ClaimRetired)
    assert isinstance(answer, SeatBooked)
    assert (retired.claim, answer.founded) == (own.claim, True)
    assert world.seats()["w1"].claim == answer.claim != own.claim
    assert world.tables[Table.LEASES][own.assignment].value.state is LeaseState.TOMBSTONE
    assert world.sightings() == set()
    (again,) = world.handle(request("w1", attempt=2, move_from=own.assignment))
    assert isinstance(again, SeatBooked)
    assert again.claim == answer.claim


def test_L5_an_own_claim_that_was_allocated_meanwhile_is_not_founded_anew(world: World) -> None:
    """The allocation won; what was founded is cleaned."""
    own = booked(world, request("w1"))
    handler = world.deliver(request("w1", attempt=2, move_from=own.assignment))
    world.run_until_write(handler, Table.LEASES)
    world.put(Table.LEASES, own.assignment, LeaseRecord(state=LeaseState.STARTING))
    world.handle(allocated(own.claim))
    world.finish(handler)
    assert isinstance(world.published[-1], SeatRefused)
    assert world.published[-1].code == "started"
    assert world.seats()["w1"].assignment == own.assignment
    assert [claim.state for key, claim in world.claims().items() if key != own.claim] == [ClaimState.RETIRING]
    assert world.sightings() == set()


def test_a_move_loses_against_a_worker_that_is_starting(world: World) -> None:
    """L5: the allocation won; the reservation on the target is cleaned."""
    first = founded(world, "w1")
    own = booked(world, request("w2"))
    world.put(Table.LEASES, own.assignment, LeaseRecord(state=LeaseState.STARTING))
    events = world.handle(request("w2", first.claim, attempt=2, found=False, move_from=own.assignment))
    assert any(isinstance(event, SeatRefused) and event.code == "started" for event in events)
    assert world.seats()["w2"].claim == own.claim
    assert len(world.claims()[first.claim].entries) == 1


def test_a_move_after_the_allocation_keeps_the_allocation(world: World) -> None:
    """L5."""
    first = founded(world, "w1")
    own = founded(world, "w2", "d1")
    events = world.handle(request("w2", first.claim, attempt=2, found=False, move_from=own.assignment))
    assert isinstance(events[0], SeatRefused)
    assert events[0].code == "started"
    assert world.seats()["w2"].assignment == own.assignment


def test_a_refused_claim_is_gone_and_its_seat_free(world: World) -> None:
    """L5."""
    answer = booked(world, request("w1"))
    events = world.handle(ClaimRefused(claim=answer.claim, node="n1", why="no such device"))
    assert isinstance(events[0], SeatReleased)
    assert world.claims()[answer.claim].state is ClaimState.GONE
    assert world.seats()["w1"].state is SeatState.EMPTY


def test_a_lowered_limit_evicts_nobody_and_admits_nobody(world: World) -> None:
    """S7."""
    first = founded(world, "w1")
    booked(world, request("w2", first.claim))
    lowered = with_limit(world, 1)
    (answer,) = lowered.handle(request("w3", first.claim, found=False))
    assert isinstance(answer, SeatRefused)
    assert len(lowered.claims()[first.claim].entries) == 2


def test_a_redelivered_worker_gone_publishes_again_what_a_crash_swallowed(world: World) -> None:
    """E6: a crash between emptying the seat and publishing loses nothing."""
    first = founded(world, "w1")
    world.handle(release("w1", first.assignment))
    handler = world.deliver(gone(first))
    while world.seats()["w1"].state is not SeatState.EMPTY:
        world.step(handler)
    published = len(world.published)
    world.crash(handler)
    world.settle()
    assert any(isinstance(event, SeatReleased) for event in world.published[published:])


def test_an_old_copy_of_a_claim_neither_refuses_a_freed_seat_nor_seats_over_the_limit(world: World) -> None:
    """S2: a copy that lags may lead to a compare-and-swap, never to a refusal or past the limit (world's limit: 2)."""
    first = founded(world, "w1")
    second = booked(world, request("w2", first.claim))
    for copies_behind in (1, 2, 3):
        full = world.deliver(request("w3", first.claim, found=False, attempt=copies_behind))
        world.finish(full, lag=copies_behind)
        assert isinstance(world.published[-1], SeatRefused)
    world.handle(release("w2", second.assignment))
    world.handle(gone(second))
    world.finish(world.deliver(request("w4", first.claim, found=False)), lag=1)
    assert isinstance(world.published[-1], SeatBooked)
    assert len(world.claims()[first.claim].entries) == 2


def test_an_own_claim_keeps_what_its_founder_avoids_P13() -> None:
    world = World(limit=0, devices=1, host_gib=100)
    avoid = (Avoid(node="n1", until=9e9, why="it did not start"),)
    (booked,) = world.handle(msgspec.structs.replace(request("w"), avoid=avoid))
    assert isinstance(booked, SeatBooked)
    assert world.claims()[booked.claim].avoid == avoid


def test_L6_a_seat_that_never_started_is_released_although_its_launcher_says_nothing(world: World) -> None:
    """L6, B7: fenced before it ran, so nothing of it can ever run; a started one waits for WorkerGone."""
    first = founded(world, "w1")
    world.handle(release("w1", first.assignment))
    assert {leftover.kind for leftover in world.sightings()} == {"unstarted-seat"}
    world.settle()
    assert world.seats()["w1"].state is SeatState.EMPTY
    assert world.tables[Table.LEASES][first.assignment].value.found == "none"
    second = founded(world, "w2", "d1")
    world.put(Table.LEASES, second.assignment, LeaseRecord(state=LeaseState.STARTING))
    world.handle(release("w2", second.assignment))
    world.settle()
    assert world.seats()["w2"].state is SeatState.RELEASING


def test_L6_L7_a_repair_that_an_old_copy_of_a_seat_asks_for_fences_nobody(world: World) -> None:
    """A rebuilt bucket may hold again what the mirror still shows as releasing."""
    first = founded(world, "w1")
    held = world.seats()["w1"]
    world.handle(release("w1", first.assignment))
    (leftover,) = world.sightings()
    assert leftover.kind == "unstarted-seat"
    world.put(Table.SEATS, "w1", held)
    world.put(Table.LEASES, first.assignment, LeaseRecord(state=LeaseState.LIVE))
    world.finish(Handler(None, janitor.repair(leftover, "t", held.incarnation)))
    assert world.tables[Table.LEASES][first.assignment].value.state is LeaseState.LIVE
    assert world.seats()["w1"] == held


def test_L6_a_retiring_claim_is_its_launchers_to_free_and_no_leftover(world: World) -> None:
    """L6: the janitor asks again, it frees nothing."""
    first = founded(world, "w1")
    world.handle(release("w1", first.assignment))
    world.handle(gone(first))
    assert janitor.retiring(world.claims()) == {first.claim: "n1"}
    world.settle()
    assert world.claims()[first.claim].state is ClaimState.RETIRING


def test_E12_a_late_word_about_an_older_assignment_takes_nothing_from_the_newer_one(world: World) -> None:
    """E12: acknowledgements fence nobody, so a message may be handled long after it is true: the assignment tells."""
    first = founded(world, "w1")
    world.handle(release("w1", first.assignment, close=False))
    world.handle(gone(first))
    second = booked(world, request("w1", attempt=2))
    assert second.assignment != first.assignment
    before = world.seats()["w1"], world.claims()[second.claim]
    world.handle(release("w1", first.assignment, close=False))
    world.handle(gone(first))
    world.settle()
    assert (world.seats()["w1"], world.claims()[second.claim]) == before


def test_P5_time_sliced_seats_need_not_fit_the_device_together(world: World) -> None:
    """P5: two of 50 GiB share a device of 80 GiB, by turns; one of 90 GiB does not get in."""
    wide = Shape(role=Role.TRAINER, device_bytes=50 * GIB)
    first = booked(world, msgspec.structs.replace(request("w1"), shape=wide))
    world.handle(allocated(first.claim))
    second = booked(world, msgspec.structs.replace(request("w2", first.claim, found=False), shape=wide))
    assert second.claim == first.claim
    large = msgspec.structs.replace(wide, device_bytes=90 * GIB)
    (refused,) = world.handle(msgspec.structs.replace(request("w3", first.claim, found=False), shape=large))
    assert isinstance(refused, SeatRefused)
    assert "needs 90" in refused.refusals[first.claim]


def test_S3_S7_a_successor_takes_its_predecessors_place_although_the_limit_was_lowered_below_it(world: World) -> None:
    """It adds no seat, so the limit is not asked, not even where another stays on the claim."""
    first = founded(world, "w1")
    booked(world, request("w2", first.claim))
    lowered = with_limit(world, 1)
    lowered.handle(request("w1", incarnation=2))
    (answer,) = lowered.handle(gone(first))
    assert isinstance(answer, SeatBooked)
    assert (answer.claim, answer.incarnation) == (first.claim, 2)
    assert len(lowered.claims()[first.claim].entries) == 2


@pytest.mark.parametrize(("host_gib", "fits"), [(70, True), (71, False)])
def test_S3_P6_a_successors_host_memory_need_fit_only_without_its_predecessors(
    world: World, host_gib: int, fits: bool
) -> None:
    """The node has 100 GiB, 30 of them are another's: the predecessor's 60 are given back by the same swap."""
    first = founded(world, "w1", host_gib=60)
    booked(world, request("w2", first.claim, host_gib=30))
    world.handle(request("w1", incarnation=2, host_gib=host_gib))
    answer = world.handle(gone(first))[0]
    assert isinstance(answer, SeatBooked if fits else SeatReleased)
    held = [entry.host_bytes for entry in world.tables[Table.BUDGETS]["n1"].value.entries.values()]
    assert sorted(held) == ([30 * GIB, 70 * GIB] if fits else [30 * GIB])
    assert world.sightings() == set()


@pytest.mark.parametrize("alone", [True, False])
def test_S3_P7_an_exclusive_successor_takes_the_place_where_its_predecessor_was_alone(
    world: World, alone: bool
) -> None:
    """Beside others it gives the place up, and books as a newcomer."""
    first = founded(world, "w1")
    if not alone:
        booked(world, request("w2", first.claim))
    world.handle(request("w1", incarnation=2, exclusive=True))
    answer = world.handle(gone(first))[0]
    assert isinstance(answer, SeatBooked if alone else SeatReleased)
    assert [entry.workload for entry in world.claims()[first.claim].entries.values()] == (["w1"] if alone else ["w2"])


def test_L3_B4_a_quarantined_claim_takes_nobody_and_is_never_freed_by_its_last_seat(world: World) -> None:
    """Its device is not trusted; who sits there stays until the worker is gone."""
    first = founded(world, "w1")
    world.handle(ClaimQuarantined(claim=first.claim, node="n1", why="memory was left behind"))
    assert world.claims()[first.claim].state is ClaimState.QUARANTINED
    assert world.seats()["w1"].state is SeatState.HELD
    (refused,) = world.handle(request("w2", first.claim, found=False))
    assert isinstance(refused, SeatRefused)
    assert "quarantined" in refused.refusals[first.claim]
    world.handle(release("w1", first.assignment))
    assert [type(event) for event in world.handle(gone(first))] == [SeatReleased]
    world.settle()
    assert world.claims()[first.claim].state is ClaimState.QUARANTINED
    world.handle(ClaimFreed(claim=first.claim, node="n1"))
    world.handle(ClaimQuarantined(claim=first.claim, node="n1", why="said again"))
    assert world.claims()[first.claim].state is ClaimState.GONE


def test_L2_B7_a_seat_whose_lease_is_fenced_is_released_and_not_adopted(world: World) -> None:
    """Its worker may be running still: it is stopped and seen gone before the workload books again."""
    first = founded(world, "w1")
    world.put(Table.LEASES, first.assignment, LeaseRecord(state=LeaseState.TOMBSTONE, found="live"))
    events = world.handle(request("w1", first.claim, attempt=2))
    assert [type(event) for event in events] == [SeatReleasing, SeatRefused]
    assert world.seats()["w1"].state is SeatState.RELEASING
    world.handle(gone(first))
    assert booked(world, request("w1", attempt=3)).assignment != first.assignment


def test_L2_a_seat_that_its_claim_does_not_list_is_finished_and_not_adopted(world: World) -> None:
    """L1: it is no seat. The same request then books a true one."""
    first = founded(world, "w1")
    claim = msgspec.structs.replace(world.claims()[first.claim], state=ClaimState.RETIRING, entries={})
    world.put(Table.CLAIMS, first.claim, claim)
    released, _, answer = world.handle(request("w1", attempt=2))
    assert isinstance(released, SeatReleased)
    assert isinstance(answer, SeatBooked)
    assert (released.assignment, answer.founded) == (first.assignment, True)
    assert answer.assignment in world.claims()[answer.claim].entries
    assert list(world.tables[Table.BUDGETS]["n1"].value.entries) == []


def test_L5_an_allocation_that_meets_a_release_gives_the_hosts_memory_back(world: World) -> None:
    """The founder was released between the node's reservation and the claim's: the write is lost, nothing is left."""
    own = booked(world, request("w1"))
    allocating = world.deliver(allocated(own.claim))
    world.run_until_write(allocating, Table.CLAIMS)
    assert own.assignment in world.tables[Table.BUDGETS]["n1"].value.entries
    world.handle(release("w1", own.assignment))
    world.finish(allocating)
    assert world.claims()[own.claim].state is ClaimState.RETIRING
    assert world.tables[Table.BUDGETS]["n1"].value.entries == {}


def test_L5_an_allocation_that_two_replicas_handle_keeps_the_founders_memory(world: World) -> None:
    """The slower one's write is lost to the faster one's: what it reserved is the founder's, and stays."""
    own = booked(world, request("w1"))
    replicas = [world.deliver(allocated(own.claim)) for _ in range(2)]
    for replica in replicas:
        world.run_until_write(replica, Table.CLAIMS)
    for replica in replicas:
        world.finish(replica)
    assert world.claims()[own.claim].state is ClaimState.ALLOCATED
    assert list(world.tables[Table.BUDGETS]["n1"].value.entries) == [own.assignment]


def test_L3_L5_a_founder_over_the_host_budget_is_fenced_before_its_claim_lets_it_go(world: World) -> None:
    """Its founding is about to name the seat, which the claim does not list then: only a fenced seat may be so."""
    founded(world, "w1", host_gib=95)
    founding = world.deliver(request("w2"))
    world.run_until_write(founding, Table.SEATS)
    ((claim, record),) = [(key, each) for key, each in world.claims().items() if each.state is ClaimState.PENDING]
    (assignment,) = record.entries
    allocating = world.deliver(allocated(claim, "d1"))
    world.run_until_write(allocating, Table.CLAIMS)
    assert world.tables[Table.LEASES][assignment].value.state is LeaseState.TOMBSTONE
    world.step(allocating)
    world.finish(founding)
    world.finish(allocating)
    assert world.claims()[claim].state is ClaimState.RETIRING
    assert world.seats()["w2"].state is SeatState.EMPTY


@pytest.mark.parametrize("num_steps", range(12))
def test_L5_S7_an_allocation_that_meets_another_write_of_its_claim_takes_no_memory_back(num_steps: int) -> None:
    """The slower one loses to a limit that is stated anew; the faster one allocates at any moment after that."""
    world = World(limit=3, devices=4, host_gib=100)
    own = booked(world, request("w1"))
    slower = world.deliver(allocated(own.claim))
    world.run_until_write(slower, Table.CLAIMS)
    world.finish(world.begin(janitor.restate_limit(own.claim, 2)))
    for _ in range(num_steps):
        if not slower.done:
            world.step(slower)
    world.handle(allocated(own.claim))
    world.finish(slower)
    assert world.claims()[own.claim].state is ClaimState.ALLOCATED
    assert list(world.tables[Table.BUDGETS]["n1"].value.entries) == [own.assignment]


def test_L5_B7_a_founder_over_the_host_budget_is_fenced(world: World) -> None:
    """Its launcher may be about to start it: the tombstone is what stops that."""
    founded(world, "w1", host_gib=95)
    own = booked(world, request("w2"))
    world.handle(allocated(own.claim, "d1"))
    lease = world.tables[Table.LEASES][own.assignment].value
    assert (lease.state, lease.found) == (LeaseState.TOMBSTONE, "none")
    assert "host memory" in lease.why
