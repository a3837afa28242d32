"""A sampler process on a real nats-server, with what surrounds it: records, weights, a client's side."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
import urllib.request
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from sampler_support import save_full_version

from openrl_common.bus import Bus
from openrl_common.names import SHARED, cancel_subject, sample_subject, workload_id
from openrl_common.records import (
    JobKind,
    JobPhase,
    JobRecord,
    JobSpec,
    LeaseRecord,
    LeaseState,
    Role,
    Shape,
    WeightsRecord,
    WorkloadPhase,
    WorkloadRecord,
)
from openrl_common.wire import SAMPLE_RESULT_DECODER, CancelSample, SampleRequest, SampleResult, SamplingParams

STUCK = Path(__file__).with_name("stuck_sampler.py")


class World:
    """The records that placement, launcher and trainer would write, a sampler process, and a client's side."""

    def __init__(
        self,
        bus: Bus,
        url: str,
        home: Path,
        model: Path,
        *,
        engine: str = "torch",
        head_dim: int = 8,
        deadline_s: float = 60.0,
    ) -> None:
        """``deadline_s``: of a start, an answer, an event."""
        self.deadline_s = deadline_s
        self.bus, self.url, self.home, self.model, self.engine = bus, url, home, model, engine
        self.full = partial(save_full_version, home, head_dim=head_dim)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.inbox = bus.new_inbox()
        self.answers: dict[str, asyncio.Future[SampleResult]] = {}
        self.answered: list[str] = []
        self.runtime = ("t", "j")

    async def listen(self) -> None:
        async def on_answer(body: bytes, _headers: dict[str, str]) -> None:
            result = SAMPLE_RESULT_DECODER.decode(body)
            self.answered.append(result.request)
            self.answers[result.request].set_result(result)

        await self.bus.subscribe(self.inbox, on_answer)

    async def workload(self, kind: JobKind, jobs: tuple[str, ...] = (), **changes: Any) -> str:
        self.runtime = ("t", "j") if kind is JobKind.FFT else (SHARED, "lora-m")
        tenant, owner = self.runtime
        workload = workload_id(tenant, owner, "sampler")
        record = WorkloadRecord(
            workload=workload, tenant=tenant, owner=owner, owner_name=owner, kind=kind, jobs=jobs, incarnation=1,
            shape=Shape(role=Role.SAMPLER, device_bytes=1 << 30), base_model=str(self.model),
            phase=WorkloadPhase.PLACED, submitted_at=time.time(), max_rank=8, engine=self.engine,
        )  # fmt: skip
        await self.bus.store.workloads.put(workload, msgspec.structs.replace(record, **changes))
        return workload

    async def job(self, name: str, sampler: str, phase: JobPhase = JobPhase.READY) -> None:
        record = JobRecord(
            tenant="t", job=name, submission="s", incarnation=1,
            spec=JobSpec(name=name, kind=JobKind.LORA, base_model=str(self.model)), phase=phase,
            runtime_tenant=SHARED, runtime="lora-m", trainer="w", sampler=sampler, submitted_at=time.time(),
        )  # fmt: skip
        await self.bus.store.jobs.put(f"t.{name}", record)

    async def weights(self, record: WeightsRecord) -> None:
        await self.bus.store.weights.put(f"{record.tenant}.{record.job}", record)

    async def start(
        self, workload: str, assignment: str, *arguments: str, program: tuple[str, ...] = ("-m", "openrl_sampler")
    ) -> subprocess.Popen[bytes]:
        await self.bus.store.leases.write(assignment, LeaseRecord(state=LeaseState.STARTING), last=0)
        environment = os.environ | {
            "OPEN_RL_NATS_URL": self.url, "OPEN_RL_HOME": str(self.home), "OPEN_RL_WORKLOAD": workload,
            "OPEN_RL_ASSIGNMENT": assignment, "OPEN_RL_NODE": "n1", "OPEN_RL_DEVICE_BYTES": "1GiB",
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        with (self.home / f"{assignment}.log").open("wb") as log:
            process = subprocess.Popen(  # noqa: ASYNC220 (returns at once)
                [sys.executable, *program, *arguments], env=environment, stdout=log, stderr=log
            )
        self.processes.append(process)
        return process

    async def ready(self, assignment: str) -> Any:
        async with asyncio.timeout(self.deadline_s):
            while True:
                entry = await self.bus.store.ready.get(assignment)
                if entry is not None and entry.value.ready:
                    return entry.value
                await asyncio.sleep(0.05)

    async def send(
        self, *, name: str = "", job: str = "j", timeout_s: float = 30.0, body: bytes = b"", asker: str = "t",
        **fields: Any,
    ) -> str:  # fmt: skip
        name = name or uuid.uuid4().hex
        request = SampleRequest(
            **{
                "request": name, "tenant": "t", "job": job, "incarnation": 1, "prompts": [[5, 9, 13], [7, 8]],
                "params": SamplingParams(n=2, max_tokens=6, seed=3), "deadline": time.time() + timeout_s,
                "reply_to": self.inbox,
            } | fields
        )  # fmt: skip
        self.answers[name] = asyncio.get_running_loop().create_future()
        await self.bus.publish_raw(
            sample_subject(*self.runtime, asker),
            body or msgspec.json.encode(request),
            message_id=name,
            ttl_s=timeout_s + 1,
        )
        return name

    async def answer(self, name: str) -> SampleResult:
        async with asyncio.timeout(self.deadline_s):
            return await self.answers[name]

    async def cancel(self, name: str) -> None:
        await self.bus.send(cancel_subject(*self.runtime), msgspec.json.encode(CancelSample(request=name)))

    async def sample(self, **fields: Any) -> SampleResult:
        return await self.answer(await self.send(**fields))

    async def error(self, **fields: Any) -> str:
        result = await self.sample(**fields)
        assert result.error is not None
        return result.error.code

    async def next_event(self, kind: type[Any]) -> Any:
        async with asyncio.timeout(self.deadline_s):
            async for delivery in self.bus.tail(stream="OPENRL_EVENTS", subject="openrl.ev.sampler.>"):
                event = delivery.event()
                if isinstance(event, kind):
                    return event

    async def pending_messages(self) -> int:
        info = await self.bus.jetstream.stream_info("OPENRL_SAMPLE")
        return info.state.messages


async def gone(process: subprocess.Popen[bytes], within_s: float = 20.0) -> int:
    async with asyncio.timeout(within_s):
        while (code := process.poll()) is None:  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.02)
    return code


def versions(result: SampleResult) -> set[int]:
    assert result.error is None, result.error
    return {version for group in result.sequences for sequence in group for version in sequence.versions}


def metrics(log: Path) -> dict[str, float]:
    """Of the process that wrote this log."""
    found = re.search(r"health_port=(\d+)", log.read_text())
    assert found is not None
    with urllib.request.urlopen(f"http://127.0.0.1:{found[1]}/metrics", timeout=5.0) as answer:
        lines = [line.rpartition(" ") for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}
