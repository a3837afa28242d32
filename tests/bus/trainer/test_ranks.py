"""Several devices (R14): two ranks over gloo train as one does, refuse as one, write what one writes, and are one to a
crash."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest
import safetensors.torch
import torch

from bus.trainer.ranks_at_work import engine_of_one
from bus.trainer.trainer_world import World, data
from openrl_common.records import JobKind
from openrl_common.weights import read_manifest, verify_files, version_directory
from openrl_common.wire import (
    RESULT_DECODER,
    AdamParams,
    AnyTrainRequest,
    Datum,
    Forward,
    ForwardBackward,
    LoadState,
    OptimStep,
    SaveState,
    SaveWeights,
    TrainResult,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
LONG = pytest.mark.long

POLICY = data(1, 5) + data(2, 1, length=30)
OVERFLOWING = [*POLICY, msgspec.structs.replace(POLICY[0], logprobs=[-1e4] * 12)]
"""One sequence of one rank whose ratio is infinite."""


def learn(seq: int, sequences: list[Datum], loss: str = "ppo") -> ForwardBackward:
    return ForwardBackward(seq=seq, incarnation=7, data=sequences, loss=loss, normalizer=7.0)


def step(seq: int) -> OptimStep:
    adam = AdamParams(learning_rate=1e-2, weight_decay=0.1, grad_clip=0.05)
    return OptimStep(seq=seq, incarnation=7, adam=adam)


def run_two(kind: str, model: Path, home: Path, requests: list[AnyTrainRequest]) -> list[TrainResult]:
    done = subprocess.run(
        [sys.executable, "-m", "bus.trainer.ranks_at_work", "2", kind, str(model), str(home)],
        input=b"\n".join(msgspec.json.encode(request) for request in requests),
        capture_output=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=200,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return [RESULT_DECODER.decode(line) for line in done.stdout.splitlines()]


def script(name: str, other: str) -> list[AnyTrainRequest]:
    """Gradients of several requests, one of a single sequence, a step; a refusal between; then on from ``other``."""
    return [
        learn(1, POLICY),
        learn(2, POLICY[:1], loss="cross_entropy"),
        learn(3, OVERFLOWING),
        Forward(seq=4, incarnation=7, data=POLICY),
        SaveState(seq=5, incarnation=7, name=f"{name}-gradients"),
        step(6),
        Forward(seq=7, incarnation=7, data=POLICY[:1]),
        SaveWeights(seq=8, incarnation=7),
        LoadState(seq=9, incarnation=7, name="nobody-has-it"),
        SaveState(seq=10, incarnation=7, name=f"{name}-step"),
        LoadState(seq=11, incarnation=7, name=other),
        step(12),
        Forward(seq=13, incarnation=7, data=POLICY),
    ]


def close(left: torch.Tensor, right: torch.Tensor, tolerance: float) -> bool:
    return torch.allclose(left.float(), right.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["fft", pytest.param("lora", marks=LONG), pytest.param("masters", marks=LONG)])
def test_two_ranks_learn_refuse_and_write_as_one_does_and_each_goes_on_from_the_others_state_R14_R6_R8(
    model: Path, tmp_path: Path, kind: str
) -> None:
    """The update is the one-device update within tolerance, whatever is where; layouts on disk are the same."""
    tolerance = 2e-2 if kind == "masters" else 2e-5
    homes = {count: tmp_path / f"home-{count}" for count in (1, 2)}
    states = tmp_path / "state"
    states.mkdir()
    for home in homes.values():
        home.mkdir()
        (home / "state").symlink_to(states)  # states are the job's, whichever trainer saved them
    alone = engine_of_one(kind, str(model), homes[1])
    one = [alone.apply(request).result for request in script("one", "one-gradients")]
    two = run_two(kind, model, homes[2], script("two", "one-gradients"))
    for expected, found in zip(one, two, strict=True):
        codes = [result.error and result.error.code for result in (expected, found)]
        assert (found.seq, codes[1]) == (expected.seq, codes[0])
        for name in ("loss", "tokens", "kl", "clip_fraction", "ratio_max", "grad_norm", "state_seq"):
            assert found.metrics.get(name, 0.0) == pytest.approx(
                expected.metrics.get(name, 0.0), rel=10 * tolerance, abs=tolerance
            ), (expected.seq, name)
        for left, right in zip(expected.logprobs or [], found.logprobs or [], strict=True):
            assert right == pytest.approx(left, abs=10 * tolerance)
    assert [result.error.code for result in two if result.error] == ["nan-loss", "state-missing"]
    assert two[0].metrics["micro_batches"] > 2, "there is more than one pass a rank"

    for name in ("gradients", "step"):
        paths = [states / "default" / "job" / f"{count}-{name}.safetensors" for count in ("one", "two")]
        left, right = (safetensors.torch.load_file(path) for path in paths)
        assert {key: (value.shape, value.dtype) for key, value in left.items()} == {
            key: (value.shape, value.dtype) for key, value in right.items()
        }
        # Adam's first step is as large for a gradient of nothing but rounding as for any other.
        scale = 1.0 if name == "gradients" else 100.0
        assert all(close(left[key], right[key], scale * tolerance) for key in left), name
    back = [
        alone.apply(request).result
        for request in (LoadState(seq=20, incarnation=7, name="two-step"), Forward(seq=21, incarnation=7, data=POLICY))
    ]
    assert [result.error for result in back] == [None, None]
    at_one_step = two[6].logprobs, back[1].logprobs
    assert at_one_step[0]
    assert at_one_step[1]
    assert at_one_step[1][0] == pytest.approx(at_one_step[0][0], abs=10 * tolerance)

    versions = [version_directory(home, "default", "job", 7, 1) for home in homes.values()]
    assert sorted(path.name for path in versions[0].iterdir()) == sorted(path.name for path in versions[1].iterdir())
    manifests = [read_manifest(version / "manifest.json") for version in versions]
    assert manifests[0].tensors == manifests[1].tensors
    assert (manifests[0].format, manifests[0].total_bytes) == (manifests[1].format, manifests[1].total_bytes)
    verify_files(manifests[1], versions[1])
    file = "adapter_model.safetensors" if kind == "lora" else "model.safetensors"
    left, right = (safetensors.torch.load_file(version / file) for version in versions)
    assert all(close(left[key], right[key], 100 * tolerance) for key in left)
    if kind != "lora":
        from transformers import AutoModelForCausalLM

        loaded = AutoModelForCausalLM.from_pretrained(versions[1])
        assert torch.equal(loaded.get_input_embeddings().weight, right["model.embed_tokens.weight"])


def entries(first: int, last: int) -> list[AnyTrainRequest]:
    """A log without an end: steps, now and then a version."""
    kinds: list[Callable[[int], AnyTrainRequest]] = [
        lambda seq: learn(seq, data(seq)),
        lambda seq: learn(seq, data(seq, 3), loss="cispo"),
        step,
        lambda seq: SaveWeights(seq=seq, incarnation=7),
    ]
    return [kinds[(seq - 1) % 4](seq) for seq in range(first, last + 1)]


async def finish(world: World, job: str, first: int, last: int) -> dict[str, bytes]:
    for request in [*entries(first, last), SaveState(seq=last + 1, incarnation=7, name="end")]:
        result = await world.ask(job, request)
        while result.seq != request.seq:  # the newest answer before a restart may come again
            result = await world.answer()
        assert result.error is None
    state = world.home / f"state/default/{job}/end.safetensors"
    versions = world.home / f"weights/default/{job}/7"
    files = {str(path.relative_to(versions)): path.read_bytes() for path in versions.rglob("*.safetensors")}
    tensors = safetensors.torch.load_file(state)
    return files | {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


@pytest.mark.long
@pytest.mark.parametrize("kind", [JobKind.FFT, JobKind.LORA])
async def test_a_rank_killed_in_the_middle_ends_the_group_and_the_next_one_comes_to_the_same_bits_R14_R5(
    world: World, kind: JobKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPEN_RL_CHECKPOINT_EVERY", "2steps")
    ends = []
    for job, killed in (("quiet", False), ("hit", True)):
        workload = await world.workload(kind, job, devices=2)
        await world.job(job, kind, workload)
        process = await world.start(workload, f"{job}-1")
        if killed:
            for request in entries(1, 14):
                assert (await world.ask(job, request)).error is None
            await world.send(job, entries(15, 15)[0])
            (other,) = [
                child for child in psutil.Process(process.pid).children() if "rank" in " ".join(child.cmdline())
            ]
            other.kill()
            assert await asyncio.to_thread(process.wait, 30) == 1
            log = (world.home / f"{job}-1.log").read_text()
            assert "rank 1 of 2" in log
            assert "the group ends with it" in log
            process = await world.start(workload, f"{job}-2")
            while (await world.answer()).seq != 15:
                pass
            ends.append(await finish(world, job, 16, 20))
        else:
            ends.append(await finish(world, job, 1, 20))
        ready = await world.bus.store.ready.get(f"{job}-{2 if killed else 1}")
        assert ready is not None
        assert (ready.value.detail["devices"], ready.value.detail["can_park"]) == ("2", "false")
        others = psutil.Process(process.pid).children()
        process.terminate()
        assert await asyncio.to_thread(process.wait, 30) == 0
        gone, alive = psutil.wait_procs(others, timeout=10)
        assert (len(gone), alive) == (1, [])
    quiet, hit = ends
    assert quiet.keys() == hit.keys()
    assert [name for name in quiet if quiet[name] != hit[name]] == []


async def two_ranks_with_a_large_budget(
    world: World, kind: JobKind, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, subprocess.Popen[bytes], psutil.Process]:
    """A job ``tight`` that has learned once: its workload, the process of rank 0, and rank 1."""
    monkeypatch.setenv("OPEN_RL_TRAIN_TOKEN_BUDGET", "60000")
    workload = await world.workload(kind, "tight", devices=2)
    await world.job("tight", kind, workload)
    process = await world.start(workload, "tight-1")
    assert (await world.ask("tight", learn(1, POLICY))).error is None
    (other,) = [child for child in psutil.Process(process.pid).children() if "openrl_trainer.rank" in child.cmdline()]
    return workload, process, other


@LONG
async def test_a_rank_short_of_memory_in_a_sharded_pass_halves_everybodys_budget_in_the_next_life_R14_R2_R5(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload, process, other = await two_ranks_with_a_large_budget(world, JobKind.FFT, monkeypatch)
    room = other.memory_info().vms + (64 << 20)  # the request itself fits, its pass does not
    other.rlimit(psutil.RLIMIT_AS, (room, room))
    await world.send("tight", learn(2, data(2, 1500, length=60)))
    assert await asyncio.to_thread(process.wait, 60) == 1
    assert "can't allocate memory" in (world.home / "tight-1.log").read_text()
    await world.start(workload, "tight-2")
    result = await world.answer()
    while result.seq != 2:
        result = await world.answer()
    assert result.error is None
    assert result.metrics["token_budget"] == result.metrics["halved_to"] == 750 * 60 / 2


@LONG
async def test_a_data_parallel_rank_short_of_memory_halves_everybodys_budget_at_once_R14_R2(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, process, other = await two_ranks_with_a_large_budget(world, JobKind.LORA, monkeypatch)
    unlimited = other.rlimit(psutil.RLIMIT_AS)
    room = other.memory_info().vms + (64 << 20)
    other.rlimit(psutil.RLIMIT_AS, (room, unlimited[1]))
    result = await world.ask("tight", learn(2, data(2, 1500, length=60)))
    assert result.metrics["halved_to"] == 750 * 60 / 2, "whether half of it fits or not"
    other.rlimit(psutil.RLIMIT_AS, unlimited)
    for request in (learn(3, POLICY), step(4)):
        assert (await world.ask("tight", request)).error is None
    assert process.poll() is None
