"""Real, very small Qwen3 models and weights versions on disk, shared by the sampler's tests."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

from openrl_common.records import JobKind, LoraSpec, WeightsRecord
from openrl_common.weights import (
    MANIFEST,
    FileInfo,
    WeightsManifest,
    encode_manifest,
    hash_file,
    read_manifest,
    read_tensor_infos,
    version_directory,
    weights_record,
)
from openrl_common.wire import SamplingParams
from openrl_sampler.engine import GenerateCall, Generated
from openrl_sampler.torch_engine import TorchEngine
from openrl_sampler.torch_model import TorchOptions

VOCABULARY = 61
LENGTH_MAX = 64
EOS = 1


@contextmanager
def quiet_peft() -> Iterator[None]:
    """peft asks transformers for a property under a name that is about to go."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        yield


def save_model(path: Path, *, tied: bool = True, seed: int = 1, **changes: Any) -> Path:
    settings = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": tied,
        "max_position_embeddings": LENGTH_MAX, "eos_token_id": EOS, "initializer_range": 0.4,
    } | changes  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**settings)).save_pretrained(str(path))
    return path


@pytest.fixture(scope="session")
def save_tiny_model() -> Callable[..., Path]:
    return save_model


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_model(tmp_path_factory.mktemp("model") / "tied")


@pytest.fixture
def new_engine(model_path: Path) -> Callable[..., TorchEngine]:
    def make(path: Path | None = None, kind: JobKind = JobKind.FFT, **options: Any) -> TorchEngine:
        engine = TorchEngine(TorchOptions(model_path=path or model_path, kind=kind, **options))
        engine.load()
        return engine

    return make


def _record(directory: Path, *, weights_format: str, job: str, version: int, incarnation: int) -> WeightsRecord:
    files = {
        path.name: FileInfo(sha256=hash_file(path), bytes=path.stat().st_size) for path in sorted(directory.iterdir())
    }
    tensors = tuple(
        tensor for name in files if name.endswith(".safetensors") for tensor in read_tensor_infos(directory / name)
    )
    manifest = WeightsManifest(
        format=weights_format, tenant="t", job=job, incarnation=incarnation, version=version, parent=version - 1,
        files=files, tensors=tensors, largest_tensor_bytes=max(tensor.bytes for tensor in tensors),
        total_bytes=sum(tensor.bytes for tensor in tensors), lora=LoraSpec() if weights_format == "lora" else None,
    )  # fmt: skip
    body = encode_manifest(manifest)
    (directory / MANIFEST).write_bytes(body)
    return weights_record(manifest, directory, hashlib.sha256(body).hexdigest())


@pytest.fixture
def save_full(tmp_path: Path) -> Callable[..., WeightsRecord]:
    """Write a full version as a trainer would: a Hugging Face directory with a manifest."""

    def save(
        version: int, *, job: str = "j", incarnation: int = 1, seed: int | None = None, **changes: Any
    ) -> WeightsRecord:
        directory = version_directory(tmp_path, "t", job, incarnation, version)
        save_model(directory, seed=version + 100 if seed is None else seed, **changes)
        return _record(directory, weights_format="full", job=job, version=version, incarnation=incarnation)

    return save


@pytest.fixture
def save_lora(tmp_path: Path, model_path: Path) -> Callable[..., WeightsRecord]:
    """Write an adapter version in the PEFT layout, with random weights of its seed."""

    def save(version: int, *, job: str = "j", incarnation: int = 1, rank: int = 4) -> WeightsRecord:
        directory = version_directory(tmp_path, "t", job, incarnation, version)
        base = transformers.AutoModelForCausalLM.from_pretrained(model_path)
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
        with quiet_peft():
            model = get_peft_model(base, config)
        generator = torch.Generator().manual_seed(1000 * incarnation + version + sum(job.encode()))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        model.save_pretrained(str(directory))
        return _record(directory, weights_format="lora", job=job, version=version, incarnation=incarnation)

    return save


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
