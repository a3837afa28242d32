"""A sampler among many requests, and among other samplers: nothing hangs, nothing is lost, nothing is answered twice.

Those that a vLLM sampler passes too are imported by tests/vllm.
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest
from sampler_support import flip_a_byte, plain_logprobs
from sampler_world import STUCK, World, gone, metrics, versions

from openrl_common.events import WeightsApplied
from openrl_common.records import JobKind
from openrl_common.wire import SamplingParams

pytestmark = pytest.mark.timeout(180)
LONG = SamplingParams(n=256, max_tokens=60, temperature=2.0)


async def _all_acknowledged(world: World) -> None:
    async with asyncio.timeout(10):
        while await world.pending_messages():  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.05)


async def test_v10_a_request_that_runs_past_its_deadline_leaves_the_engine_unanswered(world: World) -> None:
    """V10: nobody hears its answer; what runs beside it is as it was."""
    workload = await world.workload(JobKind.FFT, ("t.j",))
    await world.start(workload, "a1")
    await world.ready("a1")
    alone = await world.sample(timeout_s=60.0)
    late = await world.send(params=LONG, prompts=[[5]] * 16, timeout_s=0.7)
    beside = await world.send(timeout_s=60.0)
    assert (await world.answer(beside)).sequences == alone.sequences
    await _all_acknowledged(world)
    assert not world.answers[late].done()
    outcomes = await asyncio.to_thread(metrics, world.home / "a1.log")
    assert outcomes['openrl_sampler_requests_total{outcome="deadline"}'] == 1


@pytest.mark.long
async def test_v10_a_storm_of_requests_cancellations_and_updates_ends_with_every_request_settled_once(
    world: World,
) -> None:
    """V5, V8, V10: two hundred at once, many of them unreasonable, over a good and a bad version."""
    workload = await world.workload(JobKind.FFT, ("t.j",))
    await world.start(workload, "a1", "--max-num-seqs", "32", "--max-waiting-requests", "64")
    await world.ready("a1")
    randomness = random.Random(3)
    plain, cancelled, hopeless, hurried = [], [], [], []
    good, bad = world.full(1), world.full(2)
    flip_a_byte(Path(bad.manifest).parent)
    for index in range(200):
        kind = randomness.randrange(5)
        if kind == 0:
            cancelled.append(await world.send(params=LONG, timeout_s=100.0))
        elif kind == 1:
            hopeless.append(await world.send(exact=7, timeout_s=6.0))
        elif kind == 2:
            hurried.append(await world.send(timeout_s=randomness.uniform(0.05, 1.0)))
        else:
            plain.append(await world.send(timeout_s=100.0))
        if index % 10 == 3 and cancelled:
            await world.cancel(randomness.choice(cancelled))
        if index == 60:
            await world.weights(good)
        if index == 120:
            await world.next_event(WeightsApplied)  # or it would be skipped: only the newest version counts
            await world.weights(bad)
    for name in cancelled:
        await world.cancel(name)
    for name in plain:
        result = await world.answer(name)
        assert (result.error.code if result.error else "") in ("", "busy")
        assert result.error or versions(result) <= {0, 1}
    ends = {(await world.answer(name)).error for name in cancelled}
    assert {error.code if error else "" for error in ends} <= {"", "cancelled", "busy"}
    ends = {(await world.answer(name)).error for name in hopeless}
    assert {error.code if error else "" for error in ends} <= {"version-not-served", "busy"}
    await _all_acknowledged(world)
    assert len(world.answered) == len(set(world.answered)), "nothing is answered twice"
    after = await world.sample(timeout_s=60.0)
    assert versions(after) == {1}
    _is_of(world, after.sequences[0][0], [5, 9, 13], Path(good.manifest).parent)


def _is_of(world: World, sequence: object, prompt: list[int], directory: Path) -> None:
    """Its tokens have the log-probabilities that the whole model in ``directory`` gives them."""
    expected = plain_logprobs(directory, prompt + sequence.tokens)[len(prompt) - 1 :]  # type: ignore[attr-defined]
    assert sequence.logprobs == pytest.approx(expected, abs=1e-4)  # type: ignore[attr-defined]


async def test_v8_a_sampler_killed_in_the_middle_of_a_write_is_followed_by_one_that_serves_the_whole_version(
    world: World,
) -> None:
    """V8: half of the parameters were new when it died; the request that waited gets the new version, all of it."""
    workload = await world.workload(JobKind.FFT, ("t.j",))
    flag = world.home / "write"
    first = await world.start(workload, "a1", program=(str(STUCK), str(flag), "--in-write"))
    await world.ready("a1")
    await world.weights(world.full(1))
    assert versions(await world.sample(at_least=1, timeout_s=60.0)) == {1}
    flag.touch()
    record = world.full(2)
    waits = await world.send(at_least=2, timeout_s=300.0)
    await world.weights(record)
    async with asyncio.timeout(30):
        while not flag.with_suffix(".reached").exists():  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.02)
    assert not world.answers[waits].done()
    first.kill()
    await gone(first)
    await world.start(workload, "a2")
    answer = await world.answer(waits)
    assert versions(answer) == {2}
    for group, prompt in zip(answer.sequences, ([5, 9, 13], [7, 8]), strict=True):
        for sequence in group:
            _is_of(world, sequence, prompt, Path(record.manifest).parent)


async def test_v5_a_version_is_verified_beside_generation_and_applied_once_it_is_sound(world: World) -> None:
    """V5: reading and hashing a large version takes long; nothing stands still for it."""
    workload = await world.workload(JobKind.FFT, ("t.j",))
    flag = world.home / "verify"
    flag.touch()
    await world.start(workload, "a1", program=(str(STUCK), str(flag), "--in-verify"))
    await world.ready("a1")
    waits = await world.send(at_least=1, timeout_s=100.0)
    await world.weights(world.full(1))
    async with asyncio.timeout(30):
        while not flag.with_suffix(".reached").exists():  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.02)
    for _ in range(3):
        assert versions(await world.sample()) == {0}
    assert not world.answers[waits].done()
    flag.unlink()
    assert versions(await world.answer(waits)) == {1}
    assert versions(await world.sample()) == {1}


@pytest.mark.long
async def test_v11_replicas_share_the_requests_and_one_that_dies_leaves_its_own_to_the_other(world: World) -> None:
    """V11: both are told of weights; the survivor answers what the dead one had in hand, once, within seconds."""
    workload = await world.workload(JobKind.FFT, ("t.j",))
    processes = [await world.start(workload, name, "--max-num-seqs", "8") for name in ("a1", "a2")]
    for name in ("a1", "a2"):
        await world.ready(name)
    await world.weights(world.full(1))
    heard: set[str] = set()
    async with asyncio.timeout(30):
        async for delivery in world.bus.tail(stream="OPENRL_EVENTS", subject="openrl.ev.sampler.>"):
            event = delivery.event()
            heard |= {event.assignment} if isinstance(event, WeightsApplied) else set()
            if heard == {"a1", "a2"}:
                break
    names = [
        await world.send(params=SamplingParams(n=8, max_tokens=60, stop_token_ids=[]), timeout_s=100.0)
        for _ in range(30)
    ]
    await asyncio.sleep(0.3)
    killed_at = time.monotonic()
    processes[0].kill()
    for name in names:
        assert versions(await world.answer(name)) == {1}
    assert len(world.answered) == len(set(world.answered))
    assert time.monotonic() - killed_at < 60
    counted = await asyncio.to_thread(metrics, world.home / "a2.log")
    assert 0 < counted['openrl_sampler_requests_total{outcome="ok"}'] <= 30
    await _all_acknowledged(world)
