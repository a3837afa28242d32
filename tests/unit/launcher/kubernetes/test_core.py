"""K3, K4, B1: what there is to do about a claim and a worker, from what is stored and seen."""

from __future__ import annotations

from typing import Any

import msgspec

from openrl_common.quantities import GIB
from openrl_common.records import ClaimEntry, ClaimRecord, ClaimState, CutRecord, CutState, Role, SeatRecord, SeatState
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
from openrl_launcher.kubernetes.core import (
    Allocate,
    ClaimView,
    DeleteClaim,
    DeletePod,
    Request,
    Unpin,
    decide_claim,
    decide_worker,
)
from openrl_launcher.kubernetes.objects import (
    AllocatedDevices,
    Allocation,
    AllocationResult,
    ClaimStatus,
    Condition,
    Meta,
    Pod,
    PodSpec,
    PodStatus,
    ResourceClaim,
)

ENTRY = ClaimEntry(
    workload="t--j--trainer", tenant="t", owner="t/j", role=Role.TRAINER, device_bytes=GIB, host_bytes=GIB,
    exclusive=False, incarnation=1, reserved_at=1.0,
)  # fmt: skip
PENDING = ClaimRecord(state=ClaimState.PENDING, entries={"a-1": ENTRY})
ALLOCATED = msgspec.structs.replace(PENDING, state=ClaimState.ALLOCATED, node="n1", devices=("gpu-0",))
RETIRING = ClaimRecord(state=ClaimState.RETIRING)
CUT = CutRecord(state=CutState.ALLOCATED, node="n1", devices=("gpu-0",))
UNSCHEDULABLE = Condition(type="PodScheduled", status="False", reason="Unschedulable", message="0/3 nodes: no device")


def resource(*devices: str, deleting: bool = False) -> ResourceClaim:
    results = [AllocationResult(device=device, pool="n1", driver="d") for device in devices]
    allocation = Allocation(devices=AllocatedDevices(results=results)) if devices else None
    meta = Meta(name="c-1", uid="u", deletion_timestamp="now" if deleting else None)
    return ResourceClaim(metadata=meta, status=ClaimStatus(allocation=allocation))


def pod(
    *, on: str = "", phase: str = "Pending", pinned: str = "", deleting: bool = False, verdict: bool = False
) -> Pod:
    return Pod(
        metadata=Meta(
            name="p", uid="u", labels={"openrl.io/assignment": "a-1"},
            annotations={"openrl.io/pinned": pinned} if pinned else {}, deletion_timestamp="now" if deleting else None,
        ),
        spec=PodSpec(node_name=on),
        status=PodStatus(phase=phase, conditions=[UNSCHEDULABLE] if verdict else []),
    )  # fmt: skip


def decide(record: ClaimRecord | None, **fields: Any) -> list[Any]:
    given: dict[str, Any] = {"cut": None, "resource": None, "pods": (), "workers": (), **fields}
    return decide_claim(ClaimView(claim="c-1", record=record, **given))


def worker(status: Status, assignment: str = "a-1") -> LocalWorker:
    return LocalWorker(assignment, "t--j--trainer", "c-1", status)


def test_B1_a_pending_claim_asks_for_what_is_missing_whatever_a_crash_left() -> None:
    assert decide(PENDING) == [Request("c-1", "a-1")]
    assert decide(PENDING, resource=resource()) == [Request("c-1", "a-1")]
    assert decide(PENDING, resource=resource(), pods=(pod(),)) == []
    assert decide(PENDING, resource=resource(), pods=(pod(deleting=True),)) == []
    assert decide(PENDING, resource=resource(), pods=(pod(phase="Failed"),)) == [DeletePod(pod(phase="Failed"))]


def test_K4_the_verdict_is_passed_on_word_for_word_and_a_pin_is_given_up_first() -> None:
    told = decide(PENDING, resource=resource(), pods=(pod(verdict=True),))
    assert told == [Unschedulable("c-1", "a-1", "t--j--trainer", "t", "0/3 nodes: no device")]
    pinned = pod(verdict=True, pinned="n1")
    assert decide(PENDING, resource=resource(), pods=(pinned,)) == [Unpin("c-1", pinned)]


def test_K4_an_allocation_is_taken_once_the_founder_is_bound_and_said_until_the_ledger_knows() -> None:
    assert decide(PENDING, resource=resource("gpu-0"), pods=(pod(),)) == []
    assert decide(PENDING, resource=resource("gpu-0"), pods=(pod(on="n1"),)) == [Allocate("c-1", "n1")]
    assert decide(PENDING, resource=resource("gpu-0"), pods=(pod(on="n1"),), cut=CUT) == [SayAllocated("c-1")]


def test_K4_an_allocated_claim_that_lost_its_devices_cannot_keep_its_seats() -> None:
    for lost in (None, resource("gpu-0", deleting=True), resource(), resource("gpu-1")):
        (action,) = decide(ALLOCATED, cut=CUT, resource=lost, workers=(worker(Status.RUNNING),))
        assert isinstance(action, Stop)
        assert action.although_held
    (moved,) = decide(ALLOCATED, cut=CUT, resource=resource("gpu-0"), allocated_node="n2")
    assert isinstance(moved, Stop)
    assert decide(ALLOCATED, cut=CUT, resource=resource("gpu-0"), allocated_node="n1") == []
    assert decide(ALLOCATED, cut=CUT, resource=None, workers=(worker(Status.BUSY),)) == []


def test_B4_a_retiring_claim_is_freed_only_when_nothing_of_it_is_in_the_cluster() -> None:
    assert decide(RETIRING, cut=CUT, resource=resource("gpu-0"), workers=(worker(Status.RUNNING),)) == []
    left = pod(on="n1")
    assert decide(RETIRING, cut=CUT, resource=resource("gpu-0"), pods=(left,)) == [DeletePod(left)]
    assert decide(RETIRING, cut=CUT, resource=resource("gpu-0"), pods=(pod(deleting=True),)) == []
    assert decide(RETIRING, cut=CUT, resource=resource("gpu-0")) == [DeleteClaim(resource("gpu-0"))]
    assert decide(RETIRING, cut=CUT, resource=resource("gpu-0", deleting=True)) == []
    assert decide(RETIRING, cut=CUT) == [Free("c-1")]
    assert decide(RETIRING) == [Free("c-1")], "never cut"
    assert decide(RETIRING, cut=CutRecord(state=CutState.FREED)) == [SayFreed("c-1")]
    assert decide(None, resource=resource()) == [DeleteClaim(resource())], "nobody knows it"
    assert decide(None) == []


def test_B7_a_worker_starts_only_on_a_held_seat_of_an_allocated_claim_that_lists_it() -> None:
    held = SeatRecord(state=SeatState.HELD, assignment="a-1", claim="c-1")
    assert decide_worker("w", held, ALLOCATED, (), 0.0) == [Start("a-1", "c-1", ENTRY)]
    assert decide_worker("w", held, PENDING, (), 0.0) == []
    assert decide_worker("w", held, None, (), 0.0) == []
    assert decide_worker("w", held, msgspec.structs.replace(ALLOCATED, entries={}), (), 0.0) == []
    assert decide_worker("w", held, ALLOCATED, (worker(Status.RUNNING),), 0.0) == []


def test_F5_a_releasing_seat_and_one_that_names_another_stop_what_runs() -> None:
    releasing = SeatRecord(state=SeatState.RELEASING, assignment="a-1", claim="c-1")
    (stopped,) = decide_worker("w", releasing, ALLOCATED, (worker(Status.RUNNING),), 0.0)
    assert isinstance(stopped, Stop)
    (never_ran,) = decide_worker("w", releasing, ALLOCATED, (), 0.0)
    assert isinstance(never_ran, Stop)
    assert decide_worker("w", releasing, ALLOCATED, (worker(Status.GONE),), 0.0) == [SayGone("a-1", "w", "c-1")]
    (old,) = decide_worker("w", SeatRecord(), None, (worker(Status.RUNNING),), 0.0)
    assert isinstance(old, Stop)
    assert decide_worker("w", SeatRecord(), None, (worker(Status.GONE),), 0.0) == [Forget("a-1")]
