"""What an event should have said and did not is in the buckets: the slow pass finds it there (E4, E5)."""

from __future__ import annotations

import pytest

from openrl_common.events import JobFailed, SeatReleaseRequested, WorkerExited
from openrl_common.records import JobPhase, WorkerRecord, WorkerState, WorkloadPhase
from openrl_placement import core
from unit.placement.desk import Desk, node

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
