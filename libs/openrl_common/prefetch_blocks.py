"""A checkpoint as blocks to read, in the order in which a loader asks for its tensors (R1).

Loaders go through the tensors by name, numbers by their value; files have them by name, letter by letter: layer 10
before layer 2. Read in the loader's order, what it waits for is what comes next.

Only headers are read here, those of all files at once: on a network each is a wait of its own.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from openrl_common.tensors import TensorHeader, read_header

BLOCK_BYTES = 4 << 20
_HEADERS_AT_ONCE = 32
_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True)
class Block:
    """At most ``BLOCK_BYTES`` of a file; tensors next to each other share one."""

    path: Path
    offset: int
    num_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes


@dataclass
class Blocks:
    """``of_tensor``: the blocks that hold a tensor, as indices of ``blocks``."""

    blocks: list[Block] = field(default_factory=list)
    of_tensor: dict[str, range] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(block.num_bytes for block in self.blocks)

    def add(self, path: Path, tensor: TensorHeader) -> None:
        """Append a tensor, to the last block as far as it goes on there."""
        offset, first = tensor.begin, len(self.blocks)
        last = self.blocks[-1] if self.blocks else None
        if last is not None and last.path == path and last.end == offset and last.num_bytes < BLOCK_BYTES:
            offset = min(tensor.end, last.offset + BLOCK_BYTES)
            self.blocks[-1] = Block(path, last.offset, offset - last.offset)
            first -= 1
        while offset < tensor.end:
            self.blocks.append(Block(path, offset, min(BLOCK_BYTES, tensor.end - offset)))
            offset = self.blocks[-1].end
        self.of_tensor[tensor.name] = range(first, len(self.blocks)) if tensor.num_bytes else range(0)


def blocks_of(files: tuple[Path, ...]) -> Blocks:
    """The blocks of safetensors files. Raises Rejected as :func:`openrl_common.tensors.read_header` does."""
    with ThreadPoolExecutor(min(_HEADERS_AT_ONCE, len(files)), thread_name_prefix="headers") as threads:
        headers = list(threads.map(read_header, files))
    tensors = [(path, tensor) for path, found in zip(files, headers, strict=True) for tensor in found.values()]
    blocks = Blocks()
    for path, tensor in sorted(tensors, key=lambda one: loading_order(one[1].name)):
        blocks.add(path, tensor)
    return blocks


def loading_order(name: str) -> list[str | int]:
    """Sort key of a tensor's name: numbers by their value. Text and numbers alternate, so any two keys compare."""
    return [int(part) if place % 2 else part for place, part in enumerate(_DIGITS.split(name))]
