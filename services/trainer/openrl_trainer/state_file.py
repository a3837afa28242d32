"""A job's training state in one safetensors file: what ``save_state`` keeps and what checkpoints are made of (R5).

Holds the trained parameters, AdamW's moments, step counts and masters, and the gradients accumulated so far, so that
whoever loads it stands exactly where it was taken (random numbers need no state: they are seeded per log entry). One
file, because one rename replaces it whole. The file's ``openrl`` metadata says whose and from when it is.

    <home>/state/<tenant>/<job>/<name>.safetensors      named, replaced by the next of its name; any later incarnation
                                                        of the job may load it
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from openrl_common.errors import Rejected
from openrl_common.records import StateInfo
from openrl_common.states import read_info
from openrl_trainer.files import disk_errors, fsync_path
from openrl_trainer.fingerprint import check_base

if TYPE_CHECKING:
    from openrl_trainer.model import BaseModel

OPTIMIZER_SECTIONS = ("exp_avg", "exp_avg_sq", "step", "master")
SECTIONS = ("parameter", "gradient", *OPTIMIZER_SECTIONS)

State = dict[str, dict[str, Tensor]]
"""Section → parameter name → tensor; the sections are ``SECTIONS``."""


def write_state(path: Path, state: State, info: StateInfo) -> int:
    """Replace the file at ``path``; returns its size in bytes. Raises Rejected (``disk-full``, ``write-failed``)."""
    tensors = {
        f"{section}/{name}": tensor.detach().contiguous()
        for section in SECTIONS
        for name, tensor in state[section].items()
    }
    temporary = path.with_suffix(".writing")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            metadata = {"format": "pt", "openrl": msgspec.json.encode(info).decode()}
            safetensors.torch.save_file(tensors, temporary, metadata=metadata)
            size_bytes = temporary.stat().st_size
            fsync_path(temporary)
            os.replace(temporary, path)
            fsync_path(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    return size_bytes


def read_state(path: Path, parameters: dict[str, Tensor], base: BaseModel | None = None) -> tuple[State, StateInfo]:
    """Read and check a whole state before anything of it is used; with ``base``, that it is of these weights.

    Raises:
        Rejected: ``state-missing``, or ``bad-state`` naming both base models or the first tensor that does not fit.
    """
    if not path.is_file():
        raise Rejected(f"load_state: no state {path.stem!r} of this job at {path}", code="state-missing")
    try:
        tensors = safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise Rejected(f"load_state: {path} cannot be read: {error}", code="bad-state") from error
    info = read_info(path)
    if base is not None:
        check_base(path, info, base.path, base.fingerprint)
    state: State = {section: {} for section in SECTIONS}
    for key, tensor in tensors.items():
        section, _, name = key.partition("/")
        if section not in state or name not in parameters:
            raise Rejected(f"load_state: {path} has {key!r}, which this job does not", code="bad-state")
        wanted = parameters[name].shape if section != "step" else torch.Size(())
        if tensor.shape != wanted:
            raise Rejected(
                f"load_state: {path} has {key!r} with shape {list(tensor.shape)}, needed is {list(wanted)}",
                code="bad-state",
            )
        if not tensor.is_floating_point():
            raise Rejected(f"load_state: {path} has {key!r} of type {tensor.dtype}, no float", code="bad-state")
        if section == "step" and not (tensor.dtype is torch.float32 and 0 <= float(tensor) < float("inf")):
            raise Rejected(f"load_state: {path} has {key!r} = {tensor}, no number of steps", code="bad-state")
        state[section][name] = tensor
    absent = sorted(parameters.keys() - state["parameter"].keys())
    if absent:
        raise Rejected(f"load_state: {path} lacks {absent[0]!r} and {len(absent) - 1} more", code="bad-state")
    if not state["step"].keys() == state["exp_avg"].keys() == state["exp_avg_sq"].keys():
        raise Rejected(f"load_state: {path} has an incomplete optimizer state", code="bad-state")
    return state, info
