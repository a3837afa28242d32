"""What placement knows of the fleet: nodes, claims, host budgets, and the order in which claims are tried.

A view fed by mirrors (so it may lag; the ledger re-checks every rule on its write). Claims that may be joined stand
in a sorted index per role, so that a decision costs O(log claims), not a scan: ``(device bytes, owners, seats,
claim id)`` is P4's order, and its range from the needed bytes on is exactly the claims whose device fits.

Invariants: ``_open`` holds exactly the joinable claims with a free seat, ``_full`` those refused by the seat limit
alone (S5); every claim is in at most one of them; counters equal what a recount would give.

Not here: who waits, who was offered what (``line``), and what to do about it (``core``).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from operator import itemgetter

import msgspec
from sortedcontainers import SortedList

from openrl_common.quantities import GIB, format_bytes
from openrl_common.records import ClaimRecord, ClaimState, NodeBudget, NodeRecord, Reason, Role, Shape, Standing, Tier
from openrl_common.seating import has_room, host_refusal, join_refusal, node_refusal, usable

CANDIDATES_MAX = 16
TIERS_MAX = 8

ClaimKey = tuple[int, int, int, str]
DeviceKind = tuple[int, tuple[Role, ...]]
"""Bytes of a device, and the roles that its node accepts (empty: both)."""
_BOTH = (Role.TRAINER, Role.SAMPLER)


@dataclass(frozen=True)
class Need:
    """What a workload asks of a claim. ``avoid``: nodes and claims that failed it (P13)."""

    shape: Shape
    owner: str
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Kind:
    """Nodes that are alike for the question what they could ever hold: one entry per kind, not per node.

    A node with devices of several sizes is of several kinds (P2), one for each range of its sizes: a tier has a floor
    and a ceiling, so a claim gets a device of the size that was meant, and several may be of different sizes (P10).
    """

    device_bytes: int
    """Of the smallest device in the range."""
    num_devices: int
    roles: tuple[Role, ...] = ()
    host_bytes: int = 0
    """Allocatable, whatever others reserve of it now: that is busy, not impossible (W4); 0 = unknown."""
    largest_gib: int = 0
    """Name of the largest size in the range (P2); 0 = that of ``device_bytes``."""


class Fleet:
    """Feed it with ``set_node``, ``set_claim``, ``set_budget``; ask it for candidates, tiers and reasons."""

    def __init__(self, *, limit: int, owner_affinity: bool = True, scalable: tuple[Kind, ...] = ()) -> None:
        """``scalable``: shapes of nodes that could be added (W4)."""
        self.limit = limit
        self.owner_affinity = owner_affinity
        self._scalable = scalable
        self.nodes: dict[str, NodeRecord] = {}
        self.claims: dict[str, ClaimRecord] = {}
        self._host_used: dict[str, int] = {}
        self._node_changes: Counter[str] = Counter()
        self._claim_changes: Counter[str] = Counter()
        self._budgets: dict[str, NodeBudget] = {}
        self._named: dict[str, dict[str, int]] = {}
        """Per claim, host memory of workloads whose seats there were heard of before the claim."""
        self._leaving: dict[str, set[str]] = {}
        """Per claim, assignments that have left it and whose host memory the node still keeps for them."""
        self._reported: dict[str, NodeRecord] = {}
        self._standing: dict[str, Standing] = {}
        self._on_node: defaultdict[str, set[str]] = defaultdict(set)
        self._of_owner: defaultdict[str, set[str]] = defaultdict(set)
        self._open: dict[Role, SortedList[ClaimKey]] = {role: SortedList() for role in _BOTH}
        self._full: dict[Role, SortedList[ClaimKey]] = {role: SortedList() for role in _BOTH}
        self._placed_in: dict[str, tuple[ClaimKey, tuple[SortedList[ClaimKey], ...]]] = {}
        self._kinds: Counter[Kind] = Counter()
        self._devices: Counter[DeviceKind] = Counter()
        self._devices_claimed: Counter[DeviceKind] = Counter()
        self._counted: dict[str, list[DeviceKind]] = {}

    # --- feeding -----------------------------------------------------------------------------------------------

    def set_node(self, node: str, record: NodeRecord | None) -> bool:
        """Take in a node record; True when the node may hold more than before (heartbeats alone change nothing)."""
        before = self.nodes.get(node)
        if record is None:
            self.nodes.pop(node, None)
            self._reported.pop(node, None)
        else:
            self._reported[node] = record
            record = self.nodes[node] = _judged(record, self._standing.get(node, Standing.LIVE))
        if _static(before) == _static(record):
            return False
        self._node_changes[node] += 1
        for known, sign in ((before, -1), (record, +1)):
            for kind in _kinds(known):
                self._kinds[kind] += sign
            if known is not None and usable(known) == "":
                for device in known.devices:
                    self._devices[device.memory_bytes, known.roles] += sign
        self._kinds += Counter()
        for claim in self._on_node.get(node, ()):
            self._count_devices(claim, self.claims[claim])
            self._index(claim)
        return record is not None and usable(record) == ""

    def set_claim(self, claim: str, record: ClaimRecord | None) -> bool:
        """Take in a claim; True when it may be joined and has more room than before (wake-ups, W2)."""
        before = self.claims.get(claim)
        self._named.pop(claim, None)
        if record is not None and record.state is ClaimState.GONE:
            record = None
        if before is not None:
            self._count(claim, before, -1)
        if record is None:
            self._claim_changes.pop(claim, None)
            self.claims.pop(claim, None)
            self._leaving.pop(claim, None)
            self._unindex(claim)
            if before is not None:
                self._count_host(before.node)
            return False
        if before is not None and record.node in self._budgets:
            left = before.entries.keys() - record.entries.keys()
            if leaving := left & self._budgets[record.node].entries.keys():
                self._leaving.setdefault(claim, set()).update(leaving)
        self.claims[claim] = record
        self._count(claim, record, +1)
        self._count_host(record.node)
        self._index(claim)
        has_more_room = record.state is ClaimState.ALLOCATED and (
            before is None
            or before.state is not ClaimState.ALLOCATED
            or bool(before.entries.keys() - record.entries.keys())
            or not record.entries.keys() - before.entries.keys()  # a seat came and went since
        )
        self._claim_changes[claim] += has_more_room
        return has_more_room

    def changes(self, claim: str) -> tuple[int, int]:
        """How often the claim, its node, and the memory there have become more or different: equal when none has since.

        Each of these wakes the line. What only becomes less changes nothing about a refusal.
        """
        record = self.claims.get(claim)
        return self._claim_changes[claim], 0 if record is None else self._node_changes[record.node]

    def set_standing(self, node: str, standing: Standing) -> bool:
        """Take in what the ledger thinks of a node (F3); True when it takes newcomers now and did not before."""
        if self._standing.get(node, Standing.LIVE) is standing:
            return False
        self._standing[node] = standing
        record = self._reported.get(node)
        return record is not None and self.set_node(node, record)

    def set_budget(self, node: str, budget: NodeBudget | None) -> bool:
        """Take in a node's host reservations; True when memory was freed, or what had left a claim is off the node."""
        budget = budget or NodeBudget()
        before = self._host_used.get(node, 0)
        self._budgets[node] = budget
        self._count_host(node)
        used = self._host_used[node]
        self._node_changes[node] += used < before
        over = [
            claim
            for claim, assignments in self._leaving.items()
            if self.claims[claim].node == node and not (assignments & budget.entries.keys())
        ]
        for claim in over:
            del self._leaving[claim]
        return used < before or bool(over)

    def _count_host(self, node: str) -> None:
        """Host memory in use: what the node lists, and what its claims list that was reserved there before (L1).

        Seats, claims and nodes are followed apart: what was written last may be heard of first, and is not free (W1).
        """
        listed = self._budgets[node].entries if node in self._budgets else {}
        ahead = (
            entry.host_bytes
            for claim in self._on_node.get(node, ())
            if self.claims[claim].state is ClaimState.ALLOCATED
            for assignment, entry in self.claims[claim].entries.items()
            if assignment not in listed
        )
        named = (sum(self._named[claim].values()) for claim in self._on_node.get(node, ()) if claim in self._named)
        self._host_used[node] = sum(entry.host_bytes for entry in listed.values()) + sum(ahead) + sum(named)

    def set_seat(self, workload: str, claim: str, assignment: str, host_bytes: int) -> None:
        """Take in a seat on a claim that is known and does not list it yet: until it is heard of again, it has it."""
        record = self.claims.get(claim)
        if record is None or assignment in record.entries:
            return
        budget = self._budgets.get(record.node)
        if budget is None or assignment not in budget.entries:
            self._named.setdefault(claim, {})[workload] = host_bytes
            self._count_host(record.node)

    def drop_seat(self, workload: str, claim: str) -> None:
        """Its seat is over: whether its claim ever listed it does not matter any more."""
        if self._named.get(claim, {}).pop(workload, None) is not None:
            self._count_host(self.claims[claim].node)

    def is_leaving(self, claim: str) -> bool:
        """A seat has left it, and its host memory follows in the next moment (L4: the claim first, then the node).

        Until then the room that it seems to have is not what it will have: who is small would get what somebody larger,
        and earlier in line, is about to fit (W1).
        """
        return claim in self._leaving

    def _count(self, claim: str, record: ClaimRecord, sign: int) -> None:
        if record.node:
            self._count_devices(claim, record if sign > 0 else None)
            (self._on_node[record.node].add if sign > 0 else self._on_node[record.node].discard)(claim)
        for owner in {entry.owner for entry in record.entries.values()}:
            owned = self._of_owner[owner]
            (owned.add if sign > 0 else owned.discard)(claim)
            if not owned:
                del self._of_owner[owner]

    def _count_devices(self, claim: str, record: ClaimRecord | None) -> None:
        """Count the devices of a claim under the roles its node has now; None: not any more."""
        self._devices_claimed.subtract(self._counted.pop(claim, ()))
        node = None if record is None else self.nodes.get(record.node)
        if record is not None and (node is None or usable(node) == ""):
            roles = () if node is None else node.roles
            sizes: dict[str, int] = {}
            if node is not None and len(record.devices) > 1:  # the record has the smallest one's size
                sizes = {device.device: device.memory_bytes for device in node.devices}
            counted = [(sizes.get(device, record.device_bytes), roles) for device in record.devices]
            self._counted[claim] = counted
            self._devices_claimed.update(counted)

    def _fitting(self, shape: Shape) -> tuple[int, int]:
        """Devices that a claim for this shape could get: how many there are, how many of them are claimed.

        Its node accepts the role, and it is no larger than the largest tier.
        """
        largest_bytes = max((tier.ceiling_gib for tier in self.tiers(shape)), default=0) * GIB

        def total(counter: Counter[DeviceKind]) -> int:
            return sum(
                count
                for (size, roles), count in counter.items()
                if shape.device_bytes <= size <= largest_bytes and (not roles or shape.role in roles)
            )

        return total(self._devices), total(self._devices_claimed)

    def _unindex(self, claim: str) -> None:
        key, lists = self._placed_in.pop(claim, (None, ()))
        if key is not None:
            for each in lists:
                each.remove(key)

    def _index(self, claim: str) -> None:
        self._unindex(claim)
        record = self.claims[claim]
        node = self.nodes.get(record.node)
        joinable = (
            record.state is ClaimState.ALLOCATED
            and node is not None
            and usable(node) == ""
            and len(record.devices) == 1
            and not any(entry.exclusive for entry in record.entries.values())
        )
        if not joinable or node is None:
            return
        indexes = self._open if has_room(len(record.entries), self.limit) else self._full
        lists = tuple(indexes[role] for role in (node.roles or _BOTH))
        key = (record.device_bytes, len({entry.owner for entry in record.entries.values()}), len(record.entries), claim)
        for each in lists:
            each.add(key)
        self._placed_in[claim] = (key, lists)

    # --- joining -----------------------------------------------------------------------------------------------

    def seats_free(self, claim: str) -> int | None:
        """Seats that the limit still allows on a claim; None = no limit."""
        record = self.claims.get(claim)
        if record is None:
            return 0
        return None if self.limit == 0 else max(0, self.limit - len(record.entries))

    def host_fits(self, claim: str, host_bytes: int) -> bool:
        """P6 alone, on the claim's node."""
        record = self.claims.get(claim)
        node = self.nodes.get(record.node) if record is not None else None
        return node is None or not self._host_refusal(node, host_bytes)

    def _host_refusal(self, node: NodeRecord, host_bytes: int) -> str:
        return host_refusal(node, self._host_used.get(node.node, 0), host_bytes)

    def refusal(self, claim: str, need: Need, limit: int | None = None) -> str:
        """P3 in full: "" when the claim would take the workload, else why not, with numbers."""
        record = self.claims.get(claim)
        if record is None:
            return "the claim is gone"
        node = self.nodes.get(record.node)
        if record.state is ClaimState.ALLOCATED:
            if node is None:
                return f"node {record.node} is unknown"
            if problem := node_refusal(node, need.shape.role):
                return problem
        if claim in need.avoid or record.node in need.avoid:
            return "it failed this workload lately"
        if node is not None and (problem := self._host_refusal(node, need.shape.host_bytes)):
            return problem
        return join_refusal(record, need.shape, self.limit if limit is None else limit)

    def candidates(
        self,
        need: Need,
        *,
        left_out: Callable[[str], bool] | None = None,
        aimed: Callable[[str], int] | None = None,
        looked_at_max: int | None = None,
    ) -> list[str]:
        """P4: at most 16 claims that would take the workload, best first.

        Args:
            left_out: promised to earlier waiters.
            aimed: requests under way that try this claim first. Among devices of one size such claims come last: each
                request is about to add an owner there, and two that meet on one claim make each other start over. The
                owner's own claims stay first: nobody else's seats make another one better.
            looked_at_max: of the claims whose device fits, look at so many; None = all.
        """
        found: list[str] = []
        crowded: list[tuple[int, str]] = []
        own = self._of_owner.get(need.owner, set()) if self.owner_affinity else set()
        size = -1

        def take(claim: str) -> bool:
            # What the index holds passes ``refusal`` but for what depends on the workload.
            node = self.nodes[self.claims[claim].node]
            avoided = bool(need.avoid) and not need.avoid.isdisjoint((claim, node.node))
            if not (
                avoided or self._host_refusal(node, need.shape.host_bytes) or (left_out is not None and left_out(claim))
            ):
                found.append(claim)
            return len(found) == CANDIDATES_MAX

        for claim in islice(self._in_order(self._open[need.shape.role], need), looked_at_max):
            record = self.claims[claim]
            if record.device_bytes != size:
                if any(take(each) for _, each in sorted(crowded, key=itemgetter(0))):
                    return found
                size, crowded = record.device_bytes, []
            under_way = aimed(claim) if aimed is not None and claim not in own else 0
            if under_way:
                crowded.append((under_way, claim))
            elif take(claim):
                return found
        any(take(each) for _, each in sorted(crowded, key=itemgetter(0)))
        return found

    def _in_order(self, index: SortedList[ClaimKey], need: Need) -> Iterator[str]:
        """P4's order over the claims of ``index`` whose device fits: by device size, the owner's own claims first."""
        if need.shape.exclusive or need.shape.device_count != 1:
            return
        own: defaultdict[int, list[ClaimKey]] = defaultdict(list)
        if self.owner_affinity:
            for claim in self._of_owner.get(need.owner, ()):
                key, lists = self._placed_in.get(claim, (None, ()))
                if key is not None and any(each is index for each in lists):
                    own[key[0]].append(key)
        size = -1
        for key in index.irange(minimum=(need.shape.device_bytes, 0, 0, "")):
            if key[0] != size:
                size = key[0]
                for own_key in sorted(own.get(size, ())):
                    yield own_key[3]
            if key not in own.get(size, ()):
                yield key[3]

    # --- founding ----------------------------------------------------------------------------------------------

    @property
    def known(self) -> bool:
        """At least one node that counts (P1): before that nothing is called impossible."""
        return bool(self._kinds)

    @property
    def kinds(self) -> frozenset[Kind]:
        """What the nodes that count are like."""
        return frozenset(self._kinds)

    def tiers(self, shape: Shape) -> tuple[Tier, ...]:
        """P9: every catalogue shape that fits, tightest first, as floors in exact bytes and ceilings in whole GiB.

        The catalogue (P2) is what nodes have, never what is free. Empty: no node that counts could hold it. Of very
        many sizes the largest one's tier stands for all that lie between.
        """
        known = (*self._kinds, *self._scalable)
        sizes = sorted({k.largest_gib or ceiling_gib(k.device_bytes) for k in known if _holds(k, shape)})
        return tuple(
            Tier(count=shape.device_count, floor_bytes=shape.device_bytes, ceiling_gib=size)
            for size in sizes[: TIERS_MAX - 1] + sizes[TIERS_MAX - 1 :][-1:]
        )

    def impossible(self, shape: Shape) -> str:
        """W4: "" when some node, or one that could be added, could hold the shape, were it idle; else a sentence with
        need and largest shape.

        A role that no node accepts is not impossible (``RoleNotAccepted``: labels change), an empty fleet is neither.
        """
        known = (*self._kinds, *self._scalable)
        if not self._kinds or any(_holds(kind, shape, any_role=True) for kind in known):
            return ""
        wanted = f"needs {_devices(shape)}"
        fitting = [k for k in known if k.device_bytes >= shape.device_bytes and k.num_devices >= shape.device_count]
        if not fitting:
            largest = max(known, key=lambda kind: (kind.device_bytes, kind.num_devices))
            shape_name = f"{largest.num_devices} x {format_bytes(largest.device_bytes)}"
            short_bytes = shape.device_bytes - largest.device_bytes
            looks_equal = format_bytes(shape.device_bytes) == format_bytes(largest.device_bytes)
            short = f", {format_bytes(short_bytes)} less" if looks_equal and short_bytes > 0 else ""
            return f"{wanted}: the largest shape of the fleet is {shape_name} on a node{short}"
        most = max(kind.host_bytes for kind in fitting)
        return (
            f"needs {format_bytes(shape.host_bytes)} of host memory beside {_devices(shape)}: "
            f"the most that such a node has is {format_bytes(most)} (on a small host: a lower --{shape.role}-host-base)"
        )

    # --- reasons -----------------------------------------------------------------------------------------------

    def why(self, need: Need, cause: str = "") -> tuple[Reason, str]:
        """Why a workload that was not seated waits: the first of W4 that holds, and a sentence with numbers.

        Args:
            cause: what the launcher said of its own claim; used only when nothing more specific holds.
        """
        shape = need.shape
        if sentence := self.impossible(shape):
            return Reason.IMPOSSIBLE, sentence
        if not self._kinds:
            return Reason.WAITING_FOR_DEVICE, "no node has joined the fleet yet"
        if not self.tiers(shape):
            return Reason.ROLE_NOT_ACCEPTED, f"no node that could hold it accepts the role {shape.role}"
        if not any(_holds(kind, shape) for kind in self._kinds):
            return Reason.UNSCHEDULABLE, (
                f"no node has {_devices(shape)} yet: it waits for one that --scalable-shapes promises"
            )
        fitting, claimed = self._fitting(shape)
        if claimed >= fitting:
            if self._first_full(need) is not None:
                return Reason.WAITING_FOR_SEAT, (
                    f"every claim that fits has its {self.limit} seats taken (--max-seats-per-claim {self.limit}), "
                    f"and no device of {format_bytes(shape.device_bytes)} is free"
                )
            if host := self._first_host_refusal(need):
                return Reason.WAITING_FOR_HOST_MEMORY, host
            return Reason.WAITING_FOR_DEVICE, (
                f"all {fitting} devices of at least {format_bytes(shape.device_bytes)} are in use"
                + (", and it shares none" if shape.exclusive else "")
            )
        if "host memory" in cause:
            return Reason.WAITING_FOR_HOST_MEMORY, cause
        if host := self._host_refusal_to_found(shape):
            return Reason.WAITING_FOR_HOST_MEMORY, host
        free = f"{fitting - claimed} of {fitting} devices of at least {format_bytes(shape.device_bytes)} look free"
        return (Reason.UNSCHEDULABLE, cause) if cause else (Reason.RETRYING, f"{free}: asking again")

    def _first_full(self, need: Need) -> str | None:
        """S5: a claim that only the limit refuses."""
        for claim in self._in_order(self._full[need.shape.role], need):
            if self.refusal(claim, need, limit=0) == "":
                return claim
        return None

    def _first_host_refusal(self, need: Need) -> str:
        for claim in self._in_order(self._open[need.shape.role], need):
            refused = self.refusal(claim, need)
            if "host memory" in refused:
                return refused
        return ""

    def _host_refusal_to_found(self, shape: Shape) -> str:
        """P6 for an own claim: "" when some node with a device left has the memory (or none has a device left)."""
        first = ""
        for node in self.nodes.values():
            if not any(_holds(kind, shape) for kind in _kinds(node)):
                continue
            if self.devices_claimed(node.node) >= len(node.devices):
                continue
            refused = self._host_refusal(node, shape.host_bytes)
            if not refused:
                return ""
            first = first or refused
        return first

    # --- showing -----------------------------------------------------------------------------------------------

    def claims_on(self, node: str) -> list[str]:
        return sorted(self._on_node.get(node, ()))

    def host_used_bytes(self, node: str) -> int:
        return self._host_used.get(node, 0)

    def devices_claimed(self, node: str) -> int:
        return sum(len(self.claims[claim].devices) for claim in self._on_node.get(node, ()))

    def looked_at(self, need: Need, num_max: int) -> list[str]:
        """Claims to show in ``explain``: those with room in P4's order, then the full ones, then any other."""
        shape = need.shape
        indexed = chain(self._in_order(self._open[shape.role], need), self._in_order(self._full[shape.role], need))
        found: dict[str, None] = {}
        for claim in chain(indexed, self.claims):
            found.setdefault(claim)
            if len(found) == num_max:
                break
        return list(found)


def ceiling_gib(device_bytes: int) -> int:
    """P2: a shape's name: whole GiB rounded up (22.5 GiB is 23, 79.65 is 80)."""
    return -(-device_bytes // GIB)


def _kinds(node: NodeRecord | None) -> list[Kind]:
    """The kinds of a node that counts for the catalogue: every range of its sizes (P2), sized by the smallest device.

    A suspect or lost node still could hold things later.
    """
    if node is None or not node.enabled or not node.complete:
        return []
    shapes: defaultdict[int, list[int]] = defaultdict(list)
    for device in node.devices:
        shapes[ceiling_gib(device.memory_bytes)].append(device.memory_bytes)
    ranges = ((low, high) for low in shapes for high in shapes if low <= high)
    return [
        Kind(
            device_bytes=min(shapes[low]),
            num_devices=sum(len(sizes) for gib, sizes in shapes.items() if low <= gib <= high),
            roles=node.roles,
            host_bytes=node.host_allocatable_bytes,
            largest_gib=high,
        )
        for low, high in ranges
    ]


def _devices(shape: Shape) -> str:
    count = f"{shape.device_count} devices" if shape.device_count != 1 else "a device"
    return f"{count} of {format_bytes(shape.device_bytes)}"


def _judged(record: NodeRecord, standing: Standing) -> NodeRecord:
    """The record with what the ledger thinks of its node."""
    if standing is Standing.LIVE:
        return record
    return msgspec.structs.replace(record, suspect=True, lost=record.lost or standing is Standing.LOST)


def _static(node: NodeRecord | None) -> tuple[object, ...] | None:
    if node is None:
        return None
    return (
        node.devices,
        node.roles,
        node.enabled,
        node.complete,
        node.suspect,
        node.lost,
        node.host_allocatable_bytes,
        node.host_reserved_bytes,
    )


def _holds(kind: Kind, shape: Shape, *, any_role: bool = False) -> bool:
    return (
        kind.device_bytes >= shape.device_bytes
        and kind.num_devices >= shape.device_count
        and (any_role or not kind.roles or shape.role in kind.roles)
        and (kind.host_bytes == 0 or kind.host_bytes >= shape.host_bytes)
    )
