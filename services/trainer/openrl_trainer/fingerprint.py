"""Which weights a model directory holds, from a sample of its bytes, so that a state is not loaded onto others.

Invariants: the same tensors give the same fingerprint wherever the directory lies and however they are divided among
files; a bounded number of bytes is read, whatever the model's size. ``config.json`` has no part in it: a longer
context, for one, is set there, and is no other model.

Not here: proof. Weights that differ only where no sample lies have one fingerprint; training changes nearly every
tensor from its first bytes on.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from openrl_common.errors import Rejected
from openrl_common.records import StateInfo
from openrl_common.tensors import read_checkpoint

_TENSORS_MAX = 256
_BYTES_OF_EACH = 4096


def fingerprint(directory: Path) -> str:
    """32 hexadecimal digits: of every tensor's name, type and shape, and of the first bytes of at most 256 of them.

    Empty when the files cannot be read as safetensors: then nothing is known, and nothing is refused.
    """
    try:
        checkpoint = read_checkpoint(directory)
        names = sorted(checkpoint.tensors)
        shapes = [(name, checkpoint.tensors[name].dtype, checkpoint.tensors[name].shape) for name in names]
        digest = hashlib.sha256(msgspec.json.encode(shapes))
        for name in names[:: -(-len(names) // _TENSORS_MAX)]:
            tensor = checkpoint.tensors[name]
            with checkpoint.files[name].open("rb", buffering=0) as file:
                file.seek(tensor.begin)
                digest.update(file.read(min(tensor.num_bytes, _BYTES_OF_EACH)))
    except (Rejected, OSError):
        return ""
    return digest.hexdigest()[:32]


def check_base(state: Path, info: StateInfo, path: str, found: str) -> None:
    """Refuse a state of other weights than those at ``path``, whose fingerprint is ``found``.

    One that does not say which (saved by an earlier release) passes, as does one whose base model only lies elsewhere.

    Raises:
        Rejected: ``bad-state``, naming both.
    """
    if info.base_fingerprint and found and info.base_fingerprint != found:
        raise Rejected(
            f"{state} is of another base model: {info.base_model!r} as it was then ({info.base_fingerprint[:8]}), here"
            f" is {path!r} ({found[:8]}): use the one it was saved on",
            code="bad-state",
        )
