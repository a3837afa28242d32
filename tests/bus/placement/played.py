"""Placement and the ledger as processes on a real nats-server; the test plays client, launcher and workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from openrl_common import streams
from openrl_common.bus import Bus, Delivery
from openrl_common.errors import Rejected, Unreachable
from openrl_common.events import (
    AnyEvent,
    ClaimAllocated,
    ClaimFreed,
    ClaimRetired,
    JobSubmitted,
    SeatReleasing,
    WorkerGone,
    WorkerLaunched,
    WorkerUnschedulable,
)
from openrl_common.nats_server import NatsServer
from openrl_common.quantities import GIB
from openrl_common.records import (
    ClaimState,
    Device,
    JobKind,
    JobSpec,
    NodeRecord,
    ReadyRecord,
    WorkloadPhase,
)

CONFIG = {
    "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 300,
}  # fmt: skip


@dataclass
class System:
    """A running pair of services, and a launcher that is played here: devices are cut in the order of claims."""

    bus: Bus
    home: Path
    model: str
    environment: dict[str, str]
    devices: list[str]
    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    seen: list[AnyEvent] = field(default_factory=list)
    free: list[str] = field(default_factory=list)
    pending: list[str] = field(default_factory=list)
    cut: dict[str, str] = field(default_factory=dict)

    async def start(self, service: str, name: str = "") -> None:
        name = name or service
        with (self.home / f"{name}.log").open("ab") as log:
            self.processes[name] = await asyncio.create_subprocess_exec(
                sys.executable, "-m", f"openrl_{service}", env=self.environment, stdout=log, stderr=log
            )

    async def up(self) -> bool:
        """Do both services consume? What a test waits for begins then, however long they took to start."""
        consumers = await self.bus.jetstream.consumers_info("OPENRL_EVENTS")
        return {"ledger", "placement"} <= {info.name for info in consumers}

    async def kill(self, service: str, how: signal.Signals = signal.SIGKILL) -> int:
        process = self.processes.pop(service)
        process.send_signal(how)
        async with asyncio.timeout(15):
            return await process.wait()

    # --- client ---

    async def submit(self, name: str, kind: str = "fft", submission: str = "", **fields: object) -> JobSubmitted:
        spec = JobSpec(name=name, kind=JobKind(kind), base_model=self.model, **fields)  # type: ignore[arg-type]
        event = JobSubmitted(tenant="default", job=name, submission=submission or f"s-{name}", spec=spec)
        await self.bus.publish(event)
        return event

    def of(self, kind: type, job: str = "") -> list[AnyEvent]:
        return [each for each in self.seen if isinstance(each, kind) and getattr(each, "job", job) == job]

    async def until(self, condition: Callable[[], object | Awaitable[object]], within_s: float = 15.0) -> None:
        deadline = time.monotonic() + within_s
        while True:
            result = condition()
            if isinstance(result, Awaitable):
                try:
                    result = await result
                except (Unreachable, Rejected):
                    result = False
            if result is True or (result and not isinstance(result, Awaitable)):
                return
            assert time.monotonic() < deadline, f"not within {within_s} s; {self.logs()}"
            await asyncio.sleep(0.02)

    def logs(self) -> str:
        return "\n".join(path.read_text()[-1500:] for path in sorted(self.home.glob("*.log")))

    async def phase(self, workload: str) -> WorkloadPhase | None:
        entry = await self.bus.store.workloads.get(workload)
        return entry.value.phase if entry is not None else None

    # --- launcher and workers ---

    async def node(self) -> None:
        devices = tuple(Device(device=device, memory_bytes=8 * GIB) for device in self.devices)
        await self.bus.store.nodes.put("n1", NodeRecord(node="n1", devices=devices, host_allocatable_bytes=64 * GIB))
        self.free = list(self.devices)

    async def follow(self) -> None:
        async for delivery in self.bus.tail(stream="OPENRL_EVENTS", subject="openrl.ev.>"):
            await self._launch(delivery)

    async def _launch(self, delivery: Delivery) -> None:
        with contextlib.suppress(Exception):
            event = delivery.event()
            self.seen.append(event)
            match event:
                case SeatReleasing(node=node) if node:
                    await self.bus.publish(
                        WorkerGone(
                            tenant=event.tenant, workload=event.workload, assignment=event.assignment,
                            claim=event.claim, node=node,
                        )
                    )  # fmt: skip
                case ClaimRetired():
                    device = self.cut.pop(event.claim, "")
                    self.free.extend([device] if device else [])
                    await self.bus.publish(ClaimFreed(claim=event.claim, node="n1"))

    async def serve_claims(self) -> None:
        told: set[str] = set()
        launched: set[str] = set()
        mirror = await self.bus.store.ledger_claims.mirror()
        while True:
            waiting = sorted(
                (entry.value.order, claim)
                for claim, entry in mirror.entries.items()
                if entry.value.state is ClaimState.PENDING and claim not in self.cut
            )
            for _, claim in waiting:
                ((assignment, seat),) = mirror.entries[claim].value.entries.items() or ((("", None)),)
                if seat is None:
                    continue
                if self.free:
                    device = self.cut[claim] = self.free.pop()
                    await self.bus.publish(
                        ClaimAllocated(claim=claim, node="n1", devices=(device,), device_bytes=8 * GIB, tier="8GiB")
                    )
                elif claim not in told:
                    told.add(claim)
                    await self.bus.publish(
                        WorkerUnschedulable(
                            tenant=seat.tenant, workload=seat.workload, assignment=assignment, claim=claim,
                            cause=f"all {len(self.devices)} devices are in use",
                        )
                    )  # fmt: skip
            for claim, entry in list(mirror.entries.items()):
                if entry.value.state is ClaimState.ALLOCATED:
                    for assignment, seat in entry.value.entries.items():
                        if assignment in launched:
                            continue
                        named = await self.bus.store.ledger_seats.get(seat.workload)
                        if named is not None and named.value.assignment == assignment:
                            launched.add(assignment)
                            await self._start_worker(seat.tenant, seat.workload, assignment, claim)
            await asyncio.sleep(0.01)

    async def _start_worker(self, tenant: str, workload: str, assignment: str, claim: str) -> None:
        await self.bus.publish(
            WorkerLaunched(tenant=tenant, workload=workload, assignment=assignment, claim=claim, node="n1")
        )
        record = ReadyRecord(assignment=assignment, workload=workload, ready=True, ready_at=time.time())
        await self.bus.store.ready.put(assignment, record)


@contextlib.asynccontextmanager
async def running(
    tmp_path: Path, *, devices: int = 2, seats: int = 2, workers: bool = True, host_base: str = "1GiB"
) -> AsyncIterator[System]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    async with NatsServer(tmp_path / "nats") as server:
        bus = await Bus.connect(server.url, name="test")
        await streams.ensure(bus)
        environment = {
            **os.environ,
            "OPEN_RL_NATS_URL": server.url,
            "OPEN_RL_HOME": str(tmp_path),
            "OPEN_RL_MAX_SEATS_PER_CLAIM": str(seats),
            "OPEN_RL_TRAINER_HOST_BASE": host_base,
            "OPEN_RL_SAMPLER_HOST_BASE": host_base,
            "OPEN_RL_PASS_EVERY": "1s",
            "OPEN_RL_LORA_IDLE": "2s",
        }
        system = System(bus, tmp_path, str(model), environment, [f"d{number}" for number in range(devices)])
        tasks = [asyncio.create_task(system.follow())]
        try:
            await system.start("ledger")
            await system.start("placement")
            await system.until(system.up, within_s=45.0)
            if workers:
                await system.node()
                tasks.append(asyncio.create_task(system.serve_claims()))
            yield system
        finally:
            for service in list(system.processes):
                await system.kill(service)
            left = set(tasks)
            while left:  # asyncio.wait_for of Python 3.11 may swallow a cancellation: ask until it is heard
                for task in left:
                    task.cancel()
                _, left = await asyncio.wait(left, timeout=0.5)
            await bus.close()
