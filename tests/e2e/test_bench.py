"""The benchmark measures real services on a disk, and says every figure that docs/performance.md explains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from openrl_client.bench.machine import file_system_of

pytestmark = pytest.mark.e2e

SMALL = ["--nodes", "20", "--claims", "60", "--jobs", "20", "--waiting", "6", "--wakes", "3", "--window", "8"]
FIGURES = {
    "grants_per_s", "joined", "founded", "p50_ms", "p99_ms", "rate_per_s", "impossible_s", "wake_p99_ms", "waiting",
    "nodes", "seated_claims", "cost_ratio_10x", "store", "machine", "memory", "cpu_ms_per_grant",
}  # fmt: skip
CONTROL_SERVICE_MB_MAX = 120


def bench(*arguments: str, timeout_s: float = 150) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).parent / "openrl"), "bench", *arguments],
        capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_W1_bench_seats_prints_every_figure_and_the_first_in_line_takes_each_freed_seat(tmp_path: Path) -> None:
    if file_system_of(tmp_path) == "tmpfs":
        pytest.skip("the temporary directory is in memory, and seats are measured on a disk (--basetemp names another)")
    store, chart = tmp_path / "store", tmp_path / "chart.png"
    answer = bench(
        "seats",
        "--json",
        "--store",
        str(store),
        "--curve-rate",
        "5",
        "--curve-rate",
        "4",
        "--chart",
        str(chart),
        *SMALL,
    )
    assert answer.returncode == 0, answer.stderr
    report = json.loads(answer.stdout)
    assert report.keys() >= FIGURES
    assert report["joined"] == report["founded"] == 14
    assert (report["wakes"], report["wakes_out_of_order"], report["waiting"]) == (3, 0, 6)
    assert report["grants_per_s"] > 0
    assert report["impossible_s"] > 0
    assert report["store"]["path"] == str(store)
    assert [point["rate_per_s"] for point in report["curve"]] == [4, 5]
    assert chart.read_bytes().startswith(b"\x89PNG")
    for service in ("ledger", "placement"):
        assert report["memory"][service]["rss_mb"] < CONTROL_SERVICE_MB_MAX
    assert not list(store.iterdir()), "the store is removed afterwards"


@pytest.mark.long
@pytest.mark.timeout(320)
def test_V12_bench_sampler_prints_every_figure_and_sampler_and_trainer_agree() -> None:
    answer = bench("sampler", "--json", "--seconds", "0.5", "--clients", "1,3", "--max-tokens", "8", timeout_s=300)
    assert answer.returncode == 0, answer.stderr
    report = json.loads(answer.stdout)
    assert [level["clients"] for level in report["levels"]] == [1, 3]
    for level in report["levels"]:
        assert level["requests"] >= level["clients"]
        assert 0 < level["p50_ms"] <= level["p99_ms"]
        assert level["tokens_per_s"] >= level["requests_per_s"] > 0
        assert level["cpu_ms_per_token"] > 0
    assert report["agreement"]["num_tokens"] >= 16
    assert report["agreement"]["max"] < 1e-3, "float32 on both sides"


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no file system in memory to refuse")
def test_E18_a_store_in_memory_is_refused_with_the_flag_to_use() -> None:
    answer = bench("seats", "--store", "/dev/shm", *SMALL)
    assert answer.returncode == 2
    assert "in memory (tmpfs)" in answer.stderr
    assert "--store" in answer.stderr
    assert len(answer.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--nodes", "2", "--jobs", "200"], "--nodes"),
        (["--claims", "4"], "--claims"),
        (["--waiting", "2", "--wakes", "3"], "--wakes"),
        (["--jobs", "-1"], "--jobs"),
        (["--curve-rate", "9000"], "--nodes"),
        (["--chart", "/nowhere/chart.png"], "--chart"),
    ],
)
def test_a_plan_that_cannot_be_run_is_one_line_that_names_the_flag(options: list[str], names: str) -> None:
    answer = bench("seats", *SMALL, *options)
    assert answer.returncode == 2
    assert names in answer.stderr
    assert len(answer.stderr.splitlines()) == 1
