"""The memory model against what a pass really holds, and a real shortage (R2, R3). On a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux' /proc"),
]


def run(what: str) -> Any:
    script = Path(__file__).with_name("peak_of_a_pass.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(script), what],
        capture_output=True, text=True, timeout=280, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_R2_R3_the_predicted_peak_of_a_pass_is_the_measured_one_within_fifteen_percent() -> None:
    """Of the prediction: what it is above the peak is never used, and how much that is differs between processors."""
    for each in run("peaks"):
        assert 0.85 <= each["peak_bytes"] / each["predicted_bytes"] <= 1.05, each


def test_R2_a_pass_that_does_not_fit_a_real_limit_is_done_in_two_halves() -> None:
    found = run("short")
    assert "code" not in found["metrics"], found
    assert found["token_budget"] == 32 * 128 // 2
    assert found["metrics"]["micro_batches"] == 2
