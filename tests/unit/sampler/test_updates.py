"""Which weights are due, for whom, and how failures are tried again (V5, V8, V9, E5). Stop rules (V10)."""

from __future__ import annotations

from openrl_common.records import (
    JobKind,
    JobPhase,
    JobRecord,
    JobSpec,
    Role,
    Shape,
    WeightsRecord,
    WorkloadPhase,
    WorkloadRecord,
)
from openrl_sampler.attached import AttachedJobs
from openrl_sampler.stopping import StopRule
from openrl_sampler.updates import due, failed, job_key, next_retry_at


def _weights(version: int, *, job: str = "j", incarnation: int = 1) -> WeightsRecord:
    return WeightsRecord(
        tenant="t", job=job, incarnation=incarnation, version=version, parent=None, format="full", manifest="m",
        digest="d", total_bytes=1, largest_tensor_bytes=1,
    )  # fmt: skip


def _job(name: str, *, sampler: str, phase: JobPhase = JobPhase.READY, incarnation: int = 1) -> JobRecord:
    return JobRecord(
        tenant="t", job=name, submission="s", incarnation=incarnation,
        spec=JobSpec(name=name, kind=JobKind.LORA, base_model="m"), phase=phase, runtime_tenant="_shared",
        runtime="r", trainer="w", sampler=sampler, submitted_at=0.0,
    )  # fmt: skip


def _workload(kind: JobKind, jobs: tuple[str, ...] = ()) -> WorkloadRecord:
    return WorkloadRecord(
        workload="w", tenant="t", owner="o", owner_name="o", kind=kind, jobs=jobs, incarnation=4,
        shape=Shape(role=Role.SAMPLER, device_bytes=1), base_model="m", phase=WorkloadPhase.PLACED, submitted_at=0.0,
    )  # fmt: skip


def test_e5_only_a_newer_version_of_a_served_job_is_due() -> None:
    records = [_weights(3), _weights(9, job="other"), _weights(2, job="k")]
    keys = {"t.j.1", "t.k.1"}
    assert due(records, keys, {"t.j.1": 2, "t.k.1": 2}, {}, 0.0) == [records[0]]
    assert due(records, keys, {}, {}, 0.0) == [records[0], records[2]]


def test_v9_weights_of_an_earlier_job_of_the_same_name_are_never_due() -> None:
    assert due([_weights(9, incarnation=1)], {"t.j.2"}, {}, {}, 0.0) == []


def test_v8_a_rejected_version_is_tried_again_later_and_a_newer_one_at_once() -> None:
    key = job_key("t", "j", 1)
    failures = {key: failed(None, 3, "why", 10.0)}
    assert due([_weights(3)], {key}, {}, failures, 10.5) == []
    assert due([_weights(3)], {key}, {}, failures, 11.0) == [_weights(3)]
    assert due([_weights(4)], {key}, {}, failures, 10.0) == [_weights(4)]
    assert next_retry_at(failures) == 11.0
    assert next_retry_at({}) is None
    delays = []
    failure = None
    for _ in range(8):
        failure = failed(failure, 3, "why", 0.0)
        delays.append(failure.retry_at)
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_v9_a_lora_sampler_serves_the_jobs_that_name_it_and_have_not_ended() -> None:
    attached = AttachedJobs(_workload(JobKind.LORA))
    attached.saw("t.a", _job("a", sampler="w"), 1)
    attached.saw("t.b", _job("b", sampler="another"), 2)
    attached.saw("t.c", _job("c", sampler="w", phase=JobPhase.FAILED), 3)
    assert attached.keys == {"t.a.1"}
    attached.saw("t.a", _job("a", sampler="w", incarnation=5), 6)
    attached.saw("t.a", _job("a", sampler="w"), 4)
    assert attached.keys == {"t.a.5"}, "an older revision changes nothing"
    attached.gone("t.a")
    assert attached.keys == frozenset()


def test_v10_a_full_sampler_serves_its_one_job() -> None:
    attached = AttachedJobs(_workload(JobKind.FFT, ("t.j",)))
    attached.saw("t.x", _job("x", sampler="w"), 1)
    assert attached.keys == {"t.j.4"}


def test_v10_stop_strings_are_found_across_tokens_in_the_completion_only() -> None:
    texts = {1: "a", 2: "bc", 3: "d", 4: "\u2713"}

    def decode(tokens: object) -> str:
        return "".join(texts[token] for token in tokens)  # type: ignore[attr-defined]

    rule = StopRule(frozenset({9}), 6, ("cd",), decode)
    assert [rule.reason(tokens) for tokens in ([1], [1, 2], [1, 2, 3], [2, 1, 3])] == ["", "", "stop", ""]
    assert rule.reason([1] * 6) == "length"
    assert rule.reason([4, 1, 9]) == "stop"


def test_v10_a_stop_string_check_does_not_grow_with_the_completion() -> None:
    seen = []

    def decode(tokens: object) -> str:
        seen.append(len(tokens))  # type: ignore[arg-type]
        return ""

    StopRule(frozenset(), 10**6, ("abc",), decode).reason([1] * 10_000)
    assert seen == [16]
