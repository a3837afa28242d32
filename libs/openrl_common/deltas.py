"""Delta versions (R11, V8): which elements of which tensors a version changed, since its parent.

A version of format ``delta`` has one file, ``delta.safetensors``. For every tensor ``T`` of the model that changed:

    T:index, T:value    flat positions (I32, I64 above 2³¹ elements), rising, and the new values there; or
    T                   all of it, where that is smaller

Tensors that are not in the file are as in the parent. ``manifest.json`` names the parent by version and by the digest
of its manifest, and so on down to the baseline, a version of format ``full``: whoever holds exactly the parent applies
one delta, everybody else begins at the baseline (``read_chain``).

Invariants: a chain is followed by digest, never by name alone; values are bits, whatever their type, so that a version
put together from a chain equals the trainer's own bit for bit.

Not here: where the result goes (a sampler's resident parameters), torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from openrl_common.errors import Rejected
from openrl_common.tensors import TensorHeader, read_header
from openrl_common.weights import MANIFEST, WeightsManifest, read_manifest, version_name

DELTA_FILE = "delta.safetensors"
CHAIN_MAX = 1000
INDEX, VALUE = ":index", ":value"

Bits = np.ndarray[Any, np.dtype[Any]]
"""A flat array of unsigned integers as wide as one value."""
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class Link:
    """One version of a chain, and where it lies."""

    manifest: WeightsManifest
    directory: Path


@dataclass(frozen=True)
class Change:
    """What happens to tensor ``name``: ``value`` at the flat positions ``index``, everywhere when that is None.

    ``dtype`` is the safetensors word; ``value`` holds bits.
    """

    name: str
    dtype: str
    index: Bits | None
    value: Bits


def read_chain(path: Path | str, digest: str | None = None) -> list[Link]:
    """The version at ``path`` (its manifest) and all that it builds on, baseline first.

    Raises:
        Rejected: as :func:`read_manifest`; ``weights-parent`` when a parent is another version than the one named.
    """
    directory = Path(path).parent
    links = [Link(read_manifest(path, digest), directory)]
    while (manifest := links[0].manifest).format == "delta":
        if manifest.parent is None or len(links) > CHAIN_MAX:
            raise Rejected(f"weights {links[0].directory}: its chain of deltas has no beginning", code="weights-parent")
        below = directory.parent / version_name(manifest.parent)
        try:
            parent = read_manifest(below / MANIFEST, manifest.parent_digest)
        except Rejected as error:
            raise Rejected(f"weights {links[0].directory} need their parent: {error}", code="weights-parent") from error
        if (parent.incarnation, parent.version) != (manifest.incarnation, manifest.parent):
            raise Rejected(f"weights {below} are not the parent that was named", code="weights-parent")
        links.insert(0, Link(parent, below))
    return links


def read_changes(directory: Path) -> Iterator[Change]:
    """The changes of one delta, tensor by tensor; nothing but the tensor in hand is held in memory.

    Raises:
        Rejected: ``weights-manifest``: the file is no sound delta.
    """
    path = directory / DELTA_FILE
    header = read_header(path)
    names = sorted({name.removesuffix(INDEX).removesuffix(VALUE) for name in header})
    for name in names:
        if name in header:
            yield Change(name, header[name].dtype, None, read_bits(path, header[name]))
            continue
        index, value = header.get(name + INDEX), header.get(name + VALUE)
        if index is None or value is None or index.dtype not in ("I32", "I64"):
            raise Rejected(f"weights file {path}: {name!r} lacks its index or its values", code="weights-manifest")
        if index.num_elements != value.num_elements:
            raise Rejected(
                f"weights file {path}: {name!r} has {index.num_elements} positions for {value.num_elements} values",
                code="weights-manifest",
            )
        yield Change(name, value.dtype, read_bits(path, index), read_bits(path, value))


def read_bits(path: Path, tensor: TensorHeader) -> Bits:
    """One tensor's values as bits, read from its file."""
    width = tensor.num_bytes // tensor.num_elements if tensor.num_elements else 1
    with path.open("rb") as file:
        return np.fromfile(file, dtype=_BITS[width], count=tensor.num_elements, offset=tensor.begin)


def apply_change(change: Change, target: Bits) -> None:
    """Write a change into a tensor's flat bits.

    Raises:
        Rejected: ``weights-manifest``: a position is outside, or the widths differ; nothing was written.
    """
    if change.value.dtype != target.dtype or target.ndim != 1:
        raise Rejected(f"change of {change.name!r}: its values are of another width", code="weights-manifest")
    if change.index is None:
        if change.value.size != target.size:
            raise Rejected(f"change of {change.name!r}: another number of values", code="weights-manifest")
        target[:] = change.value
        return
    last = int(change.index[-1]) if change.index.size else 0
    if last >= max(1, target.size) or np.any(change.index[1:] <= change.index[:-1]):
        raise Rejected(f"change of {change.name!r}: positions are outside or not rising", code="weights-manifest")
    target[change.index] = change.value


def materialize(chain: list[Link]) -> dict[str, Bits]:
    """Every tensor of the last version of ``chain`` as flat bits: the whole model in memory. For tools and tests."""
    baseline = chain[0]
    tensors: dict[str, Bits] = {}
    for name in sorted({tensor.file for tensor in baseline.manifest.tensors}):
        path = baseline.directory / name
        tensors |= {tensor.name: read_bits(path, tensor) for tensor in read_header(path).values()}
    for link in chain[1:]:
        for change in read_changes(link.directory):
            if change.name not in tensors:
                raise Rejected(f"change of {change.name!r}: the baseline has no such tensor", code="weights-manifest")
            apply_change(change, tensors[change.name])
    return tensors
