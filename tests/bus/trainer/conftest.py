"""A tiny model, and a world around trainers on a real nats-server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bus.trainer.trainer_world import World
from openrl_common import streams
from openrl_common.bus import Bus
from openrl_common.nats_server import NatsServer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    path = tmp_path_factory.mktemp("model")
    config = Qwen3Config(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=True, max_position_embeddings=64,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(str(path))
    return path


@pytest.fixture
async def world(nats_server: NatsServer, tmp_path: Path, model: Path) -> AsyncIterator[World]:
    bus = await Bus.connect(nats_server.url, name="test")
    await streams.ensure(bus)
    home = tmp_path / "home"
    home.mkdir()
    world = World(bus, nats_server.url, home, model)
    await world.listen()
    yield world
    for process in world.processes:
        if process.poll() is None:
            process.kill()
            process.wait()
    await bus.close()
