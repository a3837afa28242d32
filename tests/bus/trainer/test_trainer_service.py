"""The trainer as a process of its own on a real nats-server: the log, its answers, restarts, jobs that come and go."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bus.trainer.trainer_world import World, until
from openrl_common.events import WeightsReady
from openrl_common.nats_server import NatsServer
from openrl_common.records import (
    JobKind,
    JobPhase,
    LeaseRecord,
    LeaseState,
    LoraSpec,
)
from openrl_common.weights import read_manifest, verify_files
from openrl_common.wire import (
    AdamParams,
    Datum,
    Forward,
    ForwardBackward,
    OptimStep,
    PayloadRef,
    SaveWeights,
)

DATA = [Datum(tokens=[1, 2, 3, 4, 5, 6]), Datum(tokens=[7, 8, 9], weights=[0.0, 1.0, 0.5])]


def learn(seq: int, **changes: Any) -> ForwardBackward:
    return ForwardBackward(**{"seq": seq, "incarnation": 7, "data": DATA, "loss": "cross_entropy", **changes})


def step(seq: int) -> OptimStep:
    return OptimStep(seq=seq, incarnation=7, adam=AdamParams(learning_rate=1e-2))


def save(seq: int) -> SaveWeights:
    return SaveWeights(seq=seq, incarnation=7)


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_log_is_applied_once_in_order_and_survives_kill_9_bit_for_bit_R4_R5_R6_E17(world: World) -> None:
    workload = await world.workload(JobKind.FFT, "tune")
    await world.job("tune", JobKind.FFT, workload)
    first = await world.start(workload, "a1")

    async def ready() -> bool:
        entry = await world.bus.store.ready.get("a1")
        return entry is not None and entry.value.ready

    await until(ready)
    entry = await world.bus.store.ready.get("a1")
    assert entry is not None
    names = [phase.name for phase in entry.value.phases]
    assert (names[0], set(names[1:3]), names[3]) == (
        "start",
        {"prefetch", "imports"},
        "load",
    )  # the two go side by side
    assert entry.value.detail["prefetch"].startswith("not prefetched: ")

    # An old incarnation, garbage, a gap that fills itself, an unknown loss, an unusable body, a far gap.
    stale = await world.ask("tune", learn(1, incarnation=6))
    assert stale.error is not None
    assert stale.error.code == "stale-incarnation"
    await world.send("tune", learn(0), body=b"\xff not json", again="garbage")
    deep = b'{"seq":1,"incarnation":7,"odd":' + b"[" * 5000 + b"]" * 5000 + b"}"
    await world.send("tune", learn(0), body=deep, again="deep")
    await world.send("tune", step(2))
    await world.send("tune", learn(1))
    answers = [await world.answer() for _ in range(2)]
    assert [(answer.seq, answer.error) for answer in answers] == [(1, None), (2, None)]
    wrong = await world.ask("tune", learn(3, loss="dpo"))
    assert wrong.error is not None
    assert wrong.error.code == "unknown-loss"
    unusable = msgspec.json.encode({"op": "dance", "seq": 4, "incarnation": 7, "reply_to": world.inbox})
    assert (await world.ask("tune", learn(4), body=unusable)).error.code == "bad-request"  # type: ignore[union-attr]
    assert (await world.ask("tune", learn(4000))).error.code == "gap"  # type: ignore[union-attr]

    # A large request by reference, a version announced in KV and as an event, a repetition answered from the store.
    large = msgspec.json.encode(learn(5, normalizer=2.0))
    name, digest = await world.bus.put_payload(large)
    reference = PayloadRef(seq=5, incarnation=7, object_name=name, digest=digest, size_bytes=len(large))
    fifth = await world.ask("tune", reference)
    assert fifth.error is None
    assert (await world.ask("tune", step(6))).error is None
    saved = await world.ask("tune", save(7))
    assert saved.version == 1
    assert await world.ask("tune", reference, again="repeated") == fifth
    record = await world.bus.store.weights.get("default.tune")
    assert record is not None
    assert record.value.version == 1
    manifest = read_manifest(record.value.manifest, record.value.digest)
    verify_files(manifest, Path(record.value.manifest).parent)
    event = await world.bus.last(stream="OPENRL_EVENTS", subject="openrl.ev.trainer.default.weights.tune.ready")
    assert event is not None
    assert msgspec.json.decode(event.body, type=WeightsReady).weights == record.value

    # kill -9, then a new process: the log is replayed, nothing is answered twice but the newest result.
    wanted = await world.ask("tune", Forward(seq=8, incarnation=7, data=DATA))
    first.send_signal(signal.SIGKILL)
    first.wait()
    await world.send("tune", Forward(seq=9, incarnation=7, data=DATA))
    second = await world.start(workload, "a2")
    answers = [await world.answer()]
    while answers[-1].seq != 9:
        answers.append(await world.answer())
    assert answers[-1].logprobs == wanted.logprobs
    # Besides: the newest stored result, whose answer may have been lost, and repetitions and refusals as before.
    assert {answer.seq for answer in answers if answer.error is None} <= {5, 8, 9}
    assert {answer.seq for answer in answers if answer.error is not None} <= {1, 4000}
    assert (await world.ask("tune", learn(10))).error is None
    assert (await world.ask("tune", step(11))).error is None
    assert (await world.ask("tune", save(12))).version == 2
    messages = (await world.bus.jetstream.stream_info("OPENRL_EVENTS")).state.messages
    assert messages == 2

    second.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(second.wait, 10) == 0


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_lora_jobs_come_and_go_and_one_that_cannot_be_trained_harms_nobody_R9_R10(
    world: World, nats_server: NatsServer
) -> None:
    workload = await world.workload(JobKind.LORA, "lora-m-1", tenant="_shared")
    await world.job("one", JobKind.LORA, workload)
    await world.job("bad", JobKind.LORA, workload, lora=LoraSpec(rank=64))
    process = await world.start(workload, "a1")
    assert (await world.ask("one", learn(1))).error is None
    refused = await world.ask("bad", learn(1))
    assert refused.error is not None
    assert refused.error.code == "bad-lora"
    assert "rank is 64" in refused.error.message

    await world.job("two", JobKind.LORA, workload)
    for seq in range(1, 13, 2):  # both jobs at once, several requests deep
        await world.send("two", learn(seq))
        await world.send("two", step(seq + 1))
        await world.send("one", step(seq + 1))
        await world.send("one", learn(seq + 2))
    answers = [await world.answer() for _ in range(24)]
    assert [answer.error for answer in answers] == [None] * 24
    versions = {job: await world.ask(job, save(seq)) for job, seq in (("one", 14), ("two", 13))}
    assert [result.version for result in versions.values()] == [1, 1]
    # Both had the same seed and the same data; "one" holds one more gradient, not applied: the same adapter.
    files = [world.home / f"weights/default/{job}/7/v000001/adapter_model.safetensors" for job in ("one", "two")]
    assert files[0].read_bytes() == files[1].read_bytes()

    await world.job("one", JobKind.LORA, workload, phase=JobPhase.FINISHED)
    log = world.home / "a1.log"
    await until(lambda: _contains(log, "job default.one incarnation 7 is no longer served"))
    assert (await world.ask("two", learn(14))).error is None

    # NATS dies and comes back: the trainer waits and goes on where it was.
    nats_server.kill()
    nats_server.start()
    assert (await world.ask("two", step(15))).error is None

    # A fence: the lease is not ours any more, the process ends by itself.
    await world.bus.store.leases.put("a1", LeaseRecord(state=LeaseState.TOMBSTONE))
    assert await asyncio.to_thread(process.wait, 15) == 0


async def _contains(path: Path, text: str) -> bool:
    return text in path.read_text()


@pytest.mark.slow
async def test_a_base_model_that_is_not_there_ends_the_process_with_one_clear_line(world: World) -> None:
    world.model = world.home / "no-such-model"
    workload = await world.workload(JobKind.FFT, "tune")
    await world.job("tune", JobKind.FFT, workload)
    process = await world.start(workload, "a1")
    assert await asyncio.to_thread(process.wait, 30) == 1
    last = (world.home / "a1.log").read_text().strip().splitlines()[-1]
    assert str(world.model) in last
    assert "no directory here" in last


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_stop_while_the_model_loads_ends_the_process_at_once_E17(world: World) -> None:
    workload = await world.workload(JobKind.FFT, "tune")
    process = await world.start(workload, "a1")

    async def live() -> bool:
        entry = await world.bus.store.leases.get("a1")
        return entry is not None and entry.value.state is LeaseState.LIVE

    await until(live)
    process.send_signal(signal.SIGTERM)
    started = time.monotonic()
    assert await asyncio.to_thread(process.wait, 60) == 0
    assert time.monotonic() - started < 20
