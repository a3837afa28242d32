"""The shell of the launcher: mirrors, hints and a clock around ``core.decide``, whose answer it carries out.

One reconcile pass follows every change of the ledger's keys, every hint event, every ended worker, and runs at least
every 2 s (E5): nothing depends on an event having arrived. The heartbeat (B5) is a task of its own, so that a slow pass
does not make the node look dead; without a beat that succeeded lately there is no pass: the node may be another's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any

from openrl_common.bus import Bus, Delivery
from openrl_common.controls import Running, RunningAnswer, StopWorkers, WorkersStopped
from openrl_common.errors import Transient
from openrl_common.events import FenceRequested
from openrl_common.health import Check, check
from openrl_common.identity import LedgerIdentity
from openrl_common.liveness import BEAT_S
from openrl_common.names import query_subject
from openrl_common.records import ClaimRecord, NodeBudget, SeatRecord, SeatState, Standing, WorkerRecord, WorkerState
from openrl_common.store import Entry, Mirror
from openrl_launcher import core
from openrl_launcher.backend import Backend, Inventory
from openrl_launcher.claims import Claims
from openrl_launcher.heartbeat import Heartbeat
from openrl_launcher.settings import LauncherSettings
from openrl_launcher.workers import Workers

log = logging.getLogger(__name__)

HEARTBEAT_S = BEAT_S
PASS_S = 2.0
_PASS_GAP_S = 0.01


class Launcher:
    """One node's launcher. ``run`` lasts until it is cancelled; workers go on running (E17)."""

    def __init__(
        self,
        bus: Bus,
        backend: Backend,
        settings: LauncherSettings,
        *,
        before_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """``before_stop`` is called when all workers are to be stopped, before any of them is."""
        self._before_stop = before_stop
        self._bus = bus
        self._backend = backend
        self._settings = settings
        self._node = settings.node
        self._inventory = backend.inventory()
        self._heartbeat = Heartbeat(
            bus,
            backend,
            node=self._node,
            host=f"{socket.gethostname()}:{settings.home}",
            roles=settings.roles,
            beat_s=HEARTBEAT_S,
            clock=time.monotonic,
            on_inventory=self._on_inventory,
        )
        self._tasks: asyncio.TaskGroup | None = None
        self._changed = asyncio.Event()
        self._bound = asyncio.Event()
        self._synced = False
        self._seats: dict[str, SeatRecord] = {}
        self._claim_records: dict[str, ClaimRecord] = {}
        self._budget = NodeBudget()
        self._mirrors: list[Mirror[Any]] = []
        self._identity = LedgerIdentity(bus)
        self._claims = Claims(bus, node=self._node, clock=time.monotonic, wake=self.wake, identity=self._identity)
        self.workers = Workers(
            bus,
            backend,
            self._claims,
            node=self._node,
            stop_grace_s=settings.stop_grace_s,
            restarts_max=settings.restarts_max,
            clock=time.monotonic,
            now=time.time,
            wake=self.wake,
            spawn=self._spawn,
            identity=self._identity,
        )

    def readiness(self) -> dict[str, Check]:
        return {
            "consumer": check(self._bound.is_set, "the consumer is not bound yet"),
            "ledger": check(lambda: bool(self._identity.known), "the ledger's bucket has no identity (new, or lost)"),
            "caches": check(lambda: self._synced, "the ledger has not been read yet"),
            "workers": check(lambda: not self.workers.draining, "its workers are being stopped"),
            "node": check(lambda: self._heartbeat.holds, "the last heartbeat is too old"),
        }

    def wake(self) -> None:
        """Ask for another pass soon."""
        self._changed.set()

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                await self._start(tasks)
                await self._reconcile()
        finally:
            await self._claims.close()
            for mirror in self._mirrors:
                await mirror.close()

    # --- start ----------------------------------------------------------------------------------------------

    async def _start(self, tasks: asyncio.TaskGroup) -> None:
        store = self._bus.store
        record = await self._heartbeat.join()  # nothing is touched before the node is this launcher's
        tasks.create_task(self._heartbeat.run(), name="heartbeat")
        await self._bus.serve(query_subject("launcher", f"{self._node}.running"), Running, self._say_running)
        await self._identity.wait(self._bus.stopping)
        tasks.create_task(self._identity.watch(self._bus.stopping), name="ledger's identity")
        await self._claims.load()
        self._mirrors.append(await store.ledger_claims.mirror(on_change=self._on_claim))
        self._mirrors.append(await store.ledger_seats.mirror(on_change=self._on_seat))
        self._mirrors.append(await store.ledger_nodes.mirror(on_change=self._on_budget))
        await self.workers.adopt()
        await self._bus.serve(query_subject("launcher", f"{self._node}.stop-workers"), StopWorkers, self._stop_workers)
        tasks.create_task(
            self._bus.consume(
                stream="OPENRL_EVENTS",
                durable=f"launcher-{self._node}",
                subjects=["openrl.ev.ledger.>"],
                handler=self._on_hint,
                concurrency=16,
                bound=self._bound,
                from_now=True,
            ),
            name="hints",
        )
        self._synced = True
        log.info(
            "node %s joined: %d devices, %d workers adopted", self._node, len(record.devices), self.workers.running
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._tasks is not None
        self._tasks.create_task(work)

    # --- what changed ---------------------------------------------------------------------------------------

    async def _on_hint(self, delivery: Delivery) -> None:
        if delivery.subject.endswith(f".{FenceRequested.FACT}"):
            event = delivery.event()
            if isinstance(event, FenceRequested):
                self.workers.note_fence(event.assignment, event.why)
        self.wake()

    def _on_seat(self, workload: str, entry: Entry[SeatRecord] | None) -> None:
        if entry is None or entry.value.state is SeatState.EMPTY:
            self._seats.pop(workload, None)
        else:
            self._seats[workload] = entry.value
        self.wake()

    def _on_claim(self, claim: str, entry: Entry[ClaimRecord] | None) -> None:
        if entry is None:
            self._claim_records.pop(claim, None)
        else:
            self._claim_records[claim] = entry.value
        self.wake()

    def _on_budget(self, node: str, entry: Entry[NodeBudget] | None) -> None:
        if node == self._node:
            self._budget = NodeBudget() if entry is None else entry.value
            if self._budget.standing is Standing.LOST:
                self._heartbeat.note_lost()
            self.wake()

    def _on_inventory(self, inventory: Inventory) -> None:
        if inventory != self._inventory:
            self._inventory = inventory
            self.wake()

    async def _stop_workers(self, request: StopWorkers) -> WorkersStopped:
        log.info("stopping all workers of node %s", self._node)
        self.workers.draining = True
        self._before_stop()
        stopped = await self.workers.drain()
        return WorkersStopped(stopped=stopped)

    async def _say_running(self, _: Running) -> RunningAnswer:
        """From the processes and their records, not from the ledger: it may be what is to be rebuilt (L7)."""
        running = await asyncio.to_thread(self._backend.running)
        records = {key: entry.value for key, entry in (await self._bus.store.workers.list()).items()}
        return RunningAnswer(
            workers=[
                records.get(assignment)
                or WorkerRecord(
                    assignment=assignment, workload=process.workload, tenant="", claim="", node=self._node,
                    state=WorkerState.RUNNING, pid=process.pid, started_at=process.started_at,
                )
                for assignment, process in sorted(running.items())
            ]
        )  # fmt: skip

    # --- the loop -------------------------------------------------------------------------------------------

    async def _reconcile(self) -> None:
        while True:
            self._changed.clear()
            try:
                for action in core.decide(self._view()) if self._heartbeat.holds else ():
                    await self._carry_out(action)
            except Transient as error:
                log.warning("reconcile pass cut short: %s", error)
            await asyncio.sleep(_PASS_GAP_S)  # changes come in bursts: one pass serves them all
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s()):
                    await self._changed.wait()

    def _pause_s(self) -> float:
        restart_at = self.workers.next_restart_at()
        return PASS_S if restart_at is None else min(PASS_S, max(0.0, restart_at - time.monotonic()))

    def _view(self) -> core.View:
        return core.View(
            now=time.monotonic(),
            node=self._node,
            devices=self._inventory.devices,
            claims=self._claim_records,
            seats=self._seats,
            cuts=self._claims.cuts,
            holds=self._claims.holds,
            workers=self.workers.view(),
            roles=self._settings.roles,
            host_allocatable_bytes=self._inventory.host_allocatable_bytes,
            host_budget=self._budget,
            draining=self.workers.draining,
            unix_now=time.time(),
        )

    async def _carry_out(self, action: core.Action) -> None:
        match action:
            case core.Start():
                claim = self._claim_records.get(action.claim)
                if claim is not None:  # else it was deleted since the decision, with the whole bucket perhaps (L7)
                    self.workers.start(action, claim.devices)
            case core.Stop():
                self.workers.stop(action)
            case core.SayGone():
                await self.workers.say_gone(action.assignment)
            case core.Forget():
                await self.workers.forget(action.assignment)
            case core.Cut():
                await self._claims.cut(action)
            case core.SayAllocated():
                await self._claims.say_allocated(action.claim)
            case core.Unschedulable():
                await self._claims.say_unschedulable(action)
            case core.Free():
                await self._claims.free(action.claim)
            case core.SayFreed():
                await self._claims.say_freed(action.claim)
            case core.ReleaseDevice():
                await self._claims.release(action.device, action.claim)
