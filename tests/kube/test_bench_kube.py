"""K11: ``openrl bench kube`` runs both sides on one control plane and says every figure that the guide explains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from openrl_client.bench.control_plane import missing_assets

FIGURES = {
    "nodes", "workers", "joined", "placed_per_s", "api_requests_per_worker", "launcher_rss_bytes",
    "baseline_pods_per_s", "ratio", "cpu_ms_per_worker", "cpu_ratio", "machine", "store",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_K11_bench_kube_says_every_figure_and_stays_under_eight_requests_a_worker(tmp_path: Path) -> None:
    """With full plain pods, which need all that bare ones need."""
    if why := missing_assets():
        pytest.skip(why)
    answer = subprocess.run(
        [
            str(Path(sys.executable).parent / "openrl"), "bench", "kube", "--json", "--nodes", "4", "--workers", "16",
            "--plain", "full", "--store", str(tmp_path),
        ],
        capture_output=True, text=True, timeout=380, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    report = json.loads(answer.stdout)
    assert report.keys() >= FIGURES
    assert (report["nodes"], report["workers"], report["joined"]) == (4, 16, 8)
    requests = sum(report["api_requests"].values())
    assert requests > 0
    assert report["api_requests_per_worker"] < 8
    assert report["cpu_ms_per_worker"].keys() == {"plain", "founders", "joiners", "afterwards"}
    assert not list(tmp_path.iterdir()), "the store is removed afterwards"
