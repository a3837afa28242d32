"""Submissions and ends of jobs: E6, P12, W4, L4."""

from __future__ import annotations

import msgspec
import pytest

from openrl_common.errors import Rejected
from openrl_common.events import (
    JobAdmitted,
    JobCancelled,
    JobEnded,
    JobFailed,
    JobReady,
    SeatReleaseRequested,
    SeatRequested,
    WorkerExited,
    WorkerLaunched,
)
from openrl_common.memory import MemoryBus
from openrl_common.memory_server import MemoryServer
from openrl_common.names import SHARED
from openrl_common.quantities import GIB
from openrl_common.records import ClaimState, JobPhase, LoraSpec, WorkloadPhase
from openrl_placement.estimator import Model
from openrl_placement.state import Policy
from unit.placement.desk import Desk, allocated, entry, node
from unit.placement.test_outbox import placement_on

TRAINER, SAMPLER = "default--a--trainer", "default--a--sampler"


def desk(**fields: object) -> Desk:
    made = Desk(**fields)  # type: ignore[arg-type]
    made.node(node())
    return made


def test_an_fft_job_gets_two_workloads_that_ask_for_seats() -> None:
    it = desk()
    it.submit("a", sequence=7)
    (admitted,) = it.take(JobAdmitted)
    assert admitted.workloads == (TRAINER, SAMPLER)
    assert admitted.incarnation == 7
    requests = it.take(SeatRequested)
    assert [request.workload for request in requests] == [TRAINER, SAMPLER]
    assert all(request.may_found and request.order == (0, 7) and request.attempt == 1 for request in requests)
    assert it.written == ["default.a"], "one write has the job and what was made for it"
    assert [each.workload for each in it.state.jobs["default.a"].workloads] == [TRAINER, SAMPLER]


@pytest.mark.parametrize(("method", "room_gib"), [("streamed", 0.125 + 1), ("reload", 1.0 * 4 + 1)])
async def test_M3_the_method_of_updates_is_the_workloads_and_its_shape_has_the_room(
    method: str, room_gib: float
) -> None:
    """One setting gives both: the staging factor is 1 here, the largest tensor has 2 Gi values of two bytes."""
    placement, it = placement_on(MemoryBus(MemoryServer()), update_method=method)
    it.node(node())
    it.submit("a", gib=None, model=Model(2 * GIB, largest_tensor_elements=2 * GIB, kv_values_per_token=0, vocabulary=1))
    record = it.workload(SAMPLER)
    assert record.update_method == placement.state.policy.update_method == method
    assert record.update_chunk_bytes == 1 << 27
    assert record.shape.device_bytes == (4 + 0.25 + room_gib) * GIB, "weights, engine, room"
    assert record.estimate["device_update_room"] == room_gib
    assert "device_update_room" not in it.workload(TRAINER).estimate


def test_E6_after_a_restart_what_was_admitted_is_found_in_the_jobs_record() -> None:
    it = desk()
    it.submit("a", sequence=7)
    admitted = it.state.jobs["default.a"]
    again = desk()
    again.state.put_job(admitted)
    for workload in admitted.workloads:
        again.state.put_admitted(workload, admitted, again.now)
    assert again.workload(TRAINER) == it.workload(TRAINER)
    newer = msgspec.structs.replace(it.workload(TRAINER), phase=WorkloadPhase.PLACED)
    again.state.put_workload(newer)
    again.state.put_admitted(admitted.workloads[0], admitted, again.now)
    assert again.workload(TRAINER) == newer, "the workload's own key is newer"


def test_P12_a_runtime_that_only_the_record_of_its_ended_job_has_is_released_after_its_idle_time() -> None:
    """The job ended before the runtime's own records were written, and a crash came between the two (E6)."""
    it = desk()
    it.submit("a", "lora", sequence=7)
    first = it.take(SeatRequested)
    it.cancel("a")
    ended = it.state.jobs["default.a"]
    assert ended.phase is JobPhase.CANCELLED
    again = desk(policy=Policy(lora_idle_s=60.0))
    again.state.put_job(ended)
    for workload in ended.workloads:
        again.state.put_admitted(workload, ended, again.now)
    again.book_all()
    for request in first:
        again.held(request.workload, 7, f"a-{request.workload}", f"c-{request.workload}")
    again.repair()
    again.repair()
    again.tick(61.0)
    released = {event.workload for event in again.take(SeatReleaseRequested)}
    assert released == {request.workload for request in first}


def test_a_job_is_ready_once_both_of_its_workers_are() -> None:
    it = desk()
    it.submit("a")
    it.book_all()
    record = it.workload(TRAINER)
    it.event(
        WorkerLaunched(tenant="default", workload=TRAINER, assignment=record.assignment, claim=record.claim, node="n1")
    )
    assert it.workload(TRAINER).phase is WorkloadPhase.STARTING
    it.ready(TRAINER)
    assert it.take(JobReady) == []
    it.ready(SAMPLER)
    assert len(it.take(JobReady)) == 1
    assert it.state.jobs["default.a"].phase is JobPhase.READY
    assert it.ready(SAMPLER) == [], "ready twice is announced once"


def test_E6_the_same_submission_again_publishes_the_same_ids_and_makes_nothing_new() -> None:
    it = desk()
    first = it.submit("a", sequence=3)
    again = it.submit("a", sequence=3)
    assert {event.message_id for event in again} == {event.message_id for event in first}
    assert len(it.state.workloads) == 2
    it.take(SeatRequested)
    it.submit("b", sequence=4)
    it.book_all()
    assert len(it.state.jobs) == 2


def test_E6_a_redelivery_after_a_crash_between_two_writes_completes_the_job() -> None:
    it = desk()
    first = it.submit("a", sequence=3)
    it.state.forget_workload(SAMPLER)
    again = it.submit("a", sequence=3)
    assert {event.message_id for event in again} == {event.message_id for event in first}
    assert SAMPLER in it.state.workloads


def test_a_second_job_of_a_running_name_is_refused_and_leaves_the_first_alone() -> None:
    it = desk()
    it.submit("a", submission="one")
    it.take(SeatRequested)
    events = it.submit("a", submission="two")
    (failed,) = it.take(JobFailed)
    assert events == [failed]
    assert (failed.submission, failed.code) == ("two", "duplicate-name")
    assert it.state.jobs["default.a"].submission == "one"


def test_a_submission_that_a_later_job_of_its_name_has_replaced_changes_nothing() -> None:
    it = desk()
    for submission, sequence in (("old", 5), ("new", 9)):
        it.submit("a", submission=submission, sequence=sequence)
        it.cancel("a", submission=submission)
        it.release_all()
    before = dict(it.state.jobs)
    assert it.submit("a", submission="old", sequence=5) == []
    assert it.state.jobs == before


@pytest.mark.parametrize("ended", [False, True])
def test_an_older_submission_that_comes_late_and_was_never_answered_is_refused(ended: bool) -> None:
    """Its delivery may come again after that of a later one: whoever submitted it must not wait for ever."""
    it = desk()
    it.submit("a", submission="new", sequence=9)
    if ended:
        it.cancel("a", submission="new")
        it.release_all()
    it.take(SeatRequested)
    (failed,) = it.submit("a", submission="old", sequence=5)
    assert isinstance(failed, JobFailed)
    assert (failed.submission, failed.code) == ("old", "duplicate-name")
    assert it.state.jobs["default.a"].submission == "new"
    assert it.submit("a", submission="old", sequence=5) == [failed]


@pytest.mark.parametrize(
    ("name", "fields", "code"),
    [
        ("Bad Name", {}, "bad-name"),
        ("a--b", {}, "bad-name"),
        ("a", {"tenant": "_shared"}, "bad-name"),
        ("a", {"dtype": "int4"}, "bad-spec"),
        ("a", {"gib": -1}, "bad-spec"),
        ("a", {"model": Rejected("no /models/m: give a path", code="model-unreadable")}, "model-unreadable"),
        ("a", {"gib": 81}, "impossible"),
    ],
)
def test_a_job_that_cannot_be_is_answered_with_a_code_and_asks_for_nothing(
    name: str, fields: dict[str, object], code: str
) -> None:
    it = desk()
    it.submit(name, **fields)  # type: ignore[arg-type]
    (failed,) = it.take(JobFailed)
    assert failed.code == code
    assert "\n" not in failed.message
    assert it.events == []
    assert it.state.workloads == {}
    job = it.state.jobs.get(f"default.{name}")
    assert (job is None) == (code == "bad-name")
    assert it.submit(name, sequence=it.sequence, **fields)[0].message_id == failed.message_id  # type: ignore[arg-type]


def test_W4_impossible_is_told_with_the_need_and_the_largest_shape() -> None:
    it = desk()
    it.submit("a", gib=81)
    (failed,) = it.take(JobFailed)
    assert "81 GiB" in failed.message
    assert "80 GiB" in failed.message


def test_a_model_length_beyond_the_config_is_refused() -> None:
    import dataclasses

    from unit.placement.desk import SMALL

    it = desk()
    it.submit("a", max_model_len=4_096, model=dataclasses.replace(SMALL, positions_max=2_048))
    (failed,) = it.take(JobFailed)
    assert failed.code == "bad-spec"
    assert "2048" in failed.message


def test_L4_a_finished_job_releases_both_seats_and_ends_when_both_are_gone() -> None:
    it = desk()
    it.submit("a")
    it.book_all()
    it.ready_all()
    it.finish("a")
    releases = it.take(SeatReleaseRequested)
    assert {release.workload for release in releases} == {TRAINER, SAMPLER}
    assert all(release.close and release.assignment for release in releases)
    assert it.take(JobEnded) == []
    for release in releases:
        it.release(release.workload, release.assignment, it.workload(release.workload).claim, release.incarnation)
    assert {ended.outcome for ended in it.take(JobEnded)} == {"Finished"}
    assert it.state.jobs["default.a"].phase is JobPhase.FINISHED
    assert not it.state.living
    assert it.submit("a", submission="again", sequence=99), "the name is free again"


def test_L4_a_job_cancelled_before_it_was_booked_closes_its_incarnation() -> None:
    it = desk()
    it.submit("a", sequence=5)
    it.cancel("a")
    releases = it.take(SeatReleaseRequested)
    assert all(each.close and each.assignment == "" and each.incarnation == 5 for each in releases)
    request = it.take(SeatRequested)[0]
    it.held(request.workload, 5, "late", "c")
    assert [each.assignment for each in it.take(SeatReleaseRequested)] == ["late"], "a booking in flight is withdrawn"


def test_cancelling_what_is_unknown_or_ended_changes_nothing() -> None:
    it = desk()
    assert it.cancel("a") == []
    it.submit("b")
    it.cancel("b")
    it.take(SeatRequested)
    it.release_all()
    written = len(it.written)
    it.take(JobEnded)
    assert {type(event) for event in it.cancel("b")} <= {JobEnded}
    assert it.cancel("b", submission="another") == []
    assert len(it.written) == written
    assert it.state.jobs["default.b"].phase is JobPhase.CANCELLED


def test_a_cancellation_that_overtakes_its_submission_still_counts() -> None:
    it = desk()
    it.cancel("a")
    it.submit("a")
    assert it.state.jobs["default.a"].phase is JobPhase.FINISHING
    assert it.state.jobs["default.a"].outcome is JobPhase.CANCELLED


@pytest.mark.parametrize("by", ["the same event again", "the repairing pass"])
def test_E6_an_end_of_which_only_the_jobs_record_was_written_goes_on_after_a_restart(by: str) -> None:
    """Placement was killed after that write: nobody has been told, and both workloads have their seats."""
    it = desk()
    it.submit("a")
    it.book_all()
    ending = msgspec.structs.replace(
        it.state.jobs["default.a"], phase=JobPhase.FINISHING, outcome=JobPhase.FAILED, reason="worker-failed"
    )
    it.state.put_job(ending)
    if by == "the repairing pass":
        it.repair()
    else:
        record = it.workload(TRAINER)
        it.event(
            WorkerExited(
                tenant="default", workload=TRAINER, assignment=record.assignment, claim=record.claim, exit_code=3
            )
        )
    assert it.take(JobFailed)[0].code == "worker-failed"
    it.release_all()
    assert {ended.outcome for ended in it.take(JobEnded)} == {"Failed"}


def test_a_worker_that_will_not_restart_fails_its_job_and_releases_everything() -> None:
    it = desk()
    it.submit("a")
    it.book_all()
    record = it.workload(SAMPLER)
    exited = WorkerExited(
        tenant="default", workload=SAMPLER, assignment=record.assignment, claim=record.claim, exit_code=3, why="no luck"
    )
    it.event(exited)
    (failed,) = it.take(JobFailed)
    assert failed.code == "worker-failed"
    assert "code 3" in failed.message
    assert f"{SAMPLER}.{record.assignment}.log" in failed.message
    it.release_all()
    assert {ended.outcome for ended in it.take(JobEnded)} == {"Failed"}
    assert it.event(exited) == [], "told twice, failed once"


def test_F4_a_worker_that_restarts_is_starting_again_on_the_same_booking() -> None:
    it = desk()
    it.submit("a")
    it.book_all()
    it.ready_all()
    record = it.workload(TRAINER)
    it.event(
        WorkerExited(
            tenant="default", workload=TRAINER, assignment=record.assignment, claim=record.claim, exit_code=1,
            will_restart=True,
        )
    )  # fmt: skip
    it.ready(TRAINER, False)
    assert it.workload(TRAINER).phase is WorkloadPhase.STARTING
    assert it.workload(TRAINER).assignment == record.assignment
    assert it.take(JobFailed) == []


# --- LoRA runtimes ----------------------------------------------------------------------------------------------


def test_P12_lora_jobs_of_one_model_share_a_runtime_up_to_the_bound() -> None:
    it = desk(policy=Policy(lora_jobs_per_runtime=2))
    for name in "abc":
        it.submit(name, "lora")
    runtimes = [it.state.jobs[f"default.{name}"].runtime for name in "abc"]
    assert runtimes[0] == runtimes[1] != runtimes[2]
    assert {it.state.jobs["default.a"].runtime_tenant} == {SHARED}
    requests = it.take(SeatRequested)
    assert len(requests) == 4, "the second job asks for nothing"
    assert all(request.shape.exclusive and request.owner in runtimes for request in requests)


def test_P12_another_rank_model_length_or_exclusivity_is_another_runtime() -> None:
    it = desk()
    it.submit("a", "lora")
    it.submit("b", "lora", lora=LoraSpec(rank=64))
    it.submit("c", "lora", max_model_len=128)
    it.submit("d", "lora", exclusive=False)
    it.submit("e", "lora", gib=11)
    assert len({it.state.jobs[f"default.{name}"].runtime for name in "abcde"}) == 5


def test_P12_a_job_that_joins_a_ready_runtime_is_ready_at_once() -> None:
    it = desk()
    it.submit("a", "lora")
    it.book_all()
    it.ready_all()
    assert len(it.take(JobReady)) == 1
    it.submit("b", "lora")
    (ready,) = it.take(JobReady)
    assert ready.job == "b"


def test_P12_a_runtime_outlives_its_last_job_by_the_idle_time_and_then_goes() -> None:
    it = desk(policy=Policy(lora_idle_s=600))
    it.submit("a", "lora")
    it.book_all()
    it.ready_all()
    it.finish("a")
    assert [ended.outcome for ended in it.take(JobEnded)] == ["Finished"], "a LoRA job ends at once"
    it.tick(599)
    assert it.take(SeatReleaseRequested) == []
    it.submit("b", "lora")
    assert it.state.jobs["default.b"].runtime == it.state.jobs["default.a"].runtime
    it.tick(600)
    assert it.take(SeatReleaseRequested) == []
    it.finish("b")
    it.tick(601)
    assert len(it.take(SeatReleaseRequested)) == 2


def test_P12_a_runtime_that_holds_nothing_yet_goes_with_its_last_job() -> None:
    it = desk()
    it.submit("a", "lora")
    it.cancel("a")
    assert len(it.take(SeatReleaseRequested)) == 2


def test_P12_a_runtime_on_its_way_out_is_never_joined_and_its_id_is_not_used_twice_at_once() -> None:
    it = desk()
    it.submit("a", "lora")
    it.cancel("a")
    it.submit("b", "lora")
    assert it.state.jobs["default.a"].runtime != it.state.jobs["default.b"].runtime


def test_P12_when_a_runtime_fails_every_job_on_it_fails() -> None:
    it = desk()
    it.submit("a", "lora")
    it.submit("b", "lora")
    it.book_all()
    record = it.workload(it.state.jobs["default.a"].trainer)
    it.event(
        WorkerExited(
            tenant=SHARED, workload=record.workload, assignment=record.assignment, claim=record.claim, exit_code=1
        )
    )
    assert {failed.job for failed in it.take(JobFailed)} == {"a", "b"}
    assert {release.workload for release in it.take(SeatReleaseRequested)} == set(it.state.living)


def test_a_late_duplicate_of_an_exit_does_not_make_a_restarted_worker_look_unready() -> None:
    """Invariant 10: what the worker itself says last counts, in whatever order the events come."""
    it = desk()
    it.submit("a")
    it.book_all()
    it.ready_all()
    record = it.workload(TRAINER)
    exited = WorkerExited(
        tenant="default", workload=TRAINER, assignment=record.assignment, claim=record.claim, exit_code=1,
        will_restart=True,
    )  # fmt: skip
    it.event(exited)
    it.ready(TRAINER, False)
    it.ready(TRAINER)
    it.event(exited)
    assert it.workload(TRAINER).phase is WorkloadPhase.READY


def test_a_submission_refused_for_its_name_never_runs_when_it_is_delivered_again() -> None:
    """Invariant 10: its client was told that it failed; the name coming free must not start it."""
    it = desk()
    it.submit("a", submission="first")
    assert [failed.code for failed in it.submit("a", submission="second") if isinstance(failed, JobFailed)]
    it.event(JobCancelled(tenant="default", job="a", submission="first"))
    it.release_all()
    assert it.state.jobs["default.a"].phase is JobPhase.CANCELLED
    again = it.submit("a", submission="second")
    assert [type(event) for event in again] == [JobFailed]
    assert it.submit("a", submission="third")
    assert it.state.jobs["default.a"].submission == "third"
    it.event(JobCancelled(tenant="default", job="a", submission="third"))
    it.release_all()
    assert it.submit("a", submission="first") == [], "it has run and ended"


def test_a_worker_that_cannot_start_on_a_quarantined_claim_gives_its_seat_up_and_asks_again() -> None:
    """L3, B4: nothing is started on a device that is not trusted."""
    it = desk()
    it.submit("a")
    it.book_all()
    it.take(SeatRequested)
    record = it.workload(TRAINER)
    standing = it.state.fleet.claims[record.claim]
    it.claim(record.claim, msgspec.structs.replace(standing, state=ClaimState.QUARANTINED))
    it.repair()
    (release,) = [event for event in it.take(SeatReleaseRequested) if event.workload == TRAINER]
    assert (release.assignment, release.close) == (record.assignment, False)
    it.release(TRAINER, record.assignment, record.claim, incarnation=0)
    assert [request.workload for request in it.take(SeatRequested)] == [TRAINER]


def test_a_seat_that_was_named_on_a_claim_quarantined_in_that_moment_is_given_up() -> None:
    """L3, B4: to placement it looks like a pending one, which may move; the ledger says that it may not, for ever."""
    it = desk()
    it.submit("a")
    request = next(each for each in it.take(SeatRequested) if each.workload == TRAINER)
    it.claim("shared", allocated({"x": entry("w")}, state=ClaimState.QUARANTINED))
    it.held(TRAINER, request.incarnation, "late", "shared", request.attempt)
    assert it.workload(TRAINER).phase is WorkloadPhase.PENDING
    it.repair()
    (release,) = [event for event in it.take(SeatReleaseRequested) if event.workload == TRAINER]
    assert (release.assignment, release.close) == ("late", False)
