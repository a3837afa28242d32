"""The start gate and the fence of an assignment's lease (B7), both by compare-and-swap on ``lease.<assignment>``.

absent ──open──▶ starting ──worker──▶ live          open also takes starting or live over when no process is left
   └────────────fence────┴──────fence──┴──▶ tombstone   final: nothing starts, a live worker that reads it exits
"""

from __future__ import annotations

from enum import StrEnum

from openrl_common.errors import Conflict, Transient
from openrl_common.records import LeaseRecord, LeaseState
from openrl_common.store import Bucket

_TRIES_MAX = 50


class Gate(StrEnum):
    OPENED = "opened"
    TAKEN_OVER = "taken over"
    FENCED = "fenced"


async def open_gate(leases: Bucket[LeaseRecord], assignment: str, *, holder: str) -> Gate:
    """Make the lease ``starting``. The caller knows that no process of the assignment runs.

    Raises:
        Transient: others kept changing the lease, or NATS does not answer; nothing was started.
    """
    for _ in range(_TRIES_MAX):
        entry = await leases.get(assignment)
        if entry is not None and entry.value.state is LeaseState.TOMBSTONE:
            return Gate.FENCED
        try:
            await leases.write(
                assignment,
                LeaseRecord(state=LeaseState.STARTING, holder=holder),
                last=0 if entry is None else entry.revision,
            )
        except Conflict:
            continue
        return Gate.OPENED if entry is None else Gate.TAKEN_OVER
    raise Transient(f"lease of assignment {assignment} keeps changing: its start is tried again")


async def fence(leases: Bucket[LeaseRecord], assignment: str, *, why: str) -> str:
    """Replace the lease by a tombstone; returns what it records as found (none, starting, live …).

    A renewal by a live worker makes one try fail, not the fence: the worker renews every 2 s, a try takes milliseconds.

    Raises:
        Transient: as ``open_gate``; the lease is not known to be fenced.
    """
    for _ in range(_TRIES_MAX):
        entry = await leases.get(assignment)
        if entry is not None and entry.value.state is LeaseState.TOMBSTONE:
            return entry.value.found
        found = "none" if entry is None else entry.value.state.value
        tombstone = LeaseRecord(
            state=LeaseState.TOMBSTONE,
            holder="" if entry is None else entry.value.holder,
            renewals=0 if entry is None else entry.value.renewals,
            found=found,
            why=why,
        )
        try:
            await leases.write(assignment, tombstone, last=0 if entry is None else entry.revision)
        except Conflict:
            continue
        return found
    raise Transient(f"lease of assignment {assignment} keeps changing: its fence is tried again")
