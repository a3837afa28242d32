"""The resident model of the torch engine: read from a local directory, never from a hub. Needs torch and transformers.

Also what the configuration says about it: vocabulary, longest sequence, eos, memory per cached token.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from openrl_common.arriving import load_arriving
from openrl_common.errors import Rejected
from openrl_common.prefetch import Prefetch
from openrl_common.records import JobKind
from openrl_sampler.tokenizer import Tokenizer

_KV_SHARE = 0.8
"""Share of what the weights leave of the seat that keys and values may fill; the rest is for activations."""
_LAYERS_SERVED = {"full_attention", "sliding_attention"}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NO_LIMIT = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOptions:
    """``device_bytes``: what the seat declares, 0 = not known. ``max_model_len`` 0 = what the config allows."""

    model_path: Path
    kind: JobKind
    dtype: str = "auto"
    max_model_len: int = 0
    max_rank: int = 0
    device_bytes: int = 0
    max_num_seqs: int = 256
    prefill_tokens: int = 8192
    max_adapters: int = 32
    chunk_bytes: int = 256 << 20
    headroom_bytes: int = 0
    keeps_running: bool = True


class ResidentModel:
    """A loaded model and its tokenizer, which is read only when somebody needs it."""

    def __init__(self, options: TorchOptions, prefetch: Prefetch | None = None) -> None:
        """Raises Rejected, naming the path and what is wrong with it."""
        self._path = options.model_path
        self.tokenizer = Tokenizer(options.model_path)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.type == "cuda":
            # cuDNN's attention compiles a plan for every new shape, and keys grow by one with every step.
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.model = _read(self._path, options.dtype, self.device, prefetch)
        config = self.model.config.get_text_config(decoder=True)
        self.vocabulary_size = int(config.vocab_size)
        longest = int(getattr(config, "max_position_embeddings", 0) or 2048)
        self.max_model_len = min(options.max_model_len or longest, longest)
        self.eos = self.tokenizer.eos()
        self.kv_tokens_max = self._kv_budget(config, options)

    def _kv_budget(self, config: Any, options: TorchOptions) -> int:
        """Tokens of keys and values that fit the seat beside weights and an update of them (V4); a very large number
        when the seat declares nothing."""
        if not options.device_bytes:
            return _NO_LIMIT
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        per_token = 2 * config.num_hidden_layers * heads * size * self.model.dtype.itemsize
        parameters = [p.numel() * p.element_size() for p in self.model.parameters()]
        update = options.headroom_bytes or min(options.chunk_bytes, max(parameters))
        need = sum(parameters) + (update if options.kind is JobKind.FFT else 0)
        tokens = int((options.device_bytes - need) * _KV_SHARE) // per_token
        if tokens < 1:
            raise Rejected(
                f"the seat declares {options.device_bytes} bytes, the weights of {self._path} and room for their"
                f" updates alone need {need}: declare more device memory",
                code="too-small",
            )
        return tokens


def _read(path: Path, dtype: str, device: torch.device, prefetch: Prefetch | None) -> Any:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if not (path / "config.json").is_file():
        raise Rejected(f"base model {path} has no config.json: give a Hugging Face model directory", code="bad-model")
    chosen = _DTYPES.get(dtype, torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        model: Any = load_arriving(transformers, path, dtype=chosen, device=device, prefetch=prefetch)
    except Rejected:
        raise
    except Exception as error:  # transformers and safetensors raise many kinds for files that do not fit
        raise Rejected(f"base model {path} cannot be loaded: {error}", code="bad-model") from error
    foreign = set(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()) - _LAYERS_SERVED
    if foreign:
        raise Rejected(
            f"base model {path} has {sorted(foreign)[0]} layers: the torch engine cannot serve it, use vllm",
            code="bad-model",
        )
    loaded: Any = model.to(device)
    return loaded.eval().requires_grad_(False)
