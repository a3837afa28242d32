"""A weights version streamed into resident parameters (V5, V7, V8): planned whole, then written slice by slice.

    plan     the model's own ``load_weights`` is run on stand-ins: tensors without data, one per tensor of the files.
             Every slice it would copy is written down instead of copied: fused modules (qkv, gate_up), tied
             embeddings, padded vocabularies, tensor-parallel shards come out as that loader defines them.
    write    slice by slice from the files into the parameters, never more than the chunk at once.

Invariants:
- nothing is written while planning; a plan is for tensors of given names, shapes and types, whatever their values;
- a plan is refused unless it covers exactly what the model's own checkpoint covers;
- memory beside the parameters is one buffer of at most the chunk, on the host (pinned beside a GPU); a slice whose
  place is contiguous host memory is read straight into it.

A loader that computes with values (dequantises, concatenates) cannot be planned: ``NotStreamable`` says so.
Not here: digests and versions (``torch_weights``), what to do after a write that broke off (the engine). Needs torch.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from openrl_common.deltas import DELTA_FILE, INDEX, VALUE
from openrl_common.tensors import TensorHeader, read_header
from openrl_sampler.weights_layers import Layer, TensorShape, changed_names

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_READ_BYTES = 8 << 20
"""Slices that go through the buffer are at most this long on a host: it stays in the processor's cache."""
Look = Callable[[], None]
LoadWeights = Callable[[Iterable[tuple[str, Tensor]]], Any]


class NotStreamable(Exception):
    """The model's loader does something with a tensor that no copy of a slice can stand for."""


@dataclass(frozen=True, slots=True)
class Copy:
    """``target`` takes the elements of tensor ``name`` that ``stride`` and ``offset`` (in elements) select."""

    target: Tensor
    name: str
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Plan:
    """``copies`` in the order of the loader; ``covered``: elements written per parameter storage and place."""

    copies: tuple[Copy, ...]

    @property
    def num_elements(self) -> int:
        return sum(copy.target.numel() for copy in self.copies)

    @property
    def covered(self) -> frozenset[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
        """Which places are written: address, offset, shape, stride of each."""
        return frozenset(
            (
                c.target.untyped_storage()._cdata,
                int(c.target.storage_offset()),
                tuple(c.target.shape),
                c.target.stride(),
            )
            for c in self.copies
        )


# --- planning ----------------------------------------------------------------------------------------------------


class _Recorder(TorchDispatchMode):
    """Writes down copies out of stand-ins, swallows every other write to a real tensor, lets the rest through."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self._names = names
        self.copies: list[Copy] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
        written = [
            arguments[a.name]
            for a in func._schema.arguments
            if a.alias_info is not None and a.alias_info.is_write and arguments.get(a.name) is not None
        ]
        if written and not all(tensor.is_meta for tensor in written):
            if func is torch.ops.aten.copy_.default:
                self._copy(arguments["self"], arguments["src"])
            # Padding is filled with what it holds already; anything else leaves a gap that the coverage check finds.
            return arguments.get("self", written[0])
        return func(*args, **(kwargs or {}))

    def _copy(self, target: Tensor, source: Tensor) -> None:
        name = self._names.get(source.untyped_storage()._cdata) if source.is_meta else None
        if name is None:
            raise NotStreamable("the model's loader copies a tensor that it has computed")
        if source.shape != target.shape:
            source = source.expand(target.shape)
        self.copies.append(Copy(target, name, source.stride(), int(source.storage_offset())))


def make_plan(load_weights: LoadWeights, shapes: dict[str, TensorShape]) -> Plan:
    """What ``load_weights`` would copy where, were it given a checkpoint of these tensors.

    Args:
        shapes: name → (dtype in safetensors words, shape).

    Raises:
        NotStreamable: see there.
        Exception: whatever the loader raises on names and shapes that do not fit.
    """
    stand_ins = {}
    for name, (dtype, shape) in shapes.items():
        if dtype not in DTYPES:
            raise NotStreamable(f"tensor {name!r} has dtype {dtype}")
        stand_ins[name] = torch.empty(shape, dtype=DTYPES[dtype], device="meta")
    recorder = _Recorder({tensor.untyped_storage()._cdata: name for name, tensor in stand_ins.items()})
    with torch.no_grad(), recorder:
        try:
            load_weights(iter(stand_ins.items()))
        except (NotImplementedError, RuntimeError) as error:
            if "meta" in str(error):
                raise NotStreamable(f"the model's loader looks at values: {error}") from error
            raise
    return Plan(tuple(recorder.copies))


# --- writing -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Source:
    """Where a tensor lies: an open file and its header."""

    file: int
    header: TensorHeader


def write(plan: Plan, layers: Iterable[Layer], *, chunk_bytes: int, look: Look) -> int:
    """Copy every slice of every layer, in order; returns the elements written.

    ``look`` is called while a buffer is in use, for the peak of the memory. An exception in here leaves a mix of two
    versions: the caller must not serve it (V8).
    """
    buffer = _Buffer(chunk_bytes)
    with torch.no_grad():
        written = [(_write_delta if layer.delta else _write_whole)(plan, layer, buffer, look) for layer in layers]
    if buffer.pinned:
        torch.cuda.synchronize()
    return sum(written)


def _write_whole(plan: Plan, layer: Layer, buffer: _Buffer, look: Look) -> int:
    directory = Path(layer.directory)
    headers = {file: read_header(directory / file) for file in set(layer.files.values())}
    with opened(directory, headers) as files:
        for copy in plan.copies:
            file = layer.files[copy.name]
            _write_copy(copy, Source(files[file], headers[file][copy.name]), buffer, look)
    return plan.num_elements


def _write_delta(plan: Plan, layer: Layer, buffer: _Buffer, look: Look) -> int:
    """Whole tensors as above; positions and values piece by piece, through whatever slices of the tensor are
    resident."""
    directory, written = Path(layer.directory), 0
    header = read_header(directory / DELTA_FILE)
    copies: dict[str, list[Copy]] = {}
    for copy in plan.copies:
        copies.setdefault(copy.name, []).append(copy)
    with opened(directory, [DELTA_FILE]) as files:
        for name in changed_names(header):
            for copy in copies.get(name, ()):
                if name in header:
                    _write_copy(copy, Source(files[DELTA_FILE], header[name]), buffer, look)
                    written += copy.target.numel()
                else:
                    sparse = [Source(files[DELTA_FILE], header[name + suffix]) for suffix in (INDEX, VALUE)]
                    written += _scatter(copy, sparse[0], sparse[1], buffer, look)
    return written


@contextmanager
def opened(directory: Path, names: Iterable[str]) -> Iterator[dict[str, int]]:
    """Raises OSError."""
    with ExitStack() as stack:
        files: dict[str, int] = {}
        for name in names:
            files[name] = os.open(directory / name, os.O_RDONLY)
            stack.callback(os.close, files[name])
        yield files


def _write_copy(copy: Copy, source: Source, buffer: _Buffer, look: Look) -> None:
    for part, stride, offset in _slices(copy, source, buffer.limit(copy.target)):
        buffer.move(part, source, stride, offset)
        look()


_SCATTER_BYTES = 160
"""Memory per position of a delta, measured: the position, its coordinates and place in the parameter, its value."""


def _scatter(copy: Copy, index: Source, value: Source, buffer: _Buffer, look: Look) -> int:
    """Write the values whose positions lie in this slice; returns how many those were."""
    target, written = copy.target, 0
    flat = target.as_strided((_span(target.shape, target.stride()),), (1,)) if target.numel() else target
    most = max(1, buffer.limit(target) // _SCATTER_BYTES)
    for first in range(0, index.header.num_elements, most):
        count = min(most, index.header.num_elements - first)
        positions = read_part(index, first, count).to(torch.int64)
        inside, place = _places(positions, copy)
        values = read_part(value, first, count)[inside].to(target.dtype)
        flat[place.to(target.device)] = values.to(target.device)
        written += int(place.numel())
        look()
    return written


def _places(positions: Tensor, copy: Copy) -> tuple[Tensor, Tensor]:
    """Which positions of the tensor lie in the slice, and where in the target's memory those are."""
    rest = positions - copy.offset
    inside = rest >= 0
    place = torch.zeros_like(rest)
    for dim in sorted(range(copy.target.dim()), key=lambda d: copy.stride[d], reverse=True):
        step = max(1, copy.stride[dim])
        coordinate = rest // step if copy.target.shape[dim] > 1 else torch.zeros_like(rest)
        inside &= coordinate < copy.target.shape[dim]
        place += coordinate * copy.target.stride(dim)
        rest = rest - coordinate * step
    inside &= rest == 0
    return inside, place[inside]


def read_part(source: Source, first: int, count: int) -> Tensor:
    """``count`` elements from the ``first`` one on, flat, on the host. Raises OSError."""
    dtype = DTYPES[source.header.dtype]
    found = torch.empty(count, dtype=dtype)
    _read(source, source.header.begin + first * dtype.itemsize, found.data_ptr(), count * dtype.itemsize)
    return found


def _slices(copy: Copy, source: Source, limit_bytes: int) -> Iterator[tuple[Tensor, tuple[int, ...], int]]:
    """Parts of the target, their strides and offsets in the tensor, cut where the file is jumped through furthest."""
    target, size = copy.target, DTYPES[source.header.dtype].itemsize
    if target.dim() == 0 or target.numel() == 0:
        yield target, copy.stride, copy.offset
        return
    dim = max(range(target.dim()), key=lambda d: copy.stride[d])
    rows = max(1, limit_bytes // (max(1, copy.stride[dim]) * size))
    for first in range(0, target.shape[dim], rows):
        part = target.narrow(dim, first, min(rows, target.shape[dim] - first))
        offset = copy.offset + first * copy.stride[dim]
        if part.shape[dim] == 1 and _span(part.shape, copy.stride) * size > limit_bytes and target.dim() > 1:
            row = Copy(part.select(dim, 0), copy.name, _without(copy.stride, dim), offset)
            yield from _slices(row, source, limit_bytes)
        else:
            yield part, copy.stride, offset


def _without(values: tuple[int, ...], index: int) -> tuple[int, ...]:
    return values[:index] + values[index + 1 :]


def _span(shape: Iterable[int], stride: Iterable[int]) -> int:
    """Elements from the first to the last that a view touches."""
    return 1 + sum((count - 1) * step for count, step in zip(shape, stride, strict=True))


class _Buffer:
    """Reads slices: straight into the target where that is possible, else through one buffer that is used again."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._memory: Tensor | None = None
        self.pinned = False

    def limit(self, target: Tensor) -> int:
        return self._chunk_bytes if target.is_cuda else min(self._chunk_bytes, _READ_BYTES)

    def move(self, target: Tensor, source: Source, stride: tuple[int, ...], offset: int) -> None:
        if target.numel() == 0:
            return
        dtype = DTYPES[source.header.dtype]
        begin = source.header.begin + offset * dtype.itemsize
        contiguous = target.is_contiguous() and stride == _contiguous(target.shape)
        if target.device.type == "cpu" and contiguous and target.dtype == dtype:
            _read(source, begin, target.data_ptr(), target.numel() * dtype.itemsize)
            return
        num_bytes = _span(target.shape, stride) * dtype.itemsize
        memory = self._room(target, num_bytes)
        _read(source, begin, memory.data_ptr(), num_bytes)
        target.copy_(memory.view(dtype).as_strided(target.shape, stride))

    def _room(self, target: Tensor, num_bytes: int) -> Tensor:
        if self._memory is None or self._memory.numel() < num_bytes:
            self.pinned = target.is_cuda
            size = max(num_bytes, self.limit(target))
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned)
        return self._memory[:num_bytes]


def _contiguous(shape: Iterable[int]) -> tuple[int, ...]:
    sizes = list(shape)
    return tuple(math.prod(sizes[index + 1 :]) for index in range(len(sizes)))


def _read(source: Source, begin: int, address: int, num_bytes: int) -> None:
    memory = memoryview((ctypes.c_ubyte * num_bytes).from_address(address)).cast("B")
    while memory:
        count = os.preadv(source.file, [memory], begin)
        if count == 0:
            raise OSError(f"tensor {source.header.name!r} ends at byte {begin}, {len(memory)} are missing")
        memory, begin = memory[count:], begin + count
