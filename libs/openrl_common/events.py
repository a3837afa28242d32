"""The events: facts in past tense, commands to the ledger imperative. Tagged, versioned, additive (E2).

Each class knows its subject and its deterministic message id (``ce-id`` = ``Nats-Msg-Id``), so that a handler that is
run twice publishes the same message twice and JetStream keeps one (E6).
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from openrl_common.names import FLEET, event_subject
from openrl_common.records import Avoid, JobSpec, NodeRecord, Reason, Shape, Tier, WeightsRecord


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """Base of all events. Class attributes name the subject; ``IDENTITY`` are the fields that make it unique."""

    SOURCE: ClassVar[str] = ""
    ENTITY: ClassVar[str] = ""
    FACT: ClassVar[str] = ""
    KEY: ClassVar[str] = ""
    IDENTITY: ClassVar[tuple[str, ...]] = ()

    @property
    def entity_id(self) -> str:
        value: str = getattr(self, self.KEY)
        return value

    @property
    def subject(self) -> str:
        return event_subject(self.SOURCE, getattr(self, "tenant", FLEET), self.ENTITY, self.entity_id, self.FACT)

    @property
    def message_id(self) -> str:
        identity = ":".join(str(getattr(self, field)) for field in self.IDENTITY)
        return f"{self.__struct_config__.tag}:{identity}"


# --- client -----------------------------------------------------------------------------------------------------


class _JobEvent(Event, frozen=True, kw_only=True):
    ENTITY: ClassVar[str] = "job"
    KEY: ClassVar[str] = "job"
    tenant: str
    job: str


class JobSubmitted(_JobEvent, frozen=True, kw_only=True, tag="job.submitted.v1"):
    SOURCE: ClassVar[str] = "client"
    FACT: ClassVar[str] = "submitted"
    IDENTITY: ClassVar[tuple[str, ...]] = ("tenant", "job", "submission")
    submission: str
    spec: JobSpec


class JobCancelled(_JobEvent, frozen=True, kw_only=True, tag="job.cancelled.v1"):
    SOURCE: ClassVar[str] = "client"
    FACT: ClassVar[str] = "cancelled"
    IDENTITY: ClassVar[tuple[str, ...]] = ("tenant", "job", "submission")
    submission: str
    why: str = ""


class JobFinished(_JobEvent, frozen=True, kw_only=True, tag="job.finished.v1"):
    SOURCE: ClassVar[str] = "client"
    FACT: ClassVar[str] = "finished"
    IDENTITY: ClassVar[tuple[str, ...]] = ("tenant", "job", "submission")
    submission: str


# --- placement --------------------------------------------------------------------------------------------------


class JobAdmitted(_JobEvent, frozen=True, kw_only=True, tag="job.admitted.v1"):
    SOURCE: ClassVar[str] = "placement"
    FACT: ClassVar[str] = "admitted"
    IDENTITY: ClassVar[tuple[str, ...]] = ("tenant", "job", "submission")
    submission: str
    incarnation: int
    workloads: tuple[str, ...]


class JobReady(_JobEvent, frozen=True, kw_only=True, tag="job.ready.v1"):
    """Both workers answer. Published again (with a higher ``times``) after a worker was replaced."""

    SOURCE: ClassVar[str] = "placement"
    FACT: ClassVar[str] = "ready"
    IDENTITY: ClassVar[tuple[str, ...]] = ("tenant", "job", "submission")
    submission: str
    incarnation: int


class JobEnded(_JobEvent, frozen=True, kw_only=True, tag="job.ended.v1"):
    """The job's workloads are gone and its seats are free; ``outcome`` is Finished, Failed or Cancelled."""

    SOURCE: ClassVar[str] = "placement"
    FACT: ClassVar[str] = "ended"
    IDENTITY: ClassVar[tuple[str, ...]] = ("tenant", "job", "submission")
    submission: str
    outcome: str


class JobFailed(_JobEvent, frozen=True, kw_only=True, tag="job.failed.v1"):
    SOURCE: ClassVar[str] = "placement"
    FACT: ClassVar[str] = "failed"
    IDENTITY: ClassVar[tuple[str, ...]] = ("tenant", "job", "submission")
    submission: str
    code: str
    message: str


class _SeatEvent(Event, frozen=True, kw_only=True):
    ENTITY: ClassVar[str] = "seat"
    KEY: ClassVar[str] = "workload"
    tenant: str
    workload: str


class SeatRequested(_SeatEvent, frozen=True, kw_only=True, tag="seat.requested.v1"):
    """Book one seat: try ``candidates`` in order, found an own claim when none accepts and ``may_found`` (P11).

    ``move_from`` names the assignment on the workload's own pending claim that the booking replaces (L5): by a seat
    elsewhere, or, when it may found, by another claim of its own (P9).
    ``beside`` is the first request of the same job's other workload: one message for both, answered one by one.
    """

    SOURCE: ClassVar[str] = "placement"
    FACT: ClassVar[str] = "requested"
    IDENTITY: ClassVar[tuple[str, ...]] = ("workload", "incarnation", "attempt")
    incarnation: int
    attempt: int
    owner: str
    shape: Shape
    candidates: tuple[str, ...]
    may_found: bool
    tiers: tuple[Tier, ...]
    order: tuple[int, int] = (0, 0)
    move_from: str = ""
    avoid: tuple[Avoid, ...] = ()
    """Nodes on which an own claim must not be cut (P13)."""
    beside: SeatRequested | None = None


class SeatReleaseRequested(_SeatEvent, frozen=True, kw_only=True, tag="seat.release-requested.v1"):
    """Release the seat (L4). With ``close``, nothing of ``incarnation`` or older may book again (cancel, finish)."""

    SOURCE: ClassVar[str] = "placement"
    FACT: ClassVar[str] = "release-requested"
    IDENTITY: ClassVar[tuple[str, ...]] = ("workload", "incarnation", "assignment", "attempt", "close")
    incarnation: int
    assignment: str = ""
    close: bool = True
    attempt: int = 0
    why: str = ""


# --- ledger -----------------------------------------------------------------------------------------------------


class _LedgerSeatEvent(_SeatEvent, frozen=True, kw_only=True):
    SOURCE: ClassVar[str] = "ledger"
    incarnation: int


class SeatBooked(_LedgerSeatEvent, frozen=True, kw_only=True, tag="seat.booked.v1"):
    FACT: ClassVar[str] = "booked"
    IDENTITY: ClassVar[tuple[str, ...]] = ("assignment",)
    assignment: str
    claim: str
    founded: bool
    node: str = ""
    attempt: int = 0
    refusals: dict[str, str] = {}


class SeatRefused(_LedgerSeatEvent, frozen=True, kw_only=True, tag="seat.refused.v1"):
    """No candidate accepted and founding was not allowed, or the workload may not book. ``refusals``: claim → why."""

    FACT: ClassVar[str] = "refused"
    IDENTITY: ClassVar[tuple[str, ...]] = ("workload", "incarnation", "attempt")
    attempt: int
    code: str
    """``no-candidate``, ``closed``, ``predecessor``, ``releasing``, ``started`` (a move came too late)."""
    message: str
    refusals: dict[str, str] = {}
    reason: Reason | None = None


class SeatReleasing(_LedgerSeatEvent, frozen=True, kw_only=True, tag="seat.releasing.v1"):
    FACT: ClassVar[str] = "releasing"
    IDENTITY: ClassVar[tuple[str, ...]] = ("assignment",)
    assignment: str
    claim: str
    node: str = ""


class SeatReleased(_LedgerSeatEvent, frozen=True, kw_only=True, tag="seat.released.v1"):
    FACT: ClassVar[str] = "released"
    IDENTITY: ClassVar[tuple[str, ...]] = ("assignment",)
    assignment: str
    claim: str
    node: str = ""
    host_bytes: int = 0
    seats_left: int = 0


class ClaimRetired(Event, frozen=True, kw_only=True, tag="claim.retired.v1"):
    """The last seat left: the launcher frees the device, then says ClaimFreed."""

    SOURCE: ClassVar[str] = "ledger"
    ENTITY: ClassVar[str] = "claim"
    KEY: ClassVar[str] = "claim"
    FACT: ClassVar[str] = "retired"
    IDENTITY: ClassVar[tuple[str, ...]] = ("claim",)
    claim: str
    node: str = ""


class FenceRequested(_LedgerSeatEvent, frozen=True, kw_only=True, tag="seat.fence-requested.v1"):
    """The seat's worker must be stopped, whatever it does (T3, T6); its seat is being released."""

    FACT: ClassVar[str] = "fence-requested"
    IDENTITY: ClassVar[tuple[str, ...]] = ("assignment",)
    assignment: str
    claim: str
    why: str = ""


class Repaired(Event, frozen=True, kw_only=True, tag="repair.done.v1"):
    """The janitor finished what a crash had left (L6). ``kind`` as in the ledger's ``Leftover``; ``at``: Unix time."""

    SOURCE: ClassVar[str] = "ledger"
    ENTITY: ClassVar[str] = "repair"
    KEY: ClassVar[str] = "kind"
    FACT: ClassVar[str] = "done"
    IDENTITY: ClassVar[tuple[str, ...]] = ("kind", "workload", "assignment", "claim", "node", "at")
    kind: str
    at: float
    workload: str = ""
    assignment: str = ""
    claim: str = ""
    node: str = ""


class _TurnEvent(Event, frozen=True, kw_only=True):
    ENTITY: ClassVar[str] = "turn"
    KEY: ClassVar[str] = "claim"
    tenant: str
    claim: str
    assignment: str
    epoch: int
    """Of a grant: the new one. Of a request: the last one the worker had."""


class TurnGranted(_TurnEvent, frozen=True, kw_only=True, tag="turn.granted.v1"):
    SOURCE: ClassVar[str] = "ledger"
    FACT: ClassVar[str] = "granted"
    IDENTITY: ClassVar[tuple[str, ...]] = ("assignment", "epoch")
    until: float


class TurnYieldAsked(_TurnEvent, frozen=True, kw_only=True, tag="turn.yield-asked.v1"):
    """Leave as soon as idle; with ``now``, at the next safe boundary, or be fenced after the grace (T3)."""

    SOURCE: ClassVar[str] = "ledger"
    FACT: ClassVar[str] = "yield-asked"
    IDENTITY: ClassVar[tuple[str, ...]] = ("assignment", "epoch", "now", "asked_at")
    until: float
    now: bool
    asked_at: float


class TurnRequested(_TurnEvent, frozen=True, kw_only=True, tag="turn.requested.v1"):
    """``session`` and ``attempt`` make each asking a message of its own: what was lost is asked again."""

    SOURCE: ClassVar[str] = "worker"
    FACT: ClassVar[str] = "requested"
    IDENTITY: ClassVar[tuple[str, ...]] = ("assignment", "session", "attempt")
    session: str
    attempt: int
    loading: bool | None = None
    """None: it wants the device. Else a word about the turn it has under ``epoch``: it cannot yield yet, or now can."""


class TurnReleased(_TurnEvent, frozen=True, kw_only=True, tag="turn.released.v1"):
    """Off the device. ``bytes_held``: what it still holds there; ``bytes_parked``: what it took away.

    ``park_seconds`` and ``resume_seconds`` are of this turn's end and begin; hits count since the last release: work
    that found the worker resident (hot) or parked (warm).
    """

    SOURCE: ClassVar[str] = "worker"
    FACT: ClassVar[str] = "released"
    IDENTITY: ClassVar[tuple[str, ...]] = ("assignment", "session", "attempt")
    session: str
    attempt: int
    bytes_held: int = 0
    bytes_parked: int = 0
    park_seconds: float = 0.0
    resume_seconds: float = 0.0
    hits_hot: int = 0
    hits_warm: int = 0
    resaid: int = 0
    """How often this was said before, under other attempts."""


# --- launcher ---------------------------------------------------------------------------------------------------


class _ClaimEvent(Event, frozen=True, kw_only=True):
    SOURCE: ClassVar[str] = "launcher"
    ENTITY: ClassVar[str] = "claim"
    KEY: ClassVar[str] = "claim"
    IDENTITY: ClassVar[tuple[str, ...]] = ("claim",)
    claim: str
    node: str


class ClaimAllocated(_ClaimEvent, frozen=True, kw_only=True, tag="claim.allocated.v1"):
    FACT: ClassVar[str] = "allocated"
    devices: tuple[str, ...]
    device_bytes: int
    tier: str


class ClaimRefused(_ClaimEvent, frozen=True, kw_only=True, tag="claim.refused.v1"):
    FACT: ClassVar[str] = "refused"
    why: str


class ClaimFreed(_ClaimEvent, frozen=True, kw_only=True, tag="claim.freed.v1"):
    FACT: ClassVar[str] = "freed"
    devices: tuple[str, ...] = ()


class ClaimQuarantined(_ClaimEvent, frozen=True, kw_only=True, tag="claim.quarantined.v1"):
    FACT: ClassVar[str] = "quarantined"
    why: str


class _WorkerEvent(Event, frozen=True, kw_only=True):
    SOURCE: ClassVar[str] = "launcher"
    ENTITY: ClassVar[str] = "worker"
    KEY: ClassVar[str] = "workload"
    tenant: str
    workload: str
    assignment: str
    claim: str
    node: str = ""


class WorkerLaunched(_WorkerEvent, frozen=True, kw_only=True, tag="worker.launched.v1"):
    FACT: ClassVar[str] = "launched"
    IDENTITY: ClassVar[tuple[str, ...]] = ("assignment", "restarts")
    restarts: int = 0
    pid: int = 0


class WorkerUnschedulable(_WorkerEvent, frozen=True, kw_only=True, tag="worker.unschedulable.v1"):
    """The claim stands and may still be allocated; ``cause`` is what the backend said, with numbers."""

    FACT: ClassVar[str] = "unschedulable"
    IDENTITY: ClassVar[tuple[str, ...]] = ("assignment", "cause")
    cause: str


class WorkerExited(_WorkerEvent, frozen=True, kw_only=True, tag="worker.exited.v1"):
    FACT: ClassVar[str] = "exited"
    IDENTITY: ClassVar[tuple[str, ...]] = ("assignment", "restarts")
    exit_code: int
    restarts: int = 0
    will_restart: bool = False
    why: str = ""


class WorkerGone(_WorkerEvent, frozen=True, kw_only=True, tag="worker.gone.v1"):
    """Final for an assignment: its process is seen gone and its device memory returned (B4, B7)."""

    FACT: ClassVar[str] = "gone"
    IDENTITY: ClassVar[tuple[str, ...]] = ("assignment",)


class WorkerFenced(_WorkerEvent, frozen=True, kw_only=True, tag="worker.fenced.v1"):
    """A worker that FenceRequested named is fenced, stopped and seen gone (T3); WorkerGone follows."""

    FACT: ClassVar[str] = "fenced"
    IDENTITY: ClassVar[tuple[str, ...]] = ("assignment",)
    why: str = ""


class _NodeEvent(Event, frozen=True, kw_only=True):
    SOURCE: ClassVar[str] = "launcher"
    ENTITY: ClassVar[str] = "node"
    KEY: ClassVar[str] = "node"
    IDENTITY: ClassVar[tuple[str, ...]] = ("node", "session")
    node: str
    session: str
    """Unique per start of the launcher, so that a node may join again."""


class NodeJoined(_NodeEvent, frozen=True, kw_only=True, tag="node.joined.v1"):
    FACT: ClassVar[str] = "joined"
    record: NodeRecord


class NodeChanged(_NodeEvent, frozen=True, kw_only=True, tag="node.changed.v1"):
    """Its inventory is another one now."""

    FACT: ClassVar[str] = "changed"
    IDENTITY: ClassVar[tuple[str, ...]] = ("node", "session", "beat")
    record: NodeRecord
    beat: int


class _NodeVerdict(Event, frozen=True, kw_only=True):
    """Said by the ledger: a dead node says nothing (F3). ``since``: when it was decided."""

    SOURCE: ClassVar[str] = "ledger"
    ENTITY: ClassVar[str] = "node"
    KEY: ClassVar[str] = "node"
    IDENTITY: ClassVar[tuple[str, ...]] = ("node", "since")
    node: str
    since: float
    why: str = ""


class NodeSuspect(_NodeVerdict, frozen=True, kw_only=True, tag="node.suspect.v1"):
    """It missed heartbeats: no new joins."""

    FACT: ClassVar[str] = "suspect"


class NodeLost(_NodeVerdict, frozen=True, kw_only=True, tag="node.lost.v1"):
    """Its workers' leases have lapsed too: their seats are released."""

    FACT: ClassVar[str] = "lost"


class NodeRecovered(_NodeVerdict, frozen=True, kw_only=True, tag="node.recovered.v1"):
    """It beats again. A launcher whose node had been lost also says NodeJoined."""

    FACT: ClassVar[str] = "recovered"


# --- trainer and sampler ----------------------------------------------------------------------------------------


class _WeightsEvent(Event, frozen=True, kw_only=True):
    ENTITY: ClassVar[str] = "weights"
    KEY: ClassVar[str] = "job"
    tenant: str
    job: str
    incarnation: int
    version: int


class WeightsReady(_WeightsEvent, frozen=True, kw_only=True, tag="weights.ready.v1"):
    SOURCE: ClassVar[str] = "trainer"
    FACT: ClassVar[str] = "ready"
    IDENTITY: ClassVar[tuple[str, ...]] = ("tenant", "job", "incarnation", "version")
    weights: WeightsRecord


class WeightsApplied(_WeightsEvent, frozen=True, kw_only=True, tag="weights.applied.v1"):
    SOURCE: ClassVar[str] = "sampler"
    FACT: ClassVar[str] = "applied"
    IDENTITY: ClassVar[tuple[str, ...]] = ("tenant", "job", "incarnation", "version", "assignment")
    assignment: str
    seconds: float
    peak_extra_bytes: int = 0


class WeightsRejected(_WeightsEvent, frozen=True, kw_only=True, tag="weights.rejected.v1"):
    SOURCE: ClassVar[str] = "sampler"
    FACT: ClassVar[str] = "rejected"
    IDENTITY: ClassVar[tuple[str, ...]] = ("tenant", "job", "incarnation", "version", "assignment")
    assignment: str
    why: str


class SamplerDisagreed(_WeightsEvent, frozen=True, kw_only=True, tag="weights.disagreed.v1"):
    """On this version the sampler's log-probabilities are further from the trainer's than is allowed (V12)."""

    SOURCE: ClassVar[str] = "sampler"
    FACT: ClassVar[str] = "disagreed"
    IDENTITY: ClassVar[tuple[str, ...]] = ("tenant", "job", "incarnation", "version", "assignment")
    assignment: str
    mean: float
    max: float
    limit: float


AnyEvent = (
    JobSubmitted
    | JobCancelled
    | JobFinished
    | JobAdmitted
    | JobReady
    | JobEnded
    | JobFailed
    | SeatRequested
    | SeatReleaseRequested
    | SeatBooked
    | SeatRefused
    | SeatReleasing
    | SeatReleased
    | ClaimRetired
    | FenceRequested
    | Repaired
    | TurnGranted
    | TurnYieldAsked
    | TurnRequested
    | TurnReleased
    | ClaimAllocated
    | ClaimRefused
    | ClaimFreed
    | ClaimQuarantined
    | WorkerLaunched
    | WorkerUnschedulable
    | WorkerExited
    | WorkerGone
    | WorkerFenced
    | NodeJoined
    | NodeChanged
    | NodeSuspect
    | NodeLost
    | NodeRecovered
    | WeightsReady
    | WeightsApplied
    | WeightsRejected
    | SamplerDisagreed
)

EVENT_DECODER: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)
