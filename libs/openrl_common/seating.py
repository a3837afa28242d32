"""The rules of one claim: selection (placement) and the compare-and-swap (ledger) ask the same functions (S6).

Pure. A caller that holds an old copy of a claim gets an answer about that copy; only the ledger's write decides.
"""

from __future__ import annotations

from openrl_common.quantities import format_bytes
from openrl_common.records import ClaimRecord, ClaimState, NodeRecord, Role, Shape


def has_room(num_entries: int, limit: int) -> bool:
    """S1, S2: may one more seat be added to a claim with ``num_entries``, reservations and releasing ones included?"""
    return limit == 0 or num_entries < limit


def join_refusal(claim: ClaimRecord, shape: Shape, limit: int) -> str:
    """P3, as far as the claim alone decides: "" when ``shape`` may join it, else why not, with numbers.

    The limit is looked at last, so that the answer names it only when it is what binds (S5).
    """
    if claim.state is not ClaimState.ALLOCATED:
        return f"the claim is {claim.state}"
    if shape.exclusive or shape.device_count != 1:
        return "the workload is exclusive" if shape.exclusive else f"the workload needs {shape.device_count} devices"
    if len(claim.devices) != 1:
        return f"the claim has {len(claim.devices)} devices"
    if any(entry.exclusive for entry in claim.entries.values()):
        return "the claim is held exclusively"
    if claim.device_bytes < shape.device_bytes:
        return f"needs {format_bytes(shape.device_bytes)}, the device has {format_bytes(claim.device_bytes)}"
    if not has_room(len(claim.entries), limit):
        return f"all {limit} seats are taken"
    return ""


def accepts_role(node: NodeRecord, role: Role) -> bool:
    """P1: no role named = both."""
    return not node.roles or role in node.roles


def usable(node: NodeRecord) -> str:
    """P1, P3: "" when the node counts and takes newcomers, else why not."""
    if node.lost:
        return "is lost"
    if node.suspect:
        return "missed heartbeats"
    if not node.enabled:
        return "is not enabled"
    if not node.complete or not node.devices:
        return "has no complete inventory"
    return ""


def node_refusal(node: NodeRecord, role: Role) -> str:
    """P1, P3: "" when the node takes newcomers of this role, else why not."""
    if problem := usable(node):
        return f"node {node.node} {problem}"
    return "" if accepts_role(node, role) else f"node {node.node} does not accept the role {role}"


def host_refusal(node: NodeRecord, seats_bytes: int, host_bytes: int) -> str:
    """P6: "" when the host memory fits (equality passes; unknown allocatable skips the check), else why not."""
    if node.host_allocatable_bytes == 0 or host_bytes == 0:
        return ""
    free = node.host_allocatable_bytes - node.host_reserved_bytes - seats_bytes
    if host_bytes <= free:
        return ""
    return f"needs {format_bytes(host_bytes)} of host memory, node {node.node} has {format_bytes(max(0, free))} free"
