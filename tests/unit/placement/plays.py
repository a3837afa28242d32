"""Random plays of the placement core: jobs come and go, nodes falter, answers are late, doubled, or out of order.

An honest ledger in memory answers; what it writes reaches the core as its mirrors do, each key in order, any two keys
in any. ``Play.step`` is one thing that happens; ``Play.settle`` lets everything arrive. What must hold is in
``test_line_plays``.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from openrl_common.events import (
    AnyEvent,
    ClaimFreed,
    SeatRefused,
    SeatReleased,
    SeatReleaseRequested,
    SeatRequested,
    WorkerUnschedulable,
)
from openrl_common.records import (
    Avoid,
    ClaimEntry,
    ClaimRecord,
    ClaimState,
    NodeBudget,
    NodeEntry,
    NodeRecord,
    Role,
    SeatRecord,
    SeatState,
    Shape,
    Standing,
)
from openrl_common.seating import host_refusal, join_refusal, node_refusal
from openrl_placement import core, passes
from openrl_placement.fleet import Fleet
from openrl_placement.state import State, placed
from unit.placement.desk import Desk, Policy, node

JOBS_MAX = 20
CHANGES = {
    "nodes": core.node_changed,
    "budgets": core.budget_changed,
    "seats": core.seat_changed,
    "claims": core.claim_changed,
}


class Ledger:
    """What the ledger and the launchers hold; ``mirrors`` and ``news`` are on their way to placement."""

    def __init__(self, chance: random.Random, limit: int) -> None:
        self.chance = chance
        self.limit = limit
        self.nodes: dict[str, NodeRecord] = {}
        self.budgets: dict[str, NodeBudget] = {}
        self.seats: dict[str, SeatRecord] = {}
        self.claims: dict[str, ClaimRecord] = {}
        self.mirrors: dict[tuple[str, str], list[Any]] = {}
        self.news: list[AnyEvent] = []
        self._num_ids = 0

    def put(self, table: str, key: str, value: Any) -> None:
        getattr(self, table)[key] = value
        self.mirrors.setdefault((table, key), []).append(value)

    def refusal(self, claim: str, shape: Shape) -> str:
        """Why this claim does not take it: the truth, while the view may be behind."""
        record = self.claims[claim]
        if problem := join_refusal(record, shape, self.limit):
            return problem
        if self.budget(record.node).standing is not Standing.LIVE:
            return "suspect"
        host = host_refusal(self.nodes[record.node], self._used_bytes(record.node), shape.host_bytes)
        return node_refusal(self.nodes[record.node], shape.role) or host

    def budget(self, node: str) -> NodeBudget:
        return self.budgets.get(node, NodeBudget())

    def _used_bytes(self, node: str) -> int:
        return sum(entry.host_bytes for entry in self.budget(node).entries.values())

    def _mint(self, prefix: str) -> str:
        self._num_ids += 1
        return f"{prefix}{self._num_ids:03}"

    def _reserve(self, node: str, assignment: str, workload: str, claim: str, host_bytes: int) -> None:
        entries = {
            **self.budget(node).entries,
            assignment: NodeEntry(workload=workload, claim=claim, host_bytes=host_bytes),
        }
        self.put("budgets", node, msgspec.structs.replace(self.budget(node), entries=entries))

    def _unreserve(self, node: str, assignment: str) -> None:
        entries = {key: entry for key, entry in self.budget(node).entries.items() if key != assignment}
        self.put("budgets", node, msgspec.structs.replace(self.budget(node), entries=entries))

    # --- requests ----------------------------------------------------------------------------------------------

    def book(self, request: SeatRequested) -> None:
        seat = self.seats.get(request.workload, SeatRecord())
        if request.incarnation <= seat.closed or request.incarnation < seat.incarnation:
            self._refuse(request, "closed", {})
        elif seat.state is SeatState.HELD and seat.incarnation < request.incarnation:
            self._refuse(request, "predecessor", {})
        elif seat.state is SeatState.HELD and request.move_from != seat.assignment:
            pass  # adopted: the seat says it
        elif seat.state is SeatState.HELD and self.claims[seat.claim].state is not ClaimState.PENDING:
            self._refuse(request, "started", {})
        elif seat.state is SeatState.HELD or (request.incarnation, request.attempt) > (seat.incarnation, seat.attempt):
            self._book_from(request, seat)

    def _book_from(self, request: SeatRequested, seat: SeatRecord) -> None:
        shape, refusals = request.shape, dict[str, str]()
        entry = ClaimEntry(
            workload=request.workload, tenant=request.tenant, owner=request.owner, role=shape.role,
            device_bytes=shape.device_bytes, host_bytes=shape.host_bytes, exclusive=shape.exclusive,
            incarnation=request.incarnation, reserved_at=0.0,
        )  # fmt: skip
        for claim in request.candidates:
            refusals[claim] = self.refusal(claim, shape)
            if not refusals[claim]:
                assignment, standing = self._mint("a"), self.claims[claim]
                self._reserve(standing.node, assignment, request.workload, claim, shape.host_bytes)
                entries = {**standing.entries, assignment: entry}
                self.put("claims", claim, msgspec.structs.replace(standing, entries=entries))
                self._name(request, seat, assignment, claim)
                return
        if not (request.may_found and request.tiers):
            self._refuse(request, "no-candidate", refusals)
            return
        assignment, claim = self._mint("a"), self._mint("c")
        entries = {assignment: entry}
        founded = ClaimRecord(state=ClaimState.PENDING, tiers=request.tiers, entries=entries, order=request.order)
        self.put("claims", claim, founded)
        self._name(request, seat, assignment, claim)

    def _name(self, request: SeatRequested, before: SeatRecord, assignment: str, claim: str) -> None:
        named = SeatRecord(
            state=SeatState.HELD, incarnation=request.incarnation, assignment=assignment, claim=claim,
            closed=max(before.closed, request.incarnation - 1), attempt=request.attempt,
        )  # fmt: skip
        self.put("seats", request.workload, named)
        if before.state is SeatState.HELD:  # a move: the own claim has been pending
            own = msgspec.structs.replace(self.claims[before.claim], entries={}, state=ClaimState.GONE)
            self.put("claims", before.claim, own)

    def _refuse(self, request: SeatRequested, code: str, refusals: dict[str, str]) -> None:
        refused = SeatRefused(
            tenant=request.tenant, workload=request.workload, incarnation=request.incarnation,
            attempt=request.attempt, code=code, message=code, refusals=refusals,
        )  # fmt: skip
        self.news.append(refused)

    # --- releases, devices -------------------------------------------------------------------------------------

    def close(self, workload: str, incarnation: int) -> None:
        seat = self.seats.get(workload, SeatRecord())
        if seat.incarnation <= incarnation:
            self.drop(workload)
            seat = self.seats.get(workload, SeatRecord(incarnation=incarnation))
        self.put("seats", workload, msgspec.structs.replace(seat, closed=max(seat.closed, incarnation)))

    def drop(self, workload: str) -> None:
        """A seat goes: off its claim, then off its node, emptied last (L4)."""
        seat = self.seats.get(workload, SeatRecord())
        if seat.state is SeatState.EMPTY:
            return
        claim = self.claims[seat.claim]
        entries = {key: entry for key, entry in claim.entries.items() if key != seat.assignment}
        after = claim.state if entries else ClaimState.GONE
        self.put("claims", seat.claim, msgspec.structs.replace(claim, entries=entries, state=after))
        if claim.node:
            self._unreserve(claim.node, seat.assignment)
        if not entries:
            self.news.append(ClaimFreed(claim=seat.claim, node=claim.node))
        self.put("seats", workload, msgspec.structs.replace(seat, state=SeatState.EMPTY))
        tenant = workload.partition("--")[0]
        self.news.append(
            SeatReleased(
                tenant=tenant, workload=workload, incarnation=seat.incarnation, assignment=seat.assignment,
                claim=seat.claim,
            )
        )  # fmt: skip

    def allocate(self) -> bool:
        """One pending claim gets a device, the first in line that can; who is passed over hears of it."""
        pending = sorted((claim.order, key) for key, claim in self.claims.items() if claim.state is ClaimState.PENDING)
        for _, key in pending:
            ((assignment, entry),) = self.claims[key].entries.items()
            shape = Shape(role=entry.role, device_bytes=entry.device_bytes, host_bytes=entry.host_bytes)
            for name in self.nodes:
                if self._cut(key, assignment, entry.workload, shape, name):
                    return True
            unschedulable = WorkerUnschedulable(
                tenant=entry.tenant,
                workload=entry.workload,
                assignment=assignment,
                claim=key,
                cause="no device is free",
            )
            self.news.append(unschedulable)
        return False

    def _cut(self, key: str, assignment: str, workload: str, shape: Shape, name: str) -> bool:
        record = self.nodes[name]
        used = {
            device for claim in self.claims.values() for device in claim.devices if claim.state is not ClaimState.GONE
        }
        free = [each for each in record.devices if f"{name}.{each.device}" not in used]
        fitting = [each for each in free if each.memory_bytes >= shape.device_bytes]
        host = host_refusal(record, self._used_bytes(name), shape.host_bytes)
        if not fitting or host or node_refusal(record, shape.role) or self.budget(name).standing is not Standing.LIVE:
            return False
        self._reserve(name, assignment, workload, key, shape.host_bytes)
        cut = msgspec.structs.replace(
            self.claims[key], state=ClaimState.ALLOCATED, node=name, devices=(f"{name}.{fitting[0].device}",),
            device_bytes=fitting[0].memory_bytes,
        )  # fmt: skip
        self.put("claims", key, cut)
        return True


class Play:
    """One play from its seed."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        limit = self.chance.choice([0, 1, 1, 2, 2, 3])
        timeout_s, strategy = (
            self.chance.choice([0.0, 0.0, 120.0]),
            self.chance.choice(["binpack", "binpack", "spread"]),
        )
        self.desk = Desk(limit=limit, policy=Policy(placement_timeout_s=timeout_s, strategy=strategy))
        self.ledger = Ledger(self.chance, self.chance.choice([limit, limit, 1, 2]))  # a lower one: S7
        self.requests: list[SeatRequested] = []
        self.releases: list[SeatReleaseRequested] = []
        self._num_jobs = 0
        for number in range(self.chance.randint(1, 3)):
            self._join(f"n{number}")

    def _join(self, name: str) -> None:
        devices, gib = self.chance.randint(1, 4), self.chance.choice([23, 80, 80])
        roles = self.chance.choice([(), (), (), (Role.TRAINER,)])
        self.ledger.put(
            "nodes", name, node(name, devices=devices, gib=gib, host_gib=self.chance.choice([0, 12, 20]), roles=roles)
        )

    def step(self) -> None:
        """One thing that happens."""
        likely = [self.deliver] * 8 + [self.answer] * 4 + [self.hear] * 4 + [self.release] * 2 + [self._allocate] * 2
        seldom = [self._submit] * 3 + [self._end] * 2 + [self._time] * 2 + [self._falter] * 2 + [self._lose]
        self.chance.choice(likely + seldom)()
        if self.chance.random() < 0.005:
            self._restart()

    def settle(self) -> None:
        """Everything that is on its way arrives, and what follows from it."""
        ways = (self.deliver, self.answer, self.hear, self.release)
        while self.ledger.mirrors or self.ledger.news or self.requests or self.releases:
            self.chance.choice(ways)(doubled=0.0)

    # --- what is on its way arrives ----------------------------------------------------------------------------

    def deliver(self, *, doubled: float = 0.0) -> None:
        if self.ledger.mirrors:
            table, key = self.chance.choice(list(self.ledger.mirrors))
            value = self.ledger.mirrors[table, key].pop(0)
            if not self.ledger.mirrors[table, key]:
                del self.ledger.mirrors[table, key]
            self._change(table, key, value)

    def answer(self, *, doubled: float = 0.05) -> None:
        if self.requests:
            index = self.chance.randrange(min(len(self.requests), 6))
            self.ledger.book(self.requests[index] if self.chance.random() < doubled else self.requests.pop(index))

    def hear(self, *, doubled: float = 0.1) -> None:
        if self.ledger.news:
            index = self.chance.randrange(len(self.ledger.news))
            self.desk.event(self.ledger.news[index] if self.chance.random() < doubled else self.ledger.news.pop(index))
            self.taken()

    def release(self, *, doubled: float = 0.0) -> None:
        if self.releases:
            asked = self.releases.pop(0)
            if asked.close:
                self.ledger.close(asked.workload, asked.incarnation)
            elif self.ledger.seats.get(asked.workload, SeatRecord()).assignment == asked.assignment:
                self.ledger.drop(asked.workload)

    def _change(self, table: str, key: str, value: Any) -> None:
        change: Any = CHANGES[table]
        self.desk.apply(change(self.desk.state, key, value, self.desk.now))
        self.taken()

    def taken(self) -> None:
        """What the core has asked for since."""
        self.requests += self.desk.take(SeatRequested)
        self.releases += self.desk.take(SeatReleaseRequested)

    # --- what happens ------------------------------------------------------------------------------------------

    def _submit(self) -> None:
        if self._num_jobs == JOBS_MAX:
            return
        self._num_jobs += 1
        self.desk.submit(
            f"j{self._num_jobs}", self.chance.choice(["fft", "fft", "lora"]), gib=self.chance.choice([5, 10, 20, 70]),
            host_gib=self.chance.choice([0, 1, 4, 8]), priority=self.chance.choice([0, 0, 0, 5]),
            exclusive=self.chance.choice([None] * 6 + [True]),
        )  # fmt: skip
        self.taken()

    def _end(self) -> None:
        end = self.chance.choice([self.desk.finish, self.desk.cancel])
        end(f"j{self.chance.randint(1, max(1, self._num_jobs))}")
        self.taken()

    def _time(self) -> None:
        pass_or_tick = self.chance.choice([self.desk.tick, self.desk.repair])
        pass_or_tick(self.chance.choice([0.1, 1.0, 10.0]))
        self.taken()

    def _allocate(self) -> None:
        self.ledger.allocate()

    def _falter(self) -> None:
        """A node is suspect for a while, or not enabled, or a further one joins."""
        name = self.chance.choice(list(self.ledger.nodes))
        what = self.chance.randrange(5)
        if what < 3:
            budget = self.ledger.budget(name)
            standing = Standing.SUSPECT if budget.standing is Standing.LIVE else Standing.LIVE
            self.ledger.put("budgets", name, msgspec.structs.replace(budget, standing=standing))
        elif what == 3:
            record = self.ledger.nodes[name]
            self.ledger.put("nodes", name, msgspec.structs.replace(record, enabled=not record.enabled))
        elif len(self.ledger.nodes) < 4:
            self._join(f"n{len(self.ledger.nodes)}")

    def _lose(self) -> None:
        """A seat is lost; half of the time the place is avoided from then on (F2)."""
        seated = [record for record in self.desk.state.workloads.values() if placed(record)]
        if seated:
            record = self.chance.choice(seated)
            if self.chance.random() < 0.5:
                avoid = (Avoid(claim=record.claim, until=self.desk.now + 1e6, why="it did not start there"),)
                self.desk.state.put_workload(msgspec.structs.replace(record, avoid=avoid))
            self.ledger.drop(record.workload)

    def _restart(self) -> None:
        """Placement anew, from its records and from what the buckets hold now (E4)."""
        before = self.desk.state
        self.desk.state = State(Fleet(limit=self.desk.limit), self.desk.policy)
        self.desk.repairs = passes.Pass()
        self.ledger.mirrors.clear()
        for table in ("nodes", "budgets"):
            for key, value in getattr(self.ledger, table).items():
                self._change(table, key, value)
        for job in before.jobs.values():
            self.desk.state.put_job(job)
        for workload in before.workloads.values():
            self.desk.state.put_workload(workload)
        for table in ("seats", "claims"):
            for key, value in list(getattr(self.ledger, table).items()):
                self._change(table, key, value)
