"""Headers of safetensors files, read without torch: names, dtypes, shapes, byte ranges. Never reads tensor data.

The estimator sizes models with it (M1), the trainer and the sampler check what they write and apply (R11, V6). A file
is hostile until proven otherwise: every length and offset is checked against the file before it is used.

Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header length, JSON header, data).
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from openrl_common.errors import Rejected

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_HEADER_BYTES_MAX = 100_000_000
_INDEX_BYTES_MAX = 100_000_000
_LENGTH_BYTES = 8
_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class TensorHeader:
    """One tensor: ``begin`` and ``end`` are byte offsets in its file (not in the data section)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Checkpoint:
    """All tensors of a model directory. ``files[name]`` is the file that holds tensor ``name``."""

    directory: Path
    tensors: dict[str, TensorHeader]
    files: dict[str, Path]

    @property
    def total_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def num_elements(self) -> int:
        return sum(tensor.num_elements for tensor in self.tensors.values())

    @property
    def largest(self) -> TensorHeader:
        """The tensor with most bytes; of equals the first by name."""
        return min(self.tensors.values(), key=lambda tensor: (-tensor.num_bytes, tensor.name))


def read_header(path: Path) -> dict[str, TensorHeader]:
    """The tensors of one file, in the order of their data.

    Raises:
        Rejected: not there, not readable, or not a sound safetensors file; names the file and what is wrong.
    """
    raw, file_bytes = _raw_header(path)
    length = len(raw)
    try:
        entries = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        decoded = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in entries.items()}
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _broken(path, f"its header is not valid ({error})") from error
    data_start = _LENGTH_BYTES + length
    headers = [_checked(path, name, entry, data_start) for name, entry in decoded.items()]
    headers.sort(key=lambda tensor: (tensor.begin, tensor.end))
    expected = data_start
    for tensor in headers:
        if tensor.begin != expected:
            raise _broken(
                path, f"tensor {tensor.name!r} begins at byte {tensor.begin}, expected {expected}: a hole or an overlap"
            )
        expected = tensor.end
    if expected != file_bytes:
        raise _broken(
            path, f"its tensors end at byte {expected}, the file has {file_bytes}: incomplete or not safetensors"
        )
    return {tensor.name: tensor for tensor in headers}


def read_metadata(path: Path) -> dict[str, str]:
    """The free metadata of one file. Raises Rejected as :func:`read_header` does."""
    read_header(path)
    raw, _ = _raw_header(path)
    return msgspec.json.decode(raw, type=_Metadata).values


class _Metadata(msgspec.Struct):
    values: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict)


def _raw_header(path: Path) -> tuple[bytes, int]:
    """The header's bytes, and how many the whole file has."""
    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if file_bytes < _LENGTH_BYTES or length > min(_HEADER_BYTES_MAX, file_bytes - _LENGTH_BYTES):
                raise _broken(
                    path, f"its header claims {length} bytes, the file has {file_bytes}: incomplete or not safetensors"
                )
            raw = file.read(length)
    except OSError as error:
        raise Rejected(
            f"{path}: {error.strerror or error}; give a readable safetensors file", code="unreadable"
        ) from error
    if len(raw) != length:
        raise _broken(path, f"read {len(raw)} of {length} header bytes")
    return raw, file_bytes


def checkpoint_files(directory: Path) -> tuple[Path, ...]:
    """The safetensors files of a model directory: those of its index, else ``model.safetensors``; sorted by name.

    Raises:
        Rejected: the directory has neither, the index is not readable, or it names a file that is missing.
    """
    return tuple(sorted(set(_files_by_tensor(directory).values()))) if _has_index(directory) else (_single(directory),)


def read_checkpoint(directory: Path) -> Checkpoint:
    """Headers of every file of a model directory, checked against its index when it has one.

    Raises:
        Rejected: as :func:`checkpoint_files` and :func:`read_header`; also an index that disagrees with the files.
    """
    tensors: dict[str, TensorHeader] = {}
    files: dict[str, Path] = {}
    for path in checkpoint_files(directory):
        for name, tensor in read_header(path).items():
            if name in tensors:
                raise _broken(path, f"tensor {name!r} is in {files[name].name} too")
            tensors[name], files[name] = tensor, path
    if not tensors:
        raise Rejected(f"{directory} holds no tensors: give a complete checkpoint", code="bad-checkpoint")
    if _has_index(directory):
        for name, path in _files_by_tensor(directory).items():
            if files.get(name) != path:
                raise _broken(directory / INDEX_NAME, f"tensor {name!r} is not in {path.name}, where the index puts it")
    return Checkpoint(directory=directory, tensors=tensors, files=files)


def _checked(path: Path, name: str, entry: _Entry, data_start: int) -> TensorHeader:
    begin, end = entry.data_offsets
    if entry.dtype not in _BITS:
        raise _broken(path, f"tensor {name!r} has the unknown dtype {entry.dtype!r}")
    if any(size < 0 for size in entry.shape) or not 0 <= begin <= end:
        raise _broken(path, f"tensor {name!r} has shape {entry.shape} and offsets {begin}..{end}")
    if math.prod(entry.shape) * _BITS[entry.dtype] != (end - begin) * 8:
        raise _broken(
            path, f"tensor {name!r} of shape {entry.shape} and dtype {entry.dtype} does not take {end - begin} bytes"
        )
    return TensorHeader(name, entry.dtype, tuple(entry.shape), data_start + begin, data_start + end)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _has_index(directory: Path) -> bool:
    return (directory / INDEX_NAME).is_file()


def _single(directory: Path) -> Path:
    path = directory / SINGLE_NAME
    if not path.is_file():
        raise Rejected(
            f"{directory} has neither {INDEX_NAME} nor {SINGLE_NAME}: give the directory of a safetensors model",
            code="no-model",
        )
    return path


def _files_by_tensor(directory: Path) -> dict[str, Path]:
    index = directory / INDEX_NAME
    try:
        if index.stat().st_size > _INDEX_BYTES_MAX:
            raise _broken(index, f"it has more than {_INDEX_BYTES_MAX} bytes")
        weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except OSError as error:
        raise Rejected(f"{index}: {error.strerror or error}", code="unreadable") from error
    except msgspec.MsgspecError as error:
        raise _broken(index, f"it is not a valid index ({error})") from error
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise _broken(index, f"it names {name!r}, which is not a safetensors file beside it")
    missing = [name for name in names if not (directory / name).is_file()]
    if missing or not names:
        raise _broken(index, f"missing: {', '.join(missing[:4]) or 'every file'}{' …' if len(missing) > 4 else ''}")
    return {tensor: directory / name for tensor, name in weight_map.items()}


def _broken(path: Path, what: str) -> Rejected:
    return Rejected(f"{path}: {what}; fetch or save the file again", code="bad-checkpoint")
