"""A sampler process with the torch engine, and a very small model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sampler_support import save_model
from sampler_world import World

from openrl_common import streams
from openrl_common.bus import Bus
from openrl_common.nats_server import NatsServer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture
async def world(nats_server: NatsServer, tmp_path: Path, model: Path) -> AsyncIterator[World]:
    bus = await Bus.connect(nats_server.url, name="test")
    await streams.ensure(bus)
    world = World(bus, nats_server.url, tmp_path, model)
    await world.listen()
    yield world
    for process in world.processes:
        if process.poll() is None:
            process.kill()
        process.wait()
    await bus.close()
