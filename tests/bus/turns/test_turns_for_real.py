"""Turns with a real ledger process, a real launcher and real worker processes on a real nats-server (T1-T7)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from openrl_common import streams
from openrl_common.bus import Bus
from openrl_common.events import FenceRequested, SeatRequested, TurnReleased, WorkerFenced, WorkerGone
from openrl_common.nats_server import NatsServer
from openrl_common.quantities import GIB
from openrl_common.records import (
    ClaimState,
    JobKind,
    Role,
    Shape,
    Tier,
    WorkloadPhase,
    WorkloadRecord,
)
from openrl_launcher.local import LocalBackend
from openrl_launcher.service import Launcher
from openrl_launcher.settings import LauncherSettings
from support import end_workers

FAKE_WORKERS = Path(__file__).parent / "fake_workers"
DEVICE_GIB = 10
pytestmark = pytest.mark.timeout(120)


class World:
    """The test plays placement: it asks for seats. Ledger and launcher are real."""

    def __init__(self, bus: Bus, url: str, home: Path) -> None:
        self.bus, self.url, self.home = bus, url, home
        self.claim = ""
        self.ledger: subprocess.Popen[bytes] | None = None
        self.settings: tuple[str, ...] = ()
        self.num_requests = 0

    def start_ledger(self, *arguments: str) -> None:
        self.settings = arguments or self.settings
        with (self.home / "ledger.log").open("ab") as log:
            self.ledger = subprocess.Popen(
                [sys.executable, "-m", "openrl_ledger", "--nats-url", self.url, "--home", str(self.home),
                 "--device-reserve", "1GiB", "--log-format", "json", *self.settings],
                stdout=log, stderr=log,
            )  # fmt: skip

    async def seat(self, behaviour: str, *, owner: str = "", gib: int = 8) -> str:
        """Seat a workload on the one device: the first founds the claim, the others join. Its id."""
        self.num_requests += 1
        workload = f"team--{behaviour}--trainer"
        shape = Shape(role=Role.TRAINER, device_bytes=gib * GIB)
        await self.bus.store.workloads.put(
            workload,
            WorkloadRecord(
                workload=workload, tenant="team", owner=owner or behaviour, owner_name=behaviour, kind=JobKind.FFT,
                jobs=(f"team.{behaviour}",), incarnation=1, shape=shape, base_model="none",
                phase=WorkloadPhase.PENDING, submitted_at=time.time(),
            ),
        )  # fmt: skip
        request = SeatRequested(
            tenant="team", workload=workload, incarnation=1, attempt=self.num_requests, owner=owner or behaviour,
            shape=shape, candidates=(self.claim,) if self.claim else (), may_found=not self.claim,
            tiers=(Tier(count=1, floor_bytes=gib * GIB, ceiling_gib=80),),
        )  # fmt: skip
        await self.bus.publish(request)
        await until(lambda: self.touched(workload) or self.waits(workload))
        if not self.claim:
            claims = (await self.bus.store.ledger_claims.list()).items()
            (self.claim,) = [key for key, entry in claims if entry.value.state is ClaimState.ALLOCATED]
        return workload

    async def waits(self, workload: str) -> bool:
        assignment = await self.assignment(workload)
        entry = await self.bus.store.turns.get(self.claim) if self.claim else None
        return entry is not None and assignment in {**entry.value.waiting, **entry.value.residents}

    async def assignment(self, workload: str) -> str:
        seat = await self.bus.store.ledger_seats.get(workload)
        return "" if seat is None else seat.value.assignment

    async def turns(self) -> dict[str, int]:
        entry = await self.bus.store.turns.get(self.claim)
        return {} if entry is None else entry.value.turns

    def lines(self, workload: str = "", what: str = "") -> list[list[str]]:
        path = self.home / "touches"
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in lines if workload in ("", line[1]) and what in ("", line[4])]

    def touched(self, workload: str) -> bool:
        return bool(self.lines(workload, "touch"))

    async def events(self, kind: type) -> list:  # type: ignore[type-arg]
        info = await self.bus.jetstream.stream_info("OPENRL_EVENTS")
        tail, found = self.bus.tail(stream="OPENRL_EVENTS", subject="openrl.ev.>"), []
        async with contextlib.aclosing(tail):  # type: ignore[type-var]
            async for delivery in tail:
                event = delivery.event()
                if isinstance(event, kind):
                    found.append(event)
                if delivery.sequence >= info.state.last_seq:
                    return found
        return found

    def metrics(self) -> str:
        port = next(
            line.split("health_port=")[1].split()[0].rstrip('",')
            for line in (self.home / "ledger.log").read_text().splitlines()
            if "health_port=" in line
        )
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return str(answer.read().decode())


async def until(look: Callable[[], object], within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while True:
            found = look()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return
            await asyncio.sleep(0.05)


@pytest.fixture
async def world(nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    home = tmp_path / "home"
    home.mkdir()
    (home / "capacity").write_text(str((DEVICE_GIB - 1) * GIB))
    monkeypatch.setenv("PYTHONPATH", str(FAKE_WORKERS))
    bus = await Bus.connect(nats_server.url, name="test")
    await streams.ensure(bus)
    world = World(bus, nats_server.url, home)
    config = LauncherSettings(
        nats_url=nats_server.url, home=home, log_level="info", log_format="json", health_host="127.0.0.1",
        health_port=0, node="here", devices=(DEVICE_GIB * GIB,), stop_grace_s=1.0,
    )  # fmt: skip
    backend = LocalBackend(
        home=home, node="here", nats_url=nats_server.url, declared=config.devices, host_memory_bytes=0, logs_kept=3
    )
    launcher_bus = await Bus.connect(nats_server.url, name="launcher-here")
    running = asyncio.create_task(Launcher(launcher_bus, backend, config).run())
    yield world
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    if world.ledger is not None:
        world.ledger.kill()
        world.ledger.wait()
    end_workers(home)
    await launcher_bus.close()
    await bus.close()
    assert not world.lines(what="double"), "two workers were on a device that does not hold both"


async def test_t1_t2_alone_and_co_resident_workers_never_park(world: World) -> None:
    """T1, T2: 4 + 5 of 10 GiB less the reserve."""
    world.start_ledger("--max-turn", "1s")
    first = await world.seat("busy-1", gib=4)
    second = await world.seat("busy-2", gib=5)
    await until(lambda: world.touched(second))
    await asyncio.sleep(2.5)
    assert not world.lines(what="park")
    assert len(world.lines(first, "touch")) > 20


async def test_t3_busy_workers_of_two_owners_take_equal_turns_and_idle_ones_give_way_at_once(world: World) -> None:
    """T3, T4, T7: bounded turns for who is busy; who is idle leaves long before its turn ends."""
    world.start_ledger("--max-turn", "1s", "--turn-grace", "20s")
    await world.seat("busy-1", owner="a")
    await world.seat("busy-2", owner="a")
    rival = await world.seat("long-3", owner="b")
    await until(lambda: world.touched(rival))
    before = await world.turns()
    await until(lambda: len(world.lines(rival, "resume")) >= 3, 60)
    after = await world.turns()
    shares = [after[owner] - before[owner] for owner in ("a", "b")]
    assert abs(shares[0] - shares[1]) <= 1, f"an owner with two workers got two shares: {shares}"
    released = Counter(event.assignment for event in await world.events(TurnReleased))
    assert len(released) == 3
    text = world.metrics()
    assert "openrl_turns_double_holds_total 0.0" in text
    assert f'openrl_turns_seats{{claim="{world.claim}"}} 3.0' in text
    assert f'openrl_turns_switch_seconds_count{{claim="{world.claim}",part="park"}}' in text
    assert f'openrl_turns_hits_total{{claim="{world.claim}",found="warm"}}' in text
    assert "openrl_turns_fenced_total 0.0" in text


async def test_t3_two_idle_workers_pass_the_device_on_without_waiting_for_the_end_of_a_turn(world: World) -> None:
    world.start_ledger("--max-turn", "600s")
    first = await world.seat("idle-1")
    second = await world.seat("idle-2")
    await until(lambda: len(world.lines(first, "park")) >= 2 and len(world.lines(second, "park")) >= 2)


async def test_t3_b7_a_hung_holder_is_fenced_and_the_turn_moves_on(world: World) -> None:
    """T3: it renews its lease but ignores the ask; the launcher stops it, and only then the other one comes."""
    world.start_ledger("--max-turn", "1s", "--turn-grace", "1s")
    hung = await world.seat("hung-1")
    held = await world.assignment(hung)
    pid = int(world.lines(hung, "touch")[0][3])
    other = await world.seat("busy-2")
    await until(lambda: not alive(pid))
    (world.home / "device" / held).unlink()
    await until(lambda: world.touched(other))
    fences = await world.events(FenceRequested)
    assert [event.assignment for event in fences] == [held]
    assert "grace" in fences[0].why
    await until(lambda: _said(world, WorkerFenced, held))
    await until(lambda: _said(world, WorkerGone, held))
    assert float(world.lines(other, "touch")[0][0]) > float(world.lines(hung)[-1][0])


async def test_t3_a_load_that_outlasts_turn_and_grace_beside_a_waiter_ends_and_then_yields(world: World) -> None:
    """T3, F2: 6 s inside the first turn, which is asked for after 1 s and would be fenced after another."""
    world.start_ledger("--max-turn", "1s", "--turn-grace", "1s")
    slow = await world.seat("loading-1")
    other = await world.seat("busy-2")
    await until(lambda: world.touched(other))
    (loaded,) = world.lines(slow, "loaded")
    assert float(world.lines(other, "touch")[0][0]) > float(loaded[0])
    await until(lambda: len(world.lines(slow, "resume")) >= 2)
    assert len(world.lines(slow, "loaded")) == 1
    assert not await world.events(FenceRequested)


async def test_t3_a_load_that_outlasts_its_own_bound_beside_a_waiter_is_fenced(world: World) -> None:
    world.start_ledger("--max-turn", "1s", "--turn-grace", "1s", "--load-grace", "2s")
    slow = await world.seat("loading-1")
    held = await world.assignment(slow)
    other = await world.seat("busy-2")
    await until(lambda: _said(world, WorkerGone, held))
    (world.home / "device" / held).unlink()
    await until(lambda: world.touched(other))
    assert not world.lines(slow, "loaded")
    assert [event.assignment for event in await world.events(FenceRequested)] == [held]


async def test_t6_a_holder_that_died_silently_is_fenced_within_ten_seconds(world: World) -> None:
    """T6: frozen (SIGSTOP), it renews nothing; the end of its turn is far away."""
    world.start_ledger("--max-turn", "600s", "--turn-grace", "600s")
    frozen = await world.seat("frozen-1")
    held = await world.assignment(frozen)
    other = await world.seat("busy-2")
    await until(lambda: _said(world, FenceRequested, held))
    entry = await world.bus.store.turns.get(world.claim)
    assert entry is not None
    fenced_at = entry.value.residents[held].fenced_at
    assert fenced_at is not None
    detected_s = fenced_at - entry.value.waiting[await world.assignment(other)]
    await until(lambda: not list((world.home / "device").glob(held)) or _said(world, WorkerGone, held))
    (world.home / "device" / held).unlink()
    await until(lambda: world.touched(other))
    assert detected_s < 10.0


async def test_t5_a_worker_that_cannot_park_keeps_the_turn_until_its_process_is_gone(world: World) -> None:
    """T5: the park fails, the process ends with the fault; the next one gives the turn back (F4, T4)."""
    world.start_ledger("--max-turn", "1s", "--turn-grace", "600s")
    broken = await world.seat("unparkable-1")
    await until(lambda: world.touched(broken))
    first = world.lines(broken)[0][3]
    other = await world.seat("busy-2")
    await until(lambda: world.touched(other))
    assert not alive(int(first))
    last = [line for line in world.lines(broken) if line[3] == first][-1]
    assert float(last[0]) < float(world.lines(other)[0][0])
    await until(lambda: [line for line in world.lines(broken) if line[3] != first])


async def test_e5_t4_turns_go_on_after_the_ledger_was_killed(world: World) -> None:
    """Invariant 9: kill -9 of the arbiter in the middle; requests and releases said meanwhile are not lost."""
    world.start_ledger("--max-turn", "1s")
    first = await world.seat("busy-1")
    second = await world.seat("busy-2")
    await until(lambda: world.lines(second, "park"))
    assert world.ledger is not None
    os.kill(world.ledger.pid, signal.SIGKILL)
    world.ledger.wait()
    await asyncio.sleep(1.5)
    world.start_ledger()
    turns = len(world.lines(first, "resume"))
    await until(lambda: len(world.lines(first, "resume")) >= turns + 2, 60)


async def _said(world: World, kind: type, assignment: str) -> bool:
    return any(event.assignment == assignment for event in await world.events(kind))


def alive(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
