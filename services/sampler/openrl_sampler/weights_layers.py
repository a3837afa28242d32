"""Which files bring the resident weights to a version (V8): a whole version, one delta on its exact parent, or a whole
chain from its baseline. Reads headers, digests and positions; writes nothing. No torch.

Everything that can be found wrong is found here, before the first write: another version than announced, a missing or
changed file, a parent that is not the one named, positions outside a tensor or not rising.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from openrl_common.deltas import DELTA_FILE, INDEX, VALUE, read_chain
from openrl_common.errors import Rejected
from openrl_common.records import WeightsRecord
from openrl_common.tensors import TensorHeader, read_header
from openrl_common.weights import WeightsManifest, read_manifest, verify_files

TensorShape = tuple[str, tuple[int, ...]]
"""Type in safetensors words, and shape."""
INDEX_DTYPES: dict[str, np.dtype[Any]] = {"I32": np.dtype(np.int32), "I64": np.dtype(np.int64)}
PIECE_ELEMENTS = 1 << 20
_VERIFIED_MAX = 64
_verified: OrderedDict[Path, tuple[object, ...]] = OrderedDict()
"""Version directories whose files were verified, and what the file system said of them then."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Files to write over what is there. ``files``: tensor → file name; a delta's one file is not listed."""

    directory: str
    delta: bool
    files: dict[str, str]
    shapes: dict[str, TensorShape]


@dataclass(frozen=True, slots=True)
class Resident:
    """What is served: the announced version (None = the base model) and its tensors."""

    record: WeightsRecord | None
    shapes: dict[str, TensorShape]


def layers_of(
    record: WeightsRecord, manifest: WeightsManifest, directory: Path, resident: Resident | None
) -> tuple[list[Layer], dict[str, TensorShape]]:
    """What to write for this version, in order, and the tensors it then has. ``resident`` None: begin at the baseline.

    Raises:
        Rejected: with the code of what is wrong (``weights-…``); names the file.
    """
    check_announced(record, manifest, directory)
    if manifest.format == "full":
        whole = _whole(manifest, directory)
        return [whole], whole.shapes
    if manifest.format != "delta":
        raise Rejected(
            f"weights {directory} have format {manifest.format!r}, a sampler of full weights takes 'full' and 'delta'",
            code="weights-format",
        )
    if resident is not None and resident.record is not None and _is_parent(resident.record, manifest):
        return [_delta(manifest, directory, resident.shapes)], resident.shapes
    chain = read_chain(record.manifest, record.digest)
    baseline = _whole(chain[0].manifest, chain[0].directory)
    return [
        baseline,
        *(_delta(link.manifest, link.directory, baseline.shapes) for link in chain[1:]),
    ], baseline.shapes


def layers_again(record: WeightsRecord) -> tuple[list[Layer], dict[str, TensorShape]]:
    """What brings back a version that served before, from its baseline. Raises Rejected."""
    manifest = read_manifest(record.manifest, record.digest)
    return layers_of(record, manifest, Path(record.manifest).parent, None)


def check_announced(record: WeightsRecord, manifest: WeightsManifest, directory: Path) -> None:
    """Raise Rejected when the manifest is of another version than announced."""
    announced = (record.tenant, record.job, record.incarnation, record.version)
    held = (manifest.tenant, manifest.job, manifest.incarnation, manifest.version)
    if announced != held:
        raise Rejected(f"weights {directory} hold {held}, announced were {announced}", code="weights-manifest")


def check_manifest(record: WeightsRecord, manifest: WeightsManifest, directory: Path, weights_format: str) -> None:
    """The manifest is of the version that was announced, and all its files are what it lists. Raises Rejected."""
    check_announced(record, manifest, directory)
    if manifest.format != weights_format:
        raise Rejected(
            f"weights {directory} have format {manifest.format!r}, this sampler takes {weights_format!r}",
            code="weights-format",
        )
    verify_once(manifest, directory)


def _is_parent(record: WeightsRecord, manifest: WeightsManifest) -> bool:
    return (record.version, record.digest) == (manifest.parent, manifest.parent_digest)


def _whole(manifest: WeightsManifest, directory: Path) -> Layer:
    verify_once(manifest, directory)
    return Layer(
        directory=str(directory),
        delta=False,
        files={tensor.name: tensor.file for tensor in manifest.tensors},
        shapes={tensor.name: (tensor.dtype, tuple(tensor.shape)) for tensor in manifest.tensors},
    )


def _delta(manifest: WeightsManifest, directory: Path, shapes: dict[str, TensorShape]) -> Layer:
    verify_once(manifest, directory)
    path = directory / DELTA_FILE
    header = read_header(path)
    for name in changed_names(header):
        if name not in shapes:
            raise Rejected(f"weights file {path}: tensor {name!r} is not in the baseline", code="weights-shape")
        problem = _problem(path, header, name, shapes[name])
        if problem:
            raise Rejected(f"weights file {path}: tensor {name!r} {problem}", code="weights-shape")
    return Layer(directory=str(directory), delta=True, files={}, shapes=shapes)


def verify_once(manifest: WeightsManifest, directory: Path) -> None:
    """``verify_files``, which reads every byte, unless that was done and no file has been written since.

    So versions are verified beside generation, and applied in the time that writing takes. Raises Rejected.
    """
    try:
        found = [(name, info, os.stat(directory / name)) for name, info in sorted(manifest.files.items())]
    except OSError:
        found = []  # verify_files says which
    facts = tuple((name, info.sha256, seen.st_ino, seen.st_size, seen.st_mtime_ns) for name, info, seen in found)
    if facts and _verified.get(directory) == facts:
        return
    _verified.pop(directory, None)
    verify_files(manifest, directory)
    _verified[directory] = facts
    while len(_verified) > _VERIFIED_MAX:
        _verified.popitem(last=False)


def changed_names(header: dict[str, TensorHeader]) -> list[str]:
    return sorted({name.removesuffix(INDEX).removesuffix(VALUE) for name in header})


def _problem(path: Path, header: dict[str, TensorHeader], name: str, shape: TensorShape) -> str:
    dtype, sizes = shape
    if name in header:
        held = header[name]
        return "" if (held.dtype, tuple(held.shape)) == shape else f"is {held.dtype} {list(held.shape)}, not {shape}"
    index, value = header.get(name + INDEX), header.get(name + VALUE)
    if index is None or value is None or index.dtype not in INDEX_DTYPES:
        return "lacks its positions or its values"
    if value.dtype != dtype or index.num_elements != value.num_elements:
        return f"has {index.num_elements} positions for {value.num_elements} values of {value.dtype}, wanted {dtype}"
    before, num_elements = -1, int(np.prod(sizes, dtype=np.int64))
    for piece in pieces(path, index):
        if int(piece[0]) <= before or int(piece[-1]) >= num_elements or np.any(piece[1:] <= piece[:-1]):
            return "has positions that are outside or not rising"
        before = int(piece[-1])
    return ""


def pieces(path: Path, index: TensorHeader, most: int = PIECE_ELEMENTS) -> Iterator[np.ndarray[Any, Any]]:
    """The positions of one tensor, at most ``most`` at a time."""
    dtype = INDEX_DTYPES[index.dtype]
    for first in range(0, index.num_elements, most):
        count = min(most, index.num_elements - first)
        yield np.fromfile(path, dtype=dtype, count=count, offset=index.begin + first * dtype.itemsize)
