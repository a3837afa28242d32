"""``openrl drill rehearse --simulate`` (D4, C5): table, JSON, picture, bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openrl_client.cli import run

DRILL = ["drill", "rehearse", "--simulate", "--devices", "4x79.65GiB", "--jobs", "fft:qwen3-0.6b:2,lora:gemma-4-e2b:2"]


def test_a_table_a_verdict_and_the_basis_of_the_times(capsys: pytest.CaptureFixture[str]) -> None:
    """D4."""
    assert run([*DRILL, "--figures"]) == 0
    output = capsys.readouterr().out
    assert "fft-qwen3-0-6b-1" in output
    assert "of 4 jobs finished 3 steps within 180 s of kickoff" in output
    assert "models.gemma-4-e2b.lora.sampler.capture" in output


def test_json_has_every_job_with_its_timeline(capsys: pytest.CaptureFixture[str]) -> None:
    """D2, D4."""
    assert run([*DRILL, "--max-seats-per-claim", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["plan"]["max_seats_per_claim"] == 2
    assert report["basis"]["measured"] == 9
    assert [len(job["steps_ended_s"]) for job in report["jobs"]] == [3] * 4
    names = {row["name"] for row in report["jobs"][0]["timeline"]}
    assert {"imports", "load", "engine", "capture", "sample", "train", "apply"} <= names


def test_a_picture_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """D2."""
    path = tmp_path / "drill.png"
    assert run([*DRILL, "--chart", str(path)]) == 0
    assert capsys.readouterr().out.endswith(f"\nchart: {path}\n")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_D3_one_command_warms_the_runtimes_up_runs_and_gives_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    """The verdict says what the warm-up was worth. On a virtual clock (D4): not on a running system yet."""
    lora = [*DRILL[:-1], "lora:gemma-4-e2b:3", "--json"]

    def rehearsed(*more: str) -> list[float]:
        assert run([*lora, *more]) == 0
        return [max(job["steps_ended_s"]) for job in json.loads(capsys.readouterr().out)["jobs"]]

    cold, warm = rehearsed(), rehearsed("--warm", "gemma-4-e2b")
    assert max(warm) < min(cold)
    assert run([*DRILL, "--warm", "gemma-4-e2b"]) == 0
    assert "of 4 jobs finished 3 steps within 180 s of kickoff" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["drill", "rehearse", "--jobs", "fft:m:1"], 2, "add --simulate"),
        (["drill", "rehearse", "--simulate", "--jobs", "fft:qwen3-0.6b:1"], 2, "which devices"),
        ([*DRILL[:-1], "fft:6"], 2, "'fft:6' is not KIND:MODEL:COUNT"),
        ([*DRILL[:-1], "fft:qwen3-0.6b:0"], 2, "a number from 1"),
        ([*DRILL[:-1], "fft:unheard-of:1"], 1, "'unheard-of' is not in profile reference"),
        ([*DRILL, "--max-seats-per-claim", "-1"], 2, "--max-seats-per-claim"),
        ([*DRILL, "--profile", "/nowhere/p.json"], 1, "/nowhere/p.json"),
        ([*DRILL, "--warm", "qwen3-0.6b,gemma-4-e2b,qwen3-8b"], 1, "are there enough devices"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """C5."""
    assert run(arguments) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
