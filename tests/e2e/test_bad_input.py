"""One clear line for every mistake (what, which value, what to do), its exit code, nothing half-started (C5)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.conftest import SETTINGS

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(120)]


TYPO = {"OPEN_RL_MAX_SEAT_PER_CLAIM": "2"}
MEANT = "OPEN_RL_MAX_SEAT_PER_CLAIM is set, and nothing reads it: did you mean OPEN_RL_MAX_SEATS_PER_CLAIM?"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("up")
    done = openrl(home, "up", **TYPO)
    assert done.returncode == 0, done.stderr
    assert one_line(done.stderr) == f"openrl: {MEANT}"
    yield home
    assert openrl(home, "down").returncode == 0


def openrl(home: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).parent / "openrl"), *arguments],
        env={**os.environ, **SETTINGS, "OPEN_RL_HOME": str(home), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def one_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    assert len(lines) == 1, text
    assert "Traceback" not in text
    return lines[0]


def seats_and_jobs(home: Path) -> tuple[int, int]:
    """How many claims hold a seat and how many jobs have not ended."""
    claims = [row["record"] for row in json.loads(openrl(home, "get", "claims", "-o", "json").stdout)]
    jobs = [row["record"] for row in json.loads(openrl(home, "get", "jobs", "-o", "json").stdout)]
    seated = [claim for claim in claims if claim.get("entries")]
    return len(seated), len([job for job in jobs if job["phase"] not in ("Failed", "Cancelled", "Finished")])


def test_a_model_that_does_not_exist_is_refused_by_path(home: Path) -> None:
    done = openrl(home, "submit", "--name", "a", "--kind", "fft", "--model", "/no/such/model")
    assert done.returncode == 1
    assert "/no/such/model" in one_line(done.stderr)
    assert seats_and_jobs(home) == (0, 0)


def test_an_unreadable_config_is_refused_with_what_is_missing(home: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "hidden_size": 64}')
    done = openrl(home, "submit", "--name", "a", "--kind", "fft", "--model", str(tmp_path))
    assert done.returncode == 1
    line = one_line(done.stderr)
    assert str(tmp_path) in line
    assert "num_hidden_layers" in line or "missing" in line or "safetensors" in line
    assert seats_and_jobs(home) == (0, 0)


def test_a_job_that_no_device_could_ever_hold_is_impossible_with_numbers(home: Path, tmp_path: Path) -> None:
    """W4, C5: exit code 3."""
    config = {
        "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
        "tie_word_embeddings": False, "architectures": ["Qwen3ForCausalLM"], "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = openrl(home, "submit", "--name", "big", "--kind", "fft", "--model", str(tmp_path))
    assert done.returncode == 3, done.stderr
    assert "6" in one_line(done.stderr)
    assert seats_and_jobs(home) == (0, 0)


@pytest.mark.parametrize("value", ["-1", "1.5", "many"])
def test_a_bad_seat_limit_stops_the_start_and_names_the_setting(tmp_path: Path, value: str) -> None:
    """S1, from the environment and from the flag."""
    for arguments, environment in (
        (["up", "--max-seats-per-claim", value], {}),
        (["up"], {"OPEN_RL_MAX_SEATS_PER_CLAIM": value}),
    ):
        done = openrl(tmp_path / "home", *arguments, **environment)
        assert done.returncode == 2, done.stderr
        assert "max-seats-per-claim" in done.stderr
        assert value in done.stderr
        assert not (tmp_path / "home" / "up.json").exists()


@pytest.mark.parametrize("service", ["ledger", "placement", "launcher"])
def test_E19_a_variable_that_nothing_reads_is_said_once_by_every_service(home: Path, service: str) -> None:
    """And by ``openrl up``, which goes on all the same (the fixture)."""
    log = (home / "logs" / f"{service}.log").read_text()
    assert log.count(MEANT) == 1
    assert log.count("nothing reads it") == 1


def test_doctor_finds_nothing_wrong_with_a_system_that_has_just_been_started(home: Path) -> None:
    """E18: warnings about this machine are allowed, failures are not; sync_interval is told from the server's file."""
    done = openrl(home, "doctor", "-o", "json")
    findings = json.loads(done.stdout)
    failed = [each for each in findings if each["level"] == "failed" and each["about"] != "disk"]
    assert not failed, failed
    assert {"level": "ok", "about": "durability", "what": "sync_interval: always", "remedy": ""} in findings
    assert "launcher, ledger, placement are ready" in done.stdout
    text = openrl(home, "doctor").stdout
    assert text.splitlines()[0].split() == ["LEVEL", "ABOUT", "FOUND", "REMEDY"]


def test_a_retention_shorter_than_a_message_lives_stops_the_ledger_with_one_line(tmp_path: Path) -> None:
    """L6, C5."""
    done = subprocess.run(
        [sys.executable, "-m", "openrl_ledger", "--home", str(tmp_path), "--keep-records", "3d"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--keep-records / OPEN_RL_KEEP_RECORDS" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_dead_letter_that_is_not_there_is_named(home: Path) -> None:
    done = openrl(home, "dlq", "requeue", "7")
    assert done.returncode == 1
    assert "dead letter 7" in one_line(done.stderr)
    assert openrl(home, "dlq", "requeue").returncode == 2


def test_rebuilding_a_ledger_that_runs_is_refused(home: Path) -> None:
    """L7: and a dry run says what it would write, and writes nothing."""
    dry = openrl(home, "ledger", "rebuild")
    assert dry.returncode == 0
    assert "nothing is written without --apply" in dry.stdout
    refused = openrl(home, "ledger", "rebuild", "--apply")
    assert refused.returncode == 1
    assert "--while-running" in one_line(refused.stderr)


def test_a_second_up_on_the_same_home_says_who_has_it(home: Path) -> None:
    done = openrl(home, "up")
    assert done.returncode == 1
    assert str(home) in one_line(done.stderr)
    assert openrl(home, "get", "nodes").returncode == 0


def test_without_a_system_every_command_is_unreachable(tmp_path: Path) -> None:
    """C5: exit code 5."""
    for arguments in (["get", "jobs"], ["cancel", "x"], ["explain", "x"]):
        done = openrl(tmp_path / "nobody", *arguments)
        assert done.returncode == 5, done.stderr
        assert "openrl up" in one_line(done.stderr)


@pytest.mark.parametrize("service", ["nats", "supervisor"])
def test_what_is_no_workload_has_a_log_too(home: Path, service: str) -> None:
    """Doctor sends people there."""
    done = openrl(home, "logs", service)
    assert done.returncode == 0, done.stderr
    assert done.stdout or service == "supervisor"


def test_every_unknown_job_is_named(home: Path) -> None:
    """One that cannot be cancelled keeps no other from it."""
    done = openrl(home, "cancel", "nobody", "nothing")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert ["nobody" in lines[0], "nothing" in lines[1], len(lines)] == [True, True, 2]


def test_a_reader_that_goes_away_is_no_failure() -> None:
    """``openrl … | head`` under ``set -o pipefail``."""
    done = subprocess.run(
        f"{Path(sys.executable).parent / 'openrl'} completion bash | true; exit ${{PIPESTATUS[0]}}", shell=True,
        executable="/bin/bash", capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_a_bad_name_says_the_rule(home: Path) -> None:
    done = openrl(home, "submit", "--name", "Not_OK", "--kind", "fft", "--model", "/x")
    assert done.returncode == 2
    assert "Not_OK" in done.stderr
