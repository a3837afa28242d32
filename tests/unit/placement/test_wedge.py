"""A worker that cannot start where its seat is: given up, the place avoided, the next best asked for (F2, P13)."""

from __future__ import annotations

import msgspec

from openrl_common.events import SeatReleaseRequested, SeatRequested
from openrl_common.queries import ExplainQuery
from openrl_common.records import ClaimState, ReadyRecord, WorkerRecord, WorkerState, WorkloadPhase
from openrl_placement import core
from openrl_placement.explain import explain
from openrl_placement.state import Policy
from unit.placement.desk import Desk, allocated, entry, node

GRACE_S = 300.0
TRAINER = "default--j--trainer"


def desk_with_a_placed_trainer(*, nodes: int = 2) -> Desk:
    desk = Desk(policy=Policy(wedge_grace_s=GRACE_S))
    for index in range(nodes):
        desk.node(node(f"n{index + 1}"))
    desk.submit("j")
    desk.book_all()
    desk.ready("default--j--sampler")
    assert desk.workload(TRAINER).phase is WorkloadPhase.PLACED
    return desk


def test_f2_no_word_of_the_worker_for_the_grace_gives_the_seat_up() -> None:
    """F2: the incarnation stays open, so that the workload may ask again."""
    desk = desk_with_a_placed_trainer()
    desk.repair(GRACE_S - 1.0)
    assert desk.take(SeatReleaseRequested) == []
    desk.repair(2.0)
    (asked,) = desk.take(SeatReleaseRequested)
    record = desk.workload(TRAINER)
    assert (asked.assignment, asked.close) == (record.assignment, False)
    assert {avoid.claim or avoid.node for avoid in record.avoid} == {record.claim, "n1"}
    assert all(avoid.until > desk.now and "--wedge-grace" in avoid.why for avoid in record.avoid)


def test_f2_p13_the_next_best_is_asked_for_in_the_handling_of_the_release() -> None:
    """F2, P13: neither the claim nor its node is a candidate, and an own claim must not be cut on that node."""
    desk = desk_with_a_placed_trainer()
    desk.claim("other", allocated({"x": entry("w")}, node="n2"))
    desk.claim("beside", allocated({"y": entry("w2")}, node="n1"))
    record = desk.workload(TRAINER)
    desk.repair(GRACE_S + 1.0)
    desk.release(TRAINER, record.assignment, record.claim, record.incarnation)
    (request,) = [request for request in desk.take(SeatRequested) if request.workload == TRAINER]
    assert request.candidates == ("other",)
    assert [avoid.node for avoid in request.avoid] == ["n1"]
    assert request.may_found


def test_f2_a_worker_that_said_its_first_word_has_started_however_long_it_loads() -> None:
    """F2: imports, load and compile are its own time."""
    desk = desk_with_a_placed_trainer()
    desk.ready(TRAINER, ready=False)
    desk.repair(10 * GRACE_S)
    assert desk.take(SeatReleaseRequested) == []


def test_f2_pulling_the_image_does_not_count() -> None:
    desk = desk_with_a_placed_trainer()
    record = desk.workload(TRAINER)
    worker = WorkerRecord(
        assignment=record.assignment, workload=TRAINER, tenant="default", claim=record.claim, node="n1",
        state=WorkerState.RUNNING, pulling_since=desk.now,
    )  # fmt: skip
    desk.apply(core.worker_changed(desk.state, record.assignment, worker, desk.now))
    desk.repair(4 * GRACE_S)
    assert desk.take(SeatReleaseRequested) == []
    pulled = msgspec.structs.replace(worker, pulling_since=None, pulled_s=4 * GRACE_S)
    desk.apply(core.worker_changed(desk.state, record.assignment, pulled, desk.now))
    desk.repair(GRACE_S - 1.0)
    assert desk.take(SeatReleaseRequested) == []
    desk.repair(2.0)
    assert len(desk.take(SeatReleaseRequested)) == 1


def test_f2_what_a_former_process_said_is_no_word_of_the_one_that_was_started_again() -> None:
    """F2, F4: the grace counts from its own launch; a word of its own ends it, also by a clock that is behind."""
    desk = desk_with_a_placed_trainer()
    record = desk.workload(TRAINER)

    def said(process_started_at: float, *, ready: bool) -> None:
        word = ReadyRecord(
            assignment=record.assignment, workload=TRAINER, ready=ready, process_started_at=process_started_at
        )
        desk.apply(core.ready_changed(desk.state, record.assignment, word, desk.now))

    first = desk.now
    said(first, ready=True)
    desk.repair(10 * GRACE_S)
    said(first, ready=False)  # its launcher, once it has ended
    worker = WorkerRecord(
        assignment=record.assignment, workload=TRAINER, tenant="default", claim=record.claim, node="n1", restarts=1,
        state=WorkerState.BACKING_OFF, launched_at=first, started_at=first,
    )  # fmt: skip
    desk.apply(core.worker_changed(desk.state, record.assignment, worker, desk.now))
    desk.repair(10 * GRACE_S)
    assert desk.take(SeatReleaseRequested) == []
    again = msgspec.structs.replace(worker, state=WorkerState.RUNNING, launched_at=desk.now, started_at=desk.now)
    desk.apply(core.worker_changed(desk.state, record.assignment, again, desk.now))
    desk.repair(GRACE_S - 1.0)
    assert desk.take(SeatReleaseRequested) == []
    desk.repair(2.0)
    assert len(desk.take(SeatReleaseRequested)) == 1
    said(again.started_at - 5.0, ready=False)
    desk.repair(10 * GRACE_S)
    assert desk.take(SeatReleaseRequested) == []


def test_f2_the_release_is_said_until_it_is_done_and_the_place_is_remembered_once() -> None:
    """E5: a lost request must not leave it wedged for ever."""
    desk = desk_with_a_placed_trainer()
    desk.repair(GRACE_S + 1.0)
    first, avoided = desk.take(SeatReleaseRequested), desk.workload(TRAINER).avoid
    desk.repair()
    assert desk.take(SeatReleaseRequested) == first
    assert desk.workload(TRAINER).avoid == avoided


def test_f2_a_grace_of_0_is_never() -> None:
    desk = desk_with_a_placed_trainer()
    desk.state.policy = Policy(wedge_grace_s=0.0)
    desk.repair(1e6)
    assert desk.take(SeatReleaseRequested) == []


def test_p13_what_is_avoided_expires_and_explain_shows_it() -> None:
    """P13, W5: the record keeps it, explain tells why and until when."""
    desk = desk_with_a_placed_trainer(nodes=1)
    record = desk.workload(TRAINER)
    desk.repair(GRACE_S + 1.0)
    desk.release(TRAINER, record.assignment, record.claim, record.incarnation)
    answer = explain(desk.state, ExplainQuery(workload="j/trainer"), desk.now)
    assert any("avoids n1" in note and "--wedge-grace" in note for note in answer.notes)
    assert {avoid.node for avoid in answer.record.avoid} == {"n1", ""}
    desk.claim("back", allocated({"x": entry("w")}, node="n1"))
    assert (
        "failed this workload lately"
        in {
            row.claim: row.refused
            for row in explain(desk.state, ExplainQuery(workload="j/trainer"), desk.now).candidates
        }["back"]
    )
    later = explain(desk.state, ExplainQuery(workload="j/trainer"), desk.now + 601.0)
    assert {row.claim: row.refused for row in later.candidates}["back"] == ""
    assert not any("avoids" in note for note in later.notes)
    assert desk.state.fleet.claims["back"].state is ClaimState.ALLOCATED
