"""The sampler as a process of its own on a real nats-server: requests, weights, versions, restarts, drain.

Those that a vLLM sampler passes too are imported by tests/vllm.
"""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sampler_support import save_lora_version
from sampler_world import STUCK, World, gone, metrics, versions

from openrl_common.errors import Rejected
from openrl_common.events import SamplerDisagreed, WeightsApplied, WeightsRejected
from openrl_common.names import agreement_subject
from openrl_common.records import JobKind, JobPhase
from openrl_common.wire import Agreement, AgreementVerdict, ErrorInfo, SamplingParams

pytestmark = pytest.mark.timeout(180)


async def test_v5_full_job_is_served_from_base_to_new_weights_and_a_bad_version_changes_nothing(world: World) -> None:
    """V3, V5, V8, V10, R1: cold base, ready record with phases, update, rejection with its reason, recovery."""
    workload = await world.workload(JobKind.FFT, ("t.j",))
    await world.start(workload, "a1")
    record = await world.ready("a1")
    names = [phase.name for phase in record.phases]
    assert (names[0], set(names[1:3]), names[3:]) == ("start", {"prefetch", "imports"}, ["load", "engine", "weights"])
    assert record.detail.pop("prefetch").startswith("not prefetched: ")  # R1: on a disk that is no network's
    assert record.detail == {
        "engine": "torch", "can_park": "true", "max_model_len": "64", "weights_formats": "full,delta",
    }  # fmt: skip
    cold = await world.sample()
    assert versions(cold) == {0}
    assert [len(group) for group in cold.sequences] == [2, 2]
    assert (await world.sample()).sequences == cold.sequences, "the same seed gives the same tokens"

    waits = await world.send(at_least=1)
    await world.weights(world.full(1))
    assert versions(await world.answer(waits)) == {1}
    applied = await world.next_event(WeightsApplied)
    assert (applied.version, applied.assignment) == (1, "a1")

    bad = world.full(2)
    (Path(bad.manifest).parent / "model.safetensors").write_bytes(b"short")
    await world.weights(bad)
    rejected = await world.next_event(WeightsRejected)
    assert (rejected.version, "has 5 bytes" in rejected.why) == (2, True)
    refused = await refusal(world, at_least=2, timeout_s=1.5)
    assert refused.code == "version-not-served"
    assert "has 5 bytes" in refused.message
    assert versions(await world.sample()) == {1}
    await world.weights(world.full(3))
    assert versions(await world.sample(at_least=3)) == {3}
    assert await world.error(exact=1) == "version-not-served"
    assert versions(await world.sample(exact=3)) == {3}
    async with asyncio.timeout(5):
        while await world.pending_messages():  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.05)
    phases = (await world.ready("a1")).phases
    assert phases[-1].name == "first request"


async def refusal(world: World, *, timeout_s: float, **fields: Any) -> ErrorInfo:
    """Asked again when the time was over before the sampler had it: such a request is not answered (V10)."""
    async with asyncio.timeout(world.deadline_s):
        while True:
            name = await world.send(timeout_s=timeout_s, **fields)
            await asyncio.wait({world.answers[name]}, timeout=timeout_s + 5)
            if world.answers[name].done():
                error = world.answers[name].result().error
                assert error is not None
                return error


async def test_v10_every_bad_request_gets_its_own_code_and_harms_nobody(world: World) -> None:
    """V10: typed errors; garbage goes to the dead letters; an expired request is neither run nor answered."""
    workload = await world.workload(JobKind.FFT, ("t.j",), max_model_len=32)
    await world.start(workload, "a1", "--max-waiting-requests", "4", "--max-num-seqs", "4")
    await world.ready("a1")
    assert await world.error(params=SamplingParams(temperature=-1.0)) == "bad-params"
    assert await world.error(params=SamplingParams(max_tokens=31)) == "too-long"
    assert await world.error(params=SamplingParams(max_tokens=4, stop=["x"])) == "bad-params"
    assert await world.error(job="stranger") == "unknown-job"
    assert await world.error(incarnation=9) == "unknown-job"
    assert await world.error(params=SamplingParams(temperature=float("nan"))) == "bad-request"
    assert await world.error(prompts=["text"]) == "bad-request"
    late = await world.send(deadline=time.time() - 1)
    await world.send(body=b"\xff not json")
    async with asyncio.timeout(world.deadline_s):
        async for delivery in world.bus.tail(stream="OPENRL_DLQ", subject="openrl.dlq.>"):
            assert delivery.body == b"\xff not json"
            break
    forged = await world.send(asker="other")
    waiting = [await world.send(at_least=5, timeout_s=6.0) for _ in range(6)]
    codes = [result.error.code for result in await asyncio.gather(*map(world.answer, waiting)) if result.error]
    assert sorted(codes) == ["busy"] * 2 + ["version-not-served"] * 4
    assert versions(await world.sample()) == {0}
    assert not world.answers[late].done()
    assert not world.answers[forged].done(), "its subject is another tenant's than its job"
    assert len(world.answered) == len(set(world.answered))


async def test_v10_a_cancelled_request_leaves_the_line_or_the_engine_and_harms_nobody(world: World) -> None:
    """V10: one that waits for a version, one that runs, one whose cancellation came first; all are answered, acked."""
    workload = await world.workload(JobKind.FFT, ("t.j",))
    await world.start(workload, "a1", "--max-waiting-requests", "2")
    await world.ready("a1")
    waiting = [await world.send(at_least=5, timeout_s=60.0) for _ in range(2)]
    assert await world.error(at_least=5) == "busy", "the line is full"
    for name in waiting:
        await world.cancel(name)
        assert (await world.answer(name)).error == ErrorInfo(code="cancelled", message="cancelled by its client")
    running = await world.send(params=SamplingParams(n=512, max_tokens=60, stop_token_ids=[]), timeout_s=60.0)
    beside = await world.send()
    await asyncio.sleep(0.3)
    assert not world.answers[running].done(), "it takes longer than this"
    await world.cancel(running)
    assert (await world.answer(running)).error is not None
    assert versions(await world.answer(beside)) == {0}
    await world.cancel("early")
    assert await world.error(name="early") == "cancelled"
    async with asyncio.timeout(5):
        while await world.pending_messages():  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.05)


async def test_v9_lora_jobs_come_and_go_each_with_its_own_adapter(world: World) -> None:
    """V9, V10: an adapter per job, version 0 is the base, an ended job is not served, a restart finds the newest."""
    workload = await world.workload(JobKind.LORA)
    await world.job("a", workload)
    await world.weights(save_lora_version(world.home, world.model, 4, job="a"))
    process = await world.start(workload, "a1")
    await world.ready("a1")
    first = await world.sample(job="a", exact=4)
    assert versions(first) == {4}
    await world.job("b", workload)
    base = await world.sample(job="b")
    assert versions(base) == {0}
    assert base.sequences != first.sequences
    both = [await world.send(job="a"), await world.send(job="b", at_least=1)]
    await world.weights(save_lora_version(world.home, world.model, 1, job="b"))
    results = await asyncio.gather(*map(world.answer, both))
    assert [versions(result) for result in results] == [{4}, {1}]
    assert [[s.tokens for s in group] for group in results[0].sequences] == [
        [s.tokens for s in group] for group in first.sequences
    ]
    await world.job("a", workload, JobPhase.FINISHED)
    ended: dict[str, Any] = {"job": "a", "params": SamplingParams(max_tokens=1), "at_least": 9}
    async with asyncio.timeout(world.deadline_s):
        while (await refusal(world, timeout_s=2.0, **ended)).code != "unknown-job":
            pass
    process.kill()
    await gone(process)
    await world.start(workload, "a2")
    await world.ready("a2")
    assert versions(await world.sample(job="b")) == {1}


async def test_v12_a_sampler_that_is_told_it_disagrees_with_the_trainer_says_so(world: World) -> None:
    """V12: metrics of what was measured; above the limit an event and a line in the ready record, until mended."""
    workload = await world.workload(JobKind.FFT, ("t.j",))
    await world.start(workload, "a1", "--agreement-limit", "0.02")
    await world.ready("a1")

    async def tell(mean: float, **changes: Any) -> AgreementVerdict:
        measured = Agreement(
            tenant="t", job="j", incarnation=1, version=7, num_tokens=128, mean=mean, max=3 * mean, kl=mean**2
        )
        measured = msgspec.structs.replace(measured, **changes)
        return await world.bus.request(agreement_subject(*world.runtime), measured, AgreementVerdict)

    with pytest.raises(Rejected, match=r"t\.stranger\.1 is not served"):
        await tell(0.1, job="stranger")
    assert await tell(0.3) == AgreementVerdict(limit=0.02, above=True)
    event = await world.next_event(SamplerDisagreed)
    assert (event.job, event.version, event.mean, event.limit) == ("j", 7, 0.3, 0.02)
    assert "mean 0.30000, max 0.90000 over 128 tokens, above" in (await world.ready("a1")).detail["agreement"]
    assert await tell(0.01, version=8) == AgreementVerdict(limit=0.02, above=False)
    assert "above" not in (await world.ready("a1")).detail["agreement"]
    figures = await asyncio.to_thread(metrics, world.home / "a1.log")
    assert figures['openrl_sampler_logprob_difference{statistic="mean"}'] == 0.01
    assert figures['openrl_sampler_logprob_difference{statistic="max"}'] == pytest.approx(0.03)
    assert figures["openrl_sampler_logprob_difference_limit"] == 0.02
    assert figures["openrl_sampler_disagreements_total"] == 1


async def test_v11_a_killed_sampler_leaves_its_requests_to_the_next(world: World) -> None:
    """V11, E6: kill -9 in the middle of generation; the request is redelivered and answered once."""
    workload = await world.workload(JobKind.FFT, ("t.j",))
    process = await world.start(workload, "a1")
    await world.ready("a1")
    name = await world.send(at_least=1, timeout_s=120.0)
    await asyncio.sleep(0.3)
    process.kill()
    await gone(process)
    await world.weights(world.full(1))
    await world.start(workload, "a2")
    assert versions(await world.answer(name)) == {1}


async def test_v11_an_engine_that_hangs_is_left_with_its_process_and_its_requests_go_elsewhere_once(
    world: World,
) -> None:
    """V11: the first engine that hangs gives its request back, the second answers it; who only waited goes on."""
    workload = await world.workload(JobKind.FFT, ("t.j",))
    program = (str(STUCK), str(world.home / "hang"))
    first = await world.start(workload, "a1", "--engine-stuck-after", "1s", program=program)
    await world.ready("a1")
    assert versions(await world.sample()) == {0}
    waits = await world.send(at_least=1, timeout_s=120.0)
    (world.home / "hang").touch()
    fatal = await world.send(timeout_s=120.0)
    assert await gone(first) == 1
    log = (world.home / "a1.log").read_text()
    assert "the engine has been at one step for" in log.splitlines()[-1]
    assert "stuck_sampler.py" in log, "the log says where it hangs"
    assert not world.answers[fatal].done()
    second = await world.start(workload, "a2", "--engine-stuck-after", "1s", program=program)
    await world.ready("a2")
    error = (await world.answer(fatal)).error
    assert error is not None
    assert (error.code, "given up the second time" in error.message) == ("engine-failed", True)
    assert await gone(second) == 1
    (world.home / "hang").unlink()
    await world.weights(world.full(1))
    await world.start(workload, "a3")
    await world.ready("a3")
    assert versions(await world.answer(waits)) == {1}
    assert len(world.answered) == len(set(world.answered))


async def test_v11_an_engine_that_breaks_gives_its_requests_to_the_next(world: World) -> None:
    workload = await world.workload(JobKind.FFT, ("t.j",))
    first = await world.start(workload, "a1", program=(str(STUCK), str(world.home / "hang"), "--break"))
    await world.ready("a1")
    (world.home / "hang").touch()
    name = await world.send(timeout_s=120.0)
    assert await gone(first) == 1
    await world.start(workload, "a2")
    assert versions(await world.answer(name)) == {0}


async def test_e17_sigterm_finishes_what_runs_gives_back_the_rest_and_exits_0(world: World) -> None:
    workload = await world.workload(JobKind.FFT, ("t.j",))
    process = await world.start(workload, "a1")
    await world.ready("a1")
    running = await world.send(params=SamplingParams(n=64, max_tokens=50, temperature=2.0))
    waiting = await world.send(at_least=1, timeout_s=60.0)
    assert versions(await world.sample(params=SamplingParams(max_tokens=1))) == {0}  # it has taken what came before
    process.send_signal(signal.SIGTERM)
    assert versions(await world.answer(running)) == {0}
    assert await gone(process) == 0
    await world.weights(world.full(1))
    await world.start(workload, "a2")
    assert versions(await world.answer(waiting)) == {1}


async def test_bad_base_model_ends_the_worker_with_one_clear_line(world: World) -> None:
    workload = await world.workload(JobKind.FFT, ("t.j",), base_model="/nowhere/model")
    process = await world.start(workload, "a1")
    assert await gone(process, world.deadline_s) == 1
    lines = (world.home / "a1.log").read_text().splitlines()
    assert "base model /nowhere/model has no config.json" in lines[-1]
    assert not any("Traceback" in line for line in lines)
