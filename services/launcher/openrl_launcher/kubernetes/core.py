"""What the launcher of a cluster has to do about one claim or one worker: pure functions of what is stored and seen.

    claim pending ─▶ ResourceClaim and founder's pod ─▶ allocated and bound ─▶ cut ─▶ (ledger) allocated
                     └─ unschedulable: unpinned first (K11), then said (K4) and left standing
    claim allocated, but its ResourceClaim is gone, going, or given to other devices ─▶ its seats cannot be kept
    claim retiring ─▶ its pods gone ─▶ ResourceClaim gone ─▶ freed

Level-triggered, as the local core: they know no events, so a crash between any two steps is finished by the next look
(B1). kube-scheduler decides which device a claim gets and which pending pod is first (K4); nothing here does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from openrl_common.records import ClaimRecord, ClaimState, CutRecord, CutState, SeatRecord, SeatState
from openrl_launcher.core import (
    Forget,
    Free,
    LocalWorker,
    SayAllocated,
    SayFreed,
    SayGone,
    Start,
    Status,
    Stop,
    Unschedulable,
)
from openrl_launcher.kubernetes.manifests import ASSIGNMENT, PINNED
from openrl_launcher.kubernetes.objects import Pod, ResourceClaim


@dataclass(frozen=True, slots=True)
class ClaimView:
    """One claim and all that the cluster has of it. ``allocated_node``: whose devices it holds, "" when unknown."""

    claim: str
    record: ClaimRecord | None
    cut: CutRecord | None
    resource: ResourceClaim | None
    pods: tuple[Pod, ...]
    workers: tuple[LocalWorker, ...]
    allocated_node: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """Apply the ResourceClaim and its founder's pod."""

    claim: str
    assignment: str


@dataclass(frozen=True, slots=True)
class Unpin:
    """The node it was pinned to cannot take it: the pod again, without the pin."""

    claim: str
    pod: Pod


@dataclass(frozen=True, slots=True)
class Allocate:
    """The scheduler has given it devices and bound the founder: write the cut, say ClaimAllocated."""

    claim: str
    node: str


@dataclass(frozen=True, slots=True)
class DeletePod:
    pod: Pod


@dataclass(frozen=True, slots=True)
class DeleteClaim:
    resource: ResourceClaim


ClaimAction = (
    Request | Unpin | Allocate | DeletePod | DeleteClaim | Free | SayAllocated | SayFreed | Unschedulable | Stop
)
WorkerAction = Start | Stop | SayGone | Forget


def decide_claim(view: ClaimView) -> list[ClaimAction]:
    state = None if view.record is None else view.record.state
    match state:
        case ClaimState.PENDING:
            return list(_pending(view))
        case ClaimState.ALLOCATED:
            return list(_allocated(view))
        case ClaimState.QUARANTINED:
            return []
        case _:
            return list(_over(view))


def _pending(view: ClaimView) -> Iterator[ClaimAction]:
    assert view.record is not None
    if view.cut is not None:
        if view.cut.state is CutState.ALLOCATED:
            yield SayAllocated(view.claim)
        return
    founder = min(view.record.entries.items(), key=lambda item: item[1].reserved_at, default=None)
    if founder is None:
        return
    assignment, entry = founder
    pod = next((each for each in view.pods if each.metadata.labels.get(ASSIGNMENT) == assignment), None)
    if view.resource is None or pod is None:
        yield Request(view.claim, assignment)
    elif pod.deleting:
        return  # it is made again once it is gone
    elif pod.ended:
        yield DeletePod(pod)
    elif view.resource.results:
        if pod.spec.node_name:
            yield Allocate(view.claim, pod.spec.node_name)
    elif pod.unschedulable:
        if PINNED in pod.metadata.annotations:
            yield Unpin(view.claim, pod)
        else:
            yield Unschedulable(view.claim, assignment, entry.workload, entry.tenant, pod.unschedulable)


def _allocated(view: ClaimView) -> Iterator[ClaimAction]:
    why = lost(view)
    if not why:
        return
    assert view.record is not None
    status = {worker.assignment: worker.status for worker in view.workers}
    for assignment, entry in view.record.entries.items():
        if status.get(assignment) not in (Status.BUSY, Status.GONE):
            yield Stop(assignment, entry.workload, view.claim, why, although_held=True)


def lost(view: ClaimView) -> str:
    """Why an allocated claim's devices are not its any more, "" while they are."""
    if view.cut is None or view.cut.state is not CutState.ALLOCATED:
        return ""
    if view.resource is None:
        return f"ResourceClaim {view.claim} was deleted"
    if view.resource.metadata.deletion_timestamp is not None:
        return f"ResourceClaim {view.claim} is being deleted"
    devices = {each.device for each in view.resource.results}
    if not devices:
        return f"ResourceClaim {view.claim} has lost its allocation"
    if devices != set(view.cut.devices) or view.allocated_node not in ("", view.cut.node):
        return f"ResourceClaim {view.claim} was allocated anew"
    return ""


def _over(view: ClaimView) -> Iterator[ClaimAction]:
    if any(worker.status is not Status.GONE for worker in view.workers):
        return  # its task deletes the pod, sees it gone and says so
    for pod in view.pods:
        if not pod.deleting:
            yield DeletePod(pod)
    if view.pods:
        return
    if view.resource is not None:
        if view.resource.metadata.deletion_timestamp is None:
            yield DeleteClaim(view.resource)
        return
    retiring = view.record is not None and view.record.state is ClaimState.RETIRING
    if view.cut is not None and view.cut.state is CutState.FREED:
        if retiring:
            yield SayFreed(view.claim)
    elif retiring or (view.cut is not None and view.cut.state is CutState.ALLOCATED):
        yield Free(view.claim)


def decide_worker(
    workload: str, seat: SeatRecord, claim: ClaimRecord | None, workers: tuple[LocalWorker, ...], now: float
) -> list[WorkerAction]:
    """What to do about the assignments of one workload; ``workers`` are those that this launcher knows."""
    actions: list[WorkerAction] = []
    named = seat.assignment if seat.state is not SeatState.EMPTY else ""
    for worker in workers:
        if worker.status is Status.BUSY:
            continue
        if worker.assignment != named:
            if worker.status is Status.GONE:
                actions.append(Forget(worker.assignment))
            else:
                actions.append(Stop(worker.assignment, workload, worker.claim, "no seat backs it"))
        elif worker.status is Status.GONE:
            actions.append(SayGone(worker.assignment, workload, seat.claim))
        elif seat.state is SeatState.RELEASING:
            actions.append(Stop(worker.assignment, workload, seat.claim, "its seat is being released"))
        elif claim is not None and worker.assignment not in claim.entries:
            actions.append(Stop(worker.assignment, workload, worker.claim, "its claim does not list it"))
    known = next((worker for worker in workers if worker.assignment == named), None)
    if named and claim is not None:
        if seat.state is SeatState.HELD and claim.state is ClaimState.ALLOCATED and named in claim.entries:
            if (
                known is None
                or known.status is Status.IDLE
                or (known.status is Status.BACKING_OFF and known.restart_at <= now)
            ):
                actions.append(Start(named, seat.claim, claim.entries[named]))
        elif seat.state is SeatState.RELEASING and known is None and claim.state is not ClaimState.PENDING:
            actions.append(Stop(named, workload, seat.claim, "its seat is being released"))
    return actions
