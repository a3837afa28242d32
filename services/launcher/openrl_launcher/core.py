"""What the launcher of one node has to do now, derived from what is stored and what runs (B1): a pure function.

``decide(view)`` is level-triggered: it knows no events, only the present, so calling it again after a crash, a lost
hint or a repeated one gives the work that is left, and nothing twice.

Invariants of the answer:
- A process is started only for a held seat (named and listed) on an allocated claim of this node (B7).
- A worker that no seat backs, or whose seat is being released, is stopped; the deletion wins over everything (F5).
- A device is given to one claim; pending claims are served in line order, those whose owner has its other worker
  seated before all others, each by its tightest tier and the smallest device that fits (W1, P9), after a look at the
  host budget (B8), of which those before it are left what they need for a seat beside others here.
- A claim is freed only when none of its workers is left (B4).

It does no input or output and keeps no state; ``claims`` and ``workers`` carry it out (CAS, processes, events).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from openrl_common.quantities import GIB
from openrl_common.records import (
    ClaimEntry,
    ClaimRecord,
    ClaimState,
    CutRecord,
    CutState,
    Device,
    NodeBudget,
    Role,
    SeatRecord,
    SeatState,
    Shape,
    Standing,
    Tier,
)
from openrl_common.seating import join_refusal


class Status(StrEnum):
    """Where a worker of this node is, as the launcher knows it. ``BUSY``: one of its own tasks is at it."""

    IDLE = "idle"
    RUNNING = "running"
    BACKING_OFF = "backing-off"
    EXITED = "exited"
    BUSY = "busy"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class LocalWorker:
    """One assignment that has, or had, a process here. ``restart_at`` (seconds) counts while it is backing off."""

    assignment: str
    workload: str
    claim: str
    status: Status
    restart_at: float = 0.0


@dataclass(frozen=True, slots=True)
class View:
    """Everything a decision needs. ``holds``: device → claim, devices of this node that are taken only."""

    now: float
    node: str
    devices: tuple[Device, ...]
    claims: Mapping[str, ClaimRecord]
    seats: Mapping[str, SeatRecord]
    cuts: Mapping[str, CutRecord]
    holds: Mapping[str, str]
    workers: Mapping[str, LocalWorker]
    roles: tuple[Role, ...] = ()
    host_allocatable_bytes: int = 0
    host_reserved_bytes: int = 0
    host_budget: NodeBudget = field(default_factory=NodeBudget)
    draining: bool = False
    unix_now: float = 0.0


@dataclass(frozen=True, slots=True)
class Start:
    """Pass the start gate (B7), then start the process."""

    assignment: str
    claim: str
    entry: ClaimEntry


@dataclass(frozen=True, slots=True)
class Stop:
    """Fence, stop, see it gone, say so (L4). Also for an assignment of which nothing ever ran.

    ``although_held``: its seat is held and cannot be kept, for what it names is lost; otherwise a held seat is spared.
    """

    assignment: str
    workload: str
    claim: str
    why: str
    although_held: bool = False


@dataclass(frozen=True, slots=True)
class SayGone:
    """Its process was seen gone but its seat is still being released: say it again."""

    assignment: str
    workload: str
    claim: str


@dataclass(frozen=True, slots=True)
class Forget:
    """Gone and no seat names it any more."""

    assignment: str


@dataclass(frozen=True, slots=True)
class Cut:
    """Give ``devices`` to the claim: holds first, then the record (B8)."""

    claim: str
    devices: tuple[str, ...]
    device_bytes: int
    tier: str


@dataclass(frozen=True, slots=True)
class SayAllocated:
    """The claim is cut here but its ledger record is still pending: say it again."""

    claim: str


@dataclass(frozen=True, slots=True)
class Unschedulable:
    """Nothing of this node fits the pending claim now; ``cause`` has the numbers."""

    claim: str
    assignment: str
    workload: str
    tenant: str
    cause: str


@dataclass(frozen=True, slots=True)
class Free:
    """Write the claim off as freed (also when it was never cut), then release its devices."""

    claim: str


@dataclass(frozen=True, slots=True)
class SayFreed:
    claim: str


@dataclass(frozen=True, slots=True)
class ReleaseDevice:
    """A device that names a claim which does not need it (B8: a crash between the two writes)."""

    device: str
    claim: str


Action = Start | Stop | SayGone | Forget | Cut | SayAllocated | Unschedulable | Free | SayFreed | ReleaseDevice


def decide(view: View) -> list[Action]:
    """Everything to do now, in an order that may be carried out as it stands: stops, frees, starts, cuts."""
    actions = [*_unbacked(view), *_releasing(view), *_free(view), *_stale_holds(view), *_start(view)]
    if not view.draining:
        actions.extend(_allocate(view))
    return actions


# --- workers ------------------------------------------------------------------------------------------------------


def _unbacked(view: View) -> Iterator[Action]:
    for worker in view.workers.values():
        seat = view.seats.get(worker.workload, SeatRecord())
        named = seat.state is not SeatState.EMPTY and seat.assignment == worker.assignment
        if worker.status is Status.BUSY:
            continue
        if not named:
            if worker.status is Status.GONE:
                yield Forget(worker.assignment)
            else:
                yield Stop(worker.assignment, worker.workload, worker.claim, "no seat backs it")
            continue
        claim = view.claims.get(seat.claim)
        listed = claim is None or worker.assignment in claim.entries
        if seat.state is SeatState.HELD and not listed and worker.status is not Status.GONE:
            yield Stop(worker.assignment, worker.workload, worker.claim, "its claim does not list it")
        elif worker.status is Status.GONE:
            yield SayGone(worker.assignment, worker.workload, seat.claim)


def _releasing(view: View) -> Iterator[Action]:
    for workload, seat in view.seats.items():
        if seat.state is not SeatState.RELEASING:
            continue
        worker = view.workers.get(seat.assignment)
        if worker is None:
            if _is_mine(view, seat.claim):
                yield Stop(seat.assignment, workload, seat.claim, "its seat is being released")
        elif worker.status not in (Status.BUSY, Status.GONE):
            yield Stop(seat.assignment, workload, seat.claim, "its seat is being released")


def _start(view: View) -> Iterator[Action]:
    if view.draining:
        return
    for seat in view.seats.values():
        if seat.state is not SeatState.HELD:
            continue
        claim = view.claims.get(seat.claim)
        if claim is None or claim.state is not ClaimState.ALLOCATED or claim.node != view.node:
            continue
        entry = claim.entries.get(seat.assignment)
        if entry is None:
            continue
        worker = view.workers.get(seat.assignment)
        if (
            worker is None
            or worker.status is Status.IDLE
            or (worker.status is Status.BACKING_OFF and worker.restart_at <= view.now)
        ):
            yield Start(seat.assignment, seat.claim, entry)


def _is_mine(view: View, claim_id: str) -> bool:
    """Whether the claim's device is of this node, so that only this launcher can say what runs there."""
    claim = view.claims.get(claim_id)
    return claim is not None and claim.state is not ClaimState.PENDING and claim.node == view.node


# --- claims -------------------------------------------------------------------------------------------------------


def _occupied(view: View) -> set[str]:
    """Claims whose workers are not seen gone yet (B4); "" among them: of a process that runs nobody knows the claim.

    Such a one was found running without a record, and its seat is lost with the ledger's bucket (L7). It may be on any
    device of the node, so none is freed before it is gone.
    """
    return {worker.claim for worker in view.workers.values() if worker.status is not Status.GONE}


def _free(view: View) -> Iterator[Action]:
    occupied = _occupied(view)
    if "" in occupied:
        return
    for claim_id, claim in view.claims.items():
        if claim.state not in (ClaimState.RETIRING, ClaimState.GONE) or claim_id in occupied:
            continue
        cut = view.cuts.get(claim_id)
        if cut is None:
            if claim.state is ClaimState.RETIRING:
                yield Free(claim_id)
        elif cut.state is CutState.ALLOCATED and cut.node == view.node:
            yield Free(claim_id)
        elif cut.state is CutState.FREED and claim.state is ClaimState.RETIRING and cut.node in ("", view.node):
            yield SayFreed(claim_id)
    for claim_id, cut in view.cuts.items():
        mine = cut.state is CutState.ALLOCATED and cut.node == view.node
        if mine and claim_id not in view.claims and claim_id not in occupied:
            yield Free(claim_id)  # its record was deleted: nobody else knows of these devices


def _stale_holds(view: View) -> Iterator[Action]:
    if "" in _occupied(view):
        return
    for device, claim_id in view.holds.items():
        cut = view.cuts.get(claim_id)
        if cut is None:
            claim = view.claims.get(claim_id)
            if claim is None or claim.state is ClaimState.GONE:
                yield ReleaseDevice(device, claim_id)
            # pending: _allocate finishes or frees it; retiring: Free does
        elif not (
            cut.node == view.node and device in cut.devices and cut.state in (CutState.ALLOCATED, CutState.QUARANTINED)
        ):
            yield ReleaseDevice(device, claim_id)


def _allocate(view: View) -> Iterator[Action]:
    waiting = [(claim_id, claim) for claim_id, claim in view.claims.items() if claim.state is ClaimState.PENDING]
    if not waiting:
        return
    seated = _seated(view)
    pending = sorted(
        (not any((e.owner, e.incarnation) in seated for e in claim.entries.values()), claim.order, claim_id)
        for claim_id, claim in waiting
    )
    holds = dict(view.holds)
    host_used_bytes, set_aside_bytes = _host_used_bytes(view), 0
    shared = _shared(view)
    for _, _, claim_id in pending:
        cut = view.cuts.get(claim_id)
        if cut is not None:
            if cut.state is CutState.ALLOCATED and cut.node == view.node:
                yield SayAllocated(claim_id)
            continue
        claim = view.claims[claim_id]
        founder = min(claim.entries.items(), key=lambda item: item[1].reserved_at, default=None)
        if founder is None:
            continue
        assignment, entry = founder
        chosen = _choose(view, claim_id, claim, entry, holds, host_used_bytes, set_aside_bytes)
        kept: tuple[str, ...] = ()
        if isinstance(chosen, str):
            yield Unschedulable(claim_id, assignment, entry.workload, entry.tenant, chosen)
            fits_memory = host_used_bytes + entry.host_bytes <= view.host_allocatable_bytes
            if fits_memory and shared.may_take(entry) and not _unwelcome(view, claim, entry):
                set_aside_bytes += entry.host_bytes
        else:
            yield chosen
            kept = chosen.devices
            host_used_bytes += entry.host_bytes
            holds.update(dict.fromkeys(kept, claim_id))
        for device, holder in list(holds.items()):
            if holder == claim_id and device not in kept:
                del holds[device]
                yield ReleaseDevice(device, claim_id)


def _seated(view: View) -> set[tuple[str, int]]:
    """Who already has a worker on an allocated claim: the other one goes first, or two jobs with half of what they
    need could wait for each other until one of them times out."""
    return {
        (entry.owner, entry.incarnation)
        for claim in view.claims.values()
        if claim.state is ClaimState.ALLOCATED
        for entry in claim.entries.values()
    }


def _host_used_bytes(view: View) -> int:
    """Reserved by others, by every seat on the node, and by claims here that the ledger has not counted yet.

    Or has: the node is reserved before the claim, and may be heard of after it.
    """
    used = view.host_reserved_bytes + sum(entry.host_bytes for entry in view.host_budget.entries.values())
    for claim_id, claim in view.claims.items():
        cut = view.cuts.get(claim_id)
        is_cut = cut is not None and cut.state is CutState.ALLOCATED and cut.node == view.node
        if (claim.state is ClaimState.PENDING and is_cut) or (
            claim.state is ClaimState.ALLOCATED and claim.node == view.node
        ):
            for assignment, entry in claim.entries.items():
                if assignment not in view.host_budget.entries:
                    used += entry.host_bytes
    return used


@dataclass(frozen=True, slots=True)
class _Shared:
    """Claims of this node with room for somebody. A waiter that fits one of them and the node's memory is about to be
    moved there by placement (F1): its request is under way, and who cut a device first would take its memory (W1)."""

    claims: tuple[ClaimRecord, ...]
    limit: int

    def may_take(self, entry: ClaimEntry) -> bool:
        shape = Shape(role=entry.role, device_bytes=entry.device_bytes, exclusive=entry.exclusive)
        return any(join_refusal(claim, shape, self.limit) == "" for claim in self.claims)


def _shared(view: View) -> _Shared:
    """None on a node that takes no newcomers (F3), or whose memory nobody counts (P6)."""
    if not view.host_allocatable_bytes or view.host_budget.standing is not Standing.LIVE:
        return _Shared((), 0)
    standing = (claim for claim in view.claims.values() if claim.state.stands)
    limit = max(standing, key=lambda claim: claim.founded_at).limit  # in force: the ledger keeps it true on these
    anybody = Shape(role=Role.TRAINER, device_bytes=0)
    mine = (claim for claim in view.claims.values() if claim.node == view.node)
    return _Shared(tuple(claim for claim in mine if join_refusal(claim, anybody, limit) == ""), limit)


def _unwelcome(view: View, claim: ClaimRecord, entry: ClaimEntry) -> str:
    """Why the node is not for this claim whatever is free; "" when it is."""
    avoided = next((a for a in claim.avoid if a.node == view.node and a.until > view.unix_now), None)
    if avoided is not None:
        return f"node {view.node} is avoided by it for {avoided.until - view.unix_now:.0f} s more: {avoided.why}"
    if view.roles and entry.role not in view.roles:
        return f"node {view.node} takes {' and '.join(view.roles)} workers only, this is a {entry.role}"
    return ""


def _choose(
    view: View,
    claim_id: str,
    claim: ClaimRecord,
    entry: ClaimEntry,
    holds: Mapping[str, str],
    host_used_bytes: int,
    set_aside_bytes: int,
) -> Cut | str:
    """The devices for a pending claim, or why there are none, in one line with numbers."""
    if unwelcome := _unwelcome(view, claim, entry):
        return unwelcome
    left_bytes = view.host_allocatable_bytes - host_used_bytes - set_aside_bytes
    if view.host_allocatable_bytes and entry.host_bytes > left_bytes:
        aside = f", {_gib(set_aside_bytes)} set aside for who came first" if set_aside_bytes else ""
        return (
            f"node {view.node} has not enough host memory: needs {_gib(entry.host_bytes)}, "
            f"{_gib(max(0, left_bytes))} of {_gib(view.host_allocatable_bytes)} left{aside}"
        )
    tiers = claim.tiers or (Tier(count=1, floor_bytes=entry.device_bytes, ceiling_gib=0),)
    for tier in tiers:
        fitting = [device for device in view.devices if _fits(device, tier)]
        free = [device for device in fitting if holds.get(device.device, claim_id) == claim_id]
        if len(free) >= tier.count > 0:
            # its own leftovers of an interrupted cut first, then the smallest
            free.sort(key=lambda device: (device.device not in holds, device.memory_bytes, _natural(device.device)))
            chosen = free[: tier.count]
            return Cut(
                claim_id,
                tuple(device.device for device in chosen),
                min(device.memory_bytes for device in chosen),
                f"{tier.count}x{tier.ceiling_gib or -(-tier.floor_bytes // GIB)}",
            )
    return _why_no_device(view, claim_id, tiers, holds)


def _why_no_device(view: View, claim_id: str, tiers: tuple[Tier, ...], holds: Mapping[str, str]) -> str:
    floor_bytes = min(tier.floor_bytes for tier in tiers)
    count = min(tier.count for tier in tiers)
    fitting = [device for device in view.devices if any(_fits(device, tier) for tier in tiers)]
    need = f"{count} device{'s' if count > 1 else ''} of at least {_gib(floor_bytes)}"
    if len(fitting) < count:
        largest = max((device.memory_bytes for device in view.devices), default=0)
        return (
            f"node {view.node} has not {need}: {len(fitting)} of its {len(view.devices)} fit, "
            f"the largest has {_gib(largest)}"
        )
    free = sum(holds.get(device.device, claim_id) == claim_id for device in fitting)
    return f"node {view.node} has not {need} free: {free} of the {len(fitting)} that fit"


def _fits(device: Device, tier: Tier) -> bool:
    return tier.floor_bytes <= device.memory_bytes and (
        not tier.ceiling_gib or device.memory_bytes <= tier.ceiling_gib * GIB
    )


def _natural(device: str) -> tuple[int, str]:
    return (len(device), device)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f} GiB"


# --- failures -----------------------------------------------------------------------------------------------------

BACK_OFF_FIRST_S = 1.0
BACK_OFF_MOST_S = 60.0
STABLE_S = 600.0
"""A worker that ran this long before it failed starts a new count of failures (F4)."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows from a worker's own exit (F4): ``failures`` in a row, and when to try again (None: never)."""

    failures: int
    restart_in_s: float | None


def judge_exit(*, failures_before: int, ran_s: float, restarts_max: int) -> Verdict:
    """Restart-on-failure with back-off 1, 2, 4 … seconds and a bounded count."""
    failures = 1 if ran_s >= STABLE_S else failures_before + 1
    if failures > restarts_max:
        return Verdict(failures, None)
    return Verdict(failures, min(BACK_OFF_FIRST_S * 2 ** (failures - 1), BACK_OFF_MOST_S))
