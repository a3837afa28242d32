"""Everything for real: embedded NATS, the three control services, trainers and samplers with torch, a tiny model."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from openrl_client.supervisor import LocalSystem
from openrl_client.tiny import make_tiny_model

SETTINGS = {
    "OPEN_RL_DEVICES": "3x6GiB",
    "OPEN_RL_MAX_SEATS_PER_CLAIM": "2",
    "OPEN_RL_TRAINER_HOST_BASE": "256MiB",
    "OPEN_RL_SAMPLER_HOST_BASE": "256MiB",
    "OPEN_RL_LORA_IDLE": "1s",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model, which has learned nothing."""
    return _model(tmp_path_factory, steps=1)


@pytest.fixture(scope="session")
def half_trained_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model, half trained: its reward on the letter task starts low."""
    return _model(tmp_path_factory, steps=200)


def _model(tmp_path_factory: pytest.TempPathFactory, *, steps: int) -> Path:
    import asyncio

    out = tmp_path_factory.mktemp("model") / "tiny"
    asyncio.run(make_tiny_model(out, steps=steps, environment={**os.environ, "OMP_NUM_THREADS": "1"}))
    return out


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[LocalSystem]:
    async with LocalSystem(tmp_path / "home", environment=SETTINGS) as system:
        yield system
