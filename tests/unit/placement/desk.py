"""A placement core on a desk: state, a clock, and a ledger that the test plays by hand. No bus, no sleeping."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from openrl_common.errors import Rejected
from openrl_common.events import (
    AnyEvent,
    Event,
    JobCancelled,
    JobFinished,
    JobSubmitted,
    SeatRefused,
    SeatReleased,
    SeatReleaseRequested,
    SeatRequested,
    WorkerUnschedulable,
)
from openrl_common.quantities import GIB
from openrl_common.records import (
    ClaimEntry,
    ClaimRecord,
    ClaimState,
    Device,
    JobKind,
    JobSpec,
    NodeBudget,
    NodeRecord,
    Overrides,
    ReadyRecord,
    Role,
    SeatRecord,
    SeatState,
    WorkloadRecord,
)
from openrl_placement import core, jobs, passes
from openrl_placement.estimator import Constants, Model
from openrl_placement.fleet import Fleet
from openrl_placement.state import Effects, Policy, State

E = TypeVar("E", bound=Event)

SMALL = Model(parameters=1_000_000, largest_tensor_elements=100_000, kv_values_per_token=64, vocabulary=1_000)


def node(
    name: str = "n1", *, devices: int = 3, gib: float = 80, host_gib: float = 0, roles: tuple[Role, ...] = ()
) -> NodeRecord:
    return NodeRecord(
        node=name,
        devices=tuple(Device(device=f"d{i}", memory_bytes=int(gib * GIB)) for i in range(devices)),
        host_allocatable_bytes=int(host_gib * GIB),
        roles=roles,
    )


def entry(
    workload: str, *, owner: str = "o", gib: float = 1, host_gib: float = 0, exclusive: bool = False
) -> ClaimEntry:
    return ClaimEntry(
        workload=workload,
        tenant="default",
        owner=owner,
        role=Role.TRAINER,
        device_bytes=int(gib * GIB),
        host_bytes=int(host_gib * GIB),
        exclusive=exclusive,
        incarnation=1,
        reserved_at=0.0,
    )


def allocated(
    entries: dict[str, ClaimEntry], *, node: str = "n1", gib: float = 80, state: ClaimState = ClaimState.ALLOCATED
) -> ClaimRecord:
    return ClaimRecord(state=state, node=node, devices=("d0",), device_bytes=int(gib * GIB), entries=entries)


@dataclass
class Desk:
    """``events`` and ``written`` grow with every decision; ``take`` returns (once) the events of a type."""

    limit: int = 0
    policy: Policy = field(default_factory=Policy)
    constants: Constants = field(default_factory=lambda: Constants(trainer_host_gib=0.0, sampler_host_gib=0.0))
    now: float = 1_000.0
    sequence: int = 0

    def __post_init__(self) -> None:
        self.state = State(Fleet(limit=self.limit), self.policy)
        self.events: list[Event] = []
        self.written: list[str] = []
        self.repairs = passes.Pass()
        self._assignments = 0

    def apply(self, effects: Effects) -> list[Event]:
        for event in effects.events:
            self.events.append(event)
            if isinstance(event, SeatRequested) and event.beside is not None:
                self.events.append(event.beside)
        self.written.extend([*effects.workloads, *effects.jobs])
        return effects.events

    def take(self, kind: type[E]) -> list[E]:
        found = [event for event in self.events if isinstance(event, kind)]
        self.events = [event for event in self.events if not isinstance(event, kind)]
        return found

    # --- what arrives ---

    def submit(
        self,
        name: str,
        kind: str = "fft",
        *,
        gib: float | None = 10,
        host_gib: float | None = None,
        submission: str = "",
        sequence: int = 0,
        model: Model | Rejected = SMALL,
        priority: int = 0,
        exclusive: bool | None = None,
        tenant: str = "default",
        **fields: object,
    ) -> list[Event]:
        self.sequence = sequence or self.sequence + 1
        overrides = Overrides(
            trainer_device_gib=gib, sampler_device_gib=gib, trainer_host_gib=host_gib, sampler_host_gib=host_gib
        )
        spec = JobSpec(
            name=name, kind=JobKind(kind), base_model="/models/m", overrides=overrides, priority=priority,
            exclusive=exclusive, **fields,  # type: ignore[arg-type]
        )  # fmt: skip
        event = JobSubmitted(tenant=tenant, job=name, submission=submission or f"s-{name}", spec=spec)
        submission_ = jobs.Submission(event, self.sequence, self.now)
        wanted = model if jobs.wants_model(self.state, submission_) else None
        return self.apply(jobs.submitted(self.state, submission_, wanted, self.constants, self.now))

    def event(self, event: AnyEvent) -> list[Event]:
        return self.apply(core.decide(self.state, event, self.now))

    def finish(self, name: str, submission: str = "") -> list[Event]:
        return self.event(JobFinished(tenant="default", job=name, submission=submission or f"s-{name}"))

    def cancel(self, name: str, submission: str = "") -> list[Event]:
        return self.event(JobCancelled(tenant="default", job=name, submission=submission or f"s-{name}"))

    def node(self, record: NodeRecord) -> list[Event]:
        return self.apply(core.node_changed(self.state, record.node, record, self.now))

    def claim(self, claim: str, record: ClaimRecord | None) -> list[Event]:
        return self.apply(core.claim_changed(self.state, claim, record, self.now))

    def budget(self, name: str, budget: NodeBudget) -> list[Event]:
        return self.apply(core.budget_changed(self.state, name, budget, self.now))

    def ready(self, workload: str, ready: bool = True) -> list[Event]:
        assignment = self.workload(workload).assignment
        record = ReadyRecord(assignment=assignment, workload=workload, ready=ready)
        return self.apply(core.ready_changed(self.state, assignment, record, self.now))

    def tick(self, seconds: float = 0.0) -> list[Event]:
        self.now += seconds
        return self.apply(passes.tick(self.state, self.now))

    def repair(self, seconds: float = 10.0) -> list[Event]:
        self.now += seconds
        return self.apply(self.repairs.rederive(self.state, self.now))

    # --- the ledger, played by hand ---

    def workload(self, workload: str) -> WorkloadRecord:
        return self.state.workloads[workload]

    def held(self, workload: str, incarnation: int, assignment: str, claim: str, attempt: int = 1) -> list[Event]:
        """What the ledger's bucket says of a workload's seat."""
        seat = SeatRecord(
            state=SeatState.HELD, incarnation=incarnation, assignment=assignment, claim=claim, attempt=attempt
        )
        return self.apply(core.seat_changed(self.state, workload, seat, self.now))

    def book(self, request: SeatRequested, claim: str = "", *, allocate: bool = True) -> str:
        """Answer a request: a seat on ``claim``, or on one that is founded for it (named after its workload)."""
        self._assignments += 1
        assignment = f"a{self._assignments}"
        founded = claim not in self.state.fleet.claims
        claim = claim or f"c-{request.workload}"
        standing = self.state.fleet.claims.get(claim)
        entries = dict(standing.entries) if standing is not None else {}
        entries[assignment] = entry(
            request.workload,
            owner=request.owner,
            gib=request.shape.device_bytes / GIB,
            exclusive=request.shape.exclusive,
        )
        if founded:
            self.claim(
                claim, ClaimRecord(state=ClaimState.PENDING, entries=entries, tiers=request.tiers, order=request.order)
            )
        self.held(request.workload, request.incarnation, assignment, claim, request.attempt)
        if not founded or allocate:
            self.claim(claim, allocated(entries))
        return assignment

    def book_all(self) -> None:
        for request in self.take(SeatRequested):
            self.book(request, request.candidates[0] if request.candidates else "")

    def refuse(
        self, request: SeatRequested, code: str = "no-candidate", *, why: str = "all seats are taken"
    ) -> list[Event]:
        """Answer a request with no; ``why`` is said of every claim that it names."""
        return self.event(
            SeatRefused(
                tenant=request.tenant, workload=request.workload, incarnation=request.incarnation,
                attempt=request.attempt, code=code, message="lost",
                refusals=dict.fromkeys(request.candidates, why) if code == "no-candidate" else {},
            )
        )  # fmt: skip

    def unschedulable(self, workload: str, cause: str = "no device is free") -> list[Event]:
        record = self.workload(workload)
        return self.event(
            WorkerUnschedulable(
                tenant=record.tenant, workload=workload, assignment=record.assignment, claim=record.claim, cause=cause
            )
        )

    def release(self, workload: str, assignment: str, claim: str, incarnation: int) -> list[Event]:
        """The ledger lets a seat go: the claim loses its entry (the last one out retires it), then SeatReleased."""
        standing = self.state.fleet.claims.get(claim)
        if standing is not None:
            entries = {key: each for key, each in standing.entries.items() if key != assignment}
            state = standing.state if entries else ClaimState.GONE
            self.claim(claim, allocated(entries, node=standing.node, state=state))
        closed = incarnation if self.workload(workload).incarnation == incarnation else 0
        seat = SeatRecord(
            state=SeatState.EMPTY, incarnation=incarnation, assignment=assignment, claim=claim, closed=closed
        )
        events = self.apply(core.seat_changed(self.state, workload, seat, self.now))
        return events + self.event(
            SeatReleased(
                tenant="default", workload=workload, incarnation=incarnation, assignment=assignment, claim=claim
            )
        )

    def release_all(self) -> None:
        for request in self.take(SeatReleaseRequested):
            record = self.workload(request.workload)
            self.release(request.workload, request.assignment, record.claim, request.incarnation)

    def ready_all(self) -> None:
        for workload in list(self.state.living):
            self.ready(workload)
