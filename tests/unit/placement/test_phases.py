"""The phases of a workload, from its submission to its end (W6)."""

from __future__ import annotations

import msgspec
import pytest

from openrl_common.events import SeatRequested, WorkerExited, WorkerLaunched
from openrl_common.records import WorkloadPhase, WorkloadRecord
from unit.placement.desk import Desk, allocated, node
from unit.placement.test_waiting import sampler, trainer


def phase(it: Desk, workload: str = trainer("a")) -> str:
    return it.workload(workload).phase.value


def started(it: Desk) -> list[str]:
    """The trainer's phases until it is ready."""
    it.node(node(devices=4))
    it.submit("a")
    seen = [phase(it)]
    requests = {each.workload: each for each in it.take(SeatRequested)}
    it.book(requests[sampler("a")])
    assignment = it.book(requests[trainer("a")], allocate=False)
    seen.append(phase(it))
    claim = it.workload(trainer("a")).claim
    it.claim(claim, allocated(dict(it.state.fleet.claims[claim].entries)))
    seen.append(phase(it))
    who = {"tenant": "default", "workload": trainer("a"), "assignment": assignment, "claim": claim}
    it.event(WorkerLaunched(**who))
    seen.append(phase(it))
    it.ready_all()
    return [*seen, phase(it)]


def test_W6_a_workload_goes_through_every_phase_in_their_order() -> None:
    it = Desk()
    seen = started(it)
    it.finish("a")
    seen.append(phase(it))
    it.release_all()
    seen.append(phase(it))
    assert seen == ["Submitted", "Pending", "Placed", "Starting", "Ready", "Releasing", "Finished"]
    assert [each.value for each in WorkloadPhase] == [*seen, "Failed"], "there is no other"


def test_W6_a_workload_whose_worker_failed_ends_as_failed() -> None:
    it = Desk()
    started(it)
    record = it.workload(trainer("a"))
    who = {"tenant": "default", "workload": trainer("a"), "assignment": record.assignment, "claim": record.claim}
    it.event(WorkerExited(**who, exit_code=1))
    assert phase(it) == "Releasing"
    it.release_all()
    assert phase(it) == "Failed"


def test_W6_a_record_with_another_phase_cannot_be_read() -> None:
    it = Desk()
    started(it)
    stored = msgspec.json.encode(it.workload(trainer("a")))
    assert b'"phase":"Ready"' in stored
    with pytest.raises(msgspec.ValidationError, match="phase"):
        msgspec.json.decode(stored.replace(b'"phase":"Ready"', b'"phase":"Sleeping"'), type=WorkloadRecord)
