"""The main job, for real: a published job trains and its held-out reward rises, whatever is killed meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from e2e.conftest import SETTINGS
from openrl_client import connect
from openrl_client.metrics import Metrics
from openrl_client.recipes import GrpoSettings, RecipeSettings, SftSettings, run_recipe
from openrl_client.supervisor import LocalSystem
from openrl_client.tasks import LetterTask, load_task
from openrl_client.tokenizer import Tokenizer
from openrl_common.bus import Bus
from openrl_common.records import ClaimState, JobKind, JobPhase, JobSpec, LoraSpec, SeatState
from support import until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]

RECIPE = RecipeSettings(
    sft=SftSettings(steps=120, batch=64, learning_rate=2e-3),
    grpo=GrpoSettings(steps=6, prompts=8, samples=8, learning_rate=3e-4, max_tokens=9, lag=1, agreement_every=3),
    evaluation_samples=600,
)
CLEAN = LetterTask("sort", noise=0.0)
"""Demonstrations without mistakes."""
GAIN_MIN = 0.03
"""Seen: 0.28 (FFT) and 0.15 (LoRA); the noise of a difference of two means of 600 samples is 0.026."""


def spec(model: Path, name: str, kind: JobKind) -> JobSpec:
    lora = LoraSpec(rank=16, alpha=32.0) if kind is JobKind.LORA else None
    return JobSpec(name=name, kind=kind, base_model=str(model), lora=lora, dtype="float32")


async def nothing_is_held(bus: Bus) -> None:
    """Every seat is empty, every claim gone, every device and every byte of host memory free again."""
    async with asyncio.timeout(30):
        while True:
            seats = [e.value for e in (await bus.store.ledger_seats.list()).values()]
            claims = [e.value for e in (await bus.store.ledger_claims.list()).values()]
            budgets = [e.value for e in (await bus.store.ledger_nodes.list()).values()]
            devices = [e.value for e in (await bus.store.devices.list()).values()]
            if (
                all(seat.state is SeatState.EMPTY for seat in seats)
                and all(claim.state is ClaimState.GONE and not claim.entries for claim in claims)
                and not any(budget.entries for budget in budgets)
                and not any(device.claim for device in devices)
            ):
                return
            await asyncio.sleep(0.2)


@pytest.mark.parametrize("kind", [JobKind.FFT, pytest.param(JobKind.LORA, marks=pytest.mark.long)])
async def test_a_job_ends_with_a_higher_reward_though_every_control_service_is_killed(
    system: LocalSystem, half_trained_model: Path, tmp_path: Path, kind: JobKind
) -> None:
    """Invariant 9, B1, E6, E17: ledger, placement, launcher and nats are killed -9 in the middle of the run."""
    victims = ["ledger", "placement", "launcher", "nats"]
    # Adapters want a larger step than full weights (the demo's settings).
    learning_rate = 3e-3 if kind is JobKind.LORA else 2e-3
    recipe = msgspec.structs.replace(RECIPE, sft=msgspec.structs.replace(RECIPE.sft, learning_rate=learning_rate))

    def on_step(_line: dict[str, Any]) -> None:
        nonlocal steps
        steps += 1
        if steps % 12 == 0 and victims:
            system.kill(victims.pop())

    steps = 0
    async with connect(system.nats_url) as client:
        job = await client.submit(spec(half_trained_model, "hardy", kind))
        await job.ready(90)
        workers = {entry.value.pid for entry in (await client.bus.store.workers.list()).values()}
        with Metrics(tmp_path / "metrics.jsonl") as metrics:
            outcome = await run_recipe(
                job,
                "sft+grpo",
                load_task("letters:sort"),
                Tokenizer(str(half_trained_model)),
                recipe,
                metrics,
                on_step=on_step,
            )
        survivors = {entry.value.pid for entry in (await client.bus.store.workers.list()).values()}
        record = await job.finish()
        assert record.phase is JobPhase.FINISHED
        await nothing_is_held(client.bus)
    assert victims == []
    assert workers == survivors, "a worker was lost with a control service"
    assert outcome.reward_before is not None
    assert outcome.reward_after is not None
    assert outcome.reward_after > outcome.reward_before + GAIN_MIN
    lines = [msgspec.json.decode(line) for line in (tmp_path / "metrics.jsonl").read_bytes().splitlines()]
    steps_written = [(line["recipe"], line["step"]) for line in lines if line["recipe"] != "evaluate"]
    assert len(steps_written) == len(set(steps_written)) == RECIPE.sft.steps + RECIPE.grpo.steps
    agreements = [line["agreement"] for line in lines if line.get("agreement")]
    assert len(agreements) == 2
    assert all(one["tokens"] > 8 and one["max"] < 1e-3 for one in agreements), "V12: sampler and trainer, float32"
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in workers)


async def test_every_event_delivered_again_changes_nothing(system: LocalSystem, tiny_model: Path) -> None:
    """Invariant 10: the whole event history is published a second time under new message ids."""
    async with connect(system.nats_url) as client:
        bus = client.bus
        job = await client.submit(spec(tiny_model, "again", JobKind.FFT))
        await job.ready(90)
        other = await client.submit(spec(tiny_model, "gone", JobKind.FFT))
        await other.cancel()
        before = await settled_state_of(bus)
        info = await bus.jetstream.stream_info("OPENRL_EVENTS")
        tail = bus.tail(stream="OPENRL_EVENTS", subject="openrl.ev.>")
        for number in range(info.state.messages):
            delivery = await anext(tail)
            headers = {key: value for key, value in delivery.headers.items() if not key.startswith("Nats-")}
            await bus.publish_raw(delivery.subject, delivery.body, message_id=f"again:{number}", headers=headers)
        for durable in ("ledger", "placement"):
            async with asyncio.timeout(30):
                while True:
                    consumer = await bus.jetstream.consumer_info("OPENRL_EVENTS", durable)
                    if not consumer.num_pending and not consumer.num_ack_pending:
                        break
                    await asyncio.sleep(0.1)
        assert await settled_state_of(bus) == before
        await job.finish()
        await nothing_is_held(bus)


async def settled_state_of(bus: Bus) -> dict[str, Any]:
    """The state once it has stood still for two seconds and no claim, seat or job is on its way out."""
    async with asyncio.timeout(60):
        before: dict[str, Any] = {}
        while True:
            now = await state_of(bus)
            leaving = (ClaimState.RETIRING, SeatState.RELEASING, JobPhase.FINISHING)
            states = [state for part in ("claims", "seats", "jobs") for state, *_ in now[part].values()]
            if now == before and not any(state in leaving for state in states):
                return now
            before = now
            await asyncio.sleep(2)


async def state_of(bus: Bus) -> dict[str, Any]:
    """What must not change: who sits where, which claims stand, how the jobs are, which processes run."""
    seats = {
        k: (e.value.state, e.value.assignment, e.value.claim) for k, e in (await bus.store.ledger_seats.list()).items()
    }
    claims = {k: (e.value.state, sorted(e.value.entries)) for k, e in (await bus.store.ledger_claims.list()).items()}
    jobs = {k: (e.value.phase, e.value.incarnation) for k, e in (await bus.store.jobs.list()).items()}
    workers = {k: (e.value.state, e.value.pid) for k, e in (await bus.store.workers.list()).items()}
    return {"seats": seats, "claims": claims, "jobs": jobs, "workers": workers}


async def test_a_killed_worker_comes_back_on_the_same_seat_and_the_job_goes_on(
    system: LocalSystem, tiny_model: Path, tmp_path: Path
) -> None:
    """F4, B7, R5: kill -9 of trainer and sampler; the training log is replayed, the client only sees latency."""
    killed: list[int] = []

    async with connect(system.nats_url) as client:
        job = await client.submit(spec(tiny_model, "phoenix", JobKind.FFT))
        await job.ready(90)
        seats = {k: e.value.assignment for k, e in (await client.bus.store.ledger_seats.list()).items()}
        workers = [entry.value for entry in (await client.bus.store.workers.list()).values()]

        def on_step(line: dict[str, Any]) -> None:
            if line["step"] == 10 and not killed:
                for worker in workers:
                    os.kill(worker.pid, signal.SIGKILL)
                    killed.append(worker.pid)

        settings = msgspec.structs.replace(
            RECIPE, sft=msgspec.structs.replace(RECIPE.sft, steps=30), evaluation_samples=0
        )
        with Metrics(tmp_path / "metrics.jsonl") as metrics:
            await run_recipe(
                job, "sft+grpo", load_task("letters:sort"), Tokenizer(str(tiny_model)), settings, metrics,
                on_step=on_step,
            )  # fmt: skip
        after = {k: e.value.assignment for k, e in (await client.bus.store.ledger_seats.list()).items()}
        restarts = [entry.value.restarts for entry in (await client.bus.store.workers.list()).values()]
        await job.finish()
    assert killed
    assert after == seats
    assert restarts == [1, 1]


async def test_sigterm_drains_each_service_and_exits_cleanly(system: LocalSystem, tiny_model: Path) -> None:
    """E17: not ready, finish what is in hand, exit 0; the workers stay."""
    async with connect(system.nats_url) as client:
        job = await client.submit(spec(tiny_model, "calm", JobKind.FFT))
        await job.ready(90)
        workers = [entry.value.pid for entry in (await client.bus.store.workers.list()).values()]
        for name in ("ledger", "placement", "launcher"):
            pid = system.pids[name]
            os.kill(pid, signal.SIGTERM)
            await until(lambda name=name, pid=pid: system.pids[name] not in (0, pid))  # type: ignore[misc]
            await system.ready(name)
            log = (system.home / "logs" / f"{name}.log").read_text()
            assert "service stopped" in log
            assert "Traceback" not in log
        assert all(psutil.Process(pid).is_running() for pid in workers)
        await job.finish()
        await nothing_is_held(client.bus)


@pytest.mark.long
async def test_P12_a_runtime_warmed_ahead_serves_the_first_job_without_a_start(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with LocalSystem(tmp_path / "home", environment={**SETTINGS, "OPEN_RL_LORA_IDLE": "60s"}) as system:
        arguments = ["warm", str(tiny_model), "--rank", "16", "--dtype", "float32", "--nats-url", system.nats_url]
        process = await asyncio.create_subprocess_exec(
            Path(sys.executable).parent / "openrl", *arguments, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate()
        assert process.returncode == 0
        assert output.decode().startswith("runtime/")
        async with connect(system.nats_url) as client:
            workers = {entry.value.pid for entry in (await client.bus.store.workers.list()).values()}
            job = await client.submit(spec(tiny_model, "first", JobKind.LORA))
            await job.ready(30)
            assert f"runtime/{job.record.runtime} warm" == output.decode().strip()
            assert {entry.value.pid for entry in (await client.bus.store.workers.list()).values()} == workers
