"""Weights versions on disk (R11): a directory per version, complete under its final name or absent.

Format ``full`` is a Hugging Face directory that ``from_pretrained`` loads (tied embeddings stored once); ``lora`` is
the PEFT layout that ``PeftModel.from_pretrained`` loads; ``delta`` holds the elements that changed since the version
before, all optimizer steps in between. Nothing in it depends on the clock, so that a replayed log (R5) finds its own
directory standing.

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

import msgspec
import safetensors.torch
import torch
from torch import Tensor

from openrl_common.deltas import DELTA_FILE
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
from openrl_trainer.deltas_out import changed
from openrl_trainer.files import disk_errors, publish_directory, temporary_directory
from openrl_trainer.model import BaseModel

_WORTHWHILE = 0.8
"""A delta is written when it has at most this share of a whole version's bytes."""


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
    """What a version is written from: the adapter in PEFT's layout, or the whole model when ``adapter`` is empty.

    Of a sharded model rank 0 gets the whole; all ranks call it (R14).
    """
    if base.sharding is not None:
        return base.sharding.copy_model(base.model, host_copy)
    source: Weights = base.adapter_tensors(adapter) if adapter else base.model.state_dict()
    copies: dict[tuple[int, torch.Size], Tensor] = {}
    return {
        name: copies.setdefault((tensor.data_ptr(), tensor.shape), host_copy(tensor)) for name, tensor in source.items()
    }


class VersionWriter:
    """Writes one job's versions. Whole ones are baselines; a delta is written where allowed, and where it is smaller.

    For deltas it keeps the weights of the version it wrote last: as many bytes of host memory as the model has. A
    restarted trainer has none, and begins with a baseline.
    """

    def __init__(self, home: Path, base: BaseModel, *, baseline_every: int) -> None:
        self._home = home
        self._base = base
        self._baseline_every = baseline_every
        self._parent: _Parent | None = None

    def write(self, request: VersionRequest, weights: Weights, *, deltas: bool = False) -> WeightsRecord:
        """Write one version.

        Raises:
            Rejected: ``disk-full`` or ``write-failed``; the versions before it are untouched.
        """
        parent, self._parent = self._parent, None
        final = version_directory(self._home, request.tenant, request.job, request.incarnation, request.version)
        with disk_errors(final):
            if (standing := _standing(final, request)) is not None:
                return standing
            with temporary_directory(final) as temporary:
                manifest = self._fill(temporary, request, weights, parent if deltas else None)
                body = encode_manifest(manifest)
                (temporary / MANIFEST).write_bytes(body)
                shutil.rmtree(final, ignore_errors=True)
                publish_directory(temporary, final)
        digest = hashlib.sha256(body).hexdigest()
        if deltas:
            self._parent = self._next_parent(manifest, digest, weights, parent)
        return weights_record(manifest, final, digest)

    def _fill(
        self, directory: Path, request: VersionRequest, weights: Weights, parent: _Parent | None
    ) -> WeightsManifest:
        if request.adapter:
            _write_adapter(self._base, request.adapter, weights, directory)
            return _describe(directory, self._base.path, request, "lora")
        if parent is not None and parent.version == request.parent and parent.length < self._baseline_every:
            named = {name: weights[name] for name in parent.weights}
            whole = sum(tensor.numel() * tensor.element_size() for tensor in named.values())
            delta = changed(parent.weights, named, int(_WORTHWHILE * whole))
            if delta is not None:
                safetensors.torch.save_file(delta, directory / DELTA_FILE, metadata={"format": "pt"})
                manifest = _describe(directory, self._base.path, request, "delta")
                return msgspec.structs.replace(manifest, parent_digest=parent.digest, baseline=parent.baseline)
        self._base.model.save_pretrained(str(directory), state_dict=dict(weights))
        return _describe(directory, self._base.path, request, "full")

    def _next_parent(
        self, manifest: WeightsManifest, digest: str, weights: Weights, parent: _Parent | None
    ) -> _Parent | None:
        if manifest.format == "delta":
            assert parent is not None
            named = {name: weights[name] for name in parent.weights}
            return _Parent(manifest.version, digest, named, parent.baseline, parent.length + 1)
        if manifest.format != "full":
            return None
        shapes = {tensor.name: tensor.shape for tensor in manifest.tensors}
        if any(name not in weights or tuple(weights[name].shape) != shape for name, shape in shapes.items()):
            return None  # an architecture whose files name their tensors otherwise: whole versions only
        return _Parent(manifest.version, digest, {name: weights[name] for name in shapes}, manifest.version, 0)


@dataclass(frozen=True)
class _Parent:
    """The version written last: ``weights`` under the names of its files; ``length`` deltas since ``baseline``."""

    version: int
    digest: str
    weights: Weights
    baseline: int
    length: int


def _write_adapter(base: BaseModel, adapter: str, weights: Weights, directory: Path) -> None:
    safetensors.torch.save_file(weights, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = copy.deepcopy(base.adapter_config(adapter))
    config.inference_mode = True
    config.save_pretrained(str(directory))


def _describe(directory: Path, base_model: str, request: VersionRequest, weights_format: str) -> WeightsManifest:
    paths = sorted(directory.iterdir())
    files = {path.name: FileInfo(sha256=hash_file(path), bytes=path.stat().st_size) for path in paths}
    tensors = [info for path in paths if path.suffix == ".safetensors" for info in read_tensor_infos(path)]
    return WeightsManifest(
        format=weights_format,
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
    """Keep the ``keep`` newest versions, the versions ``served``, and what any of these builds on.

    A directory that cannot be removed is left for the next time.
    """
    # Somebody's own copy of a version (v000003.bak) is none, and not ours to remove.
    found = [path for path in directory.glob("v*") if path.name[1:].isdecimal() and path.is_dir()]
    versions = {int(path.name[1:]): path for path in found}
    kept: set[int] = set()
    wanted = [*sorted(versions)[-keep:], *served]
    while wanted:
        version = wanted.pop()
        if version in versions and version not in kept:
            kept.add(version)
            wanted += _builds_on(versions[version])
    for version in versions.keys() - kept:
        shutil.rmtree(versions[version], ignore_errors=True)


def _builds_on(directory: Path) -> list[int]:
    try:
        manifest = read_manifest(directory / MANIFEST)
    except Rejected:
        return []
    return [manifest.parent] if manifest.format == "delta" and manifest.parent is not None else []
