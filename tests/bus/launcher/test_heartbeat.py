"""The node's beat, who may speak for a node, what its silence leads to: real nats-server, ledger, launcher, workers."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import psutil
import pytest

import openrl_launcher.service
from bus.launcher.launcher_helpers import Ledger, alive, judging, until
from openrl_common import duty
from openrl_common.errors import Rejected
from openrl_common.events import NodeChanged, NodeJoined, WorkerLaunched
from openrl_common.nats_server import NatsServer
from openrl_common.quantities import GIB
from openrl_common.records import Device, LeaseState, SeatState, Standing
from openrl_launcher.backend import Inventory
from openrl_launcher.heartbeat import inventory_problem
from openrl_launcher.service import Launcher
from openrl_ledger.core.nodes import NodePolicy

Launch = Callable[..., AbstractAsyncContextManager[Launcher]]
BEAT_S = 0.2
FAST = NodePolicy(suspect_after_s=3 * BEAT_S + 0.2, watch_after_s=BEAT_S + 0.1, lapse_s=3.0, start_lapse_s=30.0)
"""Shorter silences than in life; a lease is still judged after more than one missed renewal (they come every 2 s)."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openrl_launcher.service, "HEARTBEAT_S", BEAT_S)
    monkeypatch.setattr(duty, "DUTY_RENEW_S", 0.2)


async def standing(ledger: Ledger, wanted: Standing, deadline_s: float = 20.0) -> None:
    async def reached() -> bool:
        budget = await ledger.bus.store.ledger_nodes.get("here")
        return (Standing.LIVE if budget is None else budget.value.standing) is wanted

    await until(reached, deadline_s)


async def seat_state(ledger: Ledger, workload: str) -> SeatState:
    seat = await ledger.bus.store.ledger_seats.get(workload)
    return SeatState.EMPTY if seat is None else seat.value.state


async def live_worker(ledger: Ledger) -> tuple[str, str, int]:
    """A worker with a real lease, live: (workload, assignment, pid). The real ledger allocates its claim."""
    workload, _, assignment = await ledger.found("lease")
    pid = await ledger.started(assignment)

    async def live() -> bool:
        lease = await ledger.bus.store.leases.get(assignment)
        return lease is not None and lease.value.state is LeaseState.LIVE

    await until(live)
    return workload, assignment, pid


async def test_f3_seats_of_a_dead_node_are_released_and_the_node_may_come_back(
    ledger: Ledger, launch: Launch, nats_url: str, home: Path
) -> None:
    """F3, B5: launcher and workers end at once; suspect, lost, seat released, NodeJoined when it is back."""
    async with judging(nats_url, home, FAST):
        async with launch(devices=(8,)):
            workload, assignment, pid = await live_worker(ledger)
        os.kill(pid, signal.SIGKILL)
        await standing(ledger, Standing.SUSPECT, 5.0)
        await standing(ledger, Standing.LOST, 10.0)

        async def released() -> bool:
            return await seat_state(ledger, workload) is SeatState.EMPTY

        await until(released, 5.0)
        lease = await ledger.bus.store.leases.get(assignment)
        assert lease is not None
        assert (lease.value.state, lease.value.found) == (LeaseState.TOMBSTONE, "lapsed")
        joined = len(await ledger.events(NodeJoined))
        async with launch(devices=(8,)):
            await standing(ledger, Standing.LIVE)
            await until(lambda: more(ledger, joined))


async def more(ledger: Ledger, joined: int) -> bool:
    return len(await ledger.events(NodeJoined)) > joined


async def test_f3_a_dead_launcher_is_no_dead_node(ledger: Ledger, launch: Launch, nats_url: str, home: Path) -> None:
    """F3: the workers renew: the node is suspect and keeps its seats; the next launcher adopts the worker (B1)."""
    policy = dataclasses.replace(FAST, lapse_s=6.0)  # a renewal that comes a little late is none that is missed
    async with judging(nats_url, home, policy):
        async with launch(devices=(8,)):
            workload, assignment, pid = await live_worker(ledger)
        await standing(ledger, Standing.SUSPECT)
        await asyncio.sleep(policy.lapse_s + 1.5)
        await standing(ledger, Standing.SUSPECT, 0.5)
        assert await seat_state(ledger, workload) is SeatState.HELD
        assert alive(pid)
        async with launch(devices=(8,)) as launcher:
            await standing(ledger, Standing.LIVE)
            assert launcher.workers.running == 1
            assert len(await ledger.events(WorkerLaunched, assignment=assignment)) == 1


async def test_b5_a_bus_outage_expires_nobody(
    ledger: Ledger, launch: Launch, nats_url: str, nats_server: NatsServer, home: Path
) -> None:
    """B5, E13: nobody could be heard for longer than every limit; workers wait, nothing is suspected or fenced."""
    if nats_url != nats_server.url:
        pytest.skip("the test ends and starts the server: the embedded one")
    policy = dataclasses.replace(FAST, suspect_after_s=2.5, watch_after_s=2.0, lapse_s=4.0)
    async with judging(nats_server.url, home, policy), launch(devices=(8,)):
        workload, assignment, pid = await live_worker(ledger)
        nats_server.kill()
        await asyncio.sleep(policy.lapse_s + 1.5)
        assert alive(pid), "a worker without a bus parks and waits, it does not exit"
        nats_server.start()
        deadline = time.monotonic() + 4.0
        while time.monotonic() < deadline:
            await standing(ledger, Standing.LIVE, 10.0)
            assert await seat_state(ledger, workload) is SeatState.HELD
            await asyncio.sleep(0.2)
        lease = await ledger.bus.store.leases.get(assignment)
        assert lease is not None
        assert lease.value.state is LeaseState.LIVE


async def test_b5_a_worker_that_was_fenced_while_the_bus_is_reachable_exits(ledger: Ledger, launch: Launch) -> None:
    """B5, B7: its next renewal meets the tombstone."""
    async with launch(devices=(8,)):
        _, _, assignment, pid = await ledger.run("lease")

        async def live() -> int:
            lease = await ledger.bus.store.leases.get(assignment)
            return lease.revision if lease is not None and lease.value.state is LeaseState.LIVE else 0

        await until(live)
        from openrl_launcher import leases

        await leases.fence(ledger.bus.store.leases, assignment, why="test")
        await until(lambda: not alive(pid), 10.0)


async def test_two_launchers_of_one_name_the_second_is_refused(ledger: Ledger, launch: Launch, tmp_path: Path) -> None:
    """Bad input of issue 4: another home, the same node name; the first goes on as if nothing had been."""
    async with launch(devices=(8,)):
        first = await ledger.bus.store.nodes.get("here")
        assert first is not None
        other = tmp_path / "other"
        other.mkdir()
        with pytest.raises((Rejected, ExceptionGroup)) as refused:
            async with launch(devices=(16,), home_path=other):
                pass
        assert "already has a launcher" in str(_root(refused.value))
        assert "--node-name" in str(_root(refused.value))
        now = await ledger.bus.store.nodes.get("here")
        assert now is not None
        assert now.value.session == first.value.session
        assert len(await ledger.events(NodeJoined)) == 1


async def test_two_launchers_of_one_name_one_that_stood_still_finds_itself_replaced_and_ends(
    ledger: Ledger, launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first does nothing any more from before the second begins, and learns why at its next beat."""
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises((Rejected, ExceptionGroup)) as ended:  # noqa: PT012
        async with launch(devices=(8,)) as first:
            beating, still = asyncio.Event(), first._heartbeat.beat

            async def stands_still() -> None:
                await beating.wait()
                await still()

            monkeypatch.setattr(first._heartbeat, "beat", stands_still)
            await until(lambda: not first._heartbeat.holds)
            async with launch(devices=(16,), home_path=other):
                _, claim, _ = await ledger.found("sleep", gib=16)
                await ledger.allocate(claim)
                beating.set()
                await asyncio.sleep(1.0)
    assert "taken over" in str(_root(ended.value))


def _root(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def test_w2_a_changed_inventory_is_said_and_used(ledger: Ledger, launch: Launch) -> None:
    """W2, B5: a device more is NodeChanged, and the claim that waited for it is cut."""
    async with launch(devices=(8,)) as launcher:
        _, claim, _ = await ledger.found("sleep", gib=24)
        backend = launcher._backend
        grown = Inventory(
            (Device(device="dev0", memory_bytes=8 * GIB), Device(device="dev1", memory_bytes=24 * GIB)), 64 * GIB, True
        )
        backend.inventory = lambda: grown  # type: ignore[method-assign]
        changed = await ledger.event(NodeChanged, node="here")
        assert [device.device for device in changed.record.devices] == ["dev0", "dev1"]
        assert (await ledger.allocate(claim)) == ("dev1",)
        assert len(await ledger.events(NodeChanged)) == 1


async def test_an_inventory_that_makes_no_sense_marks_the_node_incomplete_and_cuts_nothing(
    ledger: Ledger, launch: Launch
) -> None:
    """P1, bad input of issue 4: what runs goes on, nothing new is given a device, and it is said once."""
    async with launch(devices=(8, 8)) as launcher:
        _, _, _, pid = await ledger.run("sleep")
        twice = Device(device="dev0", memory_bytes=8 * GIB)
        sound = launcher._backend.inventory
        launcher._backend.inventory = lambda: Inventory((twice, twice), GIB, True)  # type: ignore[method-assign]
        changed = await ledger.event(NodeChanged, node="here")
        assert not changed.record.complete
        _, claim, _ = await ledger.found("late")
        await asyncio.sleep(0.5)
        assert await ledger.bus.store.cuts.get(claim) is None
        assert psutil.pid_exists(pid)
        launcher._backend.inventory = sound  # type: ignore[method-assign]
        await ledger.allocate(claim)


@pytest.mark.parametrize(
    ("devices", "problem"),
    [
        ((("dev0", 8), ("dev0", 8)), "dev0 is listed twice"),
        ((("dev0", 0),), "dev0 has 0 bytes"),
        ((("dev0", -1),), "dev0 has -1 bytes"),
        ((("dev.0", 8),), "'dev.0' is not usable"),
        ((), "no device"),
        ((("dev0", 8), ("dev1", 8)), ""),
    ],
)
def test_p1_an_inconsistent_inventory_is_named(devices: tuple[tuple[str, int], ...], problem: str) -> None:
    found = inventory_problem(
        Inventory(tuple(Device(device=name, memory_bytes=size) for name, size in devices), GIB, True)
    )
    assert problem in found
    assert bool(problem) == bool(found)
