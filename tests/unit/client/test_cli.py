"""The command line's pure parts: exit codes, tables, options, one-line errors (C5)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from openrl_client import cli
from openrl_client.cli.common import machine_readable, table
from openrl_client.cli.explain import explanation, status_table
from openrl_client.cli.get import fingerprint, names_of, nothing, render, with_turns
from openrl_client.cli.options import spec_of
from openrl_client.cli.watch import event_line
from openrl_client.errors import JobEndedError, OpenRLError, Rejected, TimedOut, Transient, Unreachable, exit_code
from openrl_common.events import SeatBooked
from openrl_common.queries import ClaimRow, ExplainAnswer, JobRow, NodeRow, SeatRow, WorkloadRow
from openrl_common.records import (
    Avoid,
    ClaimState,
    JobKind,
    JobPhase,
    JobRecord,
    JobSpec,
    NodeRecord,
    Phase,
    ReadyRecord,
    Reason,
    Residency,
    Role,
    Shape,
    TurnRecord,
    Wait,
    WorkloadPhase,
    WorkloadRecord,
)

GIB = 1 << 30


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Rejected("no", code="duplicate-name"), 1),
        (JobEndedError("no", code="worker-failed"), 1),
        (Rejected("no", code="bad-name"), 2),
        (Rejected("no", code="bad-spec"), 2),
        (Rejected("no", code="impossible"), 3),
        (JobEndedError("no", code="impossible"), 3),
        (TimedOut("late"), 4),
        (JobEndedError("late", code="placement-timeout"), 4),
        (Unreachable("nobody"), 5),
        (Transient("odd"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_code_says_what_kind_of_failure_it_was(error: BaseException, code: int) -> None:
    """C5: 0 ok · 1 failed · 2 usage · 3 impossible · 4 timed out · 5 unreachable."""
    assert exit_code(error) == code


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["get", "pods"], 2, "'pods' is not one of jobs, workloads, claims, nodes"),
        (["run", "sft", "--kind", "lora"], 2, "--task"),
        (["run", "sft", "--kind", "lora", "--task", "letters:sort"], 2, "--model is missing"),
        (["submit", "--name", "x", "--model", "/m", "--kind", "fft", "--rank", "8"], 2, "--rank and --alpha"),
        (["submit", "--name", "x", "--model", "/m", "--kind", "fft", "--trainer-devices", "0"], 2, "1<=x<=64"),
        (["submit", "--name", "Bad_Name", "--model", "/m", "--kind", "fft"], 2, "'Bad_Name'"),
        (
            ["submit", "--name", "x", "--model", "/m", "--kind", "fft", "--engine", "foo"],
            2,
            "'foo' is not one of 'auto', 'torch', 'vllm'",
        ),
        (["get", "jobs", "--tenant", "Bad_Tenant", "--nats-url", "nats://127.0.0.1:1"], 2, "'Bad_Tenant'"),
        (["wait", "x", "--timeout", "-3"], 2, "--timeout"),
        (["run", "sft", "--task", "letters:sort", "--learning-rate", "nan"], 2, "'nan' is not a finite number above 0"),
        (["run", "sft", "--task", "letters:sort", "--alpha", "inf"], 2, "'inf' is not a finite number above 0"),
        (["run", "sft", "--task", "letters:sort", "--batch", "1000000000"], 2, "1000000000 is not in the range"),
        (["no-such-command"], 2, "no-such-command"),
        (["bench", "bus", "--store", "/proc/none"], 1, "openrl: /proc/none: "),
        (["events", "--no-follow"], 2, "say --all or --job with it"),
    ],
)
def test_bad_input_is_one_line_on_stderr(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """C5: errors are one line: what, which value, what to do."""
    assert cli.run(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize("group", [[], ["ledger"], ["dlq"], ["drill"]])
def test_a_group_alone_prints_its_help_as_it_is(group: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(group) == 2
    assert "\nCommands:\n" in capsys.readouterr().err


def test_no_system_is_exit_code_5(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """C5: unreachable, and what to do about it."""
    monkeypatch.delenv("OPEN_RL_NATS_URL", raising=False)
    assert cli.run(["get", "jobs", "--home", str(tmp_path)]) == 5
    assert "openrl up" in capsys.readouterr().err


@pytest.mark.parametrize("group", ["", "bench", "dlq", "drill", "ledger", "model", "state"])
def test_a_list_of_commands_cuts_no_sentence_off_on_a_narrow_terminal(
    group: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.run([group, "--help"] if group else ["--help"]) == 0
    assert "..." not in capsys.readouterr().out.partition("Commands:")[2]


def test_an_empty_list_says_whose_was_asked_for() -> None:
    """A LoRA runtime without a job holds devices, and is no tenant's."""
    assert nothing("workloads", "default") == "no workloads of tenant default: -A shows every tenant's"
    assert nothing("workloads", "") == "no workloads"
    assert nothing("claims", "default") == "no claims"


def test_several_failures_at_once_are_told_as_the_first() -> None:
    cause = OpenRLError("inner")
    assert cli.first_cause(ExceptionGroup("outer", [ExceptionGroup("middle", [cause])])) is cause


def test_table_pads_columns_and_marks_empty_cells() -> None:
    assert table(["A", "LONG"], [["x", ""], ["yyy", "z"]]) == "A    LONG\nx    -\nyyy  z"
    assert table(["A"], [["x"]], with_header=False) == "x"


def job(**changes: Any) -> JobRecord:
    record = JobRecord(
        tenant="default",
        job="demo",
        submission="s",
        incarnation=3,
        spec=JobSpec(name="demo", kind=JobKind.FFT, base_model="/m"),
        phase=JobPhase.ADMITTED,
        runtime_tenant="default",
        runtime="demo",
        trainer="default--demo--trainer",
        sampler="default--demo--sampler",
        submitted_at=0.0,
    )
    return msgspec.structs.replace(record, **changes)


def workload(**changes: Any) -> WorkloadRecord:
    record = WorkloadRecord(
        workload="default--demo--trainer",
        tenant="default",
        owner="default/demo",
        owner_name="demo",
        kind=JobKind.FFT,
        jobs=("default.demo",),
        incarnation=3,
        shape=Shape(role=Role.TRAINER, device_bytes=6 * GIB, host_bytes=GIB),
        base_model="/m",
        phase=WorkloadPhase.PENDING,
        submitted_at=0.0,
        reason=Reason.WAITING_FOR_SEAT,
        message="3 of 3 claims are full (limit 2)",
        since=100.0,
        estimate={"weights": 2.5},
        waits=(Wait(reason=Reason.WAITING_FOR_DEVICE, message="no device", since=50.0, until=100.0),),
    )
    return msgspec.structs.replace(record, **changes)


def test_jobs_table_shows_phase_and_reason() -> None:
    row = JobRow(record=job(), trainer_phase="Pending", reason=Reason.WAITING_FOR_SEAT, message="full")
    lines = render("jobs", [row], None).splitlines()
    assert lines[0].split() == ["NAME", "KIND", "PHASE", "TRAINER", "SAMPLER", "REASON", "DURATION", "AGE"]
    assert lines[1].split()[:6] == ["demo", "fft", "Admitted", "Pending", "-", "WaitingForSeat"]
    assert "MESSAGE" in render("jobs", [row], "wide")
    assert render("jobs", [row], "name") == "job/demo"
    assert names_of("jobs", row) == {"demo", "default/demo"}


def test_age_goes_on_after_a_job_has_ended_and_its_duration_does_not() -> None:
    now = time.time()
    ended = job(phase=JobPhase.FINISHED, submitted_at=now - 7200.0, ended_at=now - 3600.0)
    assert render("jobs", [JobRow(record=ended)], None, with_header=False).split()[-2:] == ["1h", "2h"]
    running = job(submitted_at=now - 7200.0)
    assert render("jobs", [JobRow(record=running)], None, with_header=False).split()[-2:] == ["2h", "2h"]
    row = WorkloadRow(record=workload(submitted_at=now - 7200.0))
    assert render("workloads", [row], None, with_header=False).split()[-1] == "2h"


def test_claims_table_shows_seats_used_of_limit() -> None:
    seat = SeatRow(
        assignment="a",
        workload="default--demo--trainer",
        owner="default/demo",
        role=Role.TRAINER,
        device_bytes=GIB,
        host_bytes=GIB,
        exclusive=False,
        state="held",
    )
    row = ClaimRow(claim="c1", state=ClaimState.ALLOCATED, node="n", devices=("0",), seats=[seat], limit=2)
    assert render("claims", [row], None, with_header=False).split()[:9] == [
        *("c1", "allocated", "1/2", "0", "-", "n", "0", "-", "demo/trainer")
    ]
    turns = TurnRecord(residents={"a": Residency(epoch=1, granted_at=0.0, until=9.0)}, waiting={"b": 1.0, "c": 2.0})
    shown = render("claims", [with_turns(row, turns)], None).splitlines()
    assert shown[0].split()[2:5] == ["SEATS", "RESIDENT", "WAITING"]
    assert shown[1].split()[2:5] == ["1/2", "1", "2"]
    assert "1/∞" in render("claims", [msgspec.structs.replace(row, limit=0)], None)
    alone = msgspec.structs.replace(row, seats=[msgspec.structs.replace(seat, exclusive=True)])
    line = render("claims", [alone], None, with_header=False)
    assert "demo/trainer (exclusive)" in line
    assert line.split()[2:5] == ["1/2", "-", "-"], "it takes no turns: none is resident in that sense"


def test_explanation_names_reason_line_and_candidates() -> None:
    """W5: reason, since when, position in line, why each candidate refused, earlier waits."""
    from openrl_common.queries import CandidateRow

    answer = ExplainAnswer(
        record=workload(),
        sentence="waits for a seat: 3 of 3 claims are full (limit 2)",
        position=2,
        line_length=5,
        deadline_in_s=60.0,
        candidates=[CandidateRow(claim="c1", seats=2, limit=2, refused="full", held_by=("default--a--trainer",))],
        notes=["host memory of node n is unknown and was not checked"],
    )
    text = explanation(answer, 130.0)
    for part in (
        "2 of 5 in line",
        "waits 30s",
        "fails in 1m",
        "a/trainer",
        "full",
        "no device",
        "unknown",
        "weights 2.5",
    ):
        assert part in text


def test_P13_explanation_says_what_is_avoided_until_that_is_over() -> None:
    record = msgspec.structs.replace(workload(), avoid=(Avoid(node="n0", until=140.0, why="it did not start there"),))
    answer = ExplainAnswer(
        record=record, sentence="", position=None, line_length=0, deadline_in_s=None, candidates=[], notes=[]
    )
    assert "avoids n0" in explanation(answer, 130.0)
    assert "avoids" not in explanation(answer, 140.0)


def test_status_table_has_a_column_per_phase() -> None:
    record = ReadyRecord(
        assignment="a",
        workload="default--demo--trainer",
        ready=True,
        phases=(Phase(name="imports", started_at=1.0, seconds=2.5), Phase(name="load", started_at=3.5, seconds=0.5)),
        process_started_at=1.0,
        ready_at=4.25,
        detail={"device": "cpu"},
    )
    lines = status_table([record]).splitlines()
    assert lines[0].split() == ["WORKLOAD", "READY", "IMPORTS", "LOAD", "TO", "READY"]
    assert lines[1].split() == ["demo/trainer", "yes", "2.50", "0.50", "3.25"]
    assert status_table([record], wide=True).splitlines()[1].split()[-1] == "device=cpu"


def test_event_is_one_readable_line() -> None:
    event = SeatBooked(
        tenant="default", workload="default--demo--trainer", incarnation=3, assignment="a1", claim="c1", founded=True
    )
    line = event_line(event.subject, msgspec.json.encode(event), 0.25)
    assert "ledger" in line
    assert "seat demo/trainer booked" in line
    assert "assignment=a1" in line
    assert "\n" not in line
    assert "not readable" in event_line(event.subject, b"\xff", 0.0)
    other = {"workload": "default--demo--sampler", "shape": {"role": "sampler"}}
    line = event_line(event.subject, msgspec.json.encode({"may_found": True, "beside": other}), 0.25)
    assert line.endswith("booked may_found=yes beside=demo/sampler")
    nested = {"seen": True, "parts": {"shape": {"role": "trainer"}, "owner": "o" * 500}}
    line = event_line(event.subject, msgspec.json.encode(nested), 0.25)
    assert len(line) < 250
    assert "shape" not in line


def test_spec_from_file_with_options_on_top(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    file.write_text('{"name": "a", "kind": "lora", "base_model": "/m", "lora": {"rank": 4}}')
    spec = spec_of({"name": "b", "alpha": 8.0}, file)
    assert spec.name == "b"
    assert spec.lora is not None
    assert (spec.lora.rank, spec.lora.alpha) == (4, 8.0)


def test_unknown_field_in_a_job_file_is_refused_by_name(tmp_path: Path) -> None:
    """E2: unknown fields are refused in user input."""
    file = tmp_path / "job.json"
    file.write_text('{"name": "a", "kind": "fft", "base_model": "/m", "learning_rat": 1}')
    with pytest.raises(Rejected, match="learning_rat"):
        spec_of({}, file)


def test_model_path_is_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Workers run elsewhere: a relative path would mean another place there."""
    monkeypatch.chdir(tmp_path)
    assert spec_of({"name": "a", "kind": "fft", "base_model": "m"}).base_model == str(tmp_path / "m")


def test_the_numbers_of_devices_come_from_options_or_the_file_and_are_whole_P10(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    file.write_text('{"name": "a", "kind": "fft", "base_model": "/m", "trainer_devices": 2, "sampler_devices": 3}')
    spec = spec_of({"trainer_devices": 4}, file)
    assert (spec.trainer_devices, spec.sampler_devices) == (4, 3)
    file.write_text('{"name": "a", "kind": "fft", "base_model": "/m", "trainer_devices": 1.5}')
    with pytest.raises(Rejected, match="trainer_devices"):
        spec_of({}, file)


def test_json_and_yaml_say_the_same() -> None:
    import yaml

    value = [JobRow(record=job())]
    assert yaml.safe_load(machine_readable(value, "yaml")) == msgspec.json.decode(machine_readable(value, "json"))


def test_every_listed_command_exists() -> None:
    """Nothing is listed in --help that cannot be run."""
    context = click.Context(cli.cli)
    for name in cli.cli.list_commands(context):
        assert cli.cli.get_command(context, name) is not None


def test_watch_prints_a_row_again_only_when_more_than_time_changed() -> None:
    first, later = WorkloadRow(record=workload(), waited_s=1.0), WorkloadRow(record=workload(), waited_s=2.0)
    placed = WorkloadRow(record=workload(phase=WorkloadPhase.PLACED, reason=None, claim="c1"))
    assert fingerprint("workloads", first) == fingerprint("workloads", later)
    assert fingerprint("workloads", first) != fingerprint("workloads", placed)


@pytest.mark.parametrize(
    ("suspect", "lost", "shown"), [(False, False, "ready"), (True, False, "suspect"), (True, True, "lost")]
)
def test_nodes_table_shows_what_the_ledger_thinks_of_a_node(suspect: bool, lost: bool, shown: str) -> None:
    """F3, W5."""
    record = NodeRecord(node="n1", devices=(), suspect=suspect, lost=lost)
    row = NodeRow(record=record, usable="missed heartbeats" if suspect else "")
    assert render("nodes", [row], None, with_header=False).split()[:2] == ["n1", shown]
