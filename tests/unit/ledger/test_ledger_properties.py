"""Invariants 1 to 4 of docs/rules.md under every interleaving hypothesis can think of (L1-L5, S1-S3).

Handlers of several replicas advance one step at a time; any may stall, die between two steps and be delivered again,
or have the answer of a write lost. The world asserts on every single write.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from openrl_common.events import ClaimAllocated, ClaimFreed, Event, SeatReleaseRequested, SeatRequested, WorkerGone
from openrl_common.records import ClaimState, LeaseRecord, LeaseState, SeatRecord, SeatState
from openrl_ledger.core.ops import Table
from unit.ledger.test_booking import request
from unit.ledger.world import GIB, World

WORKLOADS = ("w0", "w1", "w2", "w3")
small = st.integers(min_value=0, max_value=63)


class LedgerUnderFire(RuleBasedStateMachine):
    @initialize(limit=st.integers(0, 3), host_gib=st.sampled_from([25, 45, 100]))
    def start(self, limit: int, host_gib: int) -> None:
        self.world = World(limit=limit, devices=3, host_gib=host_gib)
        self.attempts = dict.fromkeys(WORKLOADS, 0)
        self.incarnations = dict.fromkeys(WORKLOADS, 1)
        self.past: list[Event] = []

    def deliver(self, event: Event) -> None:
        self.past.append(event)
        self.world.deliver(event)

    @rule(which=st.sampled_from(WORKLOADS), exclusive=st.booleans(), newer=st.booleans(), shuffle=st.randoms())
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

    @rule(which=st.sampled_from(WORKLOADS), found=st.booleans())
    def move(self, which: str, found: bool) -> None:
        seat = self.world.seats().get(which, SeatRecord())
        claims = self.world.claims()
        if seat.state is SeatState.HELD and claims[seat.claim].state is ClaimState.PENDING:
            targets = [key for key, claim in claims.items() if claim.state is ClaimState.ALLOCATED]
            self.attempts[which] += 1
            self.deliver(
                request(
                    which, *targets, incarnation=seat.incarnation, attempt=self.attempts[which],
                    found=found, move_from=seat.assignment,
                )
            )  # fmt: skip

    @rule(which=st.sampled_from(WORKLOADS), close=st.booleans(), named=st.booleans())
    def release(self, which: str, close: bool, named: bool) -> None:
        seat = self.world.seats().get(which, SeatRecord())
        self.deliver(
            SeatReleaseRequested(
                tenant="t", workload=which, incarnation=self.incarnations[which], close=close,
                assignment=seat.assignment if named else "", attempt=len(self.past),
            )
        )  # fmt: skip
        self.incarnations[which] += close

    @rule(choice=small)
    def duplicate(self, choice: int) -> None:
        if self.past:
            self.world.deliver(self.past[choice % len(self.past)])

    @rule(choice=small, count=st.integers(1, 12), lose_answer=st.booleans(), lag=st.integers(0, 3))
    def advance(self, choice: int, count: int, lose_answer: bool, lag: int) -> None:
        if self.world.handlers:
            handler = self.world.handlers[choice % len(self.world.handlers)]
            for _ in range(count):
                if not handler.done:
                    self.world.step(handler, lose_answer=lose_answer, lag=lag)
                    lose_answer = False

    @rule(choice=small)
    def crash(self, choice: int) -> None:
        if self.world.handlers:
            self.world.crash(self.world.handlers[choice % len(self.world.handlers)])

    @rule()
    def launcher_cuts_a_claim(self) -> None:
        world = self.world
        for key, claim in world.claims().items():
            if claim.state is ClaimState.PENDING and key not in world.device_of and world.free_devices:
                world.device_of[key] = world.free_devices.pop()
                self.deliver(
                    ClaimAllocated(
                        claim=key, node="n1", devices=(world.device_of[key],), device_bytes=80 * GIB, tier="t1x80"
                    )
                )
                return

    @rule(which=st.sampled_from(WORKLOADS))
    def launcher_starts_the_worker(self, which: str) -> None:
        """B7: only for a held seat, listed on an allocated claim, by creating the lease."""
        world = self.world
        seat = world.seats().get(which, SeatRecord())
        claim = world.claims().get(seat.claim)
        listed = claim is not None and claim.state is ClaimState.ALLOCATED and seat.assignment in claim.entries
        if seat.state is SeatState.HELD and listed and seat.assignment not in world.tables[Table.LEASES]:
            world.put(Table.LEASES, seat.assignment, LeaseRecord(state=LeaseState.LIVE))

    @rule()
    def launcher_confirms_that_workers_are_gone(self) -> None:
        world = self.world
        for event in world.releasing():
            lease = world.tables[Table.LEASES].get(event.assignment)
            if lease is not None and lease.value.state is LeaseState.LIVE:
                world.put(Table.LEASES, event.assignment, LeaseRecord(state=LeaseState.TOMBSTONE, found="live"))
            gone = WorkerGone(tenant="t", workload=event.workload, assignment=event.assignment, claim=event.claim)
            if gone not in self.past:
                self.deliver(gone)

    @rule()
    def launcher_frees_retired_claims(self) -> None:
        world = self.world
        for key, claim in world.claims().items():
            if claim.state is ClaimState.RETIRING and not claim.entries:
                if key in world.device_of:
                    world.free_devices.append(world.device_of.pop(key))
                freed = ClaimFreed(claim=key, node="n1")
                if freed not in self.past:
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
        world.settle()
        for event in world.releasing():
            world.handle(
                WorkerGone(tenant="t", workload=event.workload, assignment=event.assignment, claim=event.claim)
            )
        world.settle()
        left = {leftover for leftover in world.sightings() if leftover.kind != "fenced-seat"}
        assert left == set()
        for workload, seat in world.seats().items():
            if seat.state is SeatState.HELD:
                assert seat.assignment in world.claims()[seat.claim].entries, workload


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
