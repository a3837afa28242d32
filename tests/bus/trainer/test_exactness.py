"""kill -9 at random points of a run changes nothing but latency (R4, R5, R7, R12): every bit of the end is compared.

The short form is one of the fast tests; ``make test-exact`` runs the long one: 40 steps, 50 kills.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from typing import Any

import pytest
import safetensors.torch
import torch

from bus.trainer.trainer_world import Trainers, World, data
from openrl_client.errors import Rejected
from openrl_client.training import Pending, TrainingLog
from openrl_common.records import JobKind, LoraSpec
from openrl_common.wire import (
    AdamParams,
    Datum,
    Forward,
    ForwardBackward,
    LoadState,
    OptimStep,
    SaveState,
    SaveWeights,
    TrainResult,
)

LORA = LoraSpec(rank=4, alpha=8.0, dropout=0.1)


class Run:
    """A client's loop of ``num_steps``: several requests in flight, versions, states, refusals, a large payload."""

    def __init__(self, world: World, job: str, num_steps: int) -> None:
        self.world, self.job, self.num_steps = world, job, num_steps
        self.results: dict[int, TrainResult | str] = {}
        self.answered = asyncio.Condition()

    async def drive(self) -> None:
        async def ended() -> Exception | None:
            return None

        log = TrainingLog(
            self.world.bus, tenant="default", job=self.job, incarnation=7, next_seq=1, after=0, ended=ended,
            recover_interval_s=0.2,
        )  # fmt: skip
        await log.start()
        try:
            for number in range(self.num_steps):
                await self._all(self._step(log, number))
        finally:
            await log.close()

    def _step(self, log: TrainingLog, number: int) -> list[Pending]:
        half, quarter = self.num_steps // 2, max(1, self.num_steps // 4)
        sent = [
            log.send(ForwardBackward, data=data(2 * number), loss="ppo", normalizer=7.0),
            log.send(ForwardBackward, data=data(2 * number + 1), loss="cispo", normalizer=5.0),
        ]
        if number == 1:  # by reference: above 256 KiB (R7)
            sent.append(log.send(ForwardBackward, data=data(9999, count=120, length=48), loss="ppo"))
        if number % 3 == 1:
            sent.append(log.send(ForwardBackward, data=data(5), loss="no-such-loss"))
        sent.append(log.send(OptimStep, adam=AdamParams(learning_rate=3e-3, weight_decay=0.01 * (number % 2))))
        if number % 2 == 1:
            sent.append(log.send(SaveWeights))
        if number % quarter == 0 and number < half:
            sent.append(log.send(SaveState, name="half"))
        if number == half:
            sent.append(log.send(LoadState, name="half"))
            sent.append(log.send(SaveState, name="half"))  # replaced: a replay must not load this one
        if number % 4 == 2:
            sent.append(log.send(Forward, data=data(7)))
        if number == self.num_steps - 1:
            sent.append(log.send(ForwardBackward, data=data(1), loss="ppo"))  # a gradient that waits for its step
            sent.append(log.send(SaveState, name="end"))
        return sent

    async def _all(self, sent: list[Pending]) -> None:
        async def one(pending: Pending) -> None:
            outcome: TrainResult | str
            try:
                outcome = await pending
            except Rejected as error:
                outcome = error.code
            async with self.answered:
                self.results[pending.seq] = outcome
                self.answered.notify_all()

        await asyncio.gather(*map(one, sent))

    async def wait_answered(self, count: int) -> None:
        async with self.answered:
            await self.answered.wait_for(lambda: len(self.results) >= count)

    def told(self) -> dict[int, Any]:
        """What the client was told, without what depends on the clock."""
        return {
            seq: result
            if isinstance(result, str)
            else ({k: v for k, v in result.metrics.items() if "seconds" not in k}, result.logprobs, result.version)
            for seq, result in self.results.items()
        }

    def files(self) -> dict[str, Any]:
        """The end: the saved state's tensors and every version kept, byte by byte."""
        state = safetensors.torch.load_file(self.world.home / f"state/default/{self.job}/end.safetensors")
        versions = self.world.home / f"weights/default/{self.job}/7"
        return {
            "state": state,
            **{str(path.relative_to(versions)): path.read_bytes() for path in versions.rglob("*.safetensors")},
        }


async def hurt(trainers: Trainers, workload: str, run: Run, total: int, kills: int, seed: int, every: str) -> None:
    """Drive ``run`` while its trainer is killed ``kills`` times: after random answers, and in the middle of starts."""
    numbers = random.Random(seed)
    points = sorted(numbers.choices(range(total), k=kills))
    variables = {"OPEN_RL_CHECKPOINT_EVERY": every}
    await trainers.begin(workload, **variables)
    driving = asyncio.create_task(run.drive())

    async def killer() -> None:
        for index, point in enumerate(points):
            if index % 5 == 4:  # wherever it is: loading, restoring, replaying
                await asyncio.sleep(numbers.uniform(0.0, 1.0))
            else:
                await run.wait_answered(point)
                await asyncio.sleep(numbers.uniform(0.0, 0.06))
            await trainers.kill()
            await trainers.begin(workload, **variables)

    killing = asyncio.create_task(killer())
    await asyncio.gather(driving, killing)


async def be_rude(world: World, job: str) -> None:
    """A job that does nothing right, for ever: other jobs on its base must not notice (R10)."""
    nan = Datum(tokens=[1, 2], logprobs=[0.0, -800.0], advantages=[0.0, -1.0])

    async def ended() -> Exception | None:
        return None

    log = TrainingLog(
        world.bus, tenant="default", job=job, incarnation=7, next_seq=1, after=0, ended=ended, recover_interval_s=0.2
    )
    await log.start()
    try:
        while True:
            sent = [
                log.send(ForwardBackward, data=data(3), loss="ppo"),
                log.send(ForwardBackward, data=[nan], loss="importance_sampling"),
                log.send(ForwardBackward, data=[Datum(tokens=[1, 999_999])], loss="cross_entropy"),
                log.send(OptimStep, adam=AdamParams(learning_rate=1e30)),
                log.send(OptimStep, adam=AdamParams(learning_rate=-1.0)),
                log.send(LoadState, name="never-saved"),
            ]
            await asyncio.gather(*sent, return_exceptions=True)
    finally:
        await log.close()


async def check(world: World, trainers: Trainers, kind: JobKind, *, num_steps: int, kills: int, every: str) -> None:
    """One run undisturbed; the same under kills; for LoRA two of them on one base, beside a job that errs for ever."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    lora = LORA if kind is JobKind.LORA else None
    calm = Run(world, "calm", num_steps)
    workload = await world.workload(kind, "calm")
    await world.job("calm", kind, workload, lora=lora)
    await trainers.begin(workload, OPEN_RL_CHECKPOINT_EVERY="off")
    await calm.drive()
    await trainers.kill()

    workload = await world.workload(kind, "hurt")
    names = ("hurt", "twin") if kind is JobKind.LORA else ("hurt",)
    runs = [Run(world, name, num_steps) for name in names]
    for name in (*names, "rude") if kind is JobKind.LORA else names:
        await world.job(name, kind, workload, lora=lora)
    others = [asyncio.create_task(run.drive()) for run in runs[1:]]
    rude = asyncio.create_task(be_rude(world, "rude")) if kind is JobKind.LORA else None
    await hurt(trainers, workload, runs[0], len(calm.results), kills, seed, every)
    await asyncio.gather(*others)
    if rude is not None:
        rude.cancel()
        await asyncio.gather(rude, return_exceptions=True)
    await trainers.kill()

    for run in runs:
        _same(run, calm, seed)
        await _space_is_bounded(world, run.job, len(calm.results))


def _same(run: Run, calm: Run, seed: int) -> None:
    assert run.told() == calm.told(), f"{run.job}, seed {seed}"
    one, other = calm.files(), run.files()
    assert one.keys() == other.keys()
    for name in one.keys() - {"state"}:
        assert one[name] == other[name], f"{run.job}: {name}, seed {seed}"
    assert one["state"].keys() == other["state"].keys()
    assert any(name.startswith("exp_avg/") for name in one["state"])
    assert any(name.startswith("gradient/") for name in one["state"])
    for name, tensor in one["state"].items():
        assert torch.equal(tensor, other["state"][name]), f"{run.job}: {name}, seed {seed}"


async def _space_is_bounded(world: World, job: str, total: int) -> None:
    """Two checkpoints at most, or one more that was just written when the kill came, and the log from there on (R5)."""
    marks = list((world.home / f"checkpoints/default/{job}/7").glob("*.json"))
    assert 1 <= len(marks) <= 3
    record = await world.bus.store.checkpoints.get(f"default.{job}")
    assert record is not None
    info = await world.bus.jetstream.stream_info("OPENRL_TRAIN", subjects_filter=f"openrl.train.default.{job}")
    kept = (info.state.subjects or {})[f"openrl.train.default.{job}"]
    assert kept < total / 2, f"{kept} of {total} entries are kept"


KINDS = pytest.mark.parametrize("kind", [JobKind.FFT, JobKind.LORA])


@pytest.mark.slow
@pytest.mark.timeout(240)
@KINDS
async def test_kills_at_random_points_leave_weights_optimizer_and_answers_bit_identical_R4_R5_R7_R10_R12(
    world: World, trainers: Trainers, kind: JobKind
) -> None:
    await check(world, trainers, kind, num_steps=10, kills=5, every="2steps")


@pytest.mark.exact
@pytest.mark.timeout(1800)
@KINDS
async def test_fifty_kills_in_forty_steps_leave_every_bit_as_it_was_R4_R5_R7_R10_R12(
    world: World, trainers: Trainers, kind: JobKind
) -> None:
    await check(world, trainers, kind, num_steps=40, kills=50, every="3steps")
