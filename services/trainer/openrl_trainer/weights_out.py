"""Weights versions on disk (R11): a directory per version, complete under its final name or absent.

Format ``full`` is a Hugging Face directory that ``from_pretrained`` loads (tied embeddings stored once); ``lora`` is
the PEFT layout that ``PeftModel.from_pretrained`` loads. Nothing in it depends on the clock, so that a replayed log
(R5) writes the same bytes and finds its own directory standing.

Writing happens beside the training, from a copy (R12): nothing here looks at a parameter of the model after
``copy_weights``.
"""

from __future__ import annotations

import copy
import hashlib
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from openrl_common.errors import Rejected
from openrl_common.records import LoraSpec, WeightsRecord
from openrl_common.weights import (
    MANIFEST,
    FileInfo,
    WeightsManifest,
    encode_manifest,
    hash_file,
    read_manifest,
    read_tensor_infos,
    verify_files,
    version_directory,
    weights_record,
)
from openrl_trainer.files import disk_errors, publish_directory, temporary_directory
from openrl_trainer.model import BaseModel


@dataclass(frozen=True, kw_only=True)
class VersionRequest:
    """Which version to write. ``adapter`` empty = the whole model; ``seq`` the log entry that asked (R4)."""

    tenant: str
    job: str
    incarnation: int
    version: int
    parent: int
    seq: int
    adapter: str = ""
    lora: LoraSpec | None = None


Weights = dict[str, Tensor]
"""Tensors on the host by the name they are saved under; tied ones share their storage, as in the model."""


def host_copy(tensor: Tensor) -> Tensor:
    """A copy in host memory, contiguous, that nothing else writes to."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def copy_weights(base: BaseModel, adapter: str) -> Weights:
    """What a version is written from: the adapter in PEFT's layout, or the whole model when ``adapter`` is empty."""
    source: Weights = base.adapter_tensors(adapter) if adapter else base.model.state_dict()
    copies: dict[tuple[int, torch.Size], Tensor] = {}
    return {
        name: copies.setdefault((tensor.data_ptr(), tensor.shape), host_copy(tensor)) for name, tensor in source.items()
    }


def write_version(home: Path, base: BaseModel, request: VersionRequest, weights: Weights) -> WeightsRecord:
    """Write one version.

    Raises:
        Rejected: ``disk-full`` or ``write-failed``; the versions before it are untouched.
    """
    final = version_directory(home, request.tenant, request.job, request.incarnation, request.version)
    with disk_errors(final):
        if (standing := _standing(final, request)) is not None:
            return standing
        with temporary_directory(final) as temporary:
            if request.adapter:
                _write_adapter(base, request.adapter, weights, temporary)
            else:
                base.model.save_pretrained(str(temporary), state_dict=dict(weights))
            manifest = _describe(temporary, base.path, request)
            body = encode_manifest(manifest)
            (temporary / MANIFEST).write_bytes(body)
            shutil.rmtree(final, ignore_errors=True)
            publish_directory(temporary, final)
    return weights_record(manifest, final, hashlib.sha256(body).hexdigest())


def _write_adapter(base: BaseModel, adapter: str, weights: Weights, directory: Path) -> None:
    safetensors.torch.save_file(weights, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = copy.deepcopy(base.adapter_config(adapter))
    config.inference_mode = True
    config.save_pretrained(str(directory))


def _describe(directory: Path, base_model: str, request: VersionRequest) -> WeightsManifest:
    paths = sorted(directory.iterdir())
    files = {path.name: FileInfo(sha256=hash_file(path), bytes=path.stat().st_size) for path in paths}
    tensors = [info for path in paths if path.suffix == ".safetensors" for info in read_tensor_infos(path)]
    return WeightsManifest(
        format="lora" if request.adapter else "full",
        tenant=request.tenant,
        job=request.job,
        incarnation=request.incarnation,
        version=request.version,
        parent=request.parent,
        files=files,
        tensors=tuple(sorted(tensors, key=lambda info: info.name)),
        largest_tensor_bytes=max((info.bytes for info in tensors), default=0),
        total_bytes=sum(info.bytes for info in tensors),
        lora=request.lora if request.adapter else None,
        base_model=base_model,
        seq=request.seq,
    )


def _standing(final: Path, request: VersionRequest) -> WeightsRecord | None:
    """This very version, when an earlier life of this trainer got that far: same log, same bits (R5), so it stays."""
    try:
        manifest = read_manifest(final / MANIFEST)
        verify_files(manifest, final)
    except Rejected:
        return None
    if (manifest.incarnation, manifest.version, manifest.seq) != (request.incarnation, request.version, request.seq):
        return None
    return weights_record(manifest, final, hash_file(final / MANIFEST))


def remove_old_versions(directory: Path, keep: int, served: Collection[int] = ()) -> None:
    """Keep the ``keep`` newest version directories and the versions ``served``.

    A directory that cannot be removed is left for the next time.
    """
    versions = sorted(path for path in directory.glob("v[0-9]*") if path.is_dir())
    for path in versions[: max(0, len(versions) - keep)]:
        if int(path.name[1:]) not in served:
            shutil.rmtree(path, ignore_errors=True)
