"""What an event should have said and did not is in the buckets: the slow pass finds it there (E4, E5)."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from openrl_common.errors import Poison
from openrl_common.events import Event, JobFailed, SeatReleaseRequested, SeatRequested, WorkerExited
from openrl_common.memory import MemoryBus
from openrl_common.memory_server import MemoryServer, Network
from openrl_common.records import JobPhase, SeatRecord, SeatState, WorkerRecord, WorkerState, WorkloadPhase
from openrl_placement import core, passes, service
from openrl_placement.passes import STRAY_S, Strays
from unit.placement.desk import Desk, allocated, entry, node
from unit.placement.test_outbox import Slow, a_few_turns, placement_on

TRAINER = "default--j--trainer"


def running() -> Desk:
    desk = Desk()
    desk.node(node())
    desk.submit("j")
    desk.book_all()
    desk.ready_all()
    return desk


def said_of_the_trainer(desk: Desk, state: WorkerState, *, assignment: str = "") -> None:
    """The launcher's record of its worker; its event is lost."""
    record = desk.workload(TRAINER)
    worker = WorkerRecord(
        assignment=assignment or record.assignment, workload=TRAINER, tenant="default", claim=record.claim, node="n1",
        state=state, exit_code=3, why="out of memory", restarts=4,
    )  # fmt: skip
    desk.apply(core.worker_changed(desk.state, worker.assignment, worker, desk.now))


def test_E4_E5_a_worker_that_ended_for_good_fails_its_job_although_its_event_was_lost() -> None:
    desk = running()
    said_of_the_trainer(desk, WorkerState.EXITED)
    desk.repair()
    (failed,) = desk.take(JobFailed)
    assert failed.code == "worker-failed"
    assert "exited with code 3: out of memory" in failed.message
    assert {each.workload for each in desk.take(SeatReleaseRequested)} == {TRAINER, "default--j--sampler"}
    record = desk.workload(TRAINER)
    desk.event(
        WorkerExited(
            tenant="default", workload=TRAINER, assignment=record.assignment, claim=record.claim, exit_code=3
        )
    )  # fmt: skip
    assert desk.take(JobFailed) == [], "it was not lost, only late"
    desk.repair()
    desk.release_all()
    assert desk.state.jobs["default.j"].phase is JobPhase.FAILED


@pytest.mark.parametrize("state", [WorkerState.BACKING_OFF, WorkerState.STOPPING, WorkerState.GONE])
def test_F4_E5_a_worker_that_its_launcher_starts_again_or_stops_itself_fails_no_job(state: WorkerState) -> None:
    desk = running()
    said_of_the_trainer(desk, state)
    desk.repair()
    assert desk.take(JobFailed) == []
    assert desk.workload(TRAINER).phase is WorkloadPhase.READY


def test_E5_the_end_of_a_former_assignments_worker_fails_no_job() -> None:
    desk = running()
    said_of_the_trainer(desk, WorkerState.EXITED, assignment="a-former")
    desk.repair()
    assert desk.take(JobFailed) == []


async def test_W3_state_is_read_once_more_before_failing_and_an_allocation_wins() -> None:
    """Both mirrors are behind, as they are for a moment after an outage: the deadline has passed meanwhile."""
    bus = MemoryBus(MemoryServer(Network()))
    placement, it = placement_on(bus, placement_timeout_s=100.0)
    await placement.start()
    it.now = time.time()
    it.node(node())
    it.submit("seated")
    it.submit("unseated")
    await placement.close()
    for request in it.take(SeatRequested):
        if request.owner == "default/seated":
            workload, claim = request.workload, f"c-{request.workload}"
            await bus.store.ledger_claims.put(claim, allocated({"a": entry(workload)}))
            seat = SeatRecord(
                state=SeatState.HELD, incarnation=request.incarnation, assignment="a", claim=claim, attempt=1
            )
            await bus.store.ledger_seats.put(workload, seat)
    await placement._tick(it.now + 101.0)
    assert it.workload("default--seated--trainer").phase is WorkloadPhase.PLACED
    assert it.state.jobs["default.seated"].phase is JobPhase.ADMITTED
    assert it.state.jobs["default.unseated"].reason == "placement-timeout"


async def test_W3_E13_nothing_fails_whose_seat_cannot_be_read() -> None:
    network = Slow()
    placement, it = placement_on(MemoryBus(MemoryServer(network)), placement_timeout_s=100.0)
    it.now = time.time()
    it.node(node())
    it.submit("a")
    ticking = asyncio.create_task(placement._tick(it.now + 101.0))
    await a_few_turns()
    assert network.kept
    assert it.state.jobs["default.a"].phase is JobPhase.ADMITTED
    ticking.cancel()


def a_seat_without_a_record(it: Desk) -> None:
    it.claim("c", allocated({"a-lost": entry("default--lost--trainer")}))
    it.held("default--lost--trainer", 7, "a-lost", "c")


def test_L6_the_seat_of_an_incarnation_that_does_not_exist_is_asked_back_after_ten_minutes() -> None:
    """Placement's bucket was lost: nobody else would ever end its worker."""
    it = running()
    a_seat_without_a_record(it)
    strays = Strays()
    assert strays.look(it.state, 0.0, caught_up=True) == []
    assert strays.look(it.state, STRAY_S - 1.0, caught_up=True) == []
    (asked,) = strays.look(it.state, STRAY_S, caught_up=True)
    assert (asked.tenant, asked.workload, asked.incarnation) == ("default", "default--lost--trainer", 7)
    assert (asked.assignment, asked.close) == ("a-lost", True)
    assert strays.look(it.state, STRAY_S + 10.0, caught_up=True) == [asked], "said until it is done"


def test_L6_no_seat_is_asked_back_while_submissions_are_read_again_or_one_that_a_living_job_names() -> None:
    it = running()
    a_seat_without_a_record(it)
    it.state.forget_workload(TRAINER)  # its job is still there
    strays = Strays()
    strays.look(it.state, 0.0, caught_up=True)
    assert strays.look(it.state, STRAY_S, caught_up=False) == []
    assert strays.look(it.state, STRAY_S + 1.0, caught_up=True) == [], "seen for the first time again"
    it.submit("lost", sequence=7)
    assert strays.look(it.state, 3 * STRAY_S, caught_up=True) == []


async def test_L6_a_seat_whose_record_stands_in_the_bucket_or_cannot_be_read_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bus = MemoryBus(MemoryServer(Network()))
    placement, it = placement_on(bus)
    it.node(node())
    a_seat_without_a_record(it)
    monkeypatch.setattr(passes, "STRAY_S", 0.0)
    said: list[Event] = []

    async def publish(event: Event) -> None:
        said.append(event)

    monkeypatch.setattr(bus, "publish", publish)
    it.submit("other")
    record = msgspec.structs.replace(it.workload("default--other--trainer"), workload="default--lost--trainer")
    await bus.store.workloads.put("default--lost--trainer", msgspec.structs.replace(record, incarnation=7))
    await placement._release_strays()
    assert said == []

    async def unreadable(_: str) -> None:
        raise Poison("written by a newer version")

    with monkeypatch.context() as patched:
        patched.setattr(bus.store.jobs, "get", unreadable)
        await bus.store.workloads.delete("default--lost--trainer")
        await placement._release_strays()
    assert said == []
    await placement._release_strays()
    assert [type(event) for event in said] == [SeatReleaseRequested]


def test_L6_P12_the_seats_of_a_runtime_that_is_kept_for_nobody_stay() -> None:
    it = Desk()
    it.node(node())
    it.submit("l", "lora")
    it.book_all()
    it.ready_all()
    it.finish("l")
    assert it.state.jobs["default.l"].phase is JobPhase.FINISHED
    strays = Strays()
    strays.look(it.state, 0.0, caught_up=True)
    assert strays.look(it.state, STRAY_S, caught_up=True) == []


async def test_E7_L6_a_workload_that_a_replaced_replica_wrote_late_is_deleted_after_two_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its successor had read the bucket before, so nobody goes on with it; what changes in between is somebody's."""
    bus = MemoryBus(MemoryServer(Network()))
    placement, it = placement_on(bus)
    it.node(node())
    it.submit("known")
    record = it.workload("default--known--trainer")
    for name in ("late", "changed", "known"):
        key = f"default--{name}--trainer"
        await bus.store.workloads.put(key, msgspec.structs.replace(record, workload=key))
    await placement._drop_orphans()
    assert len(await bus.store.workloads.list()) == 3, "not before its time"
    monkeypatch.setattr(service, "_ORPHANS_EVERY_S", 0.0)
    await placement._drop_orphans()
    assert len(await bus.store.workloads.list()) == 3
    changed = msgspec.structs.replace(record, workload="default--changed--trainer", attempt=9)
    await bus.store.workloads.put("default--changed--trainer", changed)
    placement._duty = cast(Any, SimpleNamespace(held=False))
    await placement._drop_orphans()
    assert len(await bus.store.workloads.list()) == 3, "another replica's duty"
    placement._duty.held = True  # type: ignore[misc]
    await bus.store.workloads.put("default--changed--trainer", changed)
    await placement._drop_orphans()
    assert set(await bus.store.workloads.list()) == {"default--changed--trainer", "default--known--trainer"}
