"""The demo's report: what report.json must have, and the verdict's parts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from openrl_client.demo import plan
from openrl_client.demo.report import JobReport, Report, share_of_time, summary, write
from openrl_client.demo.run import JobState
from openrl_client.demo.watch import ClaimPeak, SeatCount


def report() -> Report:
    jobs = [
        JobReport(
            name="lora-sort",
            kind="lora",
            phase="Finished",
            reward_before=0.3,
            reward_after_sft=0.4,
            reward_after=0.7,
            first_step_s=9.5,
            waits=[
                {"workload": "a/trainer", "reason": "WaitingForSeat", "message": "<full>", "since_s": 1, "seconds": 4.0}
            ],
            phases={"waiting": 1.0, "grpo": 3.0},
            timeline=[("waiting", 0.0, 1.0), ("grpo", 1.0, 4.0)],
            rewards=[0.4, 0.5, 0.7],
        ),
        JobReport(name="fft-sort", kind="fft", phase="Failed", error="worker-failed"),
    ]
    return Report(
        jobs=jobs,
        claims=[ClaimPeak(claim="c1", limit=2, max_seats=2, devices=("0",))],
        seats=[SeatCount(0.5, "c1", 2, ("a/trainer", "a/sampler"))],
        seconds={"jobs": 4.0},
        share_of_time=share_of_time(jobs),
        machine={},
        passed=False,
    )


def test_report_json_has_what_a_reader_looks_for(tmp_path: Path) -> None:
    """Issue 3, point 9: jobs[] and claims[] with these names."""
    path = write(report(), tmp_path)
    found = msgspec.json.decode(path.read_bytes())
    names = {"name", "kind", "phase", "reward_before", "reward_after_sft", "reward_after", "first_step_s", "waits"}
    assert all(names <= job.keys() for job in found["jobs"])
    assert {"reason", "seconds"} <= found["jobs"][0]["waits"][0].keys()
    assert found["claims"] == [{"claim": "c1", "limit": 2, "max_seats": 2, "devices": ["0"]}]
    assert (tmp_path / "report.png").stat().st_size > 10_000
    page = (tmp_path / "report.html").read_text()
    assert "&lt;full&gt;" in page
    assert "data:image/png" in page


def test_summary_shows_gain_and_longest_wait() -> None:
    text = summary(report())
    assert "+0.300" in text
    assert "WaitingForSeat 4.0 s" in text
    assert "2/2" in text
    without = report()
    without.claims.append(ClaimPeak(claim="c2", limit=2, max_seats=1))
    assert "none came free in time" in summary(without)


def test_share_of_time_adds_up_to_one() -> None:
    assert share_of_time(report().jobs) == {"waiting": 0.25, "grpo": 0.75}


def test_phases_follow_each_other_without_gaps() -> None:
    state = JobState(plan.JOBS[0], JobReport(name="x", kind="lora", phase=""))
    for phase, at in (("waiting", 0.5), ("starting", 2.0), ("sft", 3.0), ("finished", 5.0)):
        state.begin(phase, at)
    assert state.report.timeline == [
        ("submitting", 0.0, 0.5),
        ("waiting", 0.5, 2.0),
        ("starting", 2.0, 3.0),
        ("sft", 3.0, 5.0),
    ]
    assert sum(state.report.phases.values()) == pytest.approx(5.0)


def test_demo_has_two_jobs_of_each_kind_and_more_workers_than_devices() -> None:
    """Issue 3, point 9: at least four jobs; seats, sharing and waiting really happen."""
    kinds = [job.kind.value for job in plan.JOBS]
    assert (kinds.count("fft"), kinds.count("lora")) == (2, 2)
    num_workers = 2 * kinds.count("fft") + 2
    assert num_workers > len(plan.DEVICES)
