"""A launcher on a real nats-server with real worker processes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from bus.launcher.launcher_helpers import FAKE_WORKERS, Ledger, until
from openrl_common import identity, streams
from openrl_common.bus import Bus
from openrl_common.nats_server import NatsServer
from openrl_common.quantities import GIB
from openrl_common.records import LedgerIdentityRecord
from openrl_launcher.local import LocalBackend
from openrl_launcher.service import Launcher
from openrl_launcher.settings import LauncherSettings
from support import end_workers


@pytest.fixture
def nats_url(nats_server: NatsServer) -> str:
    """The embedded server alone: that a containerised one is no different is shown by the suites of bus and store."""
    return nats_server.url


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "home"
    path.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(FAKE_WORKERS))
    return path


@pytest.fixture
async def ledger(nats_url: str, home: Path) -> AsyncIterator[Ledger]:
    bus = await Bus.connect(nats_url, name="test")
    await streams.ensure(bus)
    await bus.store.ledger_meta.put(identity.KEY, LedgerIdentityRecord(id="test"))
    ledger = Ledger(bus, home, "here")
    listening = asyncio.create_task(ledger.listen())
    yield ledger
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    await bus.close()
    end_workers(home)


@pytest.fixture
def launch(nats_url: str, home: Path) -> Callable[..., contextlib.AbstractAsyncContextManager[Launcher]]:
    """``async with launch(devices=…) as launcher``: one launcher, which leaves its workers running when it ends."""

    @contextlib.asynccontextmanager
    async def run(
        *, devices: tuple[int, ...] = (8, 8), node: str = "here", home_path: Path = home, **fields: Any
    ) -> AsyncIterator[Launcher]:
        config = LauncherSettings(
            nats_url=nats_url, home=home_path, log_level="info", log_format="json", health_host="127.0.0.1",
            health_port=0, node=node, devices=tuple(gib * GIB for gib in devices), **{"stop_grace_s": 1.0, **fields},
        )  # fmt: skip
        backend = LocalBackend(
            home=home_path, node=node, nats_url=nats_url, declared=config.devices,
            host_memory_bytes=config.host_memory_bytes, logs_kept=config.logs_kept,
        )  # fmt: skip
        bus = await Bus.connect(nats_url, name=f"launcher-{node}")
        launcher = Launcher(bus, backend, config)
        running = asyncio.create_task(launcher.run())
        try:
            await until(lambda: running.done() or all(check() is None for check in launcher.readiness().values()))
            yield launcher
            if running.done():
                running.result()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await bus.close()

    return run
