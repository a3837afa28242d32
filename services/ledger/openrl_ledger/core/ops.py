"""The steps that a rule yields, and the few helpers every rule is built from.

A rule is a generator: ``value = yield Read(...)``. ``Write`` answers the new revision, or a Lost: the write did not
land (``DEFINITE``), or it lost but an earlier try of it may have landed in between (``UNKNOWN``, E7).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import msgspec

from openrl_common.events import Event
from openrl_common.records import (
    ClaimEntry,
    ClaimRecord,
    ClaimState,
    LeaseRecord,
    NodeBudget,
    NodeEntry,
    NodeRecord,
    Role,
    SeatRecord,
    SeatState,
    Standing,
)
from openrl_common.seating import host_refusal, node_refusal

R = TypeVar("R")


class Table(Enum):
    """Where a key lives. NODES is the launcher's inventory and is only read."""

    SEATS = "ledger_seats"
    CLAIMS = "ledger_claims"
    BUDGETS = "ledger_nodes"
    LEASES = "leases"
    TURNS = "turns"
    NODES = "nodes"


class Lost(Enum):
    """A write that did not land; see the module docstring."""

    DEFINITE = "definite"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Read:
    """``old_copy``: a copy that may lag will do, because a compare-and-swap from its revision follows.

    Such a copy may only lead to a write. Whatever ends a rule without one (a refusal, "it is there already") is read
    again without it: another replica's write may be on its way here.
    """

    table: Table
    key: str
    old_copy: bool = False


@dataclass(frozen=True)
class Write:
    """Compare-and-swap from revision ``last`` (0: must not exist)."""

    table: Table
    key: str
    value: Any
    last: int


@dataclass(frozen=True)
class Emit:
    event: Event


@dataclass(frozen=True)
class Pause:
    """Wait a little, with jitter, before starting over: contention is not "no capacity" (E11)."""

    tries: int


Op = Read | Write | Emit | Pause
Steps = Generator[Op, Any, R]


@dataclass(frozen=True)
class Environment:
    """What a rule may not make up itself: the seat limit in force (S6), time and fresh ids."""

    limit: int
    now: Callable[[], float]
    mint: Callable[[str], str]
    """``mint("a")`` is a fresh assignment id, ``mint("c")`` a fresh claim id; never repeated."""


TRIES_MAX = 200
"""Contended retries of one key before the whole handling is given back to the bus: 32 racers needed up to 23."""


class Contended(Exception):
    """TRIES_MAX retries lost against other writers; the message is delivered again later."""


def read_seat(workload: str) -> Steps[tuple[SeatRecord, int]]:
    entry = yield Read(Table.SEATS, workload)
    return (SeatRecord(), 0) if entry is None else (entry.value, entry.revision)


def read_claim(claim: str, *, old_copy: bool = False) -> Steps[tuple[ClaimRecord | None, int]]:
    entry = yield Read(Table.CLAIMS, claim, old_copy)
    return (None, 0) if entry is None else (entry.value, entry.revision)


def read_budget(node: str, *, old_copy: bool = False) -> Steps[tuple[NodeBudget, int]]:
    entry = yield Read(Table.BUDGETS, node, old_copy)
    return (NodeBudget(), 0) if entry is None else (entry.value, entry.revision)


def read_node(node: str, *, old_copy: bool = False) -> Steps[NodeRecord | None]:
    entry = yield Read(Table.NODES, node, old_copy)
    return None if entry is None else entry.value


def read_lease(assignment: str) -> Steps[tuple[LeaseRecord | None, int]]:
    entry = yield Read(Table.LEASES, assignment)
    return (None, 0) if entry is None else (entry.value, entry.revision)


def names(seat: SeatRecord, assignment: str, claim: str) -> bool:
    """Whether ``seat`` names this assignment on this claim, held or releasing (L1)."""
    return seat.state is not SeatState.EMPTY and seat.assignment == assignment and seat.claim == claim


def drop_claim_entry(claim_id: str, assignment: str) -> Steps[tuple[ClaimRecord | None, ClaimEntry | None]]:
    """Take an entry off a claim; the last one out makes the claim retiring in the same CAS (L3).

    Returns:
        The claim as it stands afterwards and the entry that was taken off (None: it was not listed).
    """
    for tries in range(TRIES_MAX):
        claim, revision = yield from read_claim(claim_id)
        if claim is None or assignment not in claim.entries:
            return claim, None
        entries = {key: entry for key, entry in claim.entries.items() if key != assignment}
        state = claim.state
        if not entries and state.stands:
            state = ClaimState.RETIRING
        changed = msgspec.structs.replace(claim, entries=entries, state=state)
        landed = yield Write(Table.CLAIMS, claim_id, changed, revision)
        if isinstance(landed, int):
            return changed, claim.entries[assignment]
        if landed is Lost.UNKNOWN:
            after, _ = yield from read_claim(claim_id)
            if after is not None and assignment not in after.entries:
                return after, claim.entries[assignment]
        yield Pause(tries)
    raise Contended(f"claim {claim_id}")


def add_node_entry(
    node: str, assignment: str, entry: NodeEntry, *, joins_as: Role | None, without: str = ""
) -> Steps[str | None]:
    """Reserve host memory on a node (P6, F3), re-checked inside the CAS. Returns why not, None when reserved.

    Args:
        joins_as: the role of a newcomer, whom a node refuses that does not count, is suspect or has other labels (P1,
            P3; labels are another key than the budget: one that changes at this very moment may come too late). None:
            the node itself has just given a device to it.
        without: an assignment whose memory is about to be given back and does not count (S3).
    """
    old_copy = True
    for tries in range(TRIES_MAX):
        budget, revision = yield from read_budget(node, old_copy=old_copy)
        there = assignment in budget.entries
        inventory = yield from read_node(node, old_copy=old_copy)
        refusal = ""
        if joins_as is not None and not there and budget.standing is not Standing.LIVE:
            refusal = f"node {node} is {budget.standing}: {budget.why}"
        elif inventory is not None and not there:
            promised = sum(other.host_bytes for key, other in budget.entries.items() if key != without)
            refusal = "" if joins_as is None else node_refusal(inventory, joins_as)
            refusal = refusal or host_refusal(inventory, promised, entry.host_bytes)
        was_old, old_copy = old_copy, False
        if there or refusal:
            if was_old:
                continue
            return refusal or None
        changed = msgspec.structs.replace(budget, entries={**budget.entries, assignment: entry})
        landed = yield Write(Table.BUDGETS, node, changed, revision)
        if isinstance(landed, int):
            return None
        yield Pause(tries)
    raise Contended(f"node {node}")


def drop_node_entry(node: str, assignment: str) -> Steps[int]:
    """Give host memory back; returns the bytes (0: it was not there)."""
    if not node:
        return 0
    for tries in range(TRIES_MAX):
        budget, revision = yield from read_budget(node)
        entry = budget.entries.get(assignment)
        if entry is None:
            return 0
        rest = {key: value for key, value in budget.entries.items() if key != assignment}
        landed = yield Write(Table.BUDGETS, node, msgspec.structs.replace(budget, entries=rest), revision)
        if isinstance(landed, int):
            return entry.host_bytes
        yield Pause(tries)
    raise Contended(f"node {node}")
