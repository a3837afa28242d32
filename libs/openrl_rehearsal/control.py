"""The real placement and ledger cores, wired as the bus wires them: every write and event arrives a moment later.

Placement hears of the ledger's writes through the same ``*_changed`` functions that its mirrors call, and decides on a
view that lags by one message, as it does in life.
"""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import msgspec

from openrl_common.events import (
    ClaimAllocated,
    ClaimFreed,
    Event,
    JobEnded,
    JobFailed,
    JobReady,
    JobSubmitted,
    SeatReleaseRequested,
    SeatRequested,
    WorkerGone,
)
from openrl_common.records import NodeRecord, ReadyRecord, Role, WorkloadPhase
from openrl_ledger.core.ops import Table
from openrl_placement import core, jobs
from openrl_placement.estimator import Constants, Model
from openrl_placement.fleet import Fleet
from openrl_placement.passes import Pass, tick
from openrl_placement.state import Effects, Policy, State
from openrl_placement.waiting import repeat_request
from openrl_rehearsal.agenda import Agenda
from openrl_rehearsal.tables import Ledger, Tables

TICK_S = 1.0
PASS_EVERY_S = 10.0

_FOR_LEDGER = (SeatRequested, SeatReleaseRequested, ClaimAllocated, ClaimFreed, WorkerGone)
_FOR_CLIENTS = (JobReady, JobFailed, JobEnded)
_MIRRORED: dict[Table, Callable[[State, str, Any, float], Effects]] = {
    Table.SEATS: core.seat_changed,
    Table.CLAIMS: core.claim_changed,
    Table.BUDGETS: core.budget_changed,
    Table.NODES: core.node_changed,
}


class Control:
    """Give it nodes and submissions; ``on_change`` and ``on_event`` tell launcher and clients what came of it."""

    def __init__(
        self,
        agenda: Agenda,
        *,
        limit: int,
        owner_affinity: bool,
        policy: Policy,
        message_s: float,
        names: random.Random | None = None,
        sampler_asks_after_s: float = 0.0,
    ) -> None:
        self.agenda = agenda
        self.state = State(Fleet(limit=limit, owner_affinity=owner_affinity), policy)
        self.tables = Tables(self._written)
        self.ledger = Ledger(self.tables, limit=limit, now=lambda: agenda.now, names=names)
        self.on_change: Callable[[Table, str, Any], None] = lambda table, key, value: None
        self.on_event: Callable[[Event], None] = lambda event: None
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Processor time spent in each core; ``counts``: how often it was called."""
        self.counts: Counter[str] = Counter()
        self._message_s = message_s
        self._sampler_asks_after_s = sampler_asks_after_s
        self._constants = Constants()
        self._pass = Pass()
        self._sequence = 0

    def join(self, node: NodeRecord) -> None:
        self.tables.put(Table.NODES, node.node, node)

    def start(self) -> None:
        """Begin with the passes that time alone causes."""
        self.agenda.after(TICK_S, self._tick)
        self.agenda.after(PASS_EVERY_S, self._repair)

    def submit(self, event: JobSubmitted, model: Model) -> None:
        self._sequence += 1
        submission = jobs.Submission(event, self._sequence, self.agenda.now)
        self.agenda.after(self._message_s, self._submitted, submission, model)

    def publish(self, event: Event) -> None:
        self.agenda.after(self._message_s, self._deliver, event)

    def ready(self, record: ReadyRecord) -> None:
        """A worker's own word that it serves."""
        self.agenda.after(self._message_s, self._decide, core.ready_changed, record.assignment, record)

    # --- what arrives -------------------------------------------------------------------------------------------

    def _submitted(self, submission: jobs.Submission, model: Model) -> None:
        started_at = time.thread_time()
        wanted = model if jobs.wants_model(self.state, submission) else None
        effects = jobs.submitted(self.state, submission, wanted, self._constants, self.agenda.now)
        self._count("placement", started_at)
        if self._sampler_asks_after_s > 0:
            self._hold_samplers(effects)
        self._carry_out(effects)

    def _hold_samplers(self, effects: Effects) -> None:
        """What if: the first request of a sampler is made later, on a view that knows where its trainer sits."""
        sent: list[Event] = []
        for event in effects.events:
            if isinstance(event, SeatRequested) and event.beside is not None:
                self.agenda.after(self._sampler_asks_after_s, self._ask_again, event.beside.workload)
                event = msgspec.structs.replace(event, beside=None)
            elif isinstance(event, SeatRequested) and event.shape.role is Role.SAMPLER and event.attempt == 1:
                self.agenda.after(self._sampler_asks_after_s, self._ask_again, event.workload)
                continue
            sent.append(event)
        effects.events = sent

    def _ask_again(self, workload: str) -> None:
        record = self.state.workloads[workload]
        effects = Effects()
        if record.phase is WorkloadPhase.SUBMITTED:
            repeat_request(self.state, record, self.agenda.now, effects)
        self._carry_out(effects)

    def _deliver(self, event: Event) -> None:
        if isinstance(event, _FOR_LEDGER):
            started_at = time.thread_time()
            published = self.ledger.handle(event)
            self._count("ledger", started_at)
            for each in published:
                self.publish(each)
        if isinstance(event, _FOR_CLIENTS):
            self.on_event(event)
        elif not isinstance(event, SeatRequested | SeatReleaseRequested | ClaimAllocated | WorkerGone):
            self._decide_event(event)

    def _decide_event(self, event: Event) -> None:
        started_at = time.thread_time()
        effects = core.decide(self.state, event, self.agenda.now)  # type: ignore[arg-type]
        self._count("placement", started_at)
        self._carry_out(effects)

    def _decide(self, change: Callable[[State, str, Any, float], Effects], key: str, value: Any) -> None:
        started_at = time.thread_time()
        effects = change(self.state, key, value, self.agenda.now)
        self._count("placement", started_at)
        self._carry_out(effects)

    def _written(self, table: Table, key: str, value: Any) -> None:
        change = _MIRRORED.get(table)
        if change is not None:
            self.agenda.after(self._message_s, self._decide, change, key, value)
        self.agenda.after(self._message_s, self._tell, table, key, value)

    def _tell(self, table: Table, key: str, value: Any) -> None:
        self.on_change(table, key, value)

    def _tick(self) -> None:
        started_at = time.thread_time()
        effects = tick(self.state, self.agenda.now)
        self._count("placement", started_at)
        self._carry_out(effects)
        self.agenda.after(TICK_S, self._tick)

    def _repair(self) -> None:
        started_at = time.thread_time()
        effects = self._pass.rederive(self.state, self.agenda.now)
        self._count("repairing pass", started_at)
        self._carry_out(effects)
        self.agenda.after(PASS_EVERY_S, self._repair)

    def _carry_out(self, effects: Effects) -> None:
        """The records are in the state already; here are no buckets to write them to."""
        for event in effects.events:
            self.publish(event)

    def _count(self, what: str, started_at: float) -> None:
        self.seconds[what] += time.thread_time() - started_at
        self.counts[what] += 1
