"""The ledger's bucket derived from what runs (L7), purely."""

from __future__ import annotations

from typing import Any

import msgspec

from openrl_common.records import (
    ClaimEntry,
    ClaimState,
    CutRecord,
    CutState,
    JobKind,
    Role,
    SeatState,
    Shape,
    WorkerRecord,
    WorkerState,
    WorkloadPhase,
    WorkloadRecord,
)
from openrl_ledger.core.rebuild import Rebuilt, rebuild
from unit.ledger.world import GIB

ENTRY = ClaimEntry(
    workload="t--j--trainer", tenant="t", owner="t/j", role=Role.TRAINER, device_bytes=10 * GIB, host_bytes=20 * GIB,
    exclusive=False, incarnation=7, reserved_at=1.0,
)  # fmt: skip
CUT = CutRecord(state=CutState.ALLOCATED, node="n1", devices=("d0",), device_bytes=80 * GIB, tier="1x80")


def worker(assignment: str = "a1", **fields: Any) -> WorkerRecord:
    known: dict[str, Any] = {
        "assignment": assignment, "workload": ENTRY.workload, "tenant": "t", "claim": "c1", "node": "n1",
        "state": WorkerState.RUNNING, "entry": ENTRY,
    }  # fmt: skip
    return WorkerRecord(**{**known, **fields})


def workload(phase: WorkloadPhase = WorkloadPhase.READY, **fields: Any) -> WorkloadRecord:
    known: dict[str, Any] = {
        "workload": ENTRY.workload, "tenant": "t", "owner": "t/j", "owner_name": "j", "kind": JobKind.FFT,
        "jobs": ("t.j",), "incarnation": 7, "base_model": "m", "phase": phase, "submitted_at": 0.0, "attempt": 3,
        "shape": Shape(role=Role.TRAINER, device_bytes=10 * GIB, host_bytes=20 * GIB), "assignment": "a1",
        "claim": "c1",
    }  # fmt: skip
    return WorkloadRecord(**{**known, **fields})


def derived(
    *workers: WorkerRecord, cuts: dict[str, CutRecord] | None = None, workloads: tuple[WorkloadRecord, ...] = ()
) -> Rebuilt:
    return rebuild(workers, {"c1": CUT} if cuts is None else cuts, {each.workload: each for each in workloads}, 100.0)


def test_l7_a_running_worker_gets_its_seat_its_claim_and_its_host_memory_back() -> None:
    """L7: under the same assignment, so that nothing is started anew."""
    found = derived(worker(), workloads=(workload(),))
    seat = found.seats[ENTRY.workload]
    assert (seat.state, seat.assignment, seat.claim) == (SeatState.HELD, "a1", "c1")
    assert (seat.incarnation, seat.closed, seat.attempt) == (7, 6, 3)
    claim = found.claims["c1"]
    assert (claim.state, claim.node, claim.devices, claim.entries) == (
        ClaimState.ALLOCATED,
        "n1",
        ("d0",),
        {"a1": ENTRY},
    )
    assert found.budgets["n1"].entries["a1"].host_bytes == 20 * GIB
    assert found.notes == []


def test_l7_launchers_alone_are_enough() -> None:
    """L7: placement's buckets may be lost too."""
    found = derived(worker())
    assert found.seats[ENTRY.workload].state is SeatState.HELD


def test_l7_a_worker_that_was_never_recorded_is_known_by_its_workload() -> None:
    found = derived(worker(entry=None), workloads=(workload(),))
    assert found.claims["c1"].entries["a1"].host_bytes == 20 * GIB
    stranger = derived(worker(entry=None), workloads=(workload(assignment="another"),))
    assert stranger.seats[ENTRY.workload].state is SeatState.EMPTY
    assert "nobody knows what it was started for" in stranger.notes[0]


def test_l7_what_was_ending_goes_on_ending() -> None:
    """E3: the deletion wins; its incarnation stays closed."""
    for record in (workload(WorkloadPhase.RELEASING), workload(incarnation=9, phase=WorkloadPhase.SUBMITTED)):
        seat = derived(worker(), workloads=(record,)).seats[ENTRY.workload]
        assert (seat.state, seat.closed) == (SeatState.RELEASING, 7)
    stopping = derived(worker(state=WorkerState.STOPPING), workloads=(workload(),)).seats[ENTRY.workload]
    assert (stopping.state, stopping.closed) == (SeatState.RELEASING, 6)


def test_l7_of_two_workers_of_one_workload_the_newer_one_has_the_seat() -> None:
    """Invariant 1."""
    old = worker("a1", started_at=1.0, entry=msgspec.structs.replace(ENTRY, incarnation=6))
    starting = worker("a2", state=WorkerState.STARTING, launched_at=2.0)
    assert derived(old, starting).seats[ENTRY.workload].assignment == "a2"
    found = derived(old, worker("a2", started_at=2.0))
    assert found.seats[ENTRY.workload].assignment == "a2"
    assert list(found.claims["c1"].entries) == ["a2"]
    assert "a newer worker, a2" in found.notes[0]


def test_l7_cuts_without_workers_are_retired_quarantined_ones_stay_so() -> None:
    """B4, B8: no device is given away that is not seen free."""
    quarantined = msgspec.structs.replace(CUT, state=CutState.QUARANTINED)
    freed = msgspec.structs.replace(CUT, state=CutState.FREED)
    found = derived(cuts={"c1": CUT, "c2": quarantined, "c3": freed})
    assert {key: claim.state for key, claim in found.claims.items()} == {
        "c1": ClaimState.RETIRING, "c2": ClaimState.QUARANTINED,
    }  # fmt: skip
    assert len(found.notes) == 2


def test_l7_a_worker_on_a_claim_that_is_not_cut_gets_no_seat() -> None:
    assert derived(worker(), cuts={}).seats == {}


def test_l7_workloads_without_workers_keep_what_is_closed_and_ask_again() -> None:
    """A late message must book nothing behind an end, and those that wait lose nothing."""
    ended = workload(WorkloadPhase.FINISHED, workload="t--over--trainer", assignment="")
    waiting = workload(WorkloadPhase.PENDING, workload="t--waits--trainer", assignment="a9")
    found = derived(cuts={}, workloads=(ended, waiting))
    assert found.seats["t--over--trainer"].closed == 7
    seat = found.seats["t--waits--trainer"]
    assert (seat.state, seat.closed, seat.attempt) == (SeatState.EMPTY, 6, 3)
    assert found.notes == ["workload t--waits--trainer has no worker that runs: it asks for a seat again"]
