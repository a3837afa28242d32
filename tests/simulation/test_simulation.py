"""Invariants 1 to 10 of docs/rules.md over many schedules of the whole system.

A schedule is drawn from its seed: machines, jobs, settings, faults. The services are the real ones, workers take turns
with the code that real ones use. To see one again: ``make simulate SEED=N``; to run more: ``make simulate
SEEDS=FIRST:END``. Rules it leans on: L1 to L7, S2, S3, S7, W1, W2, W4, F3, B1, B4, B5, B7, B8, T1 to T6, E5, E6, E7,
E9, E13.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulation.regressions import REGRESSIONS
from simulation.run import simulate_many
from simulation.world import MESSAGES_MIN, WORKLOADS_MIN, Outcome

NUM_SCHEDULES = int(os.environ.get("OPEN_RL_SIMULATION_SCHEDULES", "600"))
_PROCESSES = os.cpu_count() or 1


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return list(simulate_many(range(NUM_SCHEDULES), _PROCESSES))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_schedule_breaks_an_invariant(outcomes: list[Outcome]) -> None:
    failed = [f"seed {outcome.seed}: {outcome.violation}" for outcome in outcomes if outcome.violation]
    assert not failed, "\n".join([*failed, "replay one with its trace: make simulate SEED=N"])


@pytest.mark.timeout(1800)
def test_a_schedule_has_workloads_messages_and_a_crash(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert outcome.num_workloads >= WORKLOADS_MIN, outcome.seed
        assert outcome.num_delivered >= MESSAGES_MIN, outcome.seed
        assert outcome.num_crashes >= 1, outcome.seed


@pytest.mark.timeout(300)
def test_schedules_that_once_failed_are_clean() -> None:
    failed = [
        f"seed {outcome.seed} ({REGRESSIONS[outcome.seed]}): {outcome.violation}"
        for outcome in simulate_many(sorted(REGRESSIONS), _PROCESSES)
        if outcome.violation
    ]
    assert not failed, "\n".join(failed)


@pytest.mark.timeout(120)
def test_a_seed_gives_the_same_run_in_another_process_with_another_hash_seed() -> None:
    program = "from simulation.run import simulate; print(*(simulate(seed).digest for seed in (1, 2, 144)))"

    def digests(hash_seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parent.parent)}
        return subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        ).stdout

    assert digests("1") == digests("2") != ""
