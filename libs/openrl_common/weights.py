"""Weights manifests (R11, V8): what a version directory holds, and how a reader makes sure of it.

A version directory appears complete under its final name or not at all (the trainer renames it into place)::

    <home>/weights/<tenant>/<job>/<incarnation>/v<version:06d>/
        manifest.json                    this module's WeightsManifest
        delta.safetensors                format "delta": what changed since the parent (openrl_common.deltas)
        model.safetensors, config.json   format "full": a Hugging Face model directory
        adapter_model.safetensors, adapter_config.json   format "lora": the PEFT layout

Invariants: every file but the manifest itself is listed with its size and SHA-256; every tensor of the safetensors
files is listed with its shape and type; a name never leaves the directory.

Not here: reading tensor data (that needs torch or numpy and belongs to trainer and sampler).
"""

from __future__ import annotations

import hashlib
from pathlib import Path, PurePosixPath

import msgspec

from openrl_common.errors import Rejected
from openrl_common.records import LoraSpec, Record, WeightsRecord
from openrl_common.tensors import read_header

MANIFEST = "manifest.json"
DELTA = "delta"
FORMATS = ("full", "lora", DELTA)
WEIGHTS_FORMATS = "weights_formats"
"""A sampler's ready record has this detail: the formats it takes, with commas. Without it: all but ``delta``."""
_BLOCK_BYTES = 4 * 1024 * 1024


class TensorInfo(Record, frozen=True, kw_only=True):
    """One tensor: ``dtype`` in safetensors words (``F32``, ``BF16`` …), ``bytes`` its size in the file."""

    name: str
    file: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


class FileInfo(Record, frozen=True, kw_only=True):
    sha256: str
    bytes: int


class WeightsManifest(Record, frozen=True, kw_only=True):
    """Contents of ``manifest.json``.

    Attributes:
        format: ``full``, ``lora`` or ``delta``.
        parent: the version this one was trained from (0 = the base model as it came).
        parent_digest: SHA-256 of the parent's manifest.json (``delta``).
        baseline: the version of format ``full`` that a chain of deltas begins at (``delta``).
        files: every file of the directory but the manifest, by name.
        lora: the adapter's settings for format ``lora``.
        seq: the training-log entry (04-R4) that asked for this version.
    """

    format: str
    tenant: str
    job: str
    incarnation: int
    version: int
    parent: int | None
    files: dict[str, FileInfo]
    tensors: tuple[TensorInfo, ...]
    largest_tensor_bytes: int
    total_bytes: int
    lora: LoraSpec | None = None
    base_model: str = ""
    seq: int = 0
    parent_digest: str = ""
    baseline: int | None = None


def job_directory(home: Path, tenant: str, job: str, incarnation: int) -> Path:
    return home / "weights" / tenant / job / str(incarnation)


def version_directory(home: Path, tenant: str, job: str, incarnation: int, version: int) -> Path:
    return job_directory(home, tenant, job, incarnation) / version_name(version)


def version_name(version: int) -> str:
    return f"v{version:06d}"


def encode_manifest(manifest: WeightsManifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2)


def read_manifest(path: Path | str, digest: str | None = None) -> WeightsManifest:
    """Read ``manifest.json``; with ``digest`` (SHA-256, hexadecimal) the bytes must match it.

    Raises:
        Rejected: code ``weights-missing`` (no such file), ``weights-digest`` (other bytes than announced) or
            ``weights-manifest`` (not a manifest, or one that contradicts itself). Names the file.
    """
    path = Path(path)
    try:
        body = path.read_bytes()
    except OSError as error:
        raise Rejected(f"weights manifest {path} cannot be read: {error.strerror}", code="weights-missing") from error
    found = hashlib.sha256(body).hexdigest()
    if digest is not None and found != digest:
        raise Rejected(f"weights manifest {path} has digest {found}, announced was {digest}", code="weights-digest")
    try:
        manifest = msgspec.json.decode(body, type=WeightsManifest)
    except msgspec.DecodeError as error:
        raise Rejected(f"weights manifest {path} is not usable: {error}", code="weights-manifest") from error
    problem = _contradiction(manifest)
    if problem:
        raise Rejected(f"weights manifest {path} is not usable: {problem}", code="weights-manifest")
    return manifest


def _contradiction(manifest: WeightsManifest) -> str:
    if manifest.format not in FORMATS:
        return f"format {manifest.format!r} is not one of {', '.join(FORMATS)}"
    if manifest.format == "delta" and not (manifest.parent_digest and manifest.parent is not None):
        return "a delta does not name its parent"
    for name in manifest.files:
        if PurePosixPath(name).name != name or name in ("", ".", "..", MANIFEST):
            return f"file name {name!r} is not a plain name inside the version directory"
    if len({tensor.name for tensor in manifest.tensors}) != len(manifest.tensors):
        return "two tensors have the same name"
    for tensor in manifest.tensors:
        if tensor.file not in manifest.files:
            return f"tensor {tensor.name!r} is in {tensor.file!r}, which is not listed"
    return ""


def verify_files(manifest: WeightsManifest, directory: Path | str) -> None:
    """Check every listed file in ``directory``: size, SHA-256, and tensor names, types and shapes of safetensors files.

    Reads every byte once. Nothing may be applied before this returned (V8).

    Raises:
        Rejected: ``weights-missing``, ``weights-digest`` or ``weights-manifest``, naming the file and both values.
    """
    directory = Path(directory)
    for name, info in manifest.files.items():
        path = directory / name
        try:
            size = path.stat().st_size
            found = hash_file(path) if size == info.bytes else ""
        except OSError as error:
            raise Rejected(f"weights file {path} cannot be read: {error.strerror}", code="weights-missing") from error
        if size != info.bytes:
            raise Rejected(f"weights file {path} has {size} bytes, listed are {info.bytes}", code="weights-digest")
        if found != info.sha256:
            raise Rejected(f"weights file {path} has digest {found}, listed is {info.sha256}", code="weights-digest")
        if name.endswith(".safetensors"):
            listed = {tensor.name: tensor for tensor in manifest.tensors if tensor.file == name}
            held = {tensor.name: tensor for tensor in read_tensor_infos(path)}
            for tensor in sorted(listed.keys() | held.keys()):
                if listed.get(tensor) != held.get(tensor):
                    raise Rejected(
                        f"weights file {path}: tensor {tensor!r} is {_brief(held.get(tensor))},"
                        f" listed is {_brief(listed.get(tensor))}",
                        code="weights-manifest",
                    )


def _brief(tensor: TensorInfo | None) -> str:
    return "absent" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"


def hash_file(path: Path) -> str:
    """SHA-256 of the file, hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def read_tensor_infos(path: Path) -> list[TensorInfo]:
    """What the header of a safetensors file lists.

    Raises:
        Rejected: the codes of :func:`openrl_common.tensors.read_header`, naming the file and what is wrong with it.
    """
    return [
        TensorInfo(name=tensor.name, file=path.name, shape=tensor.shape, dtype=tensor.dtype, bytes=tensor.num_bytes)
        for tensor in read_header(path).values()
    ]


def weights_record(manifest: WeightsManifest, directory: Path, digest: str) -> WeightsRecord:
    """The announcement of a version: what goes into openrl_weights and WeightsReady."""
    return WeightsRecord(
        tenant=manifest.tenant,
        job=manifest.job,
        incarnation=manifest.incarnation,
        version=manifest.version,
        parent=manifest.parent,
        format=manifest.format,
        manifest=str(directory / MANIFEST),
        digest=digest,
        total_bytes=manifest.total_bytes,
        largest_tensor_bytes=manifest.largest_tensor_bytes,
    )
