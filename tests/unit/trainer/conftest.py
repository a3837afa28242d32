"""A real, very small Qwen3 model on disk, shared by the trainer's tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers

from openrl_common.records import LoraSpec
from openrl_common.wire import AdamParams, Datum, ForwardBackward, OptimStep
from openrl_trainer.engine import EngineSettings, JobSettings, TrainEngine
from openrl_trainer.model import BaseModel, prepare_torch

VOCABULARY = 61
LENGTH_MAX = 64


def save_tiny_model(path: Path, *, tied: bool = True, seed: int = 1) -> Path:
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=tied, max_position_embeddings=LENGTH_MAX,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformers.Qwen3ForCausalLM(config).save_pretrained(str(path))
    return path


@pytest.fixture(scope="session")
def device() -> torch.device:
    return prepare_torch(1, 0)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tied")


@pytest.fixture
def new_base(model_path: Path, device: torch.device) -> Callable[..., BaseModel]:
    def make(*, frozen: bool = False, path: Path | None = None, dtype: str = "float32") -> BaseModel:
        return BaseModel(str(path or model_path), dtype=dtype, device=device, frozen=frozen)

    return make


@pytest.fixture
def new_engine(new_base: Callable[..., BaseModel], tmp_path: Path) -> Callable[..., TrainEngine]:
    def make(
        *, lora: LoraSpec | None = None, base: BaseModel | None = None, job: str = "job", seed: int = 0,
        token_budget: int = 1024, home: Path | None = None, keep: int = 4, incarnation: int = 7,
        float32_masters: bool = False, baseline_every: int = 10,
    ) -> TrainEngine:  # fmt: skip
        return TrainEngine(
            base or new_base(frozen=lora is not None),
            JobSettings(
                tenant="default",
                job=job,
                incarnation=incarnation,
                seed=seed,
                lora=lora,
                float32_masters=float32_masters,
            ),
            EngineSettings(
                home=home or tmp_path, token_budget=token_budget, keep_weights=keep, baseline_every=baseline_every
            ),
        )

    return make


def random_data(seed: int, count: int = 6, *, policy: bool = False) -> list[Datum]:
    random = torch.Generator().manual_seed(seed)
    data = []
    for _ in range(count):
        length = int(torch.randint(4, 20, (1,), generator=random))
        tokens = torch.randint(0, VOCABULARY, (length,), generator=random).tolist()
        weights = [0.0, 0.0] + [1.0] * (length - 2)
        logprobs = (-4.1 + 0.3 * torch.randn(length, generator=random)).tolist() if policy else []
        advantages = torch.randn(length, generator=random).tolist() if policy else []
        data.append(Datum(tokens=tokens, weights=weights, logprobs=logprobs, advantages=advantages))
    return data


def learn(seq: int, data: list[Datum], **changes: object) -> ForwardBackward:
    return ForwardBackward(**{"seq": seq, "incarnation": 7, "data": data, "loss": "cross_entropy", **changes})  # type: ignore[arg-type]


def step(seq: int, learning_rate: float = 1e-2, **changes: float) -> OptimStep:
    return OptimStep(seq=seq, incarnation=7, adam=AdamParams(learning_rate=learning_rate, **changes))
