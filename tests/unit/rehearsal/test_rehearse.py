"""Whole rehearsals: the reference drills, and what must hold in any (D4, D5)."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from openrl_client.drills import parse_jobs
from openrl_common.quantities import GIB
from openrl_common.records import ClaimState, SeatState
from openrl_ledger.core.ops import Table
from openrl_rehearsal.plan import Plan
from openrl_rehearsal.profile import REFERENCE, Profile, load
from openrl_rehearsal.reference import DRILL_3, DRILL_4, DRILL_7, DRILLS, H100_BYTES, MEASURED, WARM, scan
from openrl_rehearsal.rehearse import Rehearsal, rehearse

FIGURES = json.loads((Path(__file__).parent / "reference_figures.json").read_text())


@pytest.fixture(scope="module")
def profile() -> Profile:
    return load(REFERENCE)


def test_the_measured_results_are_the_reference_s() -> None:
    """D5."""
    rows = {row["drill"]: row for row in FIGURES["drills"]["rows"]}
    assert {number: row["finished"] for number, row in rows.items()} == MEASURED
    for number, plan in DRILLS.items():
        assert plan.max_seats_per_claim == rows[number]["max_seats_per_claim"]
        assert bool(plan.warm) is rows[number]["lora_runtimes_warm"]
        assert (plan.num_jobs, len(plan.devices), plan.goal_steps, plan.goal_within_s) == (12, 6, 3, 180)


@pytest.mark.parametrize("number", [3, 4], ids=["drill 3", "drill 4"])
def test_the_fit_gives_the_drills_it_was_fitted_on(profile: Profile, number: int) -> None:
    """D5: 3 and 7 of 12."""
    assert rehearse(DRILLS[number], profile).reached == MEASURED[number]


def test_drill_7_is_predicted(profile: Profile) -> None:
    """D5: 8 of 12: six LoRA jobs on warm runtimes, and two FFT jobs on the pair of devices that is left."""
    report = rehearse(DRILL_7, profile)
    assert report.reached == 8
    assert report.reached_by_kind == {"lora:qwen3-0.6b": 3, "lora:gemma-4-e2b": 3, "fft:qwen3-0.6b": 2}


def test_without_a_limit_six_samplers_share_one_device(profile: Profile) -> None:
    """D5: what the reference saw."""
    report = rehearse(DRILL_3, profile)
    assert {job.shared_with for job in report.jobs if job.kind == "fft"} == {5}
    assert FIGURES["drills"]["without_limit"].startswith("six FFT samplers time-sliced one H100")


def test_a_lora_runtime_takes_what_was_measured_cold_and_warm(profile: Profile) -> None:
    """D5: three jobs through their first step at 165 s cold, through three steps in 90 s warm."""
    measured = FIGURES["drills"]["lora_runtime"]
    alone = msgspec.structs.replace(DRILL_4, jobs=parse_jobs("lora:gemma-4-e2b:3"))
    cold = rehearse(alone, profile)
    first = max(job.steps_ended_s[0] for job in cold.jobs)
    assert first == pytest.approx(measured["cold_first_step_s_with_three_jobs_waiting"], rel=0.03)
    warm = rehearse(msgspec.structs.replace(alone, warm=WARM[1:]), profile)
    begun = min(job.submitted_s or 0.0 for job in warm.jobs)
    last = max(job.steps_ended_s[-1] for job in warm.jobs)
    assert last - begun == pytest.approx(measured["warm_three_jobs_three_steps_s"], rel=0.05)


def test_the_prediction_does_not_hang_on_unmeasured_figures(profile: Profile) -> None:
    """D5: every draw of them that still gives drills 3 and 4 gives 8 for drill 7."""
    result = scan(profile, draws=12, seed=1)
    assert result.kept >= 3
    assert set(result.drill_7) == {8}


def test_co_residency_and_a_third_seat_let_one_more_job_reach_the_goal(profile: Profile) -> None:
    """T2, D5: under turns a third seat costs jobs, among co-residents it wins one."""
    third = msgspec.structs.replace(DRILL_7, max_seats_per_claim=3)
    assert rehearse(third, profile).reached < 8
    together = rehearse(msgspec.structs.replace(third, co_residency=True, owner_affinity=True), profile)
    assert together.reached == 9
    assert together.switches == 0


def test_the_same_seed_gives_the_same_run_and_another_another(profile: Profile) -> None:
    """D4: deterministic, down to every span."""

    def run(seed: int) -> object:
        report = rehearse(msgspec.structs.replace(DRILL_4, shuffled=True, seed=seed), profile)
        return msgspec.to_builtins(report.jobs)

    assert run(5) == run(5)
    assert run(5) != run(6)


def test_nothing_is_held_when_all_jobs_are_over(profile: Profile) -> None:
    """D4, L4: FFT jobs leave no seat, claim, host memory or device; a LoRA runtime stays for its idle time (P12)."""
    plan = Plan(
        devices=(H100_BYTES,) * 16,
        jobs=parse_jobs("fft:qwen3-0.6b:40"),
        host_memory_bytes=2048 * GIB,
        max_seats_per_claim=2,
        client_spacing_s=0.05,
    )
    rehearsal = Rehearsal(plan, profile)
    report = rehearsal.run()
    tables = rehearsal.control.tables
    assert report.settled
    assert report.failed == 0
    rehearsal.agenda.run(lambda: False, rehearsal.agenda.now + 5)
    assert rehearsal.launcher.devices_used == 0
    assert {claim.state for claim in tables.values(Table.CLAIMS)} == {ClaimState.GONE}
    assert {seat.state for seat in tables.values(Table.SEATS)} == {SeatState.EMPTY}
    assert all(not budget.entries for budget in tables.values(Table.BUDGETS))


@pytest.mark.parametrize("strategy", ["binpack", "spread"])
@pytest.mark.parametrize("limit", [0, 1, 2, 3])
def test_the_limit_holds_and_every_job_ends(profile: Profile, limit: int, strategy: str) -> None:
    """S2, W3, D4: mixed device sizes, more jobs than seats."""
    plan = Plan(
        devices=(H100_BYTES,) * 4 + (int(22.5 * GIB),) * 4,
        jobs=parse_jobs("fft:gemma-4-e2b:6,lora:qwen3-0.6b:4,fft:qwen3-0.6b:8"),
        devices_per_node=4,
        max_seats_per_claim=limit,
        placement_strategy=strategy,
        placement_timeout_s=0,
        shuffled=True,
        seed=limit,
    )
    report = rehearse(plan, profile)
    assert report.settled
    assert report.failed == 0
    assert limit == 0 or report.seats_peak <= limit
    assert all(len(job.steps_ended_s) == 3 for job in report.jobs)


def test_a_job_that_fits_nowhere_fails_at_once_and_says_why(profile: Profile) -> None:
    """W4, D4."""
    plan = Plan(devices=(int(22.5 * GIB),) * 2, jobs=parse_jobs("fft:gemma-4-e2b:1,lora:qwen3-0.6b:1"))
    report = rehearse(plan, profile)
    failed, fine = report.jobs
    assert failed.failure.startswith("impossible:")
    assert failed.ended_s is not None
    assert failed.submitted_s is not None
    assert failed.ended_s - failed.submitted_s < 1
    assert fine.reached


def test_a_wait_longer_than_the_placement_timeout_is_a_failure(profile: Profile) -> None:
    """W3, D4."""
    plan = Plan(
        devices=(H100_BYTES,) * 2, jobs=parse_jobs("fft:qwen3-0.6b:3"), max_seats_per_claim=1, placement_timeout_s=60
    )
    report = rehearse(plan, profile)
    assert [bool(job.failure) for job in report.jobs] == [False, True, True]
    assert report.jobs[1].failure.startswith("placement-timeout:")
    assert report.jobs[1].ended_s == pytest.approx(60 + (report.jobs[1].submitted_s or 0), abs=2)


def test_cold_files_are_read_once_a_node(profile: Profile) -> None:
    """R1, D4: the first trainer of a node pays the network file system, who comes later the page cache."""
    plan = Plan(devices=(H100_BYTES,) * 2, jobs=parse_jobs("fft:gemma-4-e2b:2"), max_seats_per_claim=1)
    loads = []
    for cached in (True, False):
        report = rehearse(plan, msgspec.structs.replace(profile, files_cached=cached))
        spans = [row for job in report.jobs for row in job.timeline if row.name == "load"]
        loads.append([round(row.ended_s - row.began_s, 1) for row in spans])
    assert loads == [[8.0, 8.0], [43.9, 8.0]]
