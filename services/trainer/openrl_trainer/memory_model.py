"""What a pass needs of the device's memory, and from it the token budget (R2) and the chunk of logits (R3).

    peak = resident                     weights, optimizer, gradients of earlier requests
         + the larger of
             tokens × kept + logits chunk + 3 × largest gradient            the head's backward pass, chunk by chunk
                                                                            (of some models all logits besides)
             tokens × kept × (1 + 1 / layers) + 2 × largest gradient        a layer's, while the others' values wait
             all gradients + largest gradient                               the end, when they are freed

``kept`` is what autograd keeps of a token until the backward pass, a layer's gradients are as large as its share of
that, and a largest gradient stands beside the sum that it is added to and, for an embedding that is also the head, the
new sum.

``kept`` is measured, not derived: a short pass under ``saved_tensors_hooks`` counts the bytes of every storage that
autograd keeps. It knows every architecture, adapters included, and is the same on every device but for the kernel
of attention. One that keeps scores (length × length) grows faster than tokens: the probe is as long as its limit allows
to see some of that, and the reserve of a tenth has to do for the rest.

Invariants: budgets follow from the declared bytes and the model alone, never from what happens to be free, so that a
trainer that is started again packs the same way (R5); the chunk follows from the budget and the model, so that whoever
repeats a request under its recorded budget takes the same chunks. CUDA's limit of the process is these declared bytes.

Not here: packing (packing.py), what happens when it was wrong (engine.py halves the budget once).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from openrl_trainer.packing import TOKEN_BUDGET_MAX, TOKEN_BUDGET_MIN

if TYPE_CHECKING:
    from openrl_trainer.model import BaseModel

PROBE_TOKENS = 64
_RESERVE = 0.1
"""Share of the memory beyond what is resident that is left alone: fragments, workspaces of kernels, attention."""
_LOGITS_COPIES = 2.5
"""Float32 sizes of a chunk's logits at once in the backward pass: logits, their gradient, that in bfloat16."""
_CAP_COPIES = 2.0
"""More of them where the logits are capped: before it and after."""
_WHOLE_COPIES = 3.0
"""Sizes of all logits at once, in the model's type, where they cannot come in chunks: those that count, their gradient,
and that of all positions."""
_LOGITS_SHARE = 0.5
"""A chunk's logits in all copies, over what autograd keeps of a full pass: small budgets get small chunks."""
_CHUNK_BYTES_MAX = {"cpu": 64 << 20, "cuda": 256 << 20}
"""Bytes of one float32 copy of a chunk's logits at most: larger ones are no faster."""
_TOKEN_BUDGET_UNKNOWN = 8_192


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """Bytes, of one job on its base model."""

    weights_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    largest_gradient_bytes: int
    kept_bytes_per_token: float
    layers: int
    vocabulary: int
    chunk_bytes_max: int
    logits_copies: float = _LOGITS_COPIES
    whole_logits_bytes_per_token: float = 0.0
    gathered_bytes: int = 0

    @property
    def resident_bytes(self) -> int:
        """In every pass: weights, optimizer, the gradients of earlier requests, what is gathered of a sharded model."""
        return self.weights_bytes + self.optimizer_bytes + self.gradient_bytes + self.gathered_bytes

    def peak_bytes(self, tokens: int) -> int:
        """The most that a forward and backward pass over ``tokens`` holds at once."""
        kept = tokens * self.kept_bytes_per_token
        chunk = self.logits_copies * 4 * min(tokens, self.chunk_tokens(tokens)) * self.vocabulary
        whole = tokens * self.whole_logits_bytes_per_token
        head = kept + whole + chunk + 3 * self.largest_gradient_bytes
        layer = kept * (1 + 1 / max(1, self.layers)) + 2 * self.largest_gradient_bytes
        end = self.gradient_bytes + self.largest_gradient_bytes
        return self.resident_bytes + round(max(head, layer, end))

    def chunk_tokens(self, token_budget: int) -> int:
        """Tokens whose logits exist at once (R3), for passes of up to ``token_budget`` tokens."""
        one_copy = token_budget * self.kept_bytes_per_token * _LOGITS_SHARE / self.logits_copies
        return max(1, int(min(self.chunk_bytes_max, one_copy)) // (4 * self.vocabulary))

    def token_budget(self, device_bytes: int) -> int:
        """Tokens of a pass whose peak stays within ``device_bytes``, within TOKEN_BUDGET_MIN and _MAX; 0 = unknown."""
        if device_bytes <= 0:
            return _TOKEN_BUDGET_UNKNOWN
        free = int((device_bytes - self.resident_bytes) * (1 - _RESERVE))
        budget, step = 0, TOKEN_BUDGET_MAX
        while step:
            if budget + step <= TOKEN_BUDGET_MAX and self.peak_bytes(budget + step) - self.resident_bytes <= free:
                budget += step
            step //= 2
        return max(TOKEN_BUDGET_MIN, budget)


def memory_model(
    base: BaseModel, trained: Mapping[str, Tensor], *, adapter: str = "", float32_masters: bool = False
) -> MemoryModel:
    """The memory of training ``trained``, parameters of ``base`` that is on its device; runs a short pass over it.

    Of a sharded model (sharded.py) a rank has its part of everything, and in a pass what is gathered.
    """
    if adapter:
        base.activate(adapter)
    sharding = base.sharding
    ranks = 1 if sharding is None else sharding.count
    sizes = [(-(-tensor.numel() // ranks), tensor.element_size()) for tensor in trained.values()]
    trained_bytes = sum(count * size for count, size in sizes)
    return MemoryModel(
        weights_bytes=-(-base.parameter_bytes // ranks) + (trained_bytes if adapter else 0),
        gradient_bytes=trained_bytes,
        # two moments in the parameter's type, or with masters these and the master in float32
        optimizer_bytes=sum(count * (12 if float32_masters and size < 4 else 2 * size) for count, size in sizes),
        largest_gradient_bytes=max((count * size for count, size in sizes), default=0),
        kept_bytes_per_token=probe(base) if sharding is None else sharding.kept_bytes_per_token,
        layers=base.sizes["layers"],
        vocabulary=base.vocabulary,
        chunk_bytes_max=_CHUNK_BYTES_MAX.get(base.device.type, _CHUNK_BYTES_MAX["cpu"]),
        logits_copies=_LOGITS_COPIES + (_CAP_COPIES if base.caps_logits else 0.0),
        whole_logits_bytes_per_token=0.0
        if base.split_head
        else _WHOLE_COPIES * base.sizes["value_bytes"] * base.vocabulary,
        gathered_bytes=0 if sharding is None else sharding.gathered_bytes,
    )


def probe(base: BaseModel) -> float:
    """``kept_bytes_per_token`` of a model that is whole, with the adapter that is active."""
    return kept_bytes_per_token(
        base.hidden,
        base.tensors(),
        vocabulary=base.vocabulary,
        length=min(PROBE_TOKENS, base.length_max),
        device=base.device,
    )


def kept_bytes_per_token(
    hidden: Callable[[Tensor], Tensor], owned: Iterable[Tensor], *, vocabulary: int, length: int, device: torch.device
) -> float:
    """Bytes that autograd keeps for the backward pass, for each token of a sequence of ``length``.

    Args:
        hidden: token ids [1, length] → decoder output.
        owned: parameters and buffers, which are kept anyway.
    """
    known = {tensor.untyped_storage().data_ptr() for tensor in owned}
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.arange(length, device=device).remainder(vocabulary).unsqueeze(0)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        output = hidden(ids)
    count(output)
    return sum(kept.values()) / length


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was short: CUDA's error, Python's, or what torch's allocator on a CPU says."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
