"""Who waits for whom in one trainer: jobs take turns (R10), writing goes on beside training (R12)."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from pathlib import Path

import msgspec
import psutil
import pytest

from bus.trainer.trainer_world import Trainers, World, data, until
from openrl_common.names import train_subject
from openrl_common.records import JobKind
from openrl_common.streams import TRAIN
from openrl_common.wire import (
    AdamParams,
    DeleteState,
    Forward,
    ForwardBackward,
    ListStates,
    OptimStep,
    PayloadRef,
    SaveState,
    SaveWeights,
)


def forward(seq: int) -> Forward:
    return Forward(seq=seq, incarnation=7, data=data(0, count=1))


async def tune(world: World, trainers: Trainers, **variables: str) -> str:
    """A trainer with one job, ``tune``, on its own model; returns the workload."""
    workload = await world.workload(JobKind.FFT, "tune")
    await world.job("tune", JobKind.FFT, workload)
    await trainers.begin(workload, **variables)
    return workload


async def revisions(world: World, job: str, count: int) -> list[int]:
    """When each of ``count`` results was stored, in the bucket's own numbers; waits for all of them."""

    async def all_stored() -> bool:
        return len(await world.bus.store.results.list(f"default.{job}.7.")) == count

    await until(all_stored)
    entries = await world.bus.store.results.list(f"default.{job}.7.")
    assert all(entry.value.error is None for entry in entries.values())
    return [entry.revision for _, entry in sorted(entries.items(), key=lambda item: item[1].value.seq)]


@pytest.mark.timeout(240)
async def test_a_job_with_a_long_log_does_not_keep_others_waiting_R10(world: World, trainers: Trainers) -> None:
    """Sixty requests of one job are in the log before another's six: these are answered in turn, not at the end."""
    workload = await world.workload(JobKind.LORA, "lora-m-1", tenant="_shared")
    for job, count in (("greedy", 60), ("small", 6), ("late", 6)):
        await world.job(job, JobKind.LORA, workload)
        for seq in range(1, count + 1):
            await world.send(job, forward(seq))
    await trainers.begin(workload)
    greedy = await revisions(world, "greedy", 60)
    for job in ("small", "late"):
        last = (await revisions(world, job, 6))[-1]
        before = sum(revision < last for revision in greedy)
        assert before <= 20, f"{before} of 60 requests of the greedy job went before the sixth of {job}"


@pytest.mark.timeout(240)
async def test_requests_behind_a_save_are_answered_before_it_is_written_R12(
    world: World, trainers: Trainers, tmp_path: Path
) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=100_000, hidden_size=256, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=True, max_position_embeddings=64,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(str(tmp_path / "large"))
    world.model = tmp_path / "large"  # 103 MB: written, hashed and synced in more time than a forward pass takes
    await tune(world, trainers)
    assert (await world.ask("tune", forward(1))).error is None
    await world.send("tune", SaveWeights(seq=2, incarnation=7))
    for seq in range(3, 6):
        await world.send("tune", forward(seq))
    stored = await revisions(world, "tune", 5)
    assert stored[2] < stored[1], "the first request behind the save did not wait for the disk"
    result = await world.bus.store.results.get("default.tune.7.2")
    assert result is not None
    assert result.value.metrics["copy_seconds"] < result.value.metrics["write_seconds"]


@pytest.mark.timeout(240)
async def test_health_is_answered_during_a_long_step_O1(world: World, trainers: Trainers) -> None:
    """The thread that trains holds up neither the loop nor the health server, so nobody takes it for dead."""
    workload = await tune(world, trainers)
    assert (await world.ask("tune", forward(1))).error is None
    log = (world.home / f"{workload}.log").read_text()
    found = re.search(r"health_port=(\d+)", log)
    assert found is not None
    url = f"http://127.0.0.1:{found[1]}/livez"
    long = ForwardBackward(seq=2, incarnation=7, data=data(2, count=250, length=60), loss="ppo")
    asking = asyncio.create_task(world.ask("tune", long))
    answered = 0
    while not asking.done():
        status = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).status)
        assert status == 200
        answered += not asking.done()
    assert (await asking).error is None
    assert answered > 0, "at least one answer came while the step ran"


@pytest.mark.timeout(240)
async def test_states_are_saved_listed_and_deleted_in_the_order_of_the_log_R4(world: World, trainers: Trainers) -> None:
    await tune(world, trainers)
    requests = [
        ForwardBackward(seq=1, incarnation=7, data=data(1), loss="cross_entropy"),
        OptimStep(seq=2, incarnation=7, adam=AdamParams(learning_rate=1e-3)),
        SaveState(seq=3, incarnation=7, name="best"),
        ListStates(seq=4, incarnation=7),
        DeleteState(seq=5, incarnation=7, name="best"),
        ListStates(seq=6, incarnation=7),
    ]
    for request in requests:
        await world.send("tune", request)
    answers = sorted([await world.answer() for _ in requests], key=lambda answer: answer.seq)
    assert [answer.error for answer in answers] == [None] * 6
    assert [[one.name for one in answer.states or []] for answer in (answers[3], answers[5])] == [["best"], []]


@pytest.mark.timeout(240)
async def test_a_trainer_killed_between_a_removal_and_its_result_answers_it_as_done_E6_R4(
    world: World, trainers: Trainers
) -> None:
    """The bucket takes no result; killed then, the next life finds the state gone, by this very request."""
    workload = await tune(world, trainers)
    assert (await world.ask("tune", SaveState(seq=1, incarnation=7, name="best"))).error is None
    path = world.home / "state/default/tune/best.safetensors"
    jetstream = world.bus.jetstream
    results = (await jetstream.stream_info("KV_openrl_results")).config
    await jetstream.update_stream(results.evolve(max_bytes=1))
    await world.send("tune", DeleteState(seq=2, incarnation=7, name="best"))

    async def removed() -> bool:
        return not path.exists()

    await until(removed)
    await trainers.kill()
    assert world.answers.empty()
    await jetstream.update_stream(results)
    await trainers.begin(workload)
    answers = [await world.answer() for _ in range(2)]  # of the last stored one again: it may never have left
    assert [(answer.seq, answer.error) for answer in answers] == [(1, None), (2, None)]
    missing = await world.ask("tune", DeleteState(seq=3, incarnation=7, name="best"))
    assert missing.error is not None
    assert missing.error.code == "state-missing"


@pytest.mark.timeout(240)
async def test_a_state_that_is_lost_is_told_to_every_asker_and_never_guessed_R5_R6(
    world: World, trainers: Trainers
) -> None:
    """Checkpoints damaged one by one: the older one serves; without any, and the log trimmed, every answer says so."""
    every = {"OPEN_RL_CHECKPOINT_EVERY": "1step"}
    workload = await tune(world, trainers, **every)

    async def written(seq: int) -> bool:
        record = await world.bus.store.checkpoints.get("default.tune")
        return record is not None and record.value.seq >= seq

    seq = 0
    for _ in range(4):
        for request in (
            ForwardBackward(seq=seq + 1, incarnation=7, data=data(1), loss="cross_entropy"),
            OptimStep(seq=seq + 2, incarnation=7, adam=AdamParams(learning_rate=1e-2)),
        ):
            assert (await world.ask("tune", request)).error is None
        seq += 2
        await until(lambda: written(seq))  # noqa: B023 (awaited here): while one is written, none is begun
    record = await world.bus.store.checkpoints.get("default.tune")
    assert record is not None
    assert record.value.trimmed_before > 0
    wanted = await world.ask("tune", forward(9))
    directory = world.home / "checkpoints/default/tune/7"
    await trainers.kill()
    newest = sorted(directory.glob("[0-9]*.safetensors"))[-1]
    newest.write_bytes(newest.read_bytes()[:-1] + b"\x01")
    await trainers.begin(workload, **every)
    again = await world.ask("tune", forward(10))
    while again.seq != 10:
        again = await world.answer()
    assert again.logprobs == wanted.logprobs, "from the checkpoint before it, and the log since"
    await trainers.kill()

    for path in directory.glob("[0-9]*.safetensors"):
        path.write_bytes(b"damaged")
    await trainers.begin(workload, **every)
    lost = await world.ask("tune", forward(11))
    while lost.seq != 11:
        lost = await world.answer()
    assert lost.error is not None
    assert lost.error.code == "state-lost"
    assert "\n" not in lost.error.message
    stored = await world.bus.store.results.get("default.tune.7.11")
    assert stored is not None
    assert stored.value == lost
    assert await asyncio.to_thread(psutil.pid_exists, trainers.pid), "other jobs of a runtime go on"


@pytest.mark.long
@pytest.mark.timeout(240)
async def test_a_log_whose_payloads_are_gone_is_not_replayed_without_them_R5_R7(
    world: World, trainers: Trainers
) -> None:
    """The entry that could not be read was left out, and the training went on from other weights without a word."""
    workload = await tune(world, trainers)
    learn = [ForwardBackward(seq=seq, incarnation=7, data=data(seq), loss="cross_entropy") for seq in (1, 2)]
    name, digest = await world.bus.put_payload(msgspec.json.encode(learn[1]))
    reference = PayloadRef(seq=2, incarnation=7, object_name=name, digest=digest, size_bytes=1)
    step = OptimStep(seq=3, incarnation=7, adam=AdamParams(learning_rate=1e-2))
    for request in (learn[0], reference, step):
        assert (await world.ask("tune", request)).error is None
    await trainers.kill()
    await world.bus.delete_payload(name)
    await trainers.begin(workload)
    lost = await world.ask("tune", forward(4))
    while lost.seq != 4:
        lost = await world.answer()
    assert lost.error is not None
    assert lost.error.code == "state-lost"
    assert "entry 2" in lost.error.message


@pytest.mark.timeout(240)
async def test_a_log_that_has_lost_its_beginning_is_said_and_not_waited_for_R5_R6(
    world: World, trainers: Trainers
) -> None:
    """A stream has an age and a size; requests behind what it dropped were held back for ever."""
    workload = await tune(world, trainers)
    for seq in (1, 2):
        assert (await world.ask("tune", forward(seq))).error is None
    await trainers.kill()
    subject = train_subject("default", "tune")
    last = await world.bus.last(stream=TRAIN.name, subject=subject)
    assert last is not None
    await world.bus.purge(TRAIN.name, subject, before=last.sequence)
    await world.send("tune", forward(4))
    await trainers.begin(workload)
    await world.send("tune", forward(3))
    lost = {}
    while lost.keys() != {3, 4}:
        answer = await world.answer()
        if answer.seq > 2:
            lost[answer.seq] = answer.error and answer.error.code
    assert lost == {3: "state-lost", 4: "state-lost"}


@pytest.mark.timeout(240)
async def test_versions_that_a_killed_trainer_did_not_come_to_drop_are_dropped_by_the_next_R11(
    world: World, trainers: Trainers
) -> None:
    workload = await tune(world, trainers)
    for seq in (1, 2):
        assert (await world.ask("tune", SaveWeights(seq=seq, incarnation=7))).error is None
    await trainers.kill()
    directory = world.home / "weights/default/tune/7"
    assert sorted(path.name for path in directory.glob("v*")) == ["v000001", "v000002"]
    await trainers.begin(workload, OPEN_RL_KEEP_WEIGHTS="1")
    assert (await world.ask("tune", forward(3))).error is None
    assert sorted(path.name for path in directory.glob("v*")) == ["v000002"]
