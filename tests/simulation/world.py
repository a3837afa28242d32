"""One simulated system: the real services over an in-memory server, on virtual time, under a plan's faults."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any

import msgspec
from opentelemetry.trace import INVALID_SPAN, Span
from prometheus_client import CollectorRegistry

import openrl_common.bus
import openrl_common.duty
import openrl_common.identity
import openrl_common.settlement
import openrl_common.turns
import openrl_common.worker
import openrl_launcher.service
import openrl_ledger.nodes_service
import openrl_ledger.retention_service
import openrl_ledger.service
import openrl_ledger.turns_service
import openrl_placement.look_ahead
import openrl_placement.models
import openrl_placement.service
from openrl_common import service
from openrl_common.errors import OpenRLError, Rejected, Transient
from openrl_common.events import EVENT_DECODER, JobCancelled, JobFinished, JobSubmitted
from openrl_common.liveness import BEATS_MISSED_MAX
from openrl_common.memory import MemoryBus
from openrl_common.memory_server import MemoryServer, Stored, Stream
from openrl_common.quantities import GIB
from openrl_common.records import JobKind, JobSpec, Overrides
from openrl_common.service import ServiceContext
from openrl_launcher.__main__ import _body as launcher_body
from openrl_launcher.service import Launcher
from openrl_launcher.settings import LauncherSettings
from openrl_ledger import rebuild
from openrl_ledger.core.nodes import NodePolicy
from openrl_ledger.service import LedgerSettings
from openrl_ledger.service import serve as serve_ledger
from openrl_placement.estimator import Model
from openrl_placement.service import PlacementSettings
from openrl_placement.service import serve as serve_placement
from simulation.invariants import RESERVE_BYTES, Invariants
from simulation.machines import CALM, Machine, Process, SimulatedNetwork, Worker
from simulation.plan import FAULT_PHASE_S, Fault, JobPlan, Plan
from simulation.settled import Settled
from simulation.virtual_time import PROCESS, VirtualLoop, deterministic

SETTLE_S = 240.0
"""Faults have stopped: this long every wait may take to become true and every leftover to go (invariants 7 to 9)."""
MESSAGES_MIN = 200
WORKLOADS_MIN = 8
MESSAGES_WITH_FAULTS = 125
"""As many while faults go on; more would make a schedule dearer, not better."""
LAST_WORDS_S = 0.3
_LOOK_S = 2.0
_ROLLED_OUT_S = 15.0
"""Longer than a replica needs to end, and its last words to arrive."""
_MESSAGES_OF_A_JOB = 20
_ACK_WAIT_FACTOR = 0.1
_BUDGETS = "$KV.openrl_ledger.node."
_MODEL = Model(parameters=10_000_000, largest_tensor_elements=1_000_000, kv_values_per_token=512, vocabulary=1000)
_BASE: dict[str, Any] = {
    "nats_url": "memory", "home": Path("home"), "log_level": "error", "log_format": "json", "health_host": "",
    "health_port": 0,
}  # fmt: skip


_BEAT_S = 4.0
_MEASURED = (
    openrl_common.turns,
    openrl_ledger.nodes_service,
    openrl_ledger.retention_service,
    openrl_ledger.service,
    openrl_ledger.turns_service,
    openrl_placement.service,
)
_NODE_POLICY = NodePolicy(
    suspect_after_s=BEATS_MISSED_MAX * _BEAT_S + 0.5, watch_after_s=_BEAT_S + 0.2, start_lapse_s=20.0
)


class Violated(Exception):
    """The run is over: an invariant does not hold."""


@dataclass
class Outcome:
    """What became of one schedule. ``digest`` is equal for equal runs, event by event."""

    seed: int
    violation: str = ""
    num_delivered: int = 0
    num_writes: int = 0
    num_workloads: int = 0
    num_crashes: int = 0
    virtual_s: float = 0.0
    digest: str = ""
    trace: list[str] = field(default_factory=list)


class World:
    def __init__(self, plan: Plan, *, tracing: bool = False) -> None:
        self.plan = plan
        self.loop = VirtualLoop()
        self.tracing = tracing
        self.trace: list[str] = []
        self.acting = ""
        self._written: list[tuple[float, str, int]] = []
        self._violations: list[str] = []
        self.num_writes = 0
        self.num_crashes = 0
        self.num_started = 0
        self.workloads_seen: set[str] = set()
        self._random = Random(f"world {plan.seed}")
        self.network = SimulatedNetwork(self, Random(f"network {plan.seed}"))
        self.server = MemoryServer(self.network)
        self.server.ack_wait_factor = _ACK_WAIT_FACTOR
        self.server.streams["OPENRL_EVENTS"].duplicate_window_s = plan.duplicate_window_s
        self.invariants = Invariants(self)
        self.truth = self.invariants.truth
        self.processes: dict[str, Process] = {}
        self.machines: dict[str, Machine] = {}
        self._held_back: set[str] = set()
        self._away: dict[str, float] = {}
        """Services that nobody starts again before a time."""
        self._dark: dict[str, float] = {}
        self.cut_off: dict[str, float] = {}
        """Nodes without power, and nodes without a network, and until when."""
        self.stalls = False
        self._orphans_next = False
        self._healing = False
        self._new_limit_at_s = 1e9
        self._told: set[str] = set()
        for index, node in enumerate(plan.nodes):
            self.machines[f"n{index}"] = Machine(
                self, f"n{index}", node.devices, node.host_bytes, Random(f"machine {index} {plan.seed}")
            )
        self.client = Process(self, "client")
        self.settled = Settled(self)

    # --- what others ask of the world -----------------------------------------------------------------------------

    def violation(self, what: str) -> None:
        self._violations.append(f"{self.loop.now_s:.4f} s: {what}")
        self.note(f"VIOLATION {what}")

    def note(self, line: str) -> None:
        if self.tracing:
            self.trace.append(f"{self.loop.now_s:10.4f} {line}")

    def landed(self, stream: Stream, message: Stored, before: Stored | None) -> None:
        self.num_writes += 1
        self._written.append((self.loop.now_s, message.subject, message.seq))
        if self.tracing:
            self._trace_write(stream, message)
        if stream.kv:
            if message.subject.startswith("$KV.openrl_workloads."):
                self.workloads_seen.add(message.subject)
            self.invariants.written(stream, message, before)
            if message.subject.startswith(_BUDGETS):
                self.settled.budget_written(message.subject.removeprefix(_BUDGETS))
        elif message.subject.endswith(".gone"):
            self.invariants.said_gone(message)
        elif message.subject.endswith(".requested") and ".seat." in message.subject:
            self.settled.asked(message.subject.split(".")[-2])

    def _trace_write(self, stream: Stream, message: Stored) -> None:
        if ".lease." in message.subject and b"renewals" in message.data and b"tombstone" not in message.data:
            return
        if message.subject.startswith("$KV.openrl_nodes"):
            return
        shown = message.data.decode(errors="replace")
        self.note(f"{self.acting:12} {stream.name} #{message.seq} {message.subject} {shown[:600]}")

    def stalled_for_s(self, bus: MemoryBus) -> float:
        process = bus.context.get(PROCESS)
        return 0.0 if process is None else float(process.stalled_until_s - self.loop.now_s)

    def is_over(self, bus: MemoryBus) -> bool:
        """Whether what a dead process had sent can no longer arrive.

        Ledger replicas are many and must bear it at any time. The others are one each: the kernel closes their
        connection long before a supervisor starts the next.
        """
        process = bus.context.get(PROCESS)
        if process is None or process.name.startswith("ledger"):
            return False
        return bool(self.loop.now_s - process.killed_at_s > LAST_WORDS_S)

    def crash(self, bus: MemoryBus, *, before: bool) -> None:
        """Kill the process behind a bus, at one of its effects."""
        process = bus.context.get(PROCESS)
        if process is None or process is self.client or not process.alive:
            return
        for machine in self.machines.values():
            for each in machine.alive():
                if each.process is process:
                    machine.end(each, 137)
                    return
        self.kill(process.name)

    def worker_life_s(self, worker: Worker) -> float:
        """How long a worker lives before something in it breaks; for ever in calm times."""
        if self._healing or self._random.random() >= self.plan.worker_failure:
            return 1e9
        return self._random.uniform(0.1, 10.0)

    def is_gone(self, process_id: str) -> bool:
        """What the process table of the machine on which all control services run would say."""
        return not any(each.alive and each.id == process_id for each in self.processes.values())

    def idle_s(self) -> float:
        """How long a worker has nothing to do."""
        return self._random.uniform(5.0, 15.0) if self._healing else self._random.uniform(0.1, 2.0)

    def hangs(self) -> bool:
        return not self._healing and self._random.random() < self.plan.hangs

    # --- processes --------------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        plan = self.plan
        old = self.processes.get(name)
        if old is not None and old.alive:
            return
        node = name.removeprefix("launcher-")
        if node in self._dark or name in self._held_back or self.loop.now_s < self._away.get(name, 0.0):
            return
        self.num_started += 1
        process = self.processes[name] = Process(self, name, node)
        process.limit = plan.limit if old is not None or self._healing else plan.old_limit
        process.skew_s = 0.0 if self._healing else plan.skews_s.get(name, 0.0)
        self.note(f"start {name}")
        process.run(self._body(name))
        assert process.main is not None
        process.main.add_done_callback(lambda task: self._ended(process, task))

    def kill(self, name: str) -> None:
        process = self.processes.get(name)
        if process is not None and process.alive:
            self.num_crashes += 1
            self.note(f"kill {name}")
            process.kill()
            self.loop.post(self._random.uniform(1.5 * LAST_WORDS_S, 4.0), self.start, name)

    def _ended(self, process: Process, task: asyncio.Task[None]) -> None:
        """What a supervisor does: start it again, unless it was told to end."""
        if not process.alive:
            return
        error = None if task.cancelled() else task.exception()
        if isinstance(error, BaseExceptionGroup):
            error = service._root(error)
        taken_over = isinstance(error, Rejected) and error.code in ("duty-lost", "ledger-replaced")
        if error is not None and not isinstance(error, Transient) and not taken_over:
            self.violation(f"process {process.name} failed: {error!r}{_where(error)}")
        self.note(f"process {process.name} ended: {error!r}")
        process.alive = True
        process.kill()
        self.loop.post(self._random.uniform(1.5 * LAST_WORDS_S, 1.5), self.start, process.name)

    def _body(self, name: str) -> Callable[[MemoryBus], Any]:
        async def body(bus: MemoryBus) -> None:
            context = ServiceContext(bus, bus.stopping, CollectorRegistry(), {})
            plan = self.plan
            if name.startswith("ledger"):
                await serve_ledger(
                    context,
                    LedgerSettings(
                        **_BASE,
                        max_seats_per_claim=self.processes[name].limit,
                        janitor_every_s=3.0,
                        nodes=_NODE_POLICY,
                        coresidency=plan.coresidency,
                        device_reserve_bytes=RESERVE_BYTES,
                        max_turn_s=plan.max_turn_s,
                        turn_grace_s=2.0,
                    ),
                )
            elif name.startswith("placement"):
                await serve_placement(context, self._placement_settings(self.processes[name].limit))
            else:
                node = name.removeprefix("launcher-")
                index = int(node[1:])
                settings = LauncherSettings(
                    **_BASE, node=node, roles=plan.nodes[index].roles, stop_grace_s=2.0, restarts_max=plan.restarts_max
                )
                await launcher_body(context, Launcher(bus, self.machines[node], settings))
            await bus.close()

        return body

    def _placement_settings(self, limit: int) -> PlacementSettings:
        plan = self.plan
        return PlacementSettings(
            **_BASE,
            max_seats_per_claim=limit,
            placement_strategy=plan.strategy,
            owner_affinity=plan.owner_affinity,
            placement_timeout_s=plan.placement_timeout_s,
            lora_jobs_per_runtime=plan.lora_jobs_per_runtime,
            lora_idle_s=plan.lora_idle_s,
            trainer_host_base_bytes=GIB,
            sampler_host_base_bytes=GIB,
            trainer_device_base_bytes=GIB,
            sampler_device_base_bytes=GIB,
            sampler_cache_tokens=1024,
            update_method="streamed",
            update_chunk_bytes=GIB // 4,
            update_staging_factor=1.0,
            scalable_shapes=(),
            pass_every_s=4.0,
        )

    # --- faults -----------------------------------------------------------------------------------------------------

    def _do(self, fault: Fault) -> None:
        if self._healing:
            return
        self.note(f"fault {fault.what} {fault.whom} {fault.lasts_s:g}")
        if fault.what == "kill":
            self.kill(fault.whom)
        elif fault.what == "away":
            self._away[fault.whom] = max(self._away.get(fault.whom, 0.0), self.loop.now_s + fault.lasts_s)
            self.kill(fault.whom)
            self.loop.post(fault.lasts_s, self.start, fault.whom)
        elif fault.what == "stop":
            process = self.processes.get(fault.whom)
            if process is not None:
                process.bus.stopping.set()
        elif fault.what == "stall":
            process = self.processes.get(fault.whom)
            if process is not None:
                self.stalls = True
                process.stalled_until_s = self.loop.now_s + fault.lasts_s
        elif fault.what == "outage":
            self.server.stop()
            self.loop.post(fault.lasts_s, self._server_back)
        elif fault.what == "power-off":
            self._dark[fault.whom] = max(self._dark.get(fault.whom, 0.0), self.loop.now_s + fault.lasts_s)
            self.machines[fault.whom].power_off()
            self.kill(f"launcher-{fault.whom}")
            self.loop.post(fault.lasts_s, self._power_on, fault.whom)
        elif fault.what == "ledger-lost":
            self._lose_ledger()
        elif fault.what == "orphan":
            self._orphans_next = True
        elif fault.what == "cut-off":
            self.cut_off[fault.whom] = max(self.cut_off.get(fault.whom, 0.0), self.loop.now_s + fault.lasts_s)
            for bus in self._buses(fault.whom):
                bus.cut_off = True
            self.loop.post(fault.lasts_s, self._network_is_back, fault.whom)

    def _lose_ledger(self) -> None:
        self.server.lose_bucket("openrl_ledger")
        self.truth.forget()
        self.invariants.ledger_is_lost = True
        self.loop.create_task(self._rebuild_ledger(), context=self.client.bus.context)

    def launched(self, launcher: Process) -> None:
        """A worker process has just been started, and nobody has written that down yet."""
        if self._orphans_next and not self._healing:
            self._orphans_next = False
            self.kill(launcher.name)
            self._lose_ledger()

    async def _rebuild_ledger(self) -> None:
        """What an operator does whose ledger's bucket is lost: stop every replica, rebuild, start them again (L7)."""
        self._held_back = {name for name in self._names() if name.startswith("ledger")}
        for name in sorted(self._held_back):
            self.kill(name)
        await asyncio.sleep(_ROLLED_OUT_S)  # their last words are over
        while True:
            try:
                found = await rebuild.look(self.client.bus)
                await rebuild.write(self.client.bus, found.rebuilt, await rebuild.begin(self.client.bus))
                break
            except Transient:
                await asyncio.sleep(0.5)
        self.note("the ledger is rebuilt")
        names, self._held_back = self._held_back, set()
        for name in sorted(names):
            self.start(name)

    def _server_back(self) -> None:
        if not self.server.up:
            self.note("nats is back")
            self.server.start()
            self.network.connected_again([bus for bus in self._buses() if not bus.cut_off])

    def _power_on(self, node: str) -> None:
        if self.loop.now_s >= self._dark.get(node, 0.0):
            self._dark.pop(node, None)
            self.start(f"launcher-{node}")

    def _network_is_back(self, node: str) -> None:
        if self.loop.now_s < self.cut_off.get(node, 0.0):
            return
        self.note(f"node {node} is connected again")
        self.cut_off.pop(node, None)
        buses = self._buses(node)
        for bus in buses:
            bus.reconnect()
        self.network.connected_again(buses)

    def _buses(self, node: str = "") -> list[MemoryBus]:
        """Of every process that lives, or of those on one machine."""
        everyone = [*self.processes.values(), self.client]
        everyone += [each.process for machine in self.machines.values() for each in machine.alive()]
        return [each.bus for each in everyone if each.alive and (not node or each.node == node)]

    def _heal(self) -> None:
        if not self.num_crashes:
            self.kill(self._random.choice(self._names()))
        self.note("--- faults stop")
        self._healing = True
        self.network.weather = CALM
        self._server_back()
        for process in self.processes.values():
            process.stalled_until_s = 0.0
            process.skew_s = 0.0
        for name in self._names():
            self.start(name)
            if self.processes[name].limit != self.plan.limit and not name.startswith("launcher"):
                self.processes[name].bus.stopping.set()
        self._new_limit_at_s = self.loop.now_s + _ROLLED_OUT_S

    def limit_in_force(self) -> int:
        """What no claim may exceed by a seat added now: the loosest that any replica may still have (S7)."""
        limits = {self.plan.limit} if self.loop.now_s > self._new_limit_at_s else {self.plan.limit, self.plan.old_limit}
        return 0 if 0 in limits else max(limits)

    def _names(self) -> list[str]:
        plan = self.plan
        names = [f"ledger-{index}" for index in range(plan.num_ledgers)]
        names += [f"placement-{index}" for index in range(plan.num_placements)]
        return names + [f"launcher-n{index}" for index in range(len(plan.nodes))]

    # --- clients ----------------------------------------------------------------------------------------------------

    def _offer(self, job: JobPlan) -> None:
        """Submit it, and end it when its time comes; a spare one only where messages are too few so far."""
        now_s = self.loop.now_s
        if job.spare and self.network.num_delivered > MESSAGES_WITH_FAULTS * now_s / FAULT_PHASE_S:
            return
        self.loop.post(max(0.0, job.at_s - now_s), self._submit, job)
        if job.ends:
            self.loop.post(max(0.0, job.ends_at_s - now_s), self.end_job, job.name, job.submission, job.ends)

    def _submit(self, job: JobPlan) -> None:
        small, large = job.device_gib
        spec = JobSpec(
            name=job.name,
            kind=JobKind(job.kind),
            base_model="model",
            exclusive=job.exclusive,
            priority=job.priority,
            overrides=Overrides(
                trainer_device_gib=large,
                sampler_device_gib=small,
                trainer_host_gib=job.host_gib,
                sampler_host_gib=job.host_gib,
            ),
        )
        self._publish(JobSubmitted(tenant="t", job=job.name, submission=job.submission, spec=spec))

    def end_job(self, name: str, submission: str, how: str) -> None:
        event = JobCancelled if how == "cancel" else JobFinished
        self._publish(event(tenant="t", job=name, submission=submission))

    def _publish(self, event: Any) -> None:
        async def insist() -> None:
            while True:
                try:
                    return await self.client.bus.publish(event)
                except Transient:
                    await asyncio.sleep(0.5)

        self.loop.create_task(insist(), context=self.client.bus.context)

    # --- the run ----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        for name in self._names():
            self.start(name)
        await asyncio.sleep(0.2)
        self.network.weather = self.plan.weather
        for job in self.plan.jobs:
            self.loop.post(max(0.0, min(job.at_s, job.ends_at_s)), self._offer, job)
        for fault in self.plan.faults:
            self.loop.post(fault.at_s, self._do, fault)
        await self._sleep(FAULT_PHASE_S)
        self._heal()
        await self._until(self.settled.waits_are_true, "not settled")
        await self._release_one()
        self.note("--- every job is finished")
        await self._until(self._finish_all, "leftovers")
        await self._top_up()

    def _finish_all(self) -> list[str]:
        """End what runs, also what a client that was cut off for long submits only now; what is left then."""
        for job in self.truth.jobs().values():
            if not job.phase.ended and job.submission not in self._told:
                self._told.add(job.submission)
                self.end_job(job.job, job.submission, "finish")
        return self.settled.nothing_is_left()

    async def _top_up(self) -> None:
        """A schedule has ``MESSAGES_MIN`` messages and ``WORKLOADS_MIN`` workloads: more jobs in calm times if not."""
        num_jobs = 0
        while self.network.num_delivered < MESSAGES_MIN or len(self.workloads_seen) < WORKLOADS_MIN:
            messages = (MESSAGES_MIN - self.network.num_delivered) // _MESSAGES_OF_A_JOB
            workloads = (WORKLOADS_MIN - len(self.workloads_seen) + 1) // 2
            for _ in range(max(1, messages, workloads)):
                job = JobPlan(
                    name=f"x{num_jobs}", submission=f"x{num_jobs}", at_s=0.0, kind="fft", device_gib=(4.0, 4.0),
                    host_gib=1.0, exclusive=None, priority=9,
                )  # fmt: skip
                num_jobs += 1
                self._submit(job)
            await self._until(self.settled.waits_are_true, "not settled after more jobs")
            await self._until(self._finish_all, "leftovers after more jobs")

    async def _release_one(self) -> None:
        """W1, invariant 8: a seat freed in calm times goes to the first in line that it fits."""
        placed = self.settled.placed_jobs()
        if not placed or not self.settled.waiting():
            return
        before = self.settled.waiting()
        job = self._random.choice(placed)
        self.note(f"--- one job is finished: {job.job}")
        self.end_job(job.job, job.submission, "finish")
        await self._sleep(6.0)
        await self._until(self.settled.waits_are_true, "not settled after a release")
        for problem in self.settled.skipped(before):
            self.violation(problem)
        self._stop_if_violated()

    async def _until(self, problems: Callable[[], list[str]], what: str) -> None:
        deadline_s = self.loop.now_s + SETTLE_S
        await self._sleep(1.0)
        while found := problems():
            if self.loop.now_s > deadline_s:
                raise Violated(f"{what} {SETTLE_S:g} s after the faults stopped: {'; '.join(found[:4])}")
            await self._sleep(_LOOK_S)

    async def _sleep(self, seconds: float) -> None:
        end_s = self.loop.now_s + seconds
        while self.loop.now_s < end_s:
            await asyncio.sleep(min(1.0, end_s - self.loop.now_s + 1e-6))
            self._stop_if_violated()

    def _stop_if_violated(self) -> None:
        for process in self.processes.values():
            for delivery, error in process.bus.failures:
                self._violations.append(f"{process.name} failed on {delivery.subject}: {error!r}{_where(error)}")
        if self._violations:
            raise Violated(self._violations[0])

    def run(self) -> Outcome:
        outcome = Outcome(self.plan.seed)
        errors: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: errors.append(context))
        with quiet(), hurried(self), deterministic(self.loop, self.plan.seed):
            asyncio.set_event_loop(self.loop)
            try:
                self.loop.run_until_complete(self._run())
                if errors:
                    outcome.violation = f"unhandled: {errors[0].get('message')} {errors[0].get('exception')!r}"
            except Violated as error:
                outcome.violation = str(error)
            finally:
                self._end()
        outcome.num_delivered = self.network.num_delivered
        outcome.num_writes = self.num_writes
        outcome.num_workloads = len(self.workloads_seen)
        outcome.num_crashes = self.num_crashes
        outcome.virtual_s = self.loop.now_s
        outcome.digest = hashlib.sha256(repr(self._written).encode()).hexdigest()[:16]
        outcome.trace = self.trace
        return outcome

    def _end(self) -> None:
        """Kill everything and let the cancelled tasks run out."""
        self._healing = True
        everyone = [*self.processes.values(), self.client]
        everyone += [each.process for machine in self.machines.values() for each in machine.alive()]
        for process in everyone:
            process.kill()
        for _ in range(20):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()
        for task in self.loop.unfinished():
            task.cancel()
        for _ in range(5):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()
        asyncio.set_event_loop(None)
        self.loop.close()


class _NoTracer:
    """Spans cost a tenth of a run and nobody reads them here."""

    def start_as_current_span(self, *_: Any, **__: Any) -> contextlib.AbstractContextManager[Span]:
        return contextlib.nullcontext(INVALID_SPAN)


class _NoMetric:
    """Metrics cost a twentieth, and nobody reads them either. Every name that is asked for is a method of it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *_: Any, **__: Any) -> _NoMetric:
        return self

    def __enter__(self) -> _NoMetric:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _NoProcessTable:
    def Process(self) -> _NoProcessTable:
        return self

    def create_time(self) -> float:
        return 0.0


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No logs: thousands of runs, each full of faults."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def hurried(world: World) -> Iterator[None]:
    """Periods whose length is no rule are made longer: less virtual time spent on heartbeats. Models need no files."""
    replaced: list[tuple[Any, str, Any]] = [
        (openrl_common.settlement, "_TRACER", _NoTracer()),
        (openrl_common.settlement, "extract_context", lambda headers: None),
        (openrl_common.bus, "inject_context", lambda headers: None),
        (openrl_common.worker, "RENEW_S", 3.0),
        (openrl_common.worker, "psutil", _NoProcessTable()),
        (openrl_launcher.service, "HEARTBEAT_S", _BEAT_S),
        (openrl_launcher.service, "_PASS_GAP_S", 0.2),
        (openrl_placement.models, "read_model", lambda directory: _MODEL),
        (openrl_placement.models, "_stamp", lambda directory: 0.0),
        (openrl_placement.look_ahead, "BEHIND_MIN", 0),
        (openrl_placement.service, "_EARLY_END_S", 40.0),
        (openrl_placement.service, "_TICK_S", 2.0),
        (openrl_placement.service, "_ORPHANS_EVERY_S", 60.0),
        (openrl_ledger.nodes_service, "LOOK_S", 2.0),
        (openrl_ledger.turns_service, "LOOK_S", 0.5),
        (openrl_common.identity, "LOOK_S", 6.0),
        (openrl_common.duty, "DUTY_RENEW_S", 5.0),
        (openrl_placement.service, "this_process", lambda: PROCESS.get().id),
        (openrl_placement.service, "process_is_gone", world.is_gone),
        # Each ledger is on a machine of its own: a duty there goes on when its holder has been silent (L6).
        (openrl_ledger.service, "this_process", lambda: PROCESS.get().id),
        (openrl_ledger.service, "process_is_gone", lambda holder: False),
    ]
    replaced += [
        (module, name, _NoMetric)
        for module in _MEASURED
        for name in ("Counter", "Gauge", "Histogram")
        if hasattr(module, name)
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    try:
        for owner, name, new in replaced:
            setattr(owner, name, new)
        yield
    finally:
        for owner, name, old in originals:
            setattr(owner, name, old)


def _where(error: BaseException | None) -> str:
    """The innermost line of this project in a traceback."""
    found = ""
    trace: TracebackType | None = None if error is None else error.__traceback__
    while trace is not None:
        found = f" at {Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


__all__ = ["EVENT_DECODER", "OpenRLError", "Outcome", "World", "msgspec"]
