"""A real trainer and a real sampler on a device that does not hold both: they take turns, and nothing else changes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from openrl_client import connect
from openrl_client.supervisor import LocalSystem
from openrl_common.records import JobKind, JobSpec, LoraSpec, Overrides
from openrl_common.wire import AdamParams, Datum, SamplingParams

from .conftest import SETTINGS

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]
STEPS = 3


def spec(model: Path, kind: JobKind) -> JobSpec:
    """4 GiB each: two of them fit 12 GiB together and 6 GiB one at a time."""
    sizes = Overrides(trainer_device_gib=4, sampler_device_gib=4, trainer_host_gib=0.3, sampler_host_gib=0.3)
    lora = LoraSpec(rank=4, alpha=8.0) if kind is JobKind.LORA else None
    return JobSpec(
        name="narrow", kind=kind, base_model=str(model), lora=lora, dtype="float32", overrides=sizes, exclusive=False
    )


async def run_loop(model: Path, home: Path, devices: str, kind: JobKind) -> tuple[list[Any], dict[str, dict[str, str]]]:
    """What a client sees of ``STEPS`` steps, each sampled from the version just trained; and the ready records."""
    seen: list[Any] = []
    environment = {**SETTINGS, "OPEN_RL_DEVICES": devices, "OPEN_RL_MAX_TURN": "5s"}
    async with LocalSystem(home, environment=environment) as system, connect(system.nats_url) as client:
        job = await client.submit(spec(model, kind))
        await job.ready(120)
        workers = {e.value.assignment: e.value for e in (await client.bus.store.workers.list()).values()}
        assert len({worker.claim for worker in workers.values()}) == 1, "they share one device"
        version = 0
        for step in range(STEPS):
            prompts = [[1 + step, 2, 3], [4, 5]]
            params = SamplingParams(n=2, max_tokens=6, temperature=1.0, seed=step)
            sampled = await job.sample(prompts, params=params, exact=version)
            rows = [sequence for group in sampled.sequences for sequence in group]
            seen.append([(row.tokens, row.logprobs, row.versions) for row in rows])
            data = [Datum(tokens=[7, 8, *row.tokens]) for row in rows]
            trained = await job.forward_backward(data, loss="cross_entropy")
            again = await job.forward_backward(data, loss="cross_entropy")
            stepped = await job.optim_step(AdamParams(learning_rate=1e-2))
            seen.append((trained.metrics["loss"], again.metrics["loss"], stepped.metrics["grad_norm"]))
            version = await job.publish_weights()
        weights = await client.bus.store.weights.get(job.key)
        assert weights is not None
        seen.append(weights.value.version)
        tensors = Path(weights.value.manifest).parent
        seen.append([(path.name, path.read_bytes()) for path in sorted(tensors.glob("*.safetensors"))])
        ready = {e.value.workload: dict(e.value.detail) for e in (await client.bus.store.ready.list()).values()}
        await job.finish()
    return seen, ready


@pytest.mark.parametrize("kind", [pytest.param(JobKind.FFT, marks=pytest.mark.long), JobKind.LORA])
async def test_t2_t5_on_a_device_too_small_for_both_the_loop_goes_on_with_the_same_results(
    tiny_model: Path, tmp_path: Path, kind: JobKind
) -> None:
    """T2-T5, R5: parked and resumed between steps, trainer and sampler give bit for bit what they give undisturbed."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    wide, undisturbed = await run_loop(tiny_model, tmp_path / "wide", "1x12GiB", kind)
    assert not any("parked_bytes" in detail for detail in undisturbed.values()), "parked though both fit (T2)"
    narrow, switched = await run_loop(tiny_model, tmp_path / "narrow", "1x6GiB", kind)
    for workload, detail in switched.items():
        assert int(detail["parked_bytes"]) > 100_000, workload
        assert float(detail["park_seconds"]) > 0
        assert float(detail["resume_seconds"]) > 0
    assert narrow == wide
