"""The records that placement and launcher would write, trainer processes, and a client's side of the log."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil

from openrl_common.bus import Bus
from openrl_common.names import train_subject, workload_id
from openrl_common.records import (
    JobKind,
    JobPhase,
    JobRecord,
    JobSpec,
    LeaseRecord,
    LeaseState,
    LoraSpec,
    Role,
    Shape,
    WorkloadPhase,
    WorkloadRecord,
)
from openrl_common.wire import RESULT_DECODER, Datum, TrainRequest, TrainResult

DEADLINE_S = 120.0


class World:
    def __init__(self, bus: Bus, url: str, home: Path, model: Path) -> None:
        self.bus, self.url, self.home, self.model = bus, url, home, model
        self.processes: list[subprocess.Popen[bytes]] = []
        self.inbox = bus.new_inbox()
        self.answers: asyncio.Queue[TrainResult] = asyncio.Queue()

    async def listen(self) -> None:
        async def on_answer(body: bytes, _headers: dict[str, str]) -> None:
            self.answers.put_nowait(RESULT_DECODER.decode(body))

        await self.bus.subscribe(self.inbox, on_answer)

    async def workload(self, kind: JobKind, owner: str, tenant: str = "default", *, devices: int = 1) -> str:
        workload = workload_id(tenant, owner, "trainer")
        record = WorkloadRecord(
            workload=workload, tenant=tenant, owner=owner, owner_name=owner, kind=kind, jobs=(), incarnation=7,
            shape=Shape(role=Role.TRAINER, device_bytes=1 << 30, device_count=devices), base_model=str(self.model),
            phase=WorkloadPhase.PLACED, submitted_at=time.time(), max_rank=8,
        )  # fmt: skip
        await self.bus.store.workloads.put(workload, record)
        return workload

    async def job(self, name: str, kind: JobKind, trainer: str, **changes: Any) -> JobRecord:
        lora = changes.pop("lora", LoraSpec(rank=4) if kind is JobKind.LORA else None)
        spec = JobSpec(name=name, kind=kind, base_model=str(self.model), lora=lora, seed=3)
        record = JobRecord(
            tenant="default", job=name, submission="s", incarnation=7, spec=spec, phase=JobPhase.ADMITTED,
            runtime_tenant="default", runtime=name, trainer=trainer, sampler="", submitted_at=time.time(),
        )  # fmt: skip
        record = msgspec.structs.replace(record, **changes)
        await self.bus.store.jobs.put(f"default.{name}", record)
        return record

    def variables(self, workload: str, assignment: str) -> dict[str, str]:
        """What the launcher sets for a worker."""
        return {
            "OPEN_RL_NATS_URL": self.url, "OPEN_RL_HOME": str(self.home), "OPEN_RL_WORKLOAD": workload,
            "OPEN_RL_ASSIGNMENT": assignment, "OPEN_RL_NODE": "n1", "OPEN_RL_DEVICE_BYTES": "1GiB",
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    async def start(self, workload: str, assignment: str) -> subprocess.Popen[bytes]:
        await self.bus.store.leases.write(assignment, LeaseRecord(state=LeaseState.STARTING), last=0)
        environment = os.environ | self.variables(workload, assignment)
        with (self.home / f"{assignment}.log").open("wb") as log:
            process = subprocess.Popen(  # noqa: ASYNC220 (returns at once)
                [sys.executable, "-m", "openrl_trainer"], env=environment, stdout=log, stderr=log, cwd=self.home
            )
        self.processes.append(process)
        return process

    async def send(self, job: str, request: TrainRequest, *, again: str = "", body: bytes = b"") -> None:
        await self.bus.publish_raw(
            train_subject("default", job),
            body or msgspec.json.encode(msgspec.structs.replace(request, reply_to=self.inbox)),
            message_id=f"{job}:{request.incarnation}:{request.seq}:{again}",
        )

    async def answer(self) -> TrainResult:
        async with asyncio.timeout(DEADLINE_S):
            return await self.answers.get()

    async def ask(self, job: str, request: TrainRequest, **options: Any) -> TrainResult:
        await self.send(job, request, **options)
        return await self.answer()


async def until(what: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not await what():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.1)


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
