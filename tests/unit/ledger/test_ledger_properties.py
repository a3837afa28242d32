"""Invariants 1 to 4 of docs/rules.md under every interleaving hypothesis can think of (L1-L5, S1-S3).

Handlers of several replicas advance one step at a time; any may stall, die between two steps and be delivered again,
or have the answer of a write lost. The world asserts on every single write.
"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from openrl_common.events import ClaimAllocated, ClaimFreed, Event, SeatReleaseRequested, SeatRequested, WorkerGone
from openrl_common.records import ClaimState, LeaseRecord, LeaseState, SeatRecord, SeatState, Standing
from openrl_ledger.core import janitor, nodes
from openrl_ledger.core.ops import Table
from unit.ledger.test_booking import founded, request
from unit.ledger.world import GIB, World

WORKLOADS = ("w0", "w1", "w2", "w3")
AT_ONCE = 4
seldom = st.sampled_from((False, False, False, True))
small = st.integers(min_value=0, max_value=63)


class LedgerUnderFire(RuleBasedStateMachine):
    @initialize(
        limit=st.integers(0, 3), host_gib=st.sampled_from([25, 45, 100]), seated=st.integers(0, 3), shared=st.booleans()
    )
    def start(self, limit: int, host_gib: int, seated: int, shared: bool) -> None:
        self.world = World(limit=limit, devices=3, host_gib=host_gib)
        self.attempts = dict.fromkeys(WORKLOADS, 0)
        self.incarnations = dict.fromkeys(WORKLOADS, 1)
        self.past: list[Event] = []
        self.sighted: set[janitor.Leftover] = set()
        for which in WORKLOADS[:seated]:
            claims = list(self.world.claims()) if shared else []
            self.attempts[which] += 1
            self.deliver(request(which, *claims))
            self.world.finish_all()
            self.launcher_cuts_a_claim()
            self.world.finish_all()
            for assignment in self.startable():
                self.world.put(Table.LEASES, assignment, LeaseRecord(state=LeaseState.LIVE))

    # What a rule has nothing to do for is no step: an example of 60 of them would do next to nothing else.

    def few_under_way(self) -> bool:
        return len(self.world.handlers) < AT_ONCE

    def under_way(self) -> bool:
        return bool(self.world.handlers)

    def standing(self) -> Standing:
        budget = self.world.tables[Table.BUDGETS].get("n1")
        return Standing.LIVE if budget is None else budget.value.standing

    def deliver(self, event: Event) -> None:
        self.past.append(event)
        self.world.deliver(event)

    @precondition(few_under_way)
    @rule(which=st.sampled_from(WORKLOADS), exclusive=seldom, newer=seldom, shuffle=st.randoms())
    def place(self, which: str, exclusive: bool, newer: bool, shuffle: object) -> None:
        candidates = [key for key, claim in self.world.claims().items() if claim.state is ClaimState.ALLOCATED]
        shuffle.shuffle(candidates)  # type: ignore[attr-defined]
        self.attempts[which] += 1
        self.incarnations[which] += newer
        exclusive = exclusive and which == "w0"
        self.deliver(
            request(
                which, *candidates,
                incarnation=self.incarnations[which], attempt=self.attempts[which], exclusive=exclusive,
            )
        )  # fmt: skip

    def movable(self) -> list[str]:
        claims = self.world.claims()
        held = [(which, seat) for which, seat in self.world.seats().items() if seat.state is SeatState.HELD]
        return [which for which, seat in held if claims[seat.claim].state is ClaimState.PENDING]

    @precondition(lambda self: self.movable() and self.few_under_way())
    @rule(choice=small, found=st.booleans())
    def move(self, choice: int, found: bool) -> None:
        movable = self.movable()
        which = movable[choice % len(movable)]
        seat = self.world.seats()[which]
        targets = [key for key, claim in self.world.claims().items() if claim.state is ClaimState.ALLOCATED]
        self.attempts[which] += 1
        self.deliver(
            request(
                which, *targets, incarnation=seat.incarnation, attempt=self.attempts[which],
                found=found, move_from=seat.assignment,
            )
        )  # fmt: skip

    @precondition(few_under_way)
    @rule(which=st.sampled_from(WORKLOADS), close=seldom, named=st.booleans())
    def release(self, which: str, close: bool, named: bool) -> None:
        seat = self.world.seats().get(which, SeatRecord())
        self.deliver(
            SeatReleaseRequested(
                tenant="t", workload=which, incarnation=self.incarnations[which], close=close,
                assignment=seat.assignment if named else "", attempt=len(self.past),
            )
        )  # fmt: skip
        self.incarnations[which] += close

    @precondition(lambda self: self.past and self.few_under_way())
    @rule(choice=small)
    def duplicate(self, choice: int) -> None:
        self.world.deliver(self.past[choice % len(self.past)])

    @precondition(under_way)
    @rule(
        choice=small, count=st.integers(1, 12), lose_answer=st.booleans(), lag=st.integers(0, 3),
        dies=seldom,
    )  # fmt: skip
    def advance(self, choice: int, count: int, lose_answer: bool, lag: int, dies: bool) -> None:
        handler = self.world.handlers[choice % len(self.world.handlers)]
        for _ in range(count):
            if not handler.done:
                self.world.step(handler, lose_answer=lose_answer, lag=lag)
                lose_answer = False
        if dies and not handler.done:
            self.world.crash(handler)

    @precondition(under_way)
    @rule(choice=small, lag=st.integers(0, 3))
    def go_on_to_the_end(self, choice: int, lag: int) -> None:
        self.world.finish(self.world.handlers[choice % len(self.world.handlers)], lag=lag)

    @precondition(lambda self: self.few_under_way() and self.sighted | self.world.sightings())
    @rule()
    def the_janitor_passes(self) -> None:
        """L6: what two of its passes have seen, each repair by itself; it may stall for as long as it likes."""
        world, seen = self.world, self.world.sightings()
        for leftover in sorted(seen & self.sighted):
            seat = world.seats().get(leftover.workload, SeatRecord())
            world.begin(janitor.repair(leftover, leftover.tenant or "t", seat.incarnation))
        self.sighted = seen

    def node_in_use(self) -> bool:
        return self.few_under_way() and self.standing() is Standing.LIVE and len(self.past) % 4 == 0

    @precondition(node_in_use)
    @rule()
    def the_node_is_lost(self) -> None:
        """F3: everything on it has lapsed. The judge may die at any step: no message makes another one go on."""
        world = self.world
        world.finish(world.begin(nodes.declare("n1", Standing.LOST, "silent", world.environment)))
        leases = world.tables[Table.LEASES]
        entries = world.tables[Table.BUDGETS]["n1"].value.entries
        lapsed = {each: leases[each].revision if each in leases else 0 for each in entries}
        world.begin(nodes.release_lost("n1", lapsed))

    @precondition(lambda self: self.standing() is not Standing.LIVE)
    @rule()
    def the_node_beats_again(self) -> None:
        self.world.finish(self.world.begin(nodes.declare("n1", Standing.LIVE, "", self.world.environment)))

    def uncut(self) -> list[str]:
        world = self.world
        claims = world.claims().items() if world.free_devices else ()
        return [key for key, claim in claims if claim.state is ClaimState.PENDING and key not in world.device_of]

    @precondition(uncut)
    @rule()
    def launcher_cuts_a_claim(self) -> None:
        for key in self.uncut()[:1]:
            device = self.world.device_of[key] = self.world.free_devices.pop()
            self.deliver(ClaimAllocated(claim=key, node="n1", devices=(device,), device_bytes=80 * GIB, tier="t1x80"))

    def startable(self) -> list[str]:
        """B7: only for a held seat, listed on an allocated claim, by creating the lease."""
        claims, leases = self.world.claims(), self.world.tables[Table.LEASES]
        return [
            seat.assignment
            for seat in self.world.seats().values()
            if seat.state is SeatState.HELD
            and seat.assignment not in leases
            and claims[seat.claim].state is ClaimState.ALLOCATED
            and seat.assignment in claims[seat.claim].entries
        ]

    @precondition(startable)
    @rule(choice=small)
    def launcher_starts_a_worker(self, choice: int) -> None:
        able = self.startable()
        self.world.put(Table.LEASES, able[choice % len(able)], LeaseRecord(state=LeaseState.LIVE))

    def unconfirmed(self) -> list[WorkerGone]:
        """Workers that are to stop, by what was said or by what is stored (B1), and not yet said to be gone."""
        releasing = [(which, seat) for which, seat in self.world.seats().items() if seat.state is SeatState.RELEASING]
        to_stop = [(event.workload, event.assignment, event.claim) for event in self.world.releasing()]
        to_stop += [(which, seat.assignment, seat.claim) for which, seat in releasing]
        ended = [
            WorkerGone(tenant="t", workload=workload, assignment=assignment, claim=claim)
            for workload, assignment, claim in dict.fromkeys(to_stop)
        ]
        return [gone for gone in ended if gone not in self.past]

    @precondition(unconfirmed)
    @rule()
    def launcher_confirms_that_workers_are_gone(self) -> None:
        for gone in self.unconfirmed():
            self.worker_ends(gone)

    def running(self) -> list[WorkerGone]:
        """Workers on held seats, as what would be said if one ended."""
        leases = self.world.tables[Table.LEASES]
        return [
            WorkerGone(tenant="t", workload=which, assignment=seat.assignment, claim=seat.claim)
            for which, seat in self.world.seats().items()
            if seat.state is SeatState.HELD
            and seat.assignment in leases
            and leases[seat.assignment].value.state is LeaseState.LIVE
        ]

    @precondition(lambda self: self.running() and self.few_under_way())
    @rule(choice=small)
    def a_worker_ends_by_itself(self, choice: int) -> None:
        running = self.running()
        self.worker_ends(running[choice % len(running)])

    def worker_ends(self, gone: WorkerGone) -> None:
        lease = self.world.tables[Table.LEASES].get(gone.assignment)
        if lease is not None and lease.value.state is LeaseState.LIVE:
            self.world.put(Table.LEASES, gone.assignment, LeaseRecord(state=LeaseState.TOMBSTONE, found="live"))
        self.deliver(gone)

    def unfreed(self) -> list[ClaimFreed]:
        retired = [ClaimFreed(claim=key, node="n1") for key in janitor.retiring(self.world.claims())]
        return [freed for freed in retired if freed not in self.past]

    @precondition(unfreed)
    @rule()
    def launcher_frees_retired_claims(self) -> None:
        for freed in self.unfreed():
            if freed.claim in self.world.device_of:
                self.world.free_devices.append(self.world.device_of.pop(freed.claim))
            self.deliver(freed)

    @invariant()
    def no_device_belongs_to_two_claims(self) -> None:
        if hasattr(self, "world"):
            used = list(self.world.device_of.values())
            assert len(used) == len(set(used))

    def teardown(self) -> None:
        """Once everything has run and the janitor has been by, nothing is left over and seats and entries agree."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for _ in range(3):
            world.settle()
            for gone in self.unconfirmed():
                self.worker_ends(gone)
        world.settle()
        assert world.left_over() == []
        assert world.sightings() == set()


TestLedgerUnderFire = LedgerUnderFire.TestCase
TestLedgerUnderFire.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_the_last_seat_of_a_claim_goes_to_one_of_two_racers_and_the_other_takes_the_next_claim() -> None:
    """P11, S2: two replicas book at once, step by step; no needless claim is cut while another has room."""
    world = World(limit=2, devices=4, host_gib=100)
    claims = []
    for index, device in ((0, "d0"), (1, "d1")):
        (answer,) = world.handle(request(f"f{index}"))
        claims.append(answer.claim)  # type: ignore[attr-defined]
        world.handle(ClaimAllocated(claim=claims[-1], node="n1", devices=(device,), device_bytes=80 * GIB, tier="x"))
    racers: list[SeatRequested] = [request(f"r{index}", *claims) for index in range(2)]
    handlers = [world.deliver(event) for event in racers]
    while any(not handler.done for handler in handlers):
        for handler in handlers:
            if not handler.done:
                world.step(handler)
    assert [len(world.claims()[claim].entries) for claim in claims] == [2, 2]
    assert len(world.claims()) == 2


def test_the_worlds_own_checks_can_fail() -> None:
    """Invariants 1 and 6, L1: a second worker, a worker without its seat, a seat and an entry that do not match."""
    world = World(limit=0, devices=2, host_gib=100)
    first, second = founded(world, "w1"), founded(world, "w2", "d1")
    assert world.left_over() == []
    entry = world.claims()[first.claim].entries[first.assignment]
    claim = world.claims()[second.claim]
    world.put(Table.CLAIMS, second.claim, msgspec.structs.replace(claim, entries={**claim.entries, "a9": entry}))
    assert [words for words in world.left_over() if "w1 is listed as" in words]
    world.put(Table.LEASES, first.assignment, LeaseRecord(state=LeaseState.LIVE))
    world.check_seats()
    world.put(Table.LEASES, "a9", LeaseRecord(state=LeaseState.LIVE))
    with pytest.raises(AssertionError, match="runs twice"):
        world.check_seats()
    world.running.discard("a9")
    seat = world.seats()["w1"]
    world.put(Table.SEATS, "w1", msgspec.structs.replace(seat, state=SeatState.RELEASING, assignment="ghost"))
    assert {"the seat of w1 is releasing", "the seat of w1 names ghost, which nobody lists"} <= set(world.left_over())
    with pytest.raises(AssertionError, match="was given up while it runs"):
        world.check_seats()
