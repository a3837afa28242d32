"""Simulated processes, machines and the network between them.

A process is killed the way ``kill -9`` does it: whatever it had sent may still arrive, nothing it awaits ever returns,
and its ``finally`` blocks reach nobody. Workers are processes on a machine: they outlive the launcher that started
them, go live and renew their lease with the code of ``openrl_common.worker``, and die with their machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, cast

from nats.js.errors import APIError
from prometheus_client import CollectorRegistry

from openrl_common import worker
from openrl_common.errors import Transient
from openrl_common.liveness import LEASE_S
from openrl_common.memory import MemoryBus
from openrl_common.memory_server import Network
from openrl_common.records import Device
from openrl_common.turns import Moved, Turns
from openrl_launcher.backend import Inventory, Launch
from openrl_launcher.backend import Process as Handle
from simulation.virtual_time import PROCESS

if TYPE_CHECKING:
    from simulation.world import World

_REAP_ROUNDS_MAX = 100
BOUNDARY_S = 0.3
"""A worker at work comes to a safe boundary at least this often."""


class Process:
    """One operating-system process: a bus and the tasks that were started in its context."""

    def __init__(self, world: World, name: str, node: str = "") -> None:
        """``node``: the machine whose network it uses; control services have one of their own."""
        self.world = world
        self.name = name
        self.node = node
        self.id = f"{name}/{world.num_started}"
        self.limit = world.plan.limit
        self.alive = True
        self.killed_at_s = 0.0
        self.skew_s = 0.0
        self.stalled_until_s = 0.0
        self._tasks: list[asyncio.Task[Any]] = []
        context = contextvars.copy_context()
        context.run(PROCESS.set, self)
        self._context = context
        self.bus: MemoryBus = context.run(MemoryBus, world.server, name)
        self.bus.cut_off = node in world.cut_off
        self.main: asyncio.Task[None] | None = None

    def own(self, task: asyncio.Task[Any]) -> None:
        self._tasks.append(task)
        if len(self._tasks) > 512:
            self._tasks = [each for each in self._tasks if not each.done()]

    def run(self, body: Callable[[MemoryBus], Awaitable[None]]) -> None:
        async def main() -> None:
            await body(self.bus)

        self.main = self.world.loop.create_task(main(), context=self._context)

    def kill(self) -> None:
        if self.alive:
            self.alive = False
            self.killed_at_s = self.world.loop.now_s
            self.bus.kill()
            self._reap(0)

    def _reap(self, rounds: int) -> None:
        """Cancel until nothing is left: code may catch a cancellation, but it cannot reach anybody any more."""
        left = [task for task in self._tasks if not task.done()]
        if rounds > _REAP_ROUNDS_MAX:
            self.world.violation(f"process {self.name} cannot be ended: {left[:3]}")
            return
        for task in left:
            task.cancel()
        if left:
            self.world.loop.post(0.0, self._reap, rounds + 1)
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.exception()  # taken note of: nobody else will


class Fate(Enum):
    ARRIVES = "arrives"
    REQUEST_LOST = "request lost"
    ANSWER_LOST = "answer lost"
    LATE = "late"


@dataclass(frozen=True)
class Weather:
    """How bad the network and the processes are; probabilities per message. All zero is calm."""

    slow: float = 0.0
    very_slow: float = 0.0
    request_lost: float = 0.0
    answer_lost: float = 0.0
    late: float = 0.0
    delivery_lost: float = 0.0
    delivered_twice: float = 0.0
    ack_lost: float = 0.0
    changes_late: float = 0.0
    crash_at_effect: float = 0.0

    @functools.cached_property
    def odd(self) -> float:
        """How many requests do not just arrive, in good time, and are answered."""
        return self.request_lost + self.answer_lost + self.late + self.slow

    def fate(self, draw: float) -> Fate:
        """What becomes of a request, by a number drawn from 0 to 1."""
        lost = self.request_lost + self.answer_lost
        if draw >= lost + self.late:
            return Fate.ARRIVES
        if draw < self.request_lost:
            return Fate.REQUEST_LOST
        return Fate.ANSWER_LOST if draw < lost else Fate.LATE


CALM = Weather()


class SimulatedNetwork(Network):
    """Delays, loses and repeats words by a seed; kills a process at one of its effects now and then.

    A run has thousands of words: of most, one draw says what becomes of them and how long that takes.
    """

    def __init__(self, world: World, random: Random) -> None:
        self._world = world
        self._draw = random.random
        self.post = world.loop.post  # type: ignore[method-assign]  # one call less for each of them
        self.landed = world.landed  # type: ignore[method-assign]
        self.future = functools.partial(asyncio.Future, loop=world.loop)  # type: ignore[method-assign]
        self.weather = CALM
        self._backlog: list[tuple[Any, ...]] = []
        self.num_delivered = 0

    def delay_s(self) -> float:
        draw = self._draw()
        return 0.0005 + 0.002 * draw if draw >= self.weather.slow else self._slow_s()

    def _slow_s(self) -> float:
        return (3.0 if self._draw() * self.weather.slow < self.weather.very_slow else 0.06) * self._draw()

    def ask(self, bus: MemoryBus, apply: Callable[[], Any], answer: asyncio.Future[Any], timeout_s: float) -> None:
        if bus.cut_off:
            self._keep(bus, apply, answer, timeout_s, Fate.ARRIVES)
            return
        draw, weather, fate = self._draw(), self.weather, Fate.ARRIVES
        delay_s = 0.0005 + 0.002 * draw
        if draw < weather.odd:
            fate = weather.fate(draw)
            if fate is Fate.ARRIVES:
                delay_s = self._slow_s()
            else:
                self.post(timeout_s, self._answer, bus, answer, None, TimeoutError())
            if fate is Fate.REQUEST_LOST:
                return
            if fate is Fate.LATE:
                delay_s = timeout_s + 3.0 * self._draw()
        self.post(delay_s, self._arrive_at, bus, apply, answer, timeout_s, fate)

    def _arrive_at(
        self, bus: MemoryBus, apply: Callable[[], Any], answer: asyncio.Future[Any], timeout_s: float, fate: Fate
    ) -> None:
        server = bus.server
        if not server.up:
            self._keep(bus, apply, answer, timeout_s, fate)
            return
        if bus.killed and self._world.is_over(bus):
            return
        if self.weather.crash_at_effect and self._draw() < self.weather.crash_at_effect and not bus.killed:
            self._world.crash(bus, before=True)
            if bus.killed and self._draw() < 0.5:
                return
        self._world.acting = bus.name
        result: Any = None
        refused: Exception | None = None
        try:
            result = apply()
        except APIError as error:
            refused = error
        if fate is not Fate.ARRIVES:
            return
        if self.weather is CALM:  # the way there took its time; answers would be a quarter of all timers
            self._answer(bus, answer, result, refused)
            return
        self.post(self.delay_s(), self._answer, bus, answer, result, refused)

    def _keep(self, bus: MemoryBus, *request: Any) -> None:
        """Not connected: a client keeps some of what it could not send, and sends it after the reconnect."""
        _, answer, timeout_s, _ = request
        if self._draw() < 0.5:
            self._backlog.append((bus, *request))
        self.post(timeout_s, self._answer, bus, answer, None, TimeoutError())

    def _answer(self, bus: MemoryBus, answer: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
        if bus.killed or answer.done():
            return
        if bus.cut_off and not isinstance(error, TimeoutError):
            self.post(1.0, self._answer, bus, answer, None, TimeoutError())
            return
        wait_s = self._world.stalled_for_s(bus) if self._world.stalls else 0.0
        if wait_s > 0:
            self.post(wait_s, self._answer, bus, answer, result, error)
        elif error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)

    def tell(self, bus: MemoryBus, call: Callable[..., object], *arguments: Any) -> None:
        if self._draw() >= self.weather.ack_lost and not bus.cut_off:
            self.post(self.delay_s(), self._told, bus, call, arguments)

    def _told(self, bus: MemoryBus, call: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        if bus.server.up:
            call(*arguments)

    def push(self, bus: MemoryBus, kind: str, call: Callable[..., object], *arguments: Any) -> None:
        delay_s = self.delay_s()
        if kind == "changes":
            if self._draw() < self.weather.changes_late:
                delay_s = 4.0 * self._draw()
        elif kind == "message":
            if self._draw() < self.weather.delivery_lost:
                call.__self__.in_hand -= 1  # type: ignore[attr-defined]  # its member waits for the next one
                return
            if self._draw() < self.weather.delivered_twice:
                self.post(2.0 * self._draw(), self._pushed, bus, call, arguments, True)
        self.post(delay_s, self._pushed, bus, call, arguments, kind == "message")

    def _pushed(self, bus: MemoryBus, call: Callable[..., object], arguments: tuple[Any, ...], count: bool) -> None:
        if bus.killed or bus.cut_off:
            if count and bus.cut_off:
                call.__self__.in_hand -= 1  # type: ignore[attr-defined]
            return
        wait_s = self._world.stalled_for_s(bus) if self._world.stalls else 0.0
        if wait_s > 0:
            self.post(wait_s, self._pushed, bus, call, arguments, count)
            return
        self.num_delivered += count
        if count and self._world.tracing:
            self._world.note(f"{bus.name:12} <- {arguments[0].subject} #{arguments[0].seq} delivery {arguments[1]}")
        call(*arguments)

    def connected_again(self, buses: list[MemoryBus]) -> None:
        """What these had kept is sent now."""
        for bus in buses:
            bus.reconnects += 1
        backlog, self._backlog = self._backlog, []
        for request in backlog:
            if request[0] in buses:
                self.post(self.delay_s(), self._arrive_at, *request)
            else:
                self._backlog.append(request)


@dataclass
class Worker:
    """One worker process on a machine. ``touching``: between going live and its end, whatever the lease says."""

    pid: int
    launch: Launch
    node: str
    process: Process
    started_at: float
    parent: Process | None
    ignores_sigterm: bool
    claim: str = ""
    context: worker.WorkerContext | None = None
    """Once it is live."""
    resident: bool = False
    """Its memory is on the device."""
    working: bool = False
    """It uses the device this moment."""
    hung: bool = False
    exit_code: int | None = None
    waiters: list[asyncio.Future[None]] = field(default_factory=list)
    sigterm: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def alive(self) -> bool:
        return self.exit_code is None

    @property
    def touching(self) -> bool:
        return self.alive and self.context is not None

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        self.working = True
        try:
            yield
        finally:
            self.working = False

    def could_touch(self) -> bool:
        """Whether it may be on the device now or later, although its lease is a tombstone that found it lapsed.

        Not one that never went live, and not one that knows that its lease has lapsed, once it came to a boundary (B7).
        One that hangs comes to none; on a lost node nobody can stop it, and B4 keeps its device from everybody else.
        """
        if self.context is None or self.hung:
            return False
        late_s = time.monotonic() - self.context.renewed_at - LEASE_S
        return late_s < 0 or (self.working and late_s > BOUNDARY_S + 0.01)


class Machine:
    """A node: devices, host memory, worker processes. It is the backend of its launcher (the port of ``backend``)."""

    def __init__(self, world: World, node: str, devices: tuple[int, ...], host_bytes: int, random: Random) -> None:
        self._world = world
        self.node = node
        self.devices = tuple(Device(device=f"dev{index}", memory_bytes=size) for index, size in enumerate(devices))
        self.host_bytes = host_bytes
        self._random = random
        self._pids = itertools.count(100)
        self.workers: dict[int, Worker] = {}
        self._leaky: set[str] = set()

    def alive(self) -> list[Worker]:
        return [each for each in self.workers.values() if each.alive]

    def power_off(self) -> None:
        for each in self.alive():
            self.end(each, 137)

    def end(self, worker_process: Worker, exit_code: int) -> None:
        if worker_process.alive:
            worker_process.exit_code = exit_code
            if self._random.random() < self._world.plan.leak:
                self._leaky.update(worker_process.launch.devices)
            worker_process.resident = worker_process.working = False
            worker_process.process.kill()
            for waiter in worker_process.waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._world.note(f"worker {worker_process.launch.assignment} ended code={exit_code}")

    # --- the port -----------------------------------------------------------------------------------------------

    def inventory(self) -> Inventory:
        return Inventory(devices=self.devices, host_allocatable_bytes=self.host_bytes, declared=True)

    def running(self) -> dict[str, Handle]:
        return {each.launch.assignment: self._handle(each) for each in self.alive()}

    async def launch(self, launch: Launch) -> Handle:
        parent = PROCESS.get()
        if not parent.alive:
            raise asyncio.CancelledError
        self._world.note(f"launch {launch.assignment} of {launch.workload}")
        process = Process(self._world, f"worker-{launch.assignment}", self.node)
        started = Worker(
            pid=next(self._pids),
            launch=launch,
            node=self.node,
            process=process,
            started_at=self._world.loop.now_s,
            parent=parent,
            ignores_sigterm=self._random.random() < 0.1,
        )
        self._world.invariants.worker_starts(started)
        self.workers[started.pid] = started
        process.run(lambda bus: self._work(started, bus))
        self._world.launched(parent)
        return self._handle(started)

    def log_path(self, launch: Launch) -> Path:
        return Path("logs") / launch.assignment

    async def wait(self, process: Handle) -> int | None:
        waited = self.workers[process.pid]
        if waited.alive:
            ended = self._world.loop.create_future()
            waited.waiters.append(ended)
            await ended
        return waited.exit_code if waited.parent is PROCESS.get() else None

    def terminate(self, process: Handle) -> None:
        self.workers[process.pid].sigterm.set()

    def kill(self, process: Handle) -> None:
        self.end(self.workers[process.pid], 137)

    def sweep(self, assignment: str) -> int:
        return 0

    def leaked(self, devices: tuple[str, ...], *, expect_idle: bool) -> str | None:
        bad = sorted(self._leaky & set(devices))
        return f"{bad[0]} holds 1 GiB of nobody" if bad and expect_idle else None

    def last_error(self, log_path: str) -> str:
        return ""

    # --- a worker's life ----------------------------------------------------------------------------------------

    def _handle(self, of: Worker) -> Handle:
        return Handle(of.launch.assignment, of.launch.workload, of.pid, of.started_at)

    async def _work(self, this: Worker, bus: MemoryBus) -> None:
        try:
            code = await self._life(this, bus)
        except Transient:
            code = 5
        except Exception as error:
            self._world.violation(f"worker {this.launch.assignment} failed: {error!r}")
            code = 1
        self.end(this, code)

    async def _life(self, this: Worker, bus: MemoryBus) -> int:
        """As ``openrl_common.worker._work``: import, go live, work in turns until fenced, told to end, or broken."""
        draw = self._random.random
        told = self._world.loop.create_task(this.sigterm.wait(), context=bus.context)
        await asyncio.sleep(0.02 + 0.5 * draw())
        workload = await worker._record(bus.store, this.launch.workload, this.launch.assignment)
        if workload is None:
            return 1
        context = worker.WorkerContext(
            service=cast(Any, None),
            bus=bus,
            store=bus.store,
            workload=workload,
            assignment=this.launch.assignment,
            node=self.node,
            home=Path("."),
            device_bytes=this.launch.device_bytes,
            stopping=bus.stopping,
            renewed_at=time.monotonic(),
        )
        revision = await worker._go_live(context, wait_s=0.0)
        if revision is None:
            return 0
        this.context = context
        self._world.invariants.worker_touches(this)
        with contextlib.suppress(Transient):
            await context.publish_phases()
        renewing = asyncio.create_task(worker._renew(context, revision))
        context.turns = Turns(context, CollectorRegistry())
        working = asyncio.create_task(worker._with_turns(context, context.turns, lambda _: self._main(this, context)))
        life_s = self._world.worker_life_s(this)
        await asyncio.wait({renewing, working, told}, timeout=life_s, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        if told.done() and this.ignores_sigterm:
            await asyncio.wait({renewing})
        if not told.done() and not renewing.done():
            return 1
        bus.stopping.set()
        await asyncio.wait({working}, timeout=0.5 if told.done() else 5.0)
        return 0

    async def _main(self, this: Worker, context: worker.WorkerContext) -> None:
        """Load within a turn that cannot be yielded yet, then work now and then, with boundaries (T1-T6)."""
        draw, plan = self._random.random, self._world.plan

        async def park() -> Moved:
            await asyncio.sleep(0.2 * draw())
            this.resident = False
            return Moved(this.launch.device_bytes, 0.1)

        async def resume() -> Moved:
            self._world.invariants.worker_enters(this)
            await asyncio.sleep(0.2 * draw())
            return Moved(this.launch.device_bytes, 0.1)

        async with context.turn(), this.at_work():
            self._world.invariants.worker_enters(this)
            await asyncio.sleep(BOUNDARY_S * draw())
        context.movers(park, resume)
        await context.ready()
        while plan.works and not context.stopping.is_set():
            await asyncio.wait({asyncio.ensure_future(context.stopping.wait())}, timeout=self._world.idle_s())
            if context.stopping.is_set():
                return
            async with context.turn(), this.at_work():
                self._world.invariants.worker_enters(this)
                if self._world.hangs():
                    this.hung = True
                    await asyncio.sleep(1e9)
                for _ in range(1 + int(4 * draw())):
                    await asyncio.sleep(BOUNDARY_S * draw())
                    this.working = False
                    await context.boundary()
                    this.working = True
                    self._world.invariants.worker_enters(this)
        await context.stopping.wait()
