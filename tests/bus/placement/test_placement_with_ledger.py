"""Placement and the ledger as processes, client, launcher and workers played (``played``)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bus.placement.played import CONFIG, System, running
from openrl_common.errors import Rejected
from openrl_common.events import (
    JobAdmitted,
    JobCancelled,
    JobEnded,
    JobFailed,
    JobFinished,
    JobReady,
    JobSubmitted,
)
from openrl_common.quantities import GIB
from openrl_common.queries import (
    CLAIMS,
    EXPLAIN,
    JOBS,
    NODES,
    WORKLOADS,
    ClaimsAnswer,
    ExplainAnswer,
    ExplainQuery,
    JobsAnswer,
    ListQuery,
    NodesAnswer,
    WorkloadsAnswer,
)
from openrl_common.records import (
    JobKind,
    JobPhase,
    JobSpec,
    Reason,
    WorkloadPhase,
)


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    async with running(tmp_path) as made:
        yield made


async def test_a_job_goes_from_submitted_to_ready_to_ended_and_its_claims_are_gone(system: System) -> None:
    await system.submit("a")
    await system.until(lambda: system.of(JobReady, "a"))
    (row,) = (await system.bus.request(JOBS, ListQuery(), JobsAnswer)).jobs
    assert (row.trainer_phase, row.sampler_phase) == ("Ready", "Ready")
    claims = (await system.bus.request(CLAIMS, ListQuery(), ClaimsAnswer)).claims
    assert sorted(seat.state for claim in claims for seat in claim.seats) == ["held", "held"]
    (node,) = (await system.bus.request(NODES, ListQuery(), NodesAnswer)).nodes
    assert node.devices_claimed >= 1
    assert node.host_seats_bytes >= 2 * GIB
    await system.bus.publish(JobFinished(tenant="default", job="a", submission="s-a"))
    await system.until(lambda: system.of(JobEnded, "a"))
    await system.until(lambda: len(system.free) == 2)
    assert [event.outcome for event in system.of(JobEnded, "a")] == ["Finished"]  # type: ignore[union-attr]
    rows = (await system.bus.request(WORKLOADS, ListQuery(), WorkloadsAnswer)).workloads
    assert {row.record.phase for row in rows} == {WorkloadPhase.FINISHED}


async def test_S4_a_job_beyond_the_seats_waits_with_the_limits_name_and_gets_the_freed_seat(system: System) -> None:
    for name in ("a", "b"):
        await system.submit(name)
        await system.until(lambda name=name: system.of(JobReady, name))
    await system.submit("c")

    async def waits() -> bool:
        answer = await system.bus.request(EXPLAIN, ExplainQuery(workload="c/trainer"), ExplainAnswer)
        return answer.record.reason is Reason.WAITING_FOR_SEAT and answer.position is not None

    await system.until(waits)
    assert not system.of(JobReady, "c")
    await system.bus.publish(JobCancelled(tenant="default", job="a", submission="s-a"))
    await system.until(lambda: system.of(JobReady, "c"))
    claims = (await system.bus.request(CLAIMS, ListQuery(), ClaimsAnswer)).claims
    assert all(len(claim.seats) <= 2 and claim.seats_peak <= 2 for claim in claims)
    entry = await system.bus.store.workloads.get("default--c--trainer")
    assert entry is not None
    assert entry.value.waits
    assert all(wait.until is not None for wait in entry.value.waits)


async def test_invariant_9_kill_of_placement_in_the_middle_loses_nothing(system: System) -> None:
    await system.submit("a")
    await system.until(lambda: system.of(JobReady, "a"))
    await system.kill("placement")
    await system.submit("b")
    await system.bus.publish(JobFinished(tenant="default", job="a", submission="s-a"))
    await system.start("placement")
    await system.until(lambda: system.of(JobReady, "b") and system.of(JobEnded, "a"))
    assert await system.kill("placement", signal.SIGTERM) == 0, "E17"
    await system.start("placement")
    await system.bus.publish(JobFinished(tenant="default", job="b", submission="s-b"))
    await system.until(lambda: system.of(JobEnded, "b"))
    await system.until(lambda: len(system.free) == 2)


async def test_P12_lora_jobs_share_a_runtime_that_goes_when_idle(tmp_path: Path) -> None:
    async with running(tmp_path, devices=2) as system:
        await system.submit("a", "lora")
        await system.submit("b", "lora")
        await system.until(lambda: system.of(JobReady, "a") and system.of(JobReady, "b"))
        assert len((await system.bus.request(WORKLOADS, ListQuery(), WorkloadsAnswer)).workloads) == 2
        for name in ("a", "b"):
            await system.bus.publish(JobFinished(tenant="default", job=name, submission=f"s-{name}"))
            await system.until(lambda name=name: system.of(JobEnded, name))
        await system.until(lambda: len(system.free) == 2)


async def test_of_two_submissions_of_a_name_the_first_gets_it_however_long_its_model_takes_to_read(
    system: System,
) -> None:
    slow = system.home / "slow"
    slow.mkdir()
    os.mkfifo(slow / "config.json")
    spec = JobSpec(name="a", kind=JobKind.FFT, base_model=str(slow))
    await system.bus.publish(JobSubmitted(tenant="default", job="a", submission="first", spec=spec))
    await system.submit("a", submission="second")
    await system.submit("b")
    await system.until(lambda: system.of(JobAdmitted, "b"))
    assert not system.of(JobAdmitted, "a")
    await asyncio.to_thread((slow / "config.json").write_text, json.dumps(CONFIG))
    await system.until(lambda: system.of(JobFailed, "a") and system.of(JobAdmitted, "a"))
    (admitted,), (failed,) = system.of(JobAdmitted, "a"), system.of(JobFailed, "a")
    assert (admitted.submission, failed.submission, failed.code) == ("first", "second", "duplicate-name")  # type: ignore[union-attr]


async def test_bad_input_is_answered_and_garbage_goes_to_the_dead_letters(system: System) -> None:
    good = await system.submit("a")
    await system.submit("a", submission="second")
    await system.until(lambda: [e for e in system.of(JobFailed, "a") if e.code == "duplicate-name"])  # type: ignore[union-attr]
    spec = {"name": "typo", "kind": "fft", "base_model": system.model, "learning_rat": 1}
    body = {"type": "job.submitted.v1", "tenant": "default", "job": "typo", "submission": "t", "spec": spec}
    await system.bus.publish_raw(
        "openrl.ev.client.default.job.typo.submitted", json.dumps(body).encode(), message_id="typo"
    )
    await system.until(lambda: [e for e in system.of(JobFailed, "typo") if "learning_rat" in e.message])  # type: ignore[union-attr]
    spec_missing = JobSpec(name="gone", kind=JobKind.FFT, base_model="/no/such/model")
    await system.bus.publish(JobSubmitted(tenant="default", job="gone", submission="g", spec=spec_missing))
    await system.until(lambda: [e for e in system.of(JobFailed, "gone") if e.code == "model-unreadable"])  # type: ignore[union-attr]
    for name, length in (("long", 300), ("huge", 5_000_000)):
        spec_long = JobSpec(name=name, kind=JobKind.FFT, base_model="/no/" + "x" * length)
        await system.bus.publish(JobSubmitted(tenant="default", job=name, submission=name, spec=spec_long))
    await system.until(lambda: [e for e in system.of(JobFailed, "long") if e.code == "model-unreadable"])  # type: ignore[union-attr]
    await system.until(lambda: [e for e in system.of(JobFailed, "huge") if "at most 65536" in e.message])  # type: ignore[union-attr]
    await system.bus.publish_raw("openrl.ev.client.default.job.x.finished", b"\x00garbage", message_id="garbage")
    await system.bus.publish_raw(
        "openrl.ev.client.other.job.a.submitted", b'{"type":"job.submitted.v1"}', message_id="empty"
    )

    async def buried() -> bool:
        found = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                async for _ in system.bus.tail(stream="OPENRL_DLQ", subject="openrl.dlq.>"):
                    found += 1
        return found == 2

    await system.until(buried)
    with pytest.raises(Rejected, match="no workload"):
        await system.bus.request(EXPLAIN, ExplainQuery(workload="nobody/trainer"), ExplainAnswer)
    await system.bus.publish(good)
    await system.until(lambda: len(system.of(JobAdmitted, "a")) == 1)


async def active(system: System) -> int:
    """The pid of the placement that has the duty; 0: nobody has."""
    entry = await system.bus.store.duties.get("placement")
    return int(entry.value.holder.split("/")[1]) if entry is not None and entry.value.holder else 0


async def test_W1_one_placement_acts_and_another_takes_over_at_once_when_its_process_is_gone(system: System) -> None:
    """W1, L6: the stand-by is on the same machine, it sees that the process is gone."""
    await system.start("placement", "second")
    await system.submit("a")
    await system.until(lambda: system.of(JobReady, "a"))
    first = system.processes["placement"].pid
    assert await active(system) == first
    await system.kill("placement")
    await system.submit("b")
    await system.until(lambda: system.of(JobReady, "b"))
    assert await active(system) == system.processes["second"].pid
    assert len(system.of(JobAdmitted, "b")) == 1
    assert await system.kill("second", signal.SIGTERM) == 0
    assert await active(system) == 0, "handed back"


@pytest.mark.long
async def test_W1_a_placement_that_slept_past_its_lease_ends_and_changes_nothing(system: System) -> None:
    """W1, E13: the other judges by its own clock; what the sleeper had in mind is not written over the other's."""
    await system.start("placement", "second")
    await system.submit("a")
    await system.until(lambda: system.of(JobReady, "a"))
    sleeper = system.processes.pop("placement")
    sleeper.send_signal(signal.SIGSTOP)
    try:
        await system.bus.publish(JobFinished(tenant="default", job="a", submission="s-a"))
        await system.until(lambda: system.of(JobEnded, "a"), within_s=60)
    finally:
        sleeper.send_signal(signal.SIGCONT)
    async with asyncio.timeout(15):
        assert await sleeper.wait() == 1
    assert "another replica has taken over" in (system.home / "placement.log").read_text()
    record = await system.bus.store.jobs.get("default.a")
    assert record is not None
    assert record.value.phase is JobPhase.FINISHED


async def test_E10_the_ledger_writes_one_key_at_a_time(system: System) -> None:
    """E10, L1: no atomic batch in any revision of its bucket, and no message that changes two keys."""
    await system.submit("a")
    await system.until(lambda: system.of(JobReady, "a"))
    await system.bus.publish(JobFinished(tenant="default", job="a", submission="s-a"))
    await system.until(lambda: system.of(JobEnded, "a"))
    keys = set()
    async with asyncio.timeout(10):
        tail = system.bus.tail(stream="KV_openrl_ledger", subject="$KV.openrl_ledger.>")
        async for delivery in tail:
            assert not any(name.lower().startswith("nats-batch") for name in delivery.headers)
            keys.add(delivery.subject.split(".")[2])
            if delivery.message.delivered.pending == 0:
                break
        await tail.aclose()
    assert {"seat", "claim", "node"} <= keys
