"""kill -9 at random points of a run changes nothing but latency (R4, R5, R7, R12): every bit of the end is compared.

The short form is one of the fast tests; ``make test-exact`` runs the long one: 40 steps, 50 kills.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import safetensors.torch
import torch

from bus.trainer.trainer_world import World, until
from openrl_client.errors import Rejected
from openrl_client.training import Pending, TrainingLog
from openrl_common.records import JobKind, LeaseRecord, LeaseState, LoraSpec
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


class Trainers:
    """One trainer at a time, of one workload, each life forked anew."""

    def __init__(self, world: World, forker: subprocess.Popen[str]) -> None:
        self.world = world
        self._forker = forker
        self.lives = 0
        self.pid = 0

    async def begin(self, workload: str, **variables: str) -> None:
        self.lives += 1
        assignment = f"{workload}-{self.lives}"
        lease = LeaseRecord(state=LeaseState.STARTING)
        await self.world.bus.store.leases.write(assignment, lease, last=0)
        log = {"LOG": str(self.world.home / f"{workload}.log")}
        environment = self.world.variables(workload, assignment) | log | variables
        assert self._forker.stdin is not None
        assert self._forker.stdout is not None
        print(json.dumps(environment), file=self._forker.stdin, flush=True)
        self.pid = int(self._forker.stdout.readline())

    async def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

        async def gone() -> bool:
            return not psutil.pid_exists(self.pid)

        await until(gone)


@pytest.fixture(scope="module")
def forker() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bus.trainer.forked_trainers"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.stdin.close()
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.fixture
async def trainers(world: World, forker: subprocess.Popen[str]) -> AsyncIterator[Trainers]:
    trainers = Trainers(world, forker)
    yield trainers
    if trainers.pid and psutil.pid_exists(trainers.pid):
        await trainers.kill()


def data(seed: int, count: int = 4, length: int = 12) -> list[Datum]:
    """Sequences for ppo, the same for the same seed."""
    numbers = random.Random(seed)
    return [
        Datum(
            tokens=[numbers.randrange(40) for _ in range(length)],
            weights=[0.0] + [1.0] * (length - 1),
            logprobs=[numbers.uniform(-4.2, -3.2) for _ in range(length)],
            advantages=[numbers.gauss(0, 1) for _ in range(length)],
        )
        for _ in range(count)
    ]


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


async def check(world: World, trainers: Trainers, kind: JobKind, *, num_steps: int, kills: int, every: str) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    lora = LORA if kind is JobKind.LORA else None
    runs = {}
    for name in ("calm", "hurt"):
        workload = await world.workload(kind, name)
        await world.job(name, kind, workload, lora=lora)
        runs[name] = run = Run(world, name, num_steps)
        if name == "calm":
            await trainers.begin(workload, OPEN_RL_CHECKPOINT_EVERY="off")
            await run.drive()
        else:
            await hurt(trainers, workload, run, len(runs["calm"].results), kills, seed, every)
        await trainers.kill()
    calm, hurt_run = runs["calm"], runs["hurt"]
    assert hurt_run.told() == calm.told(), f"seed {seed}"
    one, other = calm.files(), hurt_run.files()
    assert one.keys() == other.keys()
    for name in one.keys() - {"state"}:
        assert one[name] == other[name], f"{name}, seed {seed}"
    assert one["state"].keys() == other["state"].keys()
    assert any(name.startswith("exp_avg/") for name in one["state"])
    assert any(name.startswith("gradient/") for name in one["state"])
    for name, tensor in one["state"].items():
        assert torch.equal(tensor, other["state"][name]), f"{name}, seed {seed}"
    await _space_is_bounded(world, "hurt", len(calm.results))


async def _space_is_bounded(world: World, job: str, total: int) -> None:
    """Two checkpoints at most, and the log from the older one on (R5)."""
    marks = list((world.home / f"checkpoints/default/{job}/7").glob("*.json"))
    assert 1 <= len(marks) <= 2
    record = await world.bus.store.checkpoints.get(f"default.{job}")
    assert record is not None
    info = await world.bus.jetstream.stream_info("OPENRL_TRAIN", subjects_filter=f"openrl.train.default.{job}")
    kept = (info.state.subjects or {})[f"openrl.train.default.{job}"]
    assert kept < total / 2, f"{kept} of {total} entries are kept"


KINDS = pytest.mark.parametrize("kind", [JobKind.FFT, JobKind.LORA])


@pytest.mark.slow
@pytest.mark.timeout(240)
@KINDS
async def test_kills_at_random_points_leave_weights_optimizer_and_answers_bit_identical_R4_R5_R7_R12(
    world: World, trainers: Trainers, kind: JobKind
) -> None:
    await check(world, trainers, kind, num_steps=10, kills=5, every="2steps")


@pytest.mark.exact
@pytest.mark.timeout(1800)
@KINDS
async def test_fifty_kills_in_forty_steps_leave_every_bit_as_it_was_R4_R5_R7_R12(
    world: World, trainers: Trainers, kind: JobKind
) -> None:
    await check(world, trainers, kind, num_steps=40, kills=50, every="3steps")
