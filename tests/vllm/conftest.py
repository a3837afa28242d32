"""The real vLLM engine on this machine's CPU, in this process; very small real models. Run by ``make test-vllm``."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

vllm_options = pytest.importorskip("openrl_sampler.vllm_options")
pytest.importorskip("vllm", reason="vllm is not installed here: make test-vllm has an environment of its own")
vllm_options.set_environment(os.environ)

import torch  # noqa: E402
from sampler_support import save_full_version, save_lora_version, save_model  # noqa: E402
from sampler_world import World  # noqa: E402
from worlds import running  # noqa: E402

from openrl_common.bus import Bus  # noqa: E402
from openrl_common.nats_server import NatsServer  # noqa: E402
from openrl_common.records import JobKind, WeightsRecord  # noqa: E402
from openrl_sampler.vllm_engine import VllmEngine  # noqa: E402
from openrl_sampler.vllm_options import VllmOptions  # noqa: E402

HEAD_DIM = 32
"""The least that vLLM's attention on CPUs takes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/vllm" in str(item.path):
            item.add_marker(pytest.mark.vllm)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(300))  # the first start inspects the model in a process of its own
            item.add_marker(pytest.mark.filterwarnings("default"))  # vLLM and what it imports warn of their own matters
            item.add_marker(pytest.mark.filterwarnings(r"error:::openrl_.*"))


@pytest.fixture(scope="session")
def save_tiny_model() -> Callable[..., Path]:
    return partial(save_model, head_dim=HEAD_DIM)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory, save_tiny_model: Callable[..., Path]) -> Path:
    torch.set_num_threads(1)
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tied")


@pytest.fixture
async def world(tmp_path: Path, model_path: Path) -> AsyncIterator[World]:
    server = NatsServer(tmp_path / "nats")
    server.start()

    def make(bus: Bus) -> World:  # importing vLLM takes long on a busy machine
        return World(bus, server.url, tmp_path, model_path, engine="vllm-cpu", head_dim=HEAD_DIM, deadline_s=400.0)

    async with running(server.url, make) as world:
        yield world
    server.stop()


@pytest.fixture
def tolerance() -> float:
    return 5e-5


@pytest.fixture
def new_engine(model_path: Path) -> Iterator[Callable[..., VllmEngine]]:
    made: list[VllmEngine] = []

    def make(path: Path | None = None, kind: JobKind = JobKind.FFT, **options: Any) -> VllmEngine:
        options = {"dtype": "float32", "max_num_seqs": 64} | options
        engine = VllmEngine(VllmOptions(model_path=path or model_path, kind=kind, **options))
        engine.load()
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def save_full(tmp_path: Path) -> Callable[..., WeightsRecord]:
    return partial(save_full_version, tmp_path, head_dim=HEAD_DIM)


@pytest.fixture
def save_lora(tmp_path: Path, model_path: Path) -> Callable[..., WeightsRecord]:
    return partial(save_lora_version, tmp_path, model_path)
