"""Very small real models and weights versions on disk, as a trainer would write them, for the sampler's tests."""

from __future__ import annotations

import hashlib
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from openrl_common.deltas import DELTA_FILE, INDEX, VALUE
from openrl_common.records import LoraSpec, WeightsRecord
from openrl_common.weights import (
    MANIFEST,
    FileInfo,
    WeightsManifest,
    encode_manifest,
    hash_file,
    read_tensor_infos,
    version_directory,
    weights_record,
)

VOCABULARY = 61
LENGTH_MAX = 64
EOS = 1


@contextmanager
def quiet_peft() -> Iterator[None]:
    """peft asks transformers for a property under a name that is about to go."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        yield


def save_model(path: Path, *, tied: bool = True, seed: int = 1, fill: float | None = None, **changes: Any) -> Path:
    """``fill``: every value of the last norm."""
    settings = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": tied,
        "max_position_embeddings": LENGTH_MAX, "eos_token_id": EOS, "initializer_range": 0.4,
    } | changes  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**settings))
    if fill is not None:
        torch.nn.init.constant_(model.model.norm.weight, fill)
    model.save_pretrained(str(path))
    return path


def new_record(
    directory: Path, *, weights_format: str, job: str, version: int, incarnation: int, **delta: Any
) -> WeightsRecord:
    """The manifest of what lies in ``directory``, written there, and its announcement."""
    files = {
        path.name: FileInfo(sha256=hash_file(path), bytes=path.stat().st_size) for path in sorted(directory.iterdir())
    }
    tensors = tuple(
        tensor for name in files if name.endswith(".safetensors") for tensor in read_tensor_infos(directory / name)
    )
    manifest = WeightsManifest(
        format=weights_format, tenant="t", job=job, incarnation=incarnation, version=version, files=files,
        tensors=tensors, largest_tensor_bytes=max(tensor.bytes for tensor in tensors),
        total_bytes=sum(tensor.bytes for tensor in tensors), lora=LoraSpec() if weights_format == "lora" else None,
        **({"parent": version - 1} | delta),
    )  # fmt: skip
    body = encode_manifest(manifest)
    (directory / MANIFEST).write_bytes(body)
    return weights_record(manifest, directory, hashlib.sha256(body).hexdigest())


def save_full_version(
    home: Path, version: int, *, job: str = "j", incarnation: int = 1, seed: int | None = None, **changes: Any
) -> WeightsRecord:
    """A Hugging Face directory with a manifest."""
    directory = version_directory(home, "t", job, incarnation, version)
    save_model(directory, seed=version + 100 if seed is None else seed, **changes)
    return new_record(directory, weights_format="full", job=job, version=version, incarnation=incarnation)


def save_lora_version(
    home: Path, model_path: Path, version: int, *, job: str = "j", incarnation: int = 1, rank: int = 4
) -> WeightsRecord:
    """The PEFT layout with a manifest; random weights that depend on job, incarnation and version."""
    directory = version_directory(home, "t", job, incarnation, version)
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
    return new_record(directory, weights_format="lora", job=job, version=version, incarnation=incarnation)


def save_delta_version(
    home: Path,
    parent: WeightsRecord,
    version: int,
    *,
    share: float = 0.1,
    outside: bool = False,
    fill: float | None = None,
) -> WeightsRecord:
    """What changed since ``parent``, a whole version or a delta: some elements of every tensor, all of the small ones.

    ``fill``: every new value of the large ones. ``outside``: a position is.
    The whole version that it stands for lies beside it under ``v<version>-whole``.
    """
    directory = version_directory(home, "t", parent.job, parent.incarnation, version)
    before = Path(parent.manifest).parent
    before = before if (before / "model.safetensors").is_file() else before.with_name(f"{before.name}-whole")
    tensors, changed = load_file(before / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(version)
    for name, tensor in sorted(tensors.items()):
        flat = tensor.reshape(-1)
        index = (torch.rand(flat.shape, generator=generator) < share).nonzero().reshape(-1)
        flat[index] = torch.randn(index.shape, generator=generator).to(flat.dtype) * 0.4
        if fill is not None:
            flat[index] = fill
        if tensor.dim() < 2:
            changed[name] = tensor
        else:
            changed |= {name + INDEX: index.to(torch.int32), name + VALUE: flat[index]}
            changed[name + INDEX][-1] += tensor.numel() if outside else 0
    whole = directory.with_name(f"{directory.name}-whole")
    shutil.copytree(before, whole, ignore=shutil.ignore_patterns(MANIFEST))
    save_file(tensors, whole / "model.safetensors", metadata={"format": "pt"})
    directory.mkdir(parents=True)
    save_file(changed, directory / DELTA_FILE)
    return new_record(
        directory, weights_format="delta", job=parent.job, version=version, incarnation=parent.incarnation,
        parent=parent.version, parent_digest=parent.digest, baseline=0,
    )  # fmt: skip


def plain_logprobs(path: Path, tokens: list[int], *, adapter: Path | None = None, temperature: float = 1.0) -> Any:
    """Log-probabilities of ``tokens[1:]`` by one plain transformers forward pass, no cache, no padding."""
    logits = _plain_logits(path, tokens, adapter) / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()


def plain_top_logprobs(path: Path, tokens: list[int], top: int) -> list[list[tuple[int, float]]]:
    """The likeliest tokens at each of ``tokens[1:]``, and their log-probabilities."""
    found = torch.log_softmax(_plain_logits(path, tokens, None), -1).topk(top)
    return [list(zip(*place, strict=True)) for place in zip(found.indices.tolist(), found.values.tolist(), strict=True)]


def _plain_logits(path: Path, tokens: list[int], adapter: Path | None) -> torch.Tensor:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    if adapter is not None:
        with quiet_peft():
            model = PeftModel.from_pretrained(model, str(adapter)).eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([tokens])).logits[0, :-1].float()
    return logits


def flip_a_byte(directory: Path) -> None:
    path = directory / "model.safetensors"
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(bytes(body))


def remove(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
