"""Jobs with one seat of the two they need (W1): of several that wait for each other, the youngest gives its seat up.

A job whose trainer sits and whose sampler waits does nothing with its seat. When every seat that the oldest such job
could take is held by younger ones in the same state, none of them would ever begin.

Invariants: only what runs for nobody gives up (its own partner waits); the older job's line place decides, so the seat
that comes free goes to the older one, and nobody gives way to a younger one.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from openrl_common.quantities import format_seconds
from openrl_common.records import WorkloadRecord
from openrl_common.seating import host_refusal, join_refusal, node_refusal
from openrl_placement.state import Effects, State, need, order, placed, release_request

HALF_SEATED_S = 20.0
"""How long the older one has waited before a younger one gives way: seats of jobs that end come free meanwhile."""
_LOOKED_AT_MAX = 256


def give_way(state: State, now: float, fx: Effects) -> None:
    """Ask for the release of one seat, when the oldest half-seated job could take it; one a pass is enough."""
    half_seated = list(_half_seated(state))
    if len(half_seated) < 2:
        return
    waiter, _ = half_seated[0]
    if waiter.since is None or now - waiter.since < HALF_SEATED_S:
        return
    if state.line.promised_to(waiter.workload).claims:  # something has come free for it: that may be all it needs
        return
    for _, sitter in reversed(half_seated[1:]):
        if order(sitter) > order(waiter) and _would_fit(state, waiter, sitter, now):
            waited = format_seconds(now - waiter.since)
            why = f"gives way: {waiter.workload} came first and has waited {waited} for its second seat"
            fx.events.append(release_request(sitter, close=False, why=why))
            return


def _half_seated(state: State) -> Iterator[tuple[WorkloadRecord, WorkloadRecord]]:
    """In the line's order: who waits, and its partner who sits."""
    for count, workload in enumerate(state.line.waiting()):
        if count == _LOOKED_AT_MAX:
            return
        record = state.workloads[workload]
        for partner in state.both_of(record):
            if partner is not record and partner.incarnation == record.incarnation and placed(partner):
                yield record, partner


def _would_fit(state: State, waiter: WorkloadRecord, sitter: WorkloadRecord, now: float) -> bool:
    """Could the waiter have this seat, or the device that goes with the last seat of its claim?"""
    claim = state.fleet.claims.get(sitter.claim)
    node = None if claim is None else state.fleet.nodes.get(claim.node)
    if claim is None or node is None or sitter.assignment not in claim.entries:
        return False
    wanted = need(waiter, now)
    if sitter.claim in wanted.avoid or claim.node in wanted.avoid:
        return False
    if node_refusal(node, wanted.shape.role):
        return False
    others_bytes = state.fleet.host_used_bytes(node.node) - sitter.shape.host_bytes
    if host_refusal(node, others_bytes, wanted.shape.host_bytes):
        return False
    rest = {assignment: entry for assignment, entry in claim.entries.items() if assignment != sitter.assignment}
    if not rest:
        return claim.device_bytes >= wanted.shape.device_bytes and len(claim.devices) >= wanted.shape.device_count
    return join_refusal(msgspec.structs.replace(claim, entries=rest), wanted.shape, state.fleet.limit) == ""
