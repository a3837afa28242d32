"""Real, very small Qwen3 models and weights versions on disk, shared by the sampler's tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sampler_support
import torch
from sampler_support import save_full_version, save_lora_version, save_model

from openrl_common.records import JobKind, WeightsRecord
from openrl_common.weights import read_manifest
from openrl_common.wire import SamplingParams
from openrl_sampler.engine import GenerateCall, Generated
from openrl_sampler.torch_engine import TorchEngine
from openrl_sampler.torch_model import TorchOptions


@pytest.fixture(scope="session")
def save_tiny_model() -> Callable[..., Path]:
    return save_model


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_model(tmp_path_factory.mktemp("model") / "tied")


@pytest.fixture
def tolerance() -> float:
    """How far logprobs may be from a plain forward pass."""
    return 2e-5


@pytest.fixture
def new_engine(model_path: Path) -> Callable[..., TorchEngine]:
    def make(path: Path | None = None, kind: JobKind = JobKind.FFT, **options: Any) -> TorchEngine:
        options = {"dtype": "float32"} | options  # on any device: what is compared here is compared to the last digits
        engine = TorchEngine(TorchOptions(model_path=path or model_path, kind=kind, **options))
        engine.load()
        return engine

    return make


@pytest.fixture
def save_full(tmp_path: Path) -> Callable[..., WeightsRecord]:
    return partial(save_full_version, tmp_path)


@pytest.fixture
def save_lora(tmp_path: Path, model_path: Path) -> Callable[..., WeightsRecord]:
    return partial(save_lora_version, tmp_path, model_path)


@pytest.fixture
def apply() -> Callable[..., Any]:
    def apply(engine: TorchEngine, record: WeightsRecord) -> Any:
        key = f"{record.tenant}.{record.job}.{record.incarnation}"
        manifest = read_manifest(record.manifest, record.digest)
        method = engine.apply_lora if record.format == "lora" else engine.apply_full
        return method(key, record, manifest, Path(record.manifest).parent)

    return apply


@pytest.fixture
def generate() -> Callable[..., Generated]:
    """Run one call alone to its end."""

    def generate(
        engine: TorchEngine,
        prompts: list[list[int]],
        *,
        seed: int = 7,
        job: str = "t.j.1",
        exact: int | None = None,
        **params: Any,
    ) -> Generated:
        engine.add(
            GenerateCall(request="r", job=job, prompts=prompts, params=SamplingParams(**params), seed=seed, exact=exact)
        )
        ended: list[Generated] = []
        while not ended:
            ended = engine.step()
        return ended[0]

    return generate


@pytest.fixture
def plain_logprobs() -> Callable[..., list[float]]:
    return sampler_support.plain_logprobs
