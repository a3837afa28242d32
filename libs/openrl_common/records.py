"""What the KV buckets hold (rule E4: one writer each). KV is the truth, events are hints.

All times are Unix seconds (float), all sizes bytes, unless a name says otherwise.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Role(StrEnum):
    TRAINER = "trainer"
    SAMPLER = "sampler"


ENGINES = ("auto", "torch", "vllm", "vllm-cpu")
"""What a job may name as its sampler's engine. ``auto`` is torch. ``vllm-cpu`` is vllm on a CPU: it cannot leave its
device, so its seat is exclusive (P7)."""
ENGINES_THAT_CANNOT_PARK = frozenset({"vllm-cpu"})
"""Sampler engines that cannot leave a device and come back (T5): vLLM has no sleep mode on its CPU platform. Their
workloads are exclusive from the estimate on, so that nobody ever waits for them to yield (P7)."""


DEVICES_MAX = 64
"""Devices that one worker may ask for."""


class JobKind(StrEnum):
    FFT = "fft"
    LORA = "lora"


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of every stored value: immutable, named fields; unknown fields of a newer writer are ignored (E2)."""


# --- what a client asks for -------------------------------------------------------------------------------------


class LoraSpec(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """LoRA settings of one job. ``target_modules`` empty means every linear layer but the head."""

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: tuple[str, ...] = ()


class Overrides(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Per-job overrides of the estimator (M2), GiB. None keeps the formula."""

    trainer_device_gib: float | None = None
    sampler_device_gib: float | None = None
    trainer_host_gib: float | None = None
    sampler_host_gib: float | None = None


class JobSpec(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job as the client submits it. Unknown fields are refused: a typo must not be ignored.

    Attributes:
        name: unique among the tenant's running jobs.
        base_model: path of a Hugging Face model directory that the workers can read.
        dtype: ``auto`` (bfloat16 on GPUs, float32 on CPUs), ``float32`` or ``bfloat16``.
        float32_masters: full fine-tuning of bfloat16 weights keeps float32 copies and moments of them, 8 bytes a
            parameter more (LoRA adapters and float32 weights are float32 anyway).
        exclusive: None keeps the default (P7: LoRA runtimes exclusive, FFT workers not).
        priority: higher goes first in the waiting line (W1).
        trainer_devices, sampler_devices: how many devices of one node each worker gets (P10), never guessed from
            memory. Several are never shared. Full fine-tuning shards the model over them, LoRA divides its data among
            them, a sampler (engine vllm) is tensor-parallel.
    """

    name: str
    kind: JobKind
    base_model: str
    lora: LoraSpec | None = None
    seed: int = 0
    dtype: str = "auto"
    float32_masters: bool = False
    exclusive: bool | None = None
    priority: int = 0
    tags: dict[str, str] = {}
    overrides: Overrides = Overrides()
    engine: str = "auto"
    max_model_len: int = 0
    """Longest sequence in tokens, prompt and completion; 0 = what the model's config allows."""
    trainer_devices: int = 1
    sampler_devices: int = 1


# --- placement's buckets: openrl_jobs, openrl_workloads ---------------------------------------------------------


class JobPhase(StrEnum):
    ADMITTED = "Admitted"
    READY = "Ready"
    FINISHING = "Finishing"
    FINISHED = "Finished"
    FAILED = "Failed"
    CANCELLED = "Cancelled"

    @property
    def ended(self) -> bool:
        return self in (JobPhase.FINISHED, JobPhase.FAILED, JobPhase.CANCELLED)


class JobRecord(Record, frozen=True, kw_only=True):
    """Key ``<tenant>.<job>`` in openrl_jobs.

    Attributes:
        incarnation: stream sequence of this JobSubmitted; a job resubmitted under its old name has a higher one.
        submission: the client's unique id of the submission; tells a duplicate delivery from a second job.
        runtime: sampler subject owner (the job for FFT, the LoRA runtime otherwise); its tenant is ``runtime_tenant``.
        outcome: how it is to end once its workloads are gone (phase FINISHING).
        refused: the last submissions that were refused because the name was in use; replaced: the last that stood here
            before. Both are answered for good: a late duplicate must not run them once the name is free.
        workloads: what was made for this job, as it was admitted: one write for all of it. A workload's own key, once
            written, is newer.
    """

    tenant: str
    job: str
    submission: str
    incarnation: int
    spec: JobSpec
    phase: JobPhase
    runtime_tenant: str
    runtime: str
    trainer: str
    sampler: str
    submitted_at: float
    reason: str = ""
    message: str = ""
    outcome: JobPhase | None = None
    ready_at: float | None = None
    ended_at: float | None = None
    refused: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    workloads: tuple[WorkloadRecord, ...] = ()


class WorkloadPhase(StrEnum):
    """W6: a closed list."""

    SUBMITTED = "Submitted"
    PENDING = "Pending"
    PLACED = "Placed"
    STARTING = "Starting"
    READY = "Ready"
    RELEASING = "Releasing"
    FINISHED = "Finished"
    FAILED = "Failed"


class Reason(StrEnum):
    """W4: why a workload waits; a closed list, in order of precedence."""

    IMPOSSIBLE = "Impossible"
    ROLE_NOT_ACCEPTED = "RoleNotAccepted"
    WAITING_FOR_PREDECESSOR = "WaitingForPredecessor"
    WAITING_FOR_SEAT = "WaitingForSeat"
    WAITING_FOR_HOST_MEMORY = "WaitingForHostMemory"
    WAITING_FOR_DEVICE = "WaitingForDevice"
    UNSCHEDULABLE = "Unschedulable"
    RETRYING = "Retrying"


class Shape(Record, frozen=True, kw_only=True):
    """What one workload needs of a claim (estimator, M2): ``device_bytes`` on each of ``device_count`` devices."""

    role: Role
    device_bytes: int
    device_count: int = 1
    host_bytes: int = 0
    exclusive: bool = False


class Wait(Record, frozen=True, kw_only=True):
    """One finished or standing wait of a workload, for ``explain`` and the report."""

    reason: Reason
    message: str
    since: float
    until: float | None = None


class Avoid(Record, frozen=True, kw_only=True):
    """P13: a node or claim that failed this workload, until ``until``."""

    node: str = ""
    claim: str = ""
    until: float = 0.0
    why: str = ""


class WorkloadRecord(Record, frozen=True, kw_only=True):
    """Key ``<workload>`` in openrl_workloads.

    Attributes:
        owner: fairness unit: ``<tenant>/<job>`` for FFT, the runtime id for LoRA.
        jobs: ``<tenant>.<job>`` keys served (one for FFT).
        attempt: counts SeatRequested, so that each has its own deterministic message id.
        assignment/claim/node: the booking last heard of; the ledger is the truth.
        waits: last 32 waits, the standing one last.
        update_method, update_chunk_bytes: how its sampler replaces full weights (M3): what room was counted for.
        estimate: every figure of the estimator in GiB, for ``explain``.
    """

    workload: str
    tenant: str
    owner: str
    owner_name: str
    kind: JobKind
    jobs: tuple[str, ...]
    incarnation: int
    shape: Shape
    base_model: str
    phase: WorkloadPhase
    submitted_at: float
    dtype: str = "auto"
    engine: str = "auto"
    seed: int = 0
    max_rank: int = 0
    max_model_len: int = 0
    priority: int = 0
    attempt: int = 0
    reason: Reason | None = None
    message: str = ""
    since: float | None = None
    deadline: float | None = None
    assignment: str = ""
    claim: str = ""
    node: str = ""
    waits: tuple[Wait, ...] = ()
    avoid: tuple[Avoid, ...] = ()
    update_method: str = "streamed"
    update_chunk_bytes: int = 256 << 20
    estimate: dict[str, float] = {}
    idle_since: float | None = None
    """A LoRA runtime without jobs, since when (P12)."""
    placed_at: float | None = None
    ready_at: float | None = None
    ended_at: float | None = None


# --- the ledger's bucket: openrl_ledger (L1) --------------------------------------------------------------------


class SeatState(StrEnum):
    EMPTY = "empty"
    HELD = "held"
    RELEASING = "releasing"


class SeatRecord(Record, frozen=True, kw_only=True):
    """Key ``seat.<workload>``. ``closed``: the highest incarnation that may never book again.

    An empty seat keeps the assignment and claim it last named, so that a redelivered WorkerGone publishes again what a
    crash may have left unpublished. ``attempt`` is that of the request that booked last: an older one is a late
    duplicate. ``successor`` is the newer incarnation's request that waits for this one to be gone (S3).
    """

    state: SeatState = SeatState.EMPTY
    incarnation: int = 0
    assignment: str = ""
    claim: str = ""
    closed: int = 0
    attempt: int = 0
    successor: Successor | None = None


class Successor(Record, frozen=True, kw_only=True):
    """What S3 needs to put a newer incarnation in its predecessor's place."""

    incarnation: int
    attempt: int
    entry: ClaimEntry


class ClaimState(StrEnum):
    PENDING = "pending"
    ALLOCATED = "allocated"
    RETIRING = "retiring"
    GONE = "gone"
    QUARANTINED = "quarantined"

    @property
    def stands(self) -> bool:
        """It has a device or is to get one: nobody has begun to end it."""
        return self in (ClaimState.PENDING, ClaimState.ALLOCATED)


class Tier(Record, frozen=True, kw_only=True):
    """One acceptable device shape of a claim (P9): floor in exact bytes, ceiling in whole GiB."""

    count: int
    floor_bytes: int
    ceiling_gib: int


class ClaimEntry(Record, frozen=True, kw_only=True):
    """One seat (or reservation) on a claim."""

    workload: str
    tenant: str
    owner: str
    role: Role
    device_bytes: int
    host_bytes: int
    exclusive: bool
    incarnation: int
    reserved_at: float


class ClaimRecord(Record, frozen=True, kw_only=True):
    """Key ``claim.<id>``. ``entries`` is keyed by assignment id.

    ``order`` is the founder's place in the waiting line (priority descending, then incarnation): the local launcher
    serves pending claims in that order (W1).
    """

    state: ClaimState
    tiers: tuple[Tier, ...] = ()
    node: str = ""
    devices: tuple[str, ...] = ()
    device_bytes: int = 0
    entries: dict[str, ClaimEntry] = {}
    founded_at: float = 0.0
    order: tuple[int, int] = (0, 0)
    limit: int = 0
    seats_peak: int = 0
    avoid: tuple[Avoid, ...] = ()
    """Nodes on which it must not be cut (P13): its founder could not start there."""


class NodeEntry(Record, frozen=True, kw_only=True):
    workload: str
    claim: str
    host_bytes: int


class Standing(StrEnum):
    """What the ledger thinks of a node (B5, F3)."""

    LIVE = "live"
    SUSPECT = "suspect"
    LOST = "lost"


class NodeBudget(Record, frozen=True, kw_only=True):
    """Key ``node.<node>`` in openrl_ledger: host memory reserved per assignment (P6), and the node's standing.

    Both in one key, so that the write that reserves is a compare-and-swap on the standing too: nobody joins a node that
    has just become suspect (F3). ``since`` and ``why`` tell of the standing.
    """

    entries: dict[str, NodeEntry] = {}
    standing: Standing = Standing.LIVE
    since: float = 0.0
    why: str = ""


class LedgerIdentityRecord(Record, frozen=True, kw_only=True):
    """Key ``meta.identity``: tells one ledger bucket from another (L7); ``rebuilt``: by `openrl ledger rebuild`."""

    id: str
    made_at: float = 0.0
    rebuilt: bool = False


class DutyRecord(Record, frozen=True, kw_only=True):
    """Key ``duty.<name>``: which replica does it now (``liveness.Duty``); ``holder`` empty = handed back."""

    holder: str = ""
    renewals: int = 0


# --- the arbiter's bucket: openrl_turns (T1-T6) ------------------------------------------------------------------


class Residency(Record, frozen=True, kw_only=True):
    """One assignment that may use a shared device now (T4: under ``epoch``, its own count of grants).

    Attributes:
        until: its turn lasts at least until then; nobody asks it to leave before, but to leave when it is idle.
        loading: it cannot yield yet (True), or can since it said so (False); None = it said nothing of it.
        pressed_at: since when somebody waits who does not fit beside it: it leaves as soon as it is idle.
        asked_at: since when it is asked to leave at its next safe boundary; None = not asked.
        fenced_at: since when it is being fenced, for ``why``; it counts until its process is gone.
    """

    epoch: int
    granted_at: float
    until: float
    loading: bool | None = None
    pressed_at: float | None = None
    asked_at: float | None = None
    fenced_at: float | None = None
    why: str = ""


class TurnRecord(Record, frozen=True, kw_only=True):
    """Key ``<claim>`` in openrl_turns: who is resident on the claim's device and who waits for it.

    Attributes:
        residents/waiting: keyed by assignment id; ``waiting`` holds since when.
        epochs: the last epoch given to each assignment.
        served: owner → number of the grant it got last (``grants`` counts them): the least goes first.
        turns: owner → how many grants it got.
    """

    residents: dict[str, Residency] = {}
    waiting: dict[str, float] = {}
    epochs: dict[str, int] = {}
    served: dict[str, int] = {}
    turns: dict[str, int] = {}
    grants: int = 0


# --- the launcher's buckets: openrl_nodes, openrl_claims, openrl_workers -----------------------------------------


class Device(Record, frozen=True, kw_only=True):
    device: str
    memory_bytes: int
    model: str = ""


class NodeRecord(Record, frozen=True, kw_only=True):
    """Key ``<node>`` in openrl_nodes. ``host_allocatable_bytes`` 0 = unknown (P6 then skips the check and says so).

    ``roles`` empty = both roles (P1). ``beat`` rises with every heartbeat (B5); 0 = nobody beats for it, so nobody
    judges it by its silence. ``host`` and ``session`` say whose beat it is: the machine and home, and the start of that
    launcher. ``suspect`` and ``lost`` are what a launcher itself reports of a node (a cluster's NotReady).
    """

    node: str
    devices: tuple[Device, ...]
    host_allocatable_bytes: int = 0
    host_reserved_bytes: int = 0
    roles: tuple[Role, ...] = ()
    enabled: bool = True
    complete: bool = True
    declared: bool = False
    beat: int = 0
    host: str = ""
    session: str = ""
    suspect: bool = False
    lost: bool = False


class CutState(StrEnum):
    ALLOCATED = "allocated"
    REFUSED = "refused"
    FREED = "freed"
    QUARANTINED = "quarantined"


class CutRecord(Record, frozen=True, kw_only=True):
    """Key ``claim.<id>`` in openrl_claims: what the backend says of a claim. ``freed`` is final."""

    state: CutState
    node: str = ""
    devices: tuple[str, ...] = ()
    device_bytes: int = 0
    tier: str = ""
    why: str = ""


class DeviceHold(Record, frozen=True, kw_only=True):
    """Key ``dev.<node>.<device>`` in openrl_claims (B8): the one claim this device is cut for, empty when free."""

    claim: str = ""


class WorkerState(StrEnum):
    """``starting``: written before there is a process, so that none runs of which only its launcher knew (L7)."""

    STARTING = "starting"
    RUNNING = "running"
    EXITED = "exited"
    BACKING_OFF = "backing-off"
    STOPPING = "stopping"
    GONE = "gone"


class WorkerRecord(Record, frozen=True, kw_only=True):
    """Key ``<assignment>`` in openrl_workers. ``started_at`` is the kernel's process start time (pid reuse)."""

    assignment: str
    workload: str
    tenant: str
    claim: str
    node: str
    state: WorkerState
    pid: int = 0
    started_at: float = 0.0
    launched_at: float = 0.0
    log_path: str = ""
    restarts: int = 0
    """How often it was started again, for whatever reason."""
    failures: int = 0
    """Exits of its own in a row (F4); a long healthy run starts the count anew."""
    exit_code: int | None = None
    why: str = ""
    pulling_since: float | None = None
    """Its image is being pulled, since when; ``pulled_s``: what that has taken before. No time of a start (F2)."""
    pulled_s: float = 0.0
    entry: ClaimEntry | None = None
    """What its claim lists for it: enough to write its seat again (L7)."""

    @property
    def who(self) -> dict[str, str]:
        """The fields that every event of a worker has."""
        return {
            "tenant": self.tenant,
            "workload": self.workload,
            "assignment": self.assignment,
            "claim": self.claim,
            "node": self.node,
        }


# --- shared buckets: openrl_leases, openrl_ready -----------------------------------------------------------------


class LeaseState(StrEnum):
    STARTING = "starting"
    LIVE = "live"
    TOMBSTONE = "tombstone"


class LeaseRecord(Record, frozen=True, kw_only=True):
    """Key ``lease.<assignment>`` in openrl_leases (B7). ``found``: what a fence replaced (none, starting, live)."""

    state: LeaseState
    holder: str = ""
    renewals: int = 0
    found: str = ""
    why: str = ""


class Phase(Record, frozen=True, kw_only=True):
    """One stamped phase of a worker's start: UTC start and monotonic duration, seconds."""

    name: str
    started_at: float
    seconds: float
    detail: str = ""


class ReadyRecord(Record, frozen=True, kw_only=True):
    """Key ``<assignment>`` in openrl_ready, written by the worker itself."""

    assignment: str
    workload: str
    ready: bool
    phases: tuple[Phase, ...] = ()
    process_started_at: float = 0.0
    ready_at: float | None = None
    detail: dict[str, str] = {}


# --- the trainer's buckets: openrl_weights, openrl_checkpoints, openrl_results ------------------------------------


class WeightsRecord(Record, frozen=True, kw_only=True):
    """Key ``<tenant>.<job>`` in openrl_weights: the newest published version, so that a restarted sampler finds it.

    ``format`` is ``full``, ``lora`` or ``delta``; ``manifest`` the path of manifest.json, ``digest`` its SHA-256.
    """

    tenant: str
    job: str
    incarnation: int
    version: int
    parent: int | None
    format: str
    manifest: str
    digest: str
    total_bytes: int
    largest_tensor_bytes: int


class CheckpointRecord(Record, frozen=True, kw_only=True):
    """Key ``<tenant>.<job>`` in openrl_checkpoints: the job's newest checkpoint (R5), for whoever asks where it stands.

    Attributes:
        seq: the last training-log entry in it.
        trimmed_before: the training log has no entries of the job before this stream sequence.
        copy_seconds: training stood still for so long; write_seconds: the disk took so long, beside it.
    """

    tenant: str
    job: str
    incarnation: int
    seq: int
    trimmed_before: int
    directory: str
    bytes: int
    taken_at: float
    copy_seconds: float = 0.0
    write_seconds: float = 0.0


# --- training states on disk (states.py) --------------------------------------------------------------------------


class StateInfo(Record, frozen=True, kw_only=True):
    """The ``openrl`` metadata of a state file.

    Attributes:
        seq: the last log entry whose effect is in it (04-R4).
        base_fingerprint: of the base model's weights (the trainer's fingerprint.py); empty: not known.
        dtype: ``float32`` or ``bfloat16``: of the model that was trained.
        lora: the adapter's settings, None for full fine-tuning.
    """

    tenant: str = ""
    job: str = ""
    incarnation: int = 0
    seq: int = 0
    base_model: str = ""
    base_fingerprint: str = ""
    dtype: str = ""
    lora: LoraSpec | None = None


class SavedState(Record, frozen=True, kw_only=True):
    """One named state as it is listed. ``saved_at``: Unix seconds, the file's own."""

    name: str
    bytes: int
    saved_at: float
    path: str
    info: StateInfo
