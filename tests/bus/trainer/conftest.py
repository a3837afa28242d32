"""A tiny model, and a world around trainers on a real nats-server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
from worlds import running

from bus.trainer.trainer_world import Trainers, World
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
    url, home = nats_server.url, tmp_path / "home"
    home.mkdir()
    async with running(url, lambda bus: World(bus, url, home, model)) as world:
        yield world


@pytest.fixture(scope="module")
def forker() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bus.trainer.forked_trainers"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.stdin.close()
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.fixture
async def trainers(world: World, forker: subprocess.Popen[str]) -> AsyncIterator[Trainers]:
    trainers = Trainers(world, forker)
    yield trainers
    if trainers.pid and psutil.pid_exists(trainers.pid):
        await trainers.kill()
