"""A sampler process with the torch engine, and a very small model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sampler_support import save_model
from sampler_world import World
from worlds import running

from openrl_common.nats_server import NatsServer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture
async def world(nats_server: NatsServer, tmp_path: Path, model: Path) -> AsyncIterator[World]:
    url = nats_server.url
    async with running(url, lambda bus: World(bus, url, tmp_path, model)) as world:
        yield world
