"""Questions to placement and their answers: what `openrl get` and `openrl explain` show. Bodies are msgspec JSON.

Asked on ``openrl.q.placement.<query>`` (E1), one query per pair of classes below. Read-only: an answer is a snapshot of
placement's own state joined with the ledger's and the launchers', and may be older than the buckets by a moment.

An unknown workload is answered with Rejected (code ``unknown-workload``).
"""

from __future__ import annotations

import msgspec

from openrl_common.names import query_subject
from openrl_common.records import (
    ClaimState,
    JobRecord,
    NodeRecord,
    Reason,
    Role,
    Tier,
    WorkloadRecord,
)

JOBS = query_subject("placement", "jobs")
WORKLOADS = query_subject("placement", "workloads")
CLAIMS = query_subject("placement", "claims")
NODES = query_subject("placement", "nodes")
EXPLAIN = query_subject("placement", "explain")


class Query(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of every question and answer."""


class ListQuery(Query, frozen=True, kw_only=True):
    """Ask for a list. ``tenant`` and ``job`` empty = all. Records that ended long ago are not kept for ever."""

    tenant: str = ""
    job: str = ""
    ended: bool = True
    """With False, only what has not ended."""


# --- jobs -------------------------------------------------------------------------------------------------------


class JobRow(Query, frozen=True, kw_only=True):
    """A job and the phases of the two workloads that serve it; ``reason`` is why it is not ready, if it is not."""

    record: JobRecord
    trainer_phase: str = ""
    sampler_phase: str = ""
    reason: Reason | None = None
    message: str = ""


class JobsAnswer(Query, frozen=True, kw_only=True):
    jobs: list[JobRow] = []


# --- workloads --------------------------------------------------------------------------------------------------


class WorkloadRow(Query, frozen=True, kw_only=True):
    """``position`` in the waiting line counts from 1; None = not waiting. ``waited_s``: the standing wait."""

    record: WorkloadRecord
    position: int | None = None
    waited_s: float | None = None


class WorkloadsAnswer(Query, frozen=True, kw_only=True):
    workloads: list[WorkloadRow] = []


# --- claims -----------------------------------------------------------------------------------------------------


class SeatRow(Query, frozen=True, kw_only=True):
    """One entry of a claim. ``state``: ``held``, ``releasing``, or ``reserved`` (listed, not yet named: L1)."""

    assignment: str
    workload: str
    owner: str
    role: Role
    device_bytes: int
    host_bytes: int
    exclusive: bool
    state: str


class ClaimRow(Query, frozen=True, kw_only=True):
    """One claim. ``limit`` 0 = no limit; ``tiers`` are what it asked for while it is pending.

    ``resident`` and ``waiting``: assignments that may use the device now, and that wait for their turn (T2, T3).
    Placement does not know; who shows the claims reads it from the arbiter's bucket.
    """

    claim: str
    state: ClaimState
    node: str = ""
    devices: tuple[str, ...] = ()
    device_bytes: int = 0
    seats: list[SeatRow] = []
    limit: int = 0
    seats_peak: int = 0
    founded_at: float = 0.0
    tiers: tuple[Tier, ...] = ()
    resident: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


class ClaimsAnswer(Query, frozen=True, kw_only=True):
    claims: list[ClaimRow] = []


# --- nodes ------------------------------------------------------------------------------------------------------


class NodeRow(Query, frozen=True, kw_only=True):
    """``host_seats_bytes``: what the ledger holds for seats; ``usable`` empty = it counts, else why it does not."""

    record: NodeRecord
    devices_claimed: int = 0
    host_seats_bytes: int = 0
    usable: str = ""


class NodesAnswer(Query, frozen=True, kw_only=True):
    nodes: list[NodeRow] = []


# --- explain ----------------------------------------------------------------------------------------------------


class ExplainQuery(Query, frozen=True, kw_only=True):
    """``workload``: a full id, or ``<job>/<role>`` with ``tenant`` (of a LoRA job: the runtime that serves it)."""

    workload: str
    tenant: str = ""


class CandidateRow(Query, frozen=True, kw_only=True):
    """One claim that was looked at, in candidate order; ``refused`` empty = it would accept."""

    claim: str
    node: str = ""
    device_bytes: int = 0
    seats: int = 0
    limit: int = 0
    refused: str = ""
    held_by: tuple[str, ...] = ()
    """Workloads seated on it."""


class ExplainAnswer(Query, frozen=True, kw_only=True):
    """W5: why a workload is where it is.

    Attributes:
        sentence: one line for a person: the standing reason, or where it sits.
        position: place in the waiting line, from 1; ``line_length`` of how many.
        candidates: at most 64 claims with a big enough device, joinable ones first.
        notes: further facts, for example that a node's host memory is unknown and was not checked (P6).
    """

    record: WorkloadRecord
    sentence: str = ""
    position: int | None = None
    line_length: int = 0
    deadline_in_s: float | None = None
    candidates: list[CandidateRow] = []
    tiers: tuple[Tier, ...] = ()
    notes: list[str] = []
