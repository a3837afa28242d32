"""What ``openrl doctor`` makes of what it heard (E18): each finding has a remedy, and it can find nothing too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from openrl_client import doctor
from openrl_client.cli import run
from openrl_client.cli.common import Where
from openrl_client.cli.doctor import look_here, report
from openrl_client.doctor import Finding, Level
from openrl_common.controls import LedgerStateAnswer
from openrl_common.errors import Unreachable
from openrl_common.quantities import GIB, MIB
from openrl_common.records import Device, NodeRecord, Standing
from openrl_common.streams import BUCKETS, STREAMS


def sound(replicas: int = 1) -> dict[str, dict[str, Any]]:
    """What the JetStream API says of a system as ``streams.ensure`` makes it."""
    found: dict[str, dict[str, Any]] = {}
    for stream in STREAMS:
        found[stream.name] = {
            "subjects": list(stream.subjects), "retention": "workqueue" if stream.work_queue else "limits",
            "max_age": int(stream.max_age_s * 1e9), "duplicate_window": int(stream.duplicate_window_s * 1e9),
            "allow_direct": True, "storage": "file", "num_replicas": replicas, "allow_msg_ttl": stream.message_ttl,
        }  # fmt: skip
    for bucket in BUCKETS:
        found[f"KV_{bucket.name}"] = {
            "max_msgs_per_subject": 1, "max_age": int(bucket.max_age_s * 1e9), "deny_delete": True,
            "allow_direct": True, "storage": "file", "num_replicas": replicas,
        }  # fmt: skip
    return found


def levels(findings: list[Finding]) -> list[str]:
    assert all(each.remedy for each in findings if each.level in (Level.WARNING, Level.FAILED)), "each has a remedy"
    return [each.level.value for each in findings]


def test_e18_anything_but_sync_always_is_a_failure() -> None:
    """E18: the default fsyncs two minutes after the acknowledgement."""
    assert doctor.judge_sync("always").level is Level.OK
    for setting in ("2m (the default)", "10s"):
        finding = doctor.judge_sync(setting)
        assert finding.level is Level.FAILED
        assert setting in finding.what
        assert "sync_interval: always" in finding.remedy
    assert doctor.judge_sync(None).level is Level.NOTE


def test_e18_streams_as_they_should_be_are_one_line() -> None:
    findings = doctor.judge_streams(sound(3), clustered=True)
    assert levels(findings) == ["ok", "ok"]


def test_e18_missing_and_changed_streams_are_named_with_what_is_wrong() -> None:
    found = sound()
    del found["OPENRL_EVENTS"]
    del found["KV_openrl_ledger"]
    found["KV_openrl_jobs"]["max_msgs_per_subject"] = 5
    found["OPENRL_SAMPLE"]["storage"] = "memory"
    by_name = {each.what.split()[0].rstrip(":"): each for each in doctor.judge_streams(found, clustered=False)}
    assert by_name["OPENRL_EVENTS"].level is Level.FAILED
    assert "ledger rebuild" in by_name["KV_openrl_ledger"].remedy
    assert "max_msgs_per_subject is 5, not 1" in by_name["KV_openrl_jobs"].what
    assert "not on a disk" in by_name["OPENRL_SAMPLE"].what


def test_e18_fewer_than_three_replicas_are_a_warning_in_a_cluster_and_a_note_on_one_server() -> None:
    assert levels(doctor.judge_streams(sound(1), clustered=True)) == ["ok", "warning"]
    assert levels(doctor.judge_streams(sound(1), clustered=False)) == ["ok", "note"]


@pytest.mark.parametrize(
    ("version", "level"), [("2.15.1", "ok"), ("2.11.0", "ok"), ("2.10.9", "failed"), ("", "failed")]
)
def test_an_old_server_is_refused(version: str, level: str) -> None:
    assert levels([doctor.judge_version({"version": version})]) == [level]


def test_clock_disk_and_limits() -> None:
    assert levels([doctor.judge_skew(0.2), doctor.judge_skew(-3.0)]) == ["ok", "warning"]
    assert "3.0 s behind" in doctor.judge_skew(-3.0).what
    disk = [doctor.judge_disk(Path("/x"), free, 100 * GIB) for free in (50 * GIB, 5 * GIB, GIB)]
    assert levels(disk) == ["ok", "warning", "failed"]
    assert levels([doctor.judge_open_files(1024, 4096), doctor.judge_open_files(65536, 65536)]) == ["warning", "ok"]
    shared = [doctor.judge_shared_memory(size) for size in (64 * MIB, 8 * GIB, None)]
    assert levels(shared) == ["warning", "ok", "note"]
    full = doctor.judge_storage({"storage": 95, "limits": {"max_storage": 100}})
    assert levels([full, doctor.judge_storage({"storage": 95, "limits": {"max_storage": -1}})]) == ["failed", "ok"]


def test_l7_a_lost_ledger_is_told_with_the_way_back() -> None:
    assert "rebuild" in doctor.judge_ledger(LedgerStateAnswer(active=False), 0).remedy
    assert doctor.judge_ledger(None, 0).level is Level.FAILED
    assert doctor.judge_ledger(LedgerStateAnswer(active=True, identity="x"), 3).level is Level.OK


def test_f3_nodes_that_do_not_count_are_named() -> None:
    device = (Device(device="d", memory_bytes=GIB),)
    nodes = {
        "a": NodeRecord(node="a", devices=device), "b": NodeRecord(node="b", devices=device),
        "c": NodeRecord(node="c", devices=device, complete=False),
    }  # fmt: skip
    findings = doctor.judge_nodes(nodes, {"a": Standing.LOST, "b": Standing.SUSPECT})
    assert levels(findings) == ["failed", "warning", "warning"]
    assert levels(doctor.judge_nodes({}, {})) == ["warning"]
    assert levels(doctor.judge_nodes({"a": nodes["a"]}, {})) == ["ok"]


def test_strays_dead_letters_and_services() -> None:
    assert doctor.judge_strays(["w"], ["w"]) == []
    assert "ghost" in doctor.judge_strays(["w", "ghost"], ["w"])[0].what
    assert levels([doctor.judge_dead_letters(2), doctor.judge_dead_letters(0)]) == ["warning", "ok"]
    assert levels(doctor.judge_services({"ledger": "not ready: draining", "placement": ""})) == ["failed"]
    assert levels(doctor.judge_services({"placement": ""})) == ["ok"]


def test_the_report_ends_with_a_verdict() -> None:
    text = report([doctor.judge_sync("10s"), doctor.judge_skew(0.0)])
    assert text.splitlines()[0].split() == ["LEVEL", "ABOUT", "FOUND", "REMEDY"]
    assert text.splitlines()[-1] == "1 failed"
    assert report([doctor.judge_skew(0.0)]).splitlines()[-1] == "all is well"


def test_a_system_that_nobody_supervises_is_a_warning_with_what_to_do() -> None:
    assert doctor.judge_supervisor(17, held=True) == []
    findings = doctor.judge_supervisor(17, held=False)
    assert levels(findings) == ["warning"]
    assert "17" in findings[0].what


def test_without_a_system_this_host_is_looked_at_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """C5: the exit code still says that nothing answers."""
    monkeypatch.delenv("OPEN_RL_NATS_URL", raising=False)
    assert run(["doctor", "--home", str(tmp_path)]) == 5
    shown = capsys.readouterr()
    assert "no OpenRL system is up" in shown.out
    assert str(tmp_path) in shown.err
    assert "disk" in shown.out


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (Unreachable("nobody is at a:b: c", remedy="start it: now"), "nobody is at a:b: c"),
        (Unreachable("bucket jobs cannot be read: NATS does not answer"), "cannot be read: NATS does not answer"),
    ],
)
def test_what_is_wrong_and_what_to_do_are_told_apart_whatever_the_sentence_has(
    tmp_path: Path, error: Unreachable, what: str
) -> None:
    """C5: the remedy is a field of the error; one without has doctor's own."""
    finding = look_here(Where(None, tmp_path, "default"), error)[0]
    assert levels([finding]) == ["failed"]
    assert finding.what.endswith(what)
    assert finding.remedy == (error.remedy or "see `openrl logs nats`, then look again")
    assert str(error) == (f"{error.what}: {error.remedy}" if error.remedy else error.what)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"ok":false,"failing":{"bus":"NATS is away","caches":"not read yet"}}', "NATS is away; not read yet"),
        (b'{"failing":["bus"]}', '{"failing":["bus"]}'),
        (b"<html>\n gateway", "<html> gateway"),
    ],
)
def test_why_a_service_is_not_ready_is_one_line(body: bytes, said: str) -> None:
    assert doctor.not_ready(body) == said
