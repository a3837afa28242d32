"""A world for the ledger's rules: tables in memory, handlers that take one step at a time, invariants on every write.

What it can do to a handler is what really happens: stall it anywhere, kill it between any two steps (its event is then
delivered again), let a write land while its answer is lost and another writer overwrites it, show it an old copy where
the rule allows one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

from openrl_common.events import Event, SeatReleasing, WorkerGone
from openrl_common.records import (
    ClaimEntry,
    ClaimRecord,
    ClaimState,
    Device,
    LeaseState,
    NodeBudget,
    NodeRecord,
    SeatRecord,
    SeatState,
)
from openrl_common.store import Entry
from openrl_ledger.core import janitor
from openrl_ledger.core.decide import decide
from openrl_ledger.core.ops import Emit, Environment, Lost, Read, Steps, Table, Write

GIB = 1 << 30


class Handler:
    """One event being handled; ``pending`` is the step that waits for its answer."""

    def __init__(self, event: Event | None, steps: Steps[Any]) -> None:
        self.event = event
        self.steps = steps
        self.pending: Any = next(steps, None)

    @property
    def done(self) -> bool:
        return self.pending is None


class World:
    def __init__(self, *, limit: int, devices: int, host_gib: int) -> None:
        self.limit = limit
        self.tables: dict[Table, dict[str, Entry[Any]]] = {table: {} for table in Table}
        self.history: dict[tuple[Table, str], list[Entry[Any]]] = {}
        self.workload_of: dict[str, str] = {}
        self.running: set[str] = set()
        self.revision = 0
        self.published: list[Event] = []
        self.handlers: list[Handler] = []
        self.free_devices = [f"d{index}" for index in range(devices)]
        self.device_of: dict[str, str] = {}
        self.counter = itertools.count()
        self.environment = Environment(
            limit=limit, now=lambda: float(self.revision), mint=lambda prefix: f"{prefix}{next(self.counter)}"
        )
        inventory = NodeRecord(
            node="n1",
            devices=tuple(Device(device=device, memory_bytes=80 * GIB) for device in self.free_devices),
            host_allocatable_bytes=host_gib * GIB,
        )
        self.put(Table.NODES, "n1", inventory)

    # --- tables ------------------------------------------------------------------------------------------------

    def put(self, table: Table, key: str, value: Any) -> int:
        self.revision += 1
        self.tables[table][key] = Entry(key, value, self.revision)
        self.history.setdefault((table, key), []).append(self.tables[table][key])
        if table is Table.LEASES and value.state is not LeaseState.TOMBSTONE:
            self.running.add(key)
        elif table is Table.LEASES and value.found != "live":
            self.running.discard(key)
        if table is Table.CLAIMS:
            self.workload_of |= {assignment: entry.workload for assignment, entry in value.entries.items()}
        return self.revision

    def write(self, step: Write) -> int | Lost:
        standing = self.tables[step.table].get(step.key)
        if (standing.revision if standing else 0) != step.last:
            return Lost.DEFINITE
        before = standing.value if standing else None
        self.check_write(step, before)
        self.check_standing(step, before)
        return self.put(step.table, step.key, step.value)

    def check_write(self, step: Write, before: Any) -> None:
        """Invariants 2 to 4 of docs/rules.md, on the write itself (S2)."""
        if step.table is Table.CLAIMS:
            old: dict[str, ClaimEntry] = before.entries if before else {}
            added = step.value.entries.keys() - old.keys()
            removed = old.keys() - step.value.entries.keys()
            if added and not removed and self.limit:
                assert len(step.value.entries) <= self.limit, "the seat limit was passed on a write"
            if added:
                assert step.value.state in (ClaimState.PENDING, ClaimState.ALLOCATED), "a dead claim took a seat"
                exclusive = [entry for entry in step.value.entries.values() if entry.exclusive]
                assert not exclusive or len(step.value.entries) == 1, "an exclusive workload shares its claim"
        if step.table is Table.BUDGETS and before is not None:
            added_bytes = sum(e.host_bytes for k, e in step.value.entries.items() if k not in before.entries)
            if added_bytes:
                allocatable = self.tables[Table.NODES]["n1"].value.host_allocatable_bytes
                total = sum(entry.host_bytes for entry in step.value.entries.values())
                assert total <= allocatable + self.swap_slack(step.value), "the node is over its host memory"

    def swap_slack(self, budget: NodeBudget) -> int:
        """During S3 predecessor and successor are both on the node for a moment; the predecessor does not count."""
        by_workload: dict[str, list[int]] = {}
        for entry in budget.entries.values():
            by_workload.setdefault(entry.workload, []).append(entry.host_bytes)
        return sum(sum(sizes) - max(sizes) for sizes in by_workload.values() if len(sizes) > 1)

    def check_standing(self, step: Write, before: Any) -> None:
        """L1, L3, on the write itself: what a held seat has is not taken from it, and a seat names what is listed."""
        if step.table is Table.CLAIMS and before is not None:
            # A founder over the host budget and a claim that its launcher gave up: their seats are finished next (L5).
            over_budget = before.state is ClaimState.PENDING and step.value.node != ""
            if step.value.state is not ClaimState.GONE and not over_budget:
                for assignment in before.entries.keys() - step.value.entries.keys():
                    held = self.holds(before.entries[assignment].workload, assignment, step.key)
                    assert not held, "a claim let a held seat go"
        if step.table is Table.BUDGETS and before is not None:
            for assignment in before.entries.keys() - step.value.entries.keys():
                entry = before.entries[assignment]
                claim = self.claims().get(entry.claim)
                listed = claim is not None and assignment in claim.entries
                held = listed and self.holds(entry.workload, assignment, entry.claim)
                assert not held, "a held seat lost its host memory"
        if step.table is Table.SEATS and step.value.state is SeatState.EMPTY and before is not None:
            claim = self.claims().get(before.claim)
            listed = claim is not None and before.assignment in claim.entries
            assert not listed or before.state is SeatState.EMPTY, "a seat was emptied although its claim still lists it"
        if step.table is Table.SEATS and step.value.state is SeatState.HELD:
            claim = self.claims().get(step.value.claim)
            assert claim is not None, "a seat names no claim"
            over = claim.state in (ClaimState.RETIRING, ClaimState.GONE)
            assert over or step.value.assignment in claim.entries, "a seat names what its claim does not list"

    def holds(self, workload: str, assignment: str, claim: str) -> bool:
        seat = self.seats().get(workload, SeatRecord())
        return seat.state is SeatState.HELD and (seat.assignment, seat.claim) == (assignment, claim)

    def check_seats(self) -> None:
        """Invariants 1 and 6, at this very revision, by whose process runs: one a workload, on a true seat (L1).

        A tombstone ends no process; WorkerGone does, and a lease that lapsed has (F3).
        """
        running = [(self.workload_of[each], each) for each in self.running if each in self.workload_of]
        twice = [workload for workload, num in Counter(workload for workload, _ in running).items() if num > 1]
        assert not twice, f"{twice} runs twice: {running}"
        for workload, assignment in running:
            seat = self.seats().get(workload, SeatRecord())
            named = seat.state is not SeatState.EMPTY and seat.assignment == assignment
            assert named, f"the seat of {assignment} was given up while it runs"
            claim = self.claims().get(seat.claim)
            assert claim is None or assignment in claim.entries, f"its claim let {assignment} go while it runs"

    def left_over(self) -> list[str]:
        """What a world at rest must not show, told from the tables alone: the janitor is not asked (L1, L6).

        A claim that retires is its launcher's to free.
        """
        found = []
        claims, seats = self.claims(), self.seats()
        budgets = {key: entry.value for key, entry in self.tables[Table.BUDGETS].items()}
        listed: dict[str, list[str]] = {}
        for key, claim in claims.items():
            if claim.entries and claim.state in (ClaimState.RETIRING, ClaimState.GONE):
                found.append(f"claim {key} is {claim.state} and lists {sorted(claim.entries)}")
            if not claim.entries and claim.state in (ClaimState.PENDING, ClaimState.ALLOCATED):
                found.append(f"claim {key} is {claim.state} for nobody")
            for assignment, entry in claim.entries.items():
                listed.setdefault(entry.workload, []).append(assignment)
                if not self.holds(entry.workload, assignment, key):
                    found.append(f"claim {key} lists {assignment}, which no held seat names")
                budget = budgets.get(claim.node, NodeBudget())
                if claim.state is ClaimState.ALLOCATED and assignment not in budget.entries:
                    found.append(f"{assignment} holds no memory of node {claim.node}")
        found += [f"{workload} is listed as {several}" for workload, several in listed.items() if len(several) > 1]
        for workload, seat in seats.items():
            if seat.state is SeatState.RELEASING:
                found.append(f"the seat of {workload} is releasing")
            if seat.state is not SeatState.EMPTY and seat.assignment not in listed.get(workload, []):
                found.append(f"the seat of {workload} names {seat.assignment}, which nobody lists")
        for node, budget in budgets.items():
            for assignment, reserved in budget.entries.items():
                if reserved.claim not in claims or assignment not in claims[reserved.claim].entries:
                    found.append(f"node {node} keeps memory for {assignment}, which nobody lists")
        return found

    # --- handlers ----------------------------------------------------------------------------------------------

    def deliver(self, event: Event) -> Handler:
        if isinstance(event, WorkerGone):
            self.running.discard(event.assignment)
        handler = Handler(event, decide(event, self.environment))
        if not handler.done:
            self.handlers.append(handler)
        return handler

    def begin(self, steps: Steps[Any]) -> Handler:
        """Steps that no message asked for: who dies in the middle is not made to start over."""
        handler = Handler(None, steps)
        self.handlers.append(handler)
        return handler

    def step(self, handler: Handler, *, lose_answer: bool = False, lag: int = 0) -> None:
        """Take one step. ``lag``: by how many revisions of its key an old copy is behind, where one will do."""
        step = handler.pending
        answer: Any = None
        if isinstance(step, Read):
            answer = self.tables[step.table].get(step.key)
            if step.old_copy and lag and answer is not None:
                copies = self.history[step.table, step.key]
                answer = copies[max(0, len(copies) - 1 - lag)]
        elif isinstance(step, Write):
            answer = self.write(step)
            if lose_answer and isinstance(answer, int) and step.table is not Table.LEASES:
                # It landed, the answer was lost, and another writer wrote the same value again before we asked.
                self.put(step.table, step.key, step.value)
                answer = Lost.UNKNOWN
        elif isinstance(step, Emit):
            self.published.append(step.event)
        self.check_seats()
        try:
            handler.pending = handler.steps.send(answer)
        except StopIteration:
            handler.pending = None
            if handler in self.handlers:
                self.handlers.remove(handler)

    def finish(self, handler: Handler, *, lag: int = 0) -> None:
        while not handler.done:
            self.step(handler, lag=lag)

    def finish_all(self) -> None:
        for _ in range(10_000):
            if not self.handlers:
                return
            self.finish(self.handlers[0])
        raise AssertionError("handlers begin without end")

    def run_until_write(self, handler: Handler, table: Table) -> None:
        """Advance until the next step is a write to ``table``; that step is not taken."""
        while not (isinstance(handler.pending, Write) and handler.pending.table is table):
            assert not handler.done, "it never writes there"
            self.step(handler)

    def handle(self, event: Event) -> list[Event]:
        """Deliver one event and run it to its end; returns what it published."""
        before = len(self.published)
        self.finish(self.deliver(event))
        return self.published[before:]

    def crash(self, handler: Handler) -> None:
        self.handlers.remove(handler)
        if handler.event is not None:
            self.deliver(handler.event)

    # --- the launcher's part -----------------------------------------------------------------------------------

    def claims(self) -> dict[str, ClaimRecord]:
        return {key: entry.value for key, entry in self.tables[Table.CLAIMS].items()}

    def seats(self) -> dict[str, SeatRecord]:
        return {key: entry.value for key, entry in self.tables[Table.SEATS].items()}

    def releasing(self) -> list[SeatReleasing]:
        return [event for event in self.published if isinstance(event, SeatReleasing)]

    def settle(self) -> None:
        """Let everything run, then the janitor twice."""
        self.finish_all()
        for _ in range(3):
            for leftover in self.sightings():
                seat = self.seats().get(leftover.workload, SeatRecord())
                self.finish(Handler(None, janitor.repair(leftover, leftover.tenant or "t", seat.incarnation)))

    def sightings(self) -> set[janitor.Leftover]:
        parts = janitor.sightings(
            self.seats(),
            self.claims(),
            {key: entry.value for key, entry in self.tables[Table.BUDGETS].items()},
            {key: entry.value for key, entry in self.tables[Table.LEASES].items()},
        )
        return set().union(*parts)
