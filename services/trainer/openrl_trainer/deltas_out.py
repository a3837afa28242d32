"""What changed since a parent version, as the tensors of a delta file (openrl_common.deltas has the format).

Values are compared as bits: -0.0 is not 0.0, and a NaN equals itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openrl_common.deltas import INDEX, VALUE

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WIDE = 1 << 31


def changed(parent: dict[str, Tensor], weights: dict[str, Tensor], bytes_max: int) -> dict[str, Tensor] | None:
    """The delta's tensors from ``parent`` to ``weights`` (same names, shapes and types).

    None when they would take more than ``bytes_max`` bytes: a whole version is better then.
    """
    found: dict[str, Tensor] = {}
    size = 0
    for name in sorted(weights):
        tensor = weights[name]
        new, old = (each.reshape(-1).view(_BITS[tensor.element_size()]) for each in (tensor, parent[name]))
        index = (new != old).nonzero().reshape(-1)
        if index.numel() == 0:
            continue
        index = index if tensor.numel() >= _WIDE else index.to(torch.int32)
        sparse = index.numel() * (index.element_size() + tensor.element_size())
        whole = tensor.numel() * tensor.element_size()
        size += min(sparse, whole)
        if size > bytes_max:
            return None
        if whole <= sparse:
            found[name] = tensor
        else:
            found[name + INDEX] = index
            found[name + VALUE] = tensor.reshape(-1)[index.long()]
    return found
