"""The ledger's bucket is deleted under a running system, rebuilt from what runs, and everything goes on (L7, E18)."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from openrl_client import connect
from openrl_client.bench.seats import MODEL_CONFIG
from openrl_client.connection import Client
from openrl_client.local_system import LocalSystem
from openrl_common.records import JobKind, JobSpec, Overrides, SeatState

from .conftest import SETTINGS

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(180)]
WORKERS = Path(__file__).parent.parent / "bus" / "launcher" / "fake_workers"
BUCKET = "KV_openrl_ledger"


@pytest.fixture
async def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalSystem]:
    """Workers are small processes with the real lease."""
    monkeypatch.setenv("PYTHONPATH", str(WORKERS))
    environment = {**SETTINGS, "OPEN_RL_WARM_START": "off", "OPEN_RL_JANITOR_EVERY": "2s", "OPEN_RL_PASS_EVERY": "2s"}
    async with LocalSystem(tmp_path / "home", environment=environment) as system:
        yield system


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(MODEL_CONFIG))
    return path


def spec(name: str, model: Path) -> JobSpec:
    sizes = Overrides(trainer_device_gib=4, sampler_device_gib=4, trainer_host_gib=0.1, sampler_host_gib=0.1)
    return JobSpec(name=name, kind=JobKind.FFT, base_model=str(model), overrides=sizes)


async def openrl(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        subprocess.run,
        [str(Path(sys.executable).parent / "openrl"), *arguments],
        env={**os.environ, "OPEN_RL_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


async def until(look: Callable[[], Awaitable[Any]], what: str, within_s: float = 45.0) -> Any:
    try:
        async with asyncio.timeout(within_s):
            while not (found := await look()):  # noqa: ASYNC110 (what is waited for happens in other processes)
                await asyncio.sleep(0.1)
            return found
    except TimeoutError:
        raise AssertionError(f"{what}: not within {within_s:g} s") from None


async def pids(client: Client) -> dict[str, int]:
    workers = await client.bus.store.workers.list()
    return {each.value.workload: each.value.pid for each in workers.values() if each.value.state == "running"}


def alive(pid: int) -> bool:
    """Not a zombie: nobody may be there to wait for a worker whose launcher was started again."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def seats(client: Client) -> dict[str, str]:
    found = await client.bus.store.ledger_seats.list()
    return {key: each.value.assignment for key, each in found.items() if each.value.state is SeatState.HELD}


async def test_l7_the_bucket_is_deleted_under_a_running_system_and_it_goes_on(system: LocalSystem, model: Path) -> None:
    """L7, E18: no worker is stopped, no seat changes hands, what waited is seated, what ends is freed."""
    async with connect(system.nats_url) as client:
        running = await client.submit(spec("lease", model))
        await running.ready(60)
        before, processes = await seats(client), await pids(client)
        assert len(before) == len(processes) == 2
        dry = await openrl(system.home, "ledger", "rebuild", "-o", "json")
        assert dry.returncode == 0, dry.stderr
        assert json.loads(dry.stdout)["seats"] == before
        refused = await openrl(system.home, "ledger", "rebuild", "--apply")
        assert refused.returncode == 1
        assert "a ledger is running" in refused.stderr

        await client.bus.jetstream.delete_stream(BUCKET)
        late = asyncio.create_task(client.submit(spec("lease-late", model), timeout_s=100.0))

        async def halted() -> bool:
            done = await openrl(system.home, "ledger", "rebuild", "--apply")
            assert done.returncode in (0, 1), done.stderr
            assert done.returncode == 0 or "a ledger is running" in done.stderr
            return done.returncode == 0

        await until(halted, "the ledger has noticed and stopped handling events")
        await until(lambda: _is(seats, client, before), "the seats are back, under their assignments")
        await system.ready("launcher")
        await system.ready("ledger")
        await system.ready("placement")
        second = await late
        await second.ready(60)
        assert await pids(client) | processes == await pids(client), "the workers that ran still run"
        assert all(alive(pid) for pid in processes.values())
        await running.finish()
        assert set(await seats(client)) == set((await pids(client)).keys())
        assert not any(alive(pid) for pid in processes.values())
        await second.finish()

        async def all_free() -> bool:
            held = (await client.bus.store.devices.list()).values()
            return not any(each.value.claim for each in held)

        await until(all_free, "every device is free again")


async def _is(look: Callable[[Client], Awaitable[Any]], client: Client, wanted: Any) -> bool:
    return bool(await look(client) == wanted)


@pytest.mark.long
async def test_l7_an_emptied_bucket_stops_nobody(system: LocalSystem, model: Path) -> None:
    """L7: made anew and empty (by `openrl up`, by an operator) it says of everybody "no seat": nobody believes it."""
    from openrl_common import streams

    async with connect(system.nats_url) as client:
        running = await client.submit(spec("lease", model))
        await running.ready(60)
        processes = await pids(client)
        await client.bus.jetstream.delete_stream(BUCKET)
        await streams.ensure(client.bus)
        await asyncio.sleep(8.0)
        assert all(alive(pid) for pid in processes.values())
        assert await seats(client) == {}
        done = await openrl(system.home, "ledger", "rebuild", "--apply", "-o", "json")
        assert done.returncode == 0, done.stderr
        assert len(json.loads(done.stdout)["seats"]) == 2
        await system.ready("launcher")
        await running.finish()
        assert not any(alive(pid) for pid in processes.values())
