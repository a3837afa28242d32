"""``openrl bench sampler``: requests through the bus to a real sampler, at several numbers of clients (V10).

A closed loop: each client sends its next request when it has the answer to the last. Prompts are random tokens, so that
no two share a prefix; completions end at the model's end token or after ``max_tokens``. The job's trainer stands by; at
the end it scores what the sampler gives, on the same version (V12).
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from openrl_client import agreement
from openrl_client.bench.figures import cpu_seconds, machine_busy_s, milliseconds, percentile
from openrl_client.bench.machine import Machine, StorePlace, describe, store_place
from openrl_client.bench.scratch import scratch_with_model
from openrl_client.connection import connect
from openrl_client.home import Progress
from openrl_client.job import Job
from openrl_client.local_system import LocalSystem
from openrl_common.errors import Rejected
from openrl_common.records import JobKind, JobSpec
from openrl_common.wire import Agreement

_READY_S = 600.0
_AGREEMENT_PROMPTS = 8


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """``clients`` at once, each with one request of one prompt in flight, for ``seconds``."""

    seconds: float
    clients: list[int]
    prompt_tokens: int
    max_tokens: int


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """``tokens_per_s`` counts what was generated; times are from sending a request to having its answer.

    ``cpu_ms_per_token``: user and system time of the sampler's process. ``other_cores``: kept busy by everything else.
    """

    clients: int
    requests: int
    requests_per_s: float
    tokens_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_ms_per_token: float
    other_cores: float


class SamplerReport(msgspec.Struct, frozen=True, kw_only=True):
    engine: str
    kind: str
    dtype: str
    parameters_mb: float
    load: Load
    levels: list[Level]
    agreement: Agreement
    store: StorePlace
    machine: Machine


async def measure(
    store: Path | None,
    *,
    model: Path | None,
    engine: str,
    kind: str,
    dtype: str,
    load: Load,
    progress: Progress,
) -> SamplerReport:
    """Raises what LocalSystem and the client raise; Rejected for a store in memory or an engine that is not there."""
    place = store_place(store)
    async with scratch_with_model(place, model, progress) as (scratch, model):
        spec = JobSpec(name="bench", kind=JobKind(kind), base_model=str(model), dtype=dtype, engine=engine)
        async with (
            LocalSystem(
                scratch / "home", devices="2x8GiB", trainer_host_base="512MiB", sampler_host_base="512MiB"
            ) as system,
            connect(system.nats_url) as client,
        ):
            job = await client.submit(spec)
            await job.ready(_READY_S)
            levels = await _levels(job, _vocabulary(model), load, progress)
            found = await _agreement(job, _vocabulary(model), load)
            await job.finish()
        size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    return SamplerReport(
        engine=engine,
        kind=kind,
        dtype=dtype,
        parameters_mb=round(size / 1e6, 1),
        load=load,
        levels=levels,
        agreement=found,
        store=place,
        machine=describe(),
    )


def _vocabulary(model: Path) -> int:
    size = json.loads((model / "config.json").read_text()).get("vocab_size")
    if not isinstance(size, int):
        raise Rejected(f"model {model}: its config.json has no vocab_size", code="bad-model")
    return size


def _prompts(vocabulary: int, length: int, seed: int) -> Iterator[list[int]]:
    randomness = random.Random(seed)
    while True:
        yield [randomness.randrange(vocabulary) for _ in range(length)]


async def _levels(job: Job, vocabulary: int, load: Load, progress: Progress) -> list[Level]:
    version = await job.publish_weights()
    (worker,) = [
        entry.value
        for entry in (await job.client.bus.store.workers.list()).values()
        if entry.value.workload == job.record.sampler
    ]
    prompts = _prompts(vocabulary, load.prompt_tokens, seed=1)
    await job.sample([next(prompts)], max_tokens=load.max_tokens, at_least=version)
    levels = []
    for num_clients in load.clients:
        levels.append(await _level(job, prompts, num_clients, worker.pid, load))
        done = levels[-1]
        progress(
            f"{num_clients} clients: {done.requests_per_s:g} requests/s, {done.tokens_per_s:g} tokens/s,"
            f" p50 {done.p50_ms:g} ms, p99 {done.p99_ms:g} ms"
        )
    return levels


async def _level(job: Job, prompts: Iterator[list[int]], num_clients: int, pid: int, load: Load) -> Level:
    taken_s: list[float] = []
    num_tokens = 0
    began, cpu, busy = time.monotonic(), cpu_seconds(pid), machine_busy_s()
    own = time.process_time()
    end = began + load.seconds

    async def run_client() -> None:
        nonlocal num_tokens
        while (sent := time.monotonic()) < end:
            result = await job.sample([next(prompts)], max_tokens=load.max_tokens)
            taken_s.append(time.monotonic() - sent)
            num_tokens += len(result.sequences[0][0].tokens)

    async with asyncio.TaskGroup() as group:
        for _ in range(num_clients):
            group.create_task(run_client())
    seconds, cpu_s = time.monotonic() - began, cpu_seconds(pid) - cpu
    others_s = machine_busy_s() - busy - cpu_s - (time.process_time() - own)
    return Level(
        clients=num_clients,
        requests=len(taken_s),
        requests_per_s=round(len(taken_s) / seconds, 2),
        tokens_per_s=round(num_tokens / seconds, 1),
        p50_ms=milliseconds(percentile(taken_s, 50)),
        p99_ms=milliseconds(percentile(taken_s, 99)),
        cpu_ms_per_token=round(1000 * cpu_s / max(1, num_tokens), 3),
        other_cores=round(max(0.0, others_s) / seconds, 2),
    )


async def _agreement(job: Job, vocabulary: int, load: Load) -> Agreement:
    prompts = _prompts(vocabulary, load.prompt_tokens, seed=2)
    return await agreement.measure(
        job,
        [next(prompts) for _ in range(_AGREEMENT_PROMPTS)],
        version=await job.publish_weights(),
        max_tokens=load.max_tokens,
        stop_token_ids=[],
    )
