"""Which nodes are suspect or lost, and what becomes of their seats (B5, F3).

    live ─ no beat for ``suspect_after_s`` ─▶ suspect ─ no beat and no lease of its workers for ``lapse_s`` ─▶ lost
      ▲         no new joins                               its seats are fenced and released                    │
      └──────────────────────────────────── it beats again ──────────────────────────────────────────────────────┘

The ledger judges, because a dead node cannot say that it is dead, and because the ledger owns what follows. What a
launcher reports itself (a cluster's NotReady) counts like silence. Either alone makes no node lost: a dead launcher is
not a dead node while its workers renew their leases.

Why a seat of a lost node may be dropped without WorkerGone: its lease stood at one revision for longer than a lease
lasts, and the tombstone was written from that very revision. So nobody renewed meanwhile, and the holder, which counts
from an earlier moment, has parked by itself (B7); when it can reach the bus again it finds the tombstone and exits.

Pure: ``NodeWatch`` is told the time, the rest are steps. Not here: clocks, the bus (``nodes_service``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from openrl_common.events import NodeLost, NodeRecovered, NodeSuspect
from openrl_common.liveness import BEAT_S, BEATS_MISSED_MAX, LEASE_S, Pulses
from openrl_common.records import LeaseRecord, LeaseState, NodeEntry, NodeRecord, SeatState, Standing
from openrl_ledger.core import releasing
from openrl_ledger.core.ops import (
    TRIES_MAX,
    Contended,
    Emit,
    Environment,
    Pause,
    Steps,
    Table,
    Write,
    names,
    read_budget,
    read_claim,
    read_lease,
    read_seat,
)

T_co = TypeVar("T_co", covariant=True)


class Stored(Protocol[T_co]):
    """A value and the revision at which it stands (``store.Entry``)."""

    @property
    def key(self) -> str: ...

    @property
    def value(self) -> T_co: ...

    @property
    def revision(self) -> int: ...


Leases = Mapping[str, Stored[LeaseRecord] | None]
_NOT_RUNNING = ("none", "starting")
"""What a tombstone may have found of an assignment that can never touch a device (B7)."""


@dataclass(frozen=True, slots=True)
class NodePolicy:
    """Seconds. ``watch_after_s``: from then on leases are looked at, so that their time has run when it matters."""

    suspect_after_s: float = BEATS_MISSED_MAX * BEAT_S + 0.5
    watch_after_s: float = BEAT_S + 0.2
    lapse_s: float = LEASE_S + 0.2
    start_lapse_s: float = 60.0
    """A process that is starting renews nothing until it is live, which takes long on a busy machine."""


class NodeWatch:
    """What one judge has seen of beats and leases, by its own clock. One that was cut off has seen nothing (E13)."""

    def __init__(self, policy: NodePolicy) -> None:
        self.policy = policy
        self._beats = Pulses()
        self._leases = Pulses()
        self._first: dict[str, int] = {}

    def cut_off(self) -> None:
        self._beats.cut_off()
        self._leases.cut_off()
        self._first.clear()

    def silent(self, nodes: Mapping[str, Stored[NodeRecord]], now: float) -> list[str]:
        """Nodes that missed a beat, or are reported: those whose leases are to be looked at."""
        self._beats.keep(nodes.keys())
        for node, entry in nodes.items():
            self._first.setdefault(node, entry.revision)
        return [
            node
            for node, entry in nodes.items()
            if (entry.value.beat and self._beats.lapsed(node, entry.revision, now, limit_s=self.policy.watch_after_s))
            or entry.value.suspect
            or entry.value.lost
        ]

    def heard(self, entry: Stored[NodeRecord]) -> bool:
        """Has it beaten since the first look at it? Only then is it known to be back."""
        return self._first.get(entry.key, entry.revision) != entry.revision

    def judge(
        self, entry: Stored[NodeRecord], leases: Mapping[str, Stored[LeaseRecord] | None], now: float
    ) -> Standing:
        """The standing of one silent node. ``leases``: by assignment, of everything that is entered on it."""
        node, record, policy = entry.key, entry.value, self.policy

        def silent_for(limit_s: float) -> bool:
            return bool(record.beat) and self._beats.lapsed(node, entry.revision, now, limit_s=limit_s)

        over = self.lapsed(leases, now)
        if not (record.suspect or record.lost or silent_for(policy.suspect_after_s)):
            return Standing.LIVE
        if (record.lost or silent_for(policy.lapse_s)) and len(over) == len(leases):
            return Standing.LOST
        return Standing.SUSPECT

    def lapsed(self, leases: Leases, now: float) -> set[str]:
        """Assignments of one node whose process cannot be at work any more, or never was.

        A start under way counts as work, but for as long as a lease when a live worker beside it has gone silent.
        """
        policy = self.policy
        live_lapsed = any(
            self._stood(assignment, lease, now, policy.lapse_s)
            for assignment, lease in leases.items()
            if lease is not None and lease.value.state is LeaseState.LIVE
        )
        start_s = policy.lapse_s if live_lapsed else policy.start_lapse_s
        over = set()
        for assignment, lease in leases.items():
            state = None if lease is None else lease.value.state
            fenced_before_it_ran = lease is not None and lease.value.found in _NOT_RUNNING
            limit_s = start_s if state is LeaseState.STARTING else policy.lapse_s
            if lease is None or fenced_before_it_ran or self._stood(assignment, lease, now, limit_s):
                over.add(assignment)
        return over

    def forget_leases(self, but: set[str]) -> None:
        """Keep only what is known of these assignments."""
        self._leases.keep(but)

    def _stood(self, assignment: str, lease: Stored[LeaseRecord], now: float, limit_s: float) -> bool:
        return self._leases.lapsed(assignment, lease.revision, now, limit_s=limit_s)


def declare(node: str, standing: Standing, why: str, environment: Environment) -> Steps[bool]:
    """Write the node's standing, by compare-and-swap on the key that every reservation there goes through.

    Returns:
        Whether it was another one before.
    """
    for tries in range(TRIES_MAX):
        budget, revision = yield from read_budget(node)
        if budget.standing is standing:
            return False
        since = environment.now()
        changed = msgspec.structs.replace(budget, standing=standing, since=since, why=why)
        landed = yield Write(Table.BUDGETS, node, changed, revision)
        if isinstance(landed, int):
            kind = {Standing.SUSPECT: NodeSuspect, Standing.LOST: NodeLost, Standing.LIVE: NodeRecovered}[standing]
            yield Emit(kind(node=node, since=since, why=why))
            return True
        yield Pause(tries)
    raise Contended(f"node {node}")


def release_lost(node: str, lapsed: Mapping[str, int]) -> Steps[int]:
    """Release every entry of a lost node whose lease stood at the given revision (0: there is none) all the while.

    The last thing that is checked before a seat goes is its lease, inside the write that fences it. Returns how many
    were released; the others are looked at again.
    """
    budget, _ = yield from read_budget(node)
    if budget.standing is not Standing.LOST:
        return 0
    released = 0
    for assignment, entry in budget.entries.items():
        revision = lapsed.get(assignment)
        if revision is not None and (yield from _fence_from(assignment, revision, f"node {node} is lost")):
            yield from _drop(assignment, entry)
            released += 1
    return released


def _fence_from(assignment: str, revision: int, why: str) -> Steps[bool]:
    """FENCE, but only from the revision that lapsed: who renewed since is alive, and False is the answer."""
    lease, now_at = yield from read_lease(assignment)
    if now_at != revision:
        return False
    if lease is not None and lease.state is LeaseState.TOMBSTONE:
        return True
    found = "none" if lease is None else "lapsed" if lease.state is LeaseState.LIVE else str(lease.state.value)
    tombstone = LeaseRecord(state=LeaseState.TOMBSTONE, found=found, why=why)
    landed = yield Write(Table.LEASES, assignment, tombstone, revision)
    return isinstance(landed, int)


def _drop(assignment: str, entry: NodeEntry) -> Steps[None]:
    """What WorkerGone would do: nothing of it can be at work. A successor books elsewhere as a newcomer (S3)."""
    seat, _ = yield from read_seat(entry.workload)
    if not names(seat, assignment, entry.claim):
        yield from releasing.clean(entry.workload, assignment, entry.claim)
        return
    claim, _ = yield from read_claim(entry.claim)
    listed = None if claim is None else claim.entries.get(assignment)
    tenant = "_fleet" if listed is None else listed.tenant
    if seat.state is SeatState.HELD:
        yield from releasing.request_release(entry.workload, tenant, seat.incarnation, assignment, close=False)
    yield from releasing.finish(entry.workload, tenant, assignment, entry.claim)
