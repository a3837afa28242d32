"""Real, very small Qwen3 models and weights versions on disk, shared by the sampler's tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from sampler_support import quiet_peft, save_full_version, save_lora_version, save_model

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
    """Log-probabilities of ``tokens[1:]`` by one plain transformers forward pass, no cache, no padding."""

    def compute(path: Path, tokens: list[int], *, adapter: Path | None = None, temperature: float = 1.0) -> list[float]:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
        if adapter is not None:
            with quiet_peft():
                model = PeftModel.from_pretrained(model, str(adapter)).eval()
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1].float() / temperature
        return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()

    return compute
