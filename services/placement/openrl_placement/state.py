"""Placement's state: jobs, workloads, and the indexes derived from them. The buckets are the truth, this is a copy.

Every record is put in through ``put_job`` and ``put_workload``, which keep the indexes; nothing else writes them.
Whoever rebuilds the state at start puts in what the buckets hold and gets the same indexes.

Invariants: a workload stands in the line exactly when it is Pending with a reason; it has a deadline exactly when
it is not placed; what ended is in no index but ``ended``.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
from sortedcontainers import SortedSet

from openrl_common.events import AnyEvent, Event, SeatReleaseRequested
from openrl_common.names import SHARED, runtime_id, workload_id
from openrl_common.records import (
    JobKind,
    JobRecord,
    Reason,
    Role,
    SeatRecord,
    Shape,
    Wait,
    WorkerRecord,
    WorkloadPhase,
    WorkloadRecord,
)
from openrl_placement.fleet import Fleet, Need
from openrl_placement.line import Group, Line, Place

WAITS_MAX = 32
_EARLY_MAX = 4_096
_RELEASED_MAX = 65_536
_PLACED = (WorkloadPhase.PLACED, WorkloadPhase.STARTING, WorkloadPhase.READY)
_ENDED = (WorkloadPhase.FINISHED, WorkloadPhase.FAILED)


@dataclass(frozen=True)
class Policy:
    """The settings that decisions depend on. ``placement_timeout_s`` 0 = never."""

    strategy: str = "binpack"
    placement_timeout_s: float = 900.0
    lora_jobs_per_runtime: int = 8
    lora_idle_s: float = 600.0
    keep_ended_s: float = 7 * 86_400.0
    update_method: str = "streamed"
    update_chunk_bytes: int = 256 << 20
    wedge_grace_s: float = 300.0
    verdict_wait_s: float = 10.0
    logs_directory: str = "logs"


@dataclass
class Effects:
    """What a decision asks of the shell: write these records as they then stand, then publish these events."""

    jobs: dict[str, None] = field(default_factory=dict)
    workloads: dict[str, None] = field(default_factory=dict)
    carried: dict[str, str] = field(default_factory=dict)
    """Workload → the job whose record carries it: it is written by itself only where that record does not any more."""
    events: list[Event] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.jobs or self.workloads or self.events)

    def add(self, other: Effects) -> None:
        self.jobs.update(other.jobs)
        self.workloads.update(other.workloads)
        self.carried.update(other.carried)
        self.events.extend(other.events)


@dataclass(frozen=True)
class RuntimeKey:
    """P12: jobs share a LoRA runtime when all of this is equal. The shapes carry exclusivity and overrides."""

    base_model: str
    max_rank: int
    dtype: str
    engine: str
    max_model_len: int
    trainer: Shape
    sampler: Shape


class State:
    """Records by key, and indexes over them."""

    def __init__(self, fleet: Fleet, policy: Policy) -> None:
        self.fleet = fleet
        self.policy = policy
        self.line = Line()
        self.jobs: dict[str, JobRecord] = {}
        self.workloads: dict[str, WorkloadRecord] = {}
        self.runtimes: defaultdict[RuntimeKey, dict[str, None]] = defaultdict(dict)
        self.deadlines: SortedSet[tuple[float, str]] = SortedSet()
        self.idle: SortedSet[tuple[float, str]] = SortedSet()
        self.ended: SortedSet[tuple[float, str]] = SortedSet()
        self.living: dict[str, None] = {}
        self.on_claim: defaultdict[str, set[str]] = defaultdict(set)
        self.seats: dict[str, SeatRecord] = {}
        self.ready: dict[str, bool] = {}
        self.spoke: dict[str, float] = {}
        """Assignment → when the process started that wrote its ready record last (Unix seconds, 0 = unknown)."""
        self.workers: dict[str, WorkerRecord] = {}
        self.requested_at: dict[str, float] = {}
        self.overtakings = 0
        """Own claims that got a device before an earlier waiter's did, which would have taken it (W1)."""
        self.sweep_at: float | None = None
        self.unexplained: set[str] = set()
        """Waiters whose reason names no number yet: what took the last device is heard of a moment later (W4)."""
        self.seatless_after: Place | None = None
        """The last wake-up of waiters without any claim asked for as many as one may: it goes on behind this place."""
        self.refused_at: defaultdict[str, dict[str, tuple[tuple[int, int], float, str]]] = defaultdict(dict)
        """Claims that refused a workload: how often each had changed when it asked (``Fleet.changes``), when, why."""
        self.asked_of: dict[str, dict[str, tuple[int, int]]] = {}
        """Per workload with a request under way: claims that it names, and how often each had changed by then."""
        self._released: OrderedDict[str, None] = OrderedDict()
        self._early: OrderedDict[str, list[AnyEvent]] = OrderedDict()
        self._cancelled_early: OrderedDict[str, AnyEvent] = OrderedDict()

    # --- putting records in ------------------------------------------------------------------------------------

    def put_job(self, record: JobRecord) -> None:
        key = job_key(record)
        before = self.jobs.get(key)
        if before is not None and before.ended_at is not None:
            self.ended.discard((before.ended_at, key))
        self.jobs[key] = record
        if record.phase.ended and record.ended_at is not None:
            self.ended.add((record.ended_at, key))

    def put_workload(self, record: WorkloadRecord) -> None:
        before = self.workloads.get(record.workload)
        if before is not None:
            self._unindex(before)
        self.workloads[record.workload] = record
        self._index(record)

    def put_admitted(self, record: WorkloadRecord, job: JobRecord, now: float) -> None:
        """After a restart: a workload that only its job's record has yet.

        A LoRA job ends at once and leaves its runtime, which may have asked for its seats already: it stays known.
        """
        standing = self.workloads.get(record.workload)
        if standing is not None and standing.incarnation >= record.incarnation:
            return
        if not job.phase.ended:
            self.put_workload(record)
        elif record.kind is JobKind.LORA:
            self.put_workload(msgspec.structs.replace(record, jobs=(), idle_since=now))

    def forget_job(self, key: str) -> None:
        record = self.jobs.pop(key, None)
        if record is not None and record.ended_at is not None:
            self.ended.discard((record.ended_at, key))

    def forget_workload(self, workload: str) -> None:
        record = self.workloads.pop(workload, None)
        if record is not None:
            self._unindex(record)

    def _index(self, record: WorkloadRecord) -> None:
        workload = record.workload
        if record.phase in _ENDED:
            return
        self.living[workload] = None
        if record.claim:
            self.on_claim[record.claim].add(workload)
        if record.deadline is not None:
            self.deadlines.add((record.deadline, workload))
        if record.idle_since is not None:
            self.idle.add((record.idle_since, workload))
        if record.kind is JobKind.LORA and record.phase is not WorkloadPhase.RELEASING:
            key = self._runtime_key(record)
            if key is not None:
                self.runtimes[key][record.owner_name] = None
        if waits(record):
            self.line.put(workload, order(record) + (workload,), Group(record.shape, record.assignment == ""))

    def _unindex(self, record: WorkloadRecord) -> None:
        workload = record.workload
        self.living.pop(workload, None)
        if record.claim:
            self.on_claim[record.claim].discard(workload)
            if not self.on_claim[record.claim]:
                del self.on_claim[record.claim]
        if record.deadline is not None:
            self.deadlines.discard((record.deadline, workload))
        if record.idle_since is not None:
            self.idle.discard((record.idle_since, workload))
        if record.kind is JobKind.LORA:
            key = self._runtime_key(record)
            if key is not None:
                self.runtimes[key].pop(record.owner_name, None)
                if not self.runtimes[key]:
                    del self.runtimes[key]
        self.line.leave(workload)

    def _runtime_key(self, record: WorkloadRecord) -> RuntimeKey | None:
        """The key of a runtime, once both of its workloads are known."""
        pair = [
            self.workloads.get(workload_id(SHARED, record.owner_name, role)) for role in (Role.TRAINER, Role.SAMPLER)
        ]
        trainer, sampler = pair
        if trainer is None or sampler is None:
            return None
        return RuntimeKey(
            base_model=record.base_model,
            max_rank=record.max_rank,
            dtype=record.dtype,
            engine=record.engine,
            max_model_len=record.max_model_len,
            trainer=trainer.shape,
            sampler=sampler.shape,
        )

    # --- looking up --------------------------------------------------------------------------------------------

    def runtime_with_room(self, key: RuntimeKey, job: str) -> str | None:
        """A living runtime of this key that serves ``job`` already, else the first with room for one more."""
        free = None
        for runtime in self.runtimes.get(key, ()):
            trainer = self.workloads[workload_id(SHARED, runtime, Role.TRAINER)]
            sampler = self.workloads[workload_id(SHARED, runtime, Role.SAMPLER)]
            if not (alive(trainer) and alive(sampler)):
                continue
            if job in trainer.jobs:
                return runtime
            if free is None and len(trainer.jobs) < self.policy.lora_jobs_per_runtime:
                free = runtime
        return free

    def new_runtime(self, key: RuntimeKey) -> str:
        """The lowest runtime id of this model and rank that no living or releasing workload uses."""
        index = 0
        while True:
            runtime = runtime_id(key.base_model, key.max_rank, key.trainer.exclusive, index)
            pair = [workload_id(SHARED, runtime, role) for role in (Role.TRAINER, Role.SAMPLER)]
            if not any(workload in self.living for workload in pair):
                return runtime
            index += 1

    def pair(self, job: JobRecord) -> list[WorkloadRecord]:
        """The workloads of a job that exist: trainer, sampler."""
        found = [self.workloads.get(workload) for workload in (job.trainer, job.sampler)]
        return [record for record in found if record is not None]

    def both_of(self, record: WorkloadRecord) -> list[WorkloadRecord]:
        """Trainer and sampler of the job or LoRA runtime that this workload is one of, as far as they exist."""
        stem = record.workload.rpartition("--")[0]
        found = [self.workloads.get(f"{stem}--{role}") for role in Role]
        return [each for each in found if each is not None]

    def jobs_of(self, record: WorkloadRecord) -> Iterator[JobRecord]:
        for key in record.jobs:
            job = self.jobs.get(key)
            if job is not None and record.workload in (job.trainer, job.sampler):
                yield job

    # --- what arrived out of order -----------------------------------------------------------------------------

    def was_released(self, assignment: str) -> bool:
        return assignment in self._released

    def note_released(self, assignment: str) -> None:
        if assignment:
            self._released[assignment] = None
            if len(self._released) > _RELEASED_MAX:
                self._released.popitem(last=False)

    def keep_early(self, assignment: str, event: AnyEvent) -> None:
        """A worker's event overtook the SeatBooked of its assignment: keep it until that arrives (bounded)."""
        self._early.setdefault(assignment, []).append(event)
        if len(self._early) > _EARLY_MAX:
            self._early.popitem(last=False)

    def take_early(self, assignment: str) -> list[AnyEvent]:
        return self._early.pop(assignment, [])

    def keep_cancel(self, submission: str, event: AnyEvent) -> None:
        """A cancellation overtook its submission (bounded)."""
        self._cancelled_early[submission] = event
        if len(self._cancelled_early) > _EARLY_MAX:
            self._cancelled_early.popitem(last=False)

    def take_cancel(self, submission: str) -> AnyEvent | None:
        return self._cancelled_early.pop(submission, None)


# --- facts about records ----------------------------------------------------------------------------------------


def job_key(record: JobRecord) -> str:
    return f"{record.tenant}.{record.job}"


def order(record: WorkloadRecord) -> tuple[int, int]:
    """W1 as ascending numbers (what ClaimRecord.order carries): higher priority first, then the earlier one."""
    return (-record.priority, record.incarnation)


def waits(record: WorkloadRecord) -> bool:
    return record.phase is WorkloadPhase.PENDING and record.reason is not None


def placed(record: WorkloadRecord) -> bool:
    return record.phase in _PLACED


def ended(record: WorkloadRecord) -> bool:
    return record.phase in _ENDED


def alive(record: WorkloadRecord) -> bool:
    """It should have a seat: neither ended nor on its way out."""
    return record.phase is not WorkloadPhase.RELEASING and not ended(record)


def release_request(record: WorkloadRecord, *, close: bool, why: str) -> SeatReleaseRequested:
    """Give up the seat that the record names; with ``close`` nothing of its incarnation books again (L4)."""
    return SeatReleaseRequested(
        tenant=record.tenant,
        workload=record.workload,
        incarnation=record.incarnation,
        assignment=record.assignment,
        close=close,
        attempt=record.attempt,
        why=why,
    )


def need(record: WorkloadRecord, now: float) -> Need:
    avoid = frozenset(name for each in record.avoid if each.until > now for name in (each.node, each.claim) if name)
    return Need(shape=record.shape, owner=record.owner, avoid=avoid)


def with_reason(record: WorkloadRecord, reason: Reason, message: str, now: float) -> WorkloadRecord:
    """The record waiting for ``reason``: a new wait begins when the reason changes, the last 32 are kept (W5)."""
    waits_list = list(record.waits)
    if record.reason is reason and waits_list:
        waits_list[-1] = msgspec.structs.replace(waits_list[-1], message=message)
        since = record.since
    else:
        if waits_list and waits_list[-1].until is None:
            waits_list[-1] = msgspec.structs.replace(waits_list[-1], until=now)
        waits_list.append(Wait(reason=reason, message=message, since=now))
        since = now
    return msgspec.structs.replace(
        record,
        phase=WorkloadPhase.PENDING,
        reason=reason,
        message=message,
        since=since,
        waits=tuple(waits_list[-WAITS_MAX:]),
    )


def without_reason(record: WorkloadRecord, now: float) -> WorkloadRecord:
    """The record no longer waiting; its standing wait ends now."""
    waits_list = list(record.waits)
    if waits_list and waits_list[-1].until is None:
        waits_list[-1] = msgspec.structs.replace(waits_list[-1], until=now)
    return msgspec.structs.replace(record, reason=None, message="", since=None, waits=tuple(waits_list))
