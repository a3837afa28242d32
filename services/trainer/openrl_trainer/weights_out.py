"""Weights versions on disk (R11): a directory per version, complete under its final name or absent.

Format ``full`` is a Hugging Face directory that ``from_pretrained`` loads (tied embeddings stored once); ``lora`` is
the PEFT layout that ``PeftModel.from_pretrained`` loads. Nothing in it depends on the clock, so that a replayed log
(R5) writes the same bytes and finds its own directory standing.

Simplified: no delta format, written on the training thread (R12 comes later), retention by count alone.
"""

from __future__ import annotations

import copy
import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch

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


def write_version(home: Path, base: BaseModel, request: VersionRequest, *, keep: int) -> WeightsRecord:
    """Write one version and drop all but the newest ``keep``.

    Raises:
        Rejected: ``disk-full`` or ``write-failed``; the versions before it are untouched.
    """
    final = version_directory(home, request.tenant, request.job, request.incarnation, request.version)
    with disk_errors(final), temporary_directory(final) as temporary:
        if request.adapter:
            _write_adapter(base, request.adapter, temporary)
        else:
            base.model.save_pretrained(str(temporary))
        manifest = _describe(temporary, base.path, request)
        body = encode_manifest(manifest)
        (temporary / MANIFEST).write_bytes(body)
        digest = hashlib.sha256(body).hexdigest()
        if not _stands(final, digest):
            shutil.rmtree(final, ignore_errors=True)
            publish_directory(temporary, final)
    remove_old_versions(final.parent, keep)
    return weights_record(manifest, final, digest)


def _write_adapter(base: BaseModel, adapter: str, directory: Path) -> None:
    tensors = {name: tensor.detach().contiguous() for name, tensor in base.adapter_tensors(adapter).items()}
    safetensors.torch.save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
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


def _stands(final: Path, digest: str) -> bool:
    """Whether this very version is there already: an earlier life of this trainer got that far."""
    try:
        verify_files(read_manifest(final / MANIFEST, digest), final)
    except Rejected:
        return False
    return True


def remove_old_versions(directory: Path, keep: int) -> None:
    """Keep the ``keep`` newest version directories. A directory that cannot be removed is left for the next time."""
    versions = sorted(path for path in directory.glob("v[0-9]*") if path.is_dir())
    for path in versions[: max(0, len(versions) - keep)]:
        shutil.rmtree(path, ignore_errors=True)
