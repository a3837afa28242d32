"""Writes that are given up in an outage and land after it: whoever holds something by renewing it knows its own (E7).

On a virtual clock: nats-py keeps what it could not send and sends it when it is connected again, whoever still waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from openrl_common.duty import Duty
from openrl_common.errors import Rejected, Transient
from openrl_common.liveness import RENEW_S
from openrl_common.memory import MemoryBus
from openrl_common.memory_server import MemoryServer, Network, outcome, settle
from openrl_common.quantities import GIB
from openrl_common.records import (
    ClaimEntry,
    DutyRecord,
    LeaseRecord,
    LeaseState,
    Role,
    WorkerRecord,
    WorkerState,
)
from openrl_common.worker import WorkerContext, _go_live, _record, _renew
from openrl_launcher import leases
from simulation.virtual_time import VirtualLoop, deterministic
from unit.common.test_turns_after_restart import WORKLOAD

_OUTAGE_S = 50.0
"""Two writes are given up in it, and a third is under way at its end."""


class Keeping(Network):
    """What a bus that is cut off asks is kept, and its asker hears nothing."""

    def __init__(self) -> None:
        self.kept: list[Callable[[], Any]] = []

    def ask(self, bus: MemoryBus, apply: Callable[[], Any], answer: asyncio.Future[Any], timeout_s: float) -> None:
        if not bus.cut_off:
            super().ask(bus, apply, answer, timeout_s)
            return
        self.kept.append(apply)
        self.post(timeout_s, settle, answer, None, TimeoutError())

    def send_kept(self) -> None:
        kept, self.kept = self.kept, []
        for apply in kept:
            outcome(apply)


class Scene:
    """A bus that can be cut off, and another beside it."""

    def __init__(self) -> None:
        self.network = Keeping()
        server = MemoryServer(self.network)
        self.bus, self.other = MemoryBus(server), MemoryBus(server)
        self.stopping = asyncio.Event()

    async def outage(self, meanwhile: Callable[[], Awaitable[object]] | None = None) -> None:
        self.bus.cut_off = True
        await asyncio.sleep(_OUTAGE_S)
        if meanwhile is not None:
            await meanwhile()
        self.bus.reconnect()
        self.network.send_kept()

    def context(self) -> WorkerContext:
        return WorkerContext(
            service=cast(Any, None), bus=self.bus, store=self.bus.store, workload=WORKLOAD, assignment="a-1", node="n1",
            home=Path("home"), device_bytes=GIB, stopping=self.stopping, renewed_at=time.monotonic(),
        )  # fmt: skip

    async def live(self) -> tuple[WorkerContext, asyncio.Task[None]]:
        """A worker that has gone live and has renewed."""
        context = self.context()
        await leases.open_gate(self.other.store.leases, "a-1", holder="launcher")
        revision = await _go_live(context, wait_s=0.0)
        assert revision is not None
        renewing = asyncio.create_task(_renew(context, revision))
        await asyncio.sleep(5.0)
        assert (await self.lease()).renewals > 0
        return context, renewing

    async def lease(self) -> LeaseRecord:
        entry = await self.other.store.leases.get("a-1")
        assert entry is not None
        return entry.value

    def duty(self, holder: str, bus: MemoryBus | None = None) -> Duty:
        return Duty((bus or self.bus).store.duties, "placement", holder=holder, clock=time.monotonic)


def play(story: Callable[[Scene], Awaitable[None]]) -> None:
    loop = VirtualLoop()

    async def run() -> None:
        await story(Scene())

    with deterministic(loop, 1):
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(run())
        finally:
            for task in loop.unfinished():
                task.cancel()
            loop.call_soon(loop.stop)
            loop.run_forever()
            asyncio.set_event_loop(None)
            loop.close()


def test_B5_E7_a_worker_whose_given_up_renewal_lands_after_the_outage_goes_on() -> None:
    async def story(scene: Scene) -> None:
        context, renewing = await scene.live()
        before = await scene.lease()
        await scene.outage()
        assert not context.lease_held
        assert (await scene.lease()).renewals == before.renewals + 1, "the first that was given up has landed"
        await asyncio.sleep(3 * RENEW_S)
        assert not renewing.done()
        assert context.lease_held
        assert (await scene.lease()).renewals > before.renewals + 2
        assert (await scene.lease()).state is LeaseState.LIVE

    play(story)


def test_B7_a_late_renewal_does_not_raise_a_fenced_lease_from_the_dead() -> None:
    async def story(scene: Scene) -> None:
        context, renewing = await scene.live()
        await scene.outage(lambda: leases.fence(scene.other.store.leases, "a-1", why="moved"))
        await asyncio.sleep(3 * RENEW_S)
        assert renewing.done()
        assert not context.lease_held
        assert (await scene.lease()).state is LeaseState.TOMBSTONE

    play(story)


def test_B7_a_fence_behind_a_late_renewal_ends_the_worker_too() -> None:
    async def story(scene: Scene) -> None:
        _, renewing = await scene.live()
        await scene.outage()
        await leases.fence(scene.other.store.leases, "a-1", why="moved")
        await asyncio.sleep(3 * RENEW_S)
        assert renewing.done()
        assert (await scene.lease()).state is LeaseState.TOMBSTONE

    play(story)


def test_B7_a_lease_of_another_process_with_the_same_node_and_pid_is_not_ours() -> None:
    """In pods every pid is 1."""

    async def story(scene: Scene) -> None:
        context, renewing = await scene.live()
        successor = scene.context()
        assert successor.holder != context.holder
        assert successor.holder.partition("#")[0] == context.holder.partition("#")[0]

        async def take_over() -> None:
            entry = await scene.other.store.leases.get("a-1")
            assert entry is not None
            theirs = msgspec.structs.replace(entry.value, holder=successor.holder)
            await scene.other.store.leases.write("a-1", theirs, last=entry.revision)

        await scene.outage(take_over)
        await asyncio.sleep(3 * RENEW_S)
        assert renewing.done()
        assert (await scene.lease()).holder == successor.holder

    play(story)


def test_B7_a_lease_that_is_deleted_or_starting_again_ends_the_worker() -> None:
    async def deleted(scene: Scene) -> None:
        _, renewing = await scene.live()
        await scene.other.store.leases.delete("a-1")
        await asyncio.sleep(2 * RENEW_S)
        assert renewing.done()

    async def starting(scene: Scene) -> None:
        _, renewing = await scene.live()
        await leases.open_gate(scene.other.store.leases, "a-1", holder="launcher")
        await asyncio.sleep(2 * RENEW_S)
        assert renewing.done()

    play(deleted)
    play(starting)


def test_L6_E7_a_duty_whose_given_up_renewal_lands_after_the_outage_is_not_lost() -> None:
    async def story(scene: Scene) -> None:
        duty = scene.duty("ours")
        keeping = asyncio.create_task(duty.keep(scene.stopping))
        lost = asyncio.create_task(duty.wait_lost(scene.stopping))
        await asyncio.sleep(5.0)
        assert duty.held
        await scene.outage()
        assert not duty.held
        await asyncio.sleep(10.0)
        assert duty.held
        assert not lost.done()
        scene.stopping.set()
        await keeping
        entry = await scene.other.store.duties.get("placement")
        assert entry is not None
        assert entry.value.holder == "", "handed back, from the revision at which it stands"

    play(story)


def test_L6_a_duty_that_was_taken_over_in_the_outage_is_lost_whatever_lands_late() -> None:
    async def story(scene: Scene) -> None:
        duty, successor = scene.duty("ours"), scene.duty("theirs", scene.other)
        keeping = asyncio.create_task(duty.keep(scene.stopping))
        lost = asyncio.create_task(duty.wait_lost(scene.stopping))
        await asyncio.sleep(5.0)
        standing_by = asyncio.create_task(successor.keep(scene.stopping))
        await scene.outage()
        assert successor.held
        await asyncio.sleep(10.0)
        assert (duty.held, successor.held) == (False, True)
        with pytest.raises(Rejected, match="another replica has taken over"):
            await lost
        scene.stopping.set()
        await asyncio.gather(keeping, standing_by)

    play(story)


def test_L6_a_duty_that_another_had_and_handed_back_is_lost_too() -> None:
    async def story(scene: Scene) -> None:
        duty = scene.duty("ours")
        await duty.look()
        entry = await scene.other.store.duties.get("placement")
        assert entry is not None
        theirs = await scene.other.store.duties.write("placement", DutyRecord(holder="theirs"), last=entry.revision)
        await scene.other.store.duties.write("placement", DutyRecord(), last=theirs)
        await duty.look()
        assert not duty.held
        with pytest.raises(Rejected):
            await duty.wait_lost(scene.stopping)

    play(story)


def test_B5_a_worker_that_has_loaded_waits_to_say_so_and_does_not_end_in_an_outage() -> None:
    async def story(scene: Scene) -> None:
        context = scene.context()
        saying = asyncio.create_task(context.ready({"engine": "x"}))
        scene.bus.cut_off = True
        await asyncio.sleep(_OUTAGE_S)
        await context.publish_phases()  # what only shows how far it is neither ends it
        assert not saying.done()
        scene.bus.reconnect()
        scene.network.send_kept()
        await saying
        entry = await scene.other.store.ready.get("a-1")
        assert entry is not None
        assert entry.value.ready

    async def told_to_stop(scene: Scene) -> None:
        scene.bus.cut_off = True
        saying = asyncio.create_task(scene.context().ready())
        await asyncio.sleep(_OUTAGE_S)
        scene.stopping.set()
        with pytest.raises(Transient):
            await saying

    play(story)
    play(told_to_stop)


# --- a ledger whose bucket is lost ------------------------------------------------------------------------------------


def test_L7_a_worker_without_a_ledger_is_not_what_an_earlier_incarnation_of_its_name_was() -> None:
    """It was of another model, or had the device for itself; its launcher knows for whom it was started."""

    async def story(scene: Scene) -> None:
        store = scene.bus.store
        entry = ClaimEntry(
            workload=WORKLOAD.workload, tenant="t", owner="t/j", role=Role.TRAINER, device_bytes=GIB, host_bytes=GIB,
            exclusive=False, incarnation=2, reserved_at=0.0,
        )  # fmt: skip
        launched = WorkerRecord(
            assignment="a-1", workload=WORKLOAD.workload, tenant="t", claim="c-1", node="n1", entry=entry,
            state=WorkerState.STARTING, launched_at=0.0, log_path="log",
        )  # fmt: skip
        await store.workers.put("a-1", launched)
        await store.workloads.put(WORKLOAD.workload, WORKLOAD)
        told = asyncio.create_task(_record(store, WORKLOAD.workload, "a-1"))
        await asyncio.sleep(1.0)
        assert not told.done()
        await store.workloads.put(WORKLOAD.workload, msgspec.structs.replace(WORKLOAD, incarnation=2, base_model="n"))
        found = await told
        assert found is not None
        assert (found.incarnation, found.base_model) == (2, "n")

    play(story)
