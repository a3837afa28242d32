"""The base model of a trainer, and the adapters on it.

One process holds one base: trained whole (FFT) or frozen under one LoRA adapter per job. Everything here is ordinary
transformers and peft; what is added is where the log-probabilities are taken (decoder output and head apart, so that
logits come in chunks, R3) and that an adapter's initial values depend on its job's seed alone (R5, R9).

Invariants: only local files are read; exactly one adapter is active, the one of the job being served; the base model
runs in evaluation mode (no dropout), so that its log-probabilities are the sampler's; adapters of other jobs never get
gradients.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import safetensors
import torch
import transformers
from torch import Tensor, nn

from openrl_common.arriving import load_arriving
from openrl_common.errors import Rejected
from openrl_common.prefetch import Prefetch
from openrl_common.records import LoraSpec
from openrl_trainer.fingerprint import fingerprint
from openrl_trainer.losses import chunked_logprobs
from openrl_trainer.model_path import check_model_path

if TYPE_CHECKING:
    import peft

    from openrl_trainer.sharded import Sharding

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PROBE_TOKENS = 8


def prepare_torch(num_threads: int, device_bytes: int, rank: int = 0) -> torch.device:
    """Deterministic algorithms, thread count, device; on CUDA never more memory than the seat declares.

    CUDA needs ``CUBLAS_WORKSPACE_CONFIG=:4096:8`` in the environment before this is called. ``rank``: which of the
    devices that this worker sees.

    Raises:
        Rejected: ``no-devices``: it sees fewer GPUs than its seat has devices.
    """
    cast(Any, transformers.utils.logging).disable_progress_bar()
    torch.set_num_threads(num_threads)
    # Never warn_only: with it the backward passes of CUDA's attention kernels choose their non-deterministic form (R5).
    torch.use_deterministic_algorithms(True)
    # Nothing here reads memory before it is written; filling it costs a tenth of a step, and parking most of R13.
    cast(Any, torch.utils.deterministic).fill_uninitialized_memory = False
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # cuDNN's attention compiles a plan for every new shape (a tenth of a second each), and batches have many.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if rank >= torch.cuda.device_count():
        raise Rejected(
            f"{torch.cuda.device_count()} GPU(s) are visible and {rank + 1} are needed: CUDA_VISIBLE_DEVICES is"
            f" {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')!r}",
            code="no-devices",
        )
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    if device_bytes > 0:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, device_bytes / total), device)
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto``: bfloat16 on CUDA, float32 on CPUs. Raises Rejected (``bad-dtype``) for anything unknown."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in _DTYPES:
        raise Rejected(f"dtype {name!r} is unknown: use auto, {' or '.join(_DTYPES)}", code="bad-dtype")
    return _DTYPES[name]


class BaseModel:
    """A causal language model on its device, with named LoRA adapters.

    Attributes:
        model: the transformers model (peft changes its layers in place, the object stays).
        fingerprint: of the weights at ``path`` (fingerprint.py), as they were loaded.
        length_max: tokens of the longest sequence it takes.
        vocabulary: number of token ids it knows.
        parameter_bytes: of the model alone, whatever adapters are on it: what follows from it must not depend on which
            jobs came first (R5).
        caps_logits: the head ends with a soft cap, which takes two more copies of a chunk's logits.
        split_head: False when decoder and head apart do not give the model's own logits (it does something to them
            that ``head`` does not know); log-probabilities then come from whole logits.
        score: what a pass calls: ``logprobs``, through FSDP2 where the model is sharded.
        sharding: how it is divided among ranks; None: this process has it whole.
    """

    def __init__(
        self,
        path: str,
        *,
        dtype: str,
        device: torch.device,
        frozen: bool,
        length_max: int = 0,
        prefetch: Prefetch | None = None,
    ) -> None:
        """``prefetch``: runs in another thread; the model is loaded as its tensors arrive (R1)."""
        directory = check_model_path(path)
        chosen = choose_dtype(dtype, device)
        try:
            loaded = load_arriving(transformers, directory, dtype=chosen, device=device, prefetch=prefetch)
        except (OSError, ValueError, KeyError, RuntimeError, safetensors.SafetensorError) as error:
            reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
            raise Rejected(f"base model {path!r} cannot be loaded: {reason}", code="bad-model") from error
        self.model = cast(Any, loaded)
        self.path = path
        self.fingerprint = fingerprint(directory)
        self.device = device
        self.model.to(device)
        self.model.eval()
        self.model.config.use_cache = False
        self.model.requires_grad_(not frozen)
        self.vocabulary = int(self.model.get_input_embeddings().weight.shape[0])
        known = int(getattr(self.model.config.get_text_config(), "max_position_embeddings", 0) or 0)
        self.length_max = min(length_max or known or 1 << 30, known or 1 << 30)
        self.parameter_bytes = sum(tensor.numel() * tensor.element_size() for tensor in self.model.parameters())
        self.linear_names = _linear_names(self.model)
        self._peft: peft.PeftModel | None = None
        self._active = ""
        self.score: Callable[[Tensor, Tensor, Tensor, int], Tensor] = self.logprobs
        self.sharding: Sharding | None = None
        for finish, caps_logits in _finishes(self.model.config.get_text_config()):
            self._finish, self.caps_logits = finish, caps_logits
            self.split_head = self._probe_head()
            if self.split_head:
                break

    # --- forward ------------------------------------------------------------------------------------------------

    def hidden(self, ids: Tensor) -> Tensor:
        """Decoder output [rows, length, hidden] of right-padded ``ids``; causal, so padding needs no mask."""
        output: Tensor = self.model.get_decoder()(input_ids=ids, use_cache=False)[0]
        return output

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of decoder outputs; see ``split_head``."""
        return self._finish(self.model.get_output_embeddings()(hidden))

    def logits(self, ids: Tensor) -> Tensor:
        """Whole logits [rows, length, vocabulary] as the model itself gives them."""
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits

    def logprobs(self, ids: Tensor, positions: Tensor, targets: Tensor, chunk_tokens: int) -> Tensor:
        """Log-probabilities [tokens] of ``targets`` at the flat ``positions`` of ``ids`` (batch.py), in float32."""
        if not self.split_head:
            logits = self.logits(ids).flatten(0, 1).index_select(0, positions)
            return chunked_logprobs(logits, targets, lambda rows: rows, chunk_tokens)
        hidden = self.hidden(ids).flatten(0, 1).index_select(0, positions)
        return chunked_logprobs(hidden, targets, self.head, chunk_tokens)

    def _probe_head(self) -> bool:
        """Whether head(hidden) equals the model's own logits. A model without weights (on ``meta``) has no logits."""
        if self.device.type == "meta":
            return False
        count = min(_PROBE_TOKENS, self.vocabulary, self.length_max)
        ids = torch.arange(count, device=self.device).unsqueeze(0)
        with torch.no_grad():
            try:
                apart = self.head(self.hidden(ids))
            except (AttributeError, TypeError, NotImplementedError):
                return False
            whole = self.logits(ids)
        return apart.shape == whole.shape and torch.allclose(apart, whole, rtol=1e-3, atol=1e-3)

    @property
    def sizes(self) -> dict[str, int]:
        """What the token budget is computed from; bytes and counts."""
        config = self.model.config.get_text_config()
        hidden = int(config.hidden_size)
        return {
            "hidden": hidden,
            "layers": int(config.num_hidden_layers),
            "intermediate": int(getattr(config, "intermediate_size", 0) or 4 * hidden),
            "value_bytes": self.model.dtype.itemsize,
        }

    def tensors(self) -> Iterator[Tensor]:
        """Every parameter and buffer, adapters included."""
        yield from self.model.parameters()
        yield from self.model.buffers()

    # --- adapters -----------------------------------------------------------------------------------------------

    def add_adapter(self, name: str, spec: LoraSpec, *, seed: int, rank_max: int = 0) -> None:
        """Add a LoRA adapter whose initial values depend on ``seed`` and ``spec`` alone.

        Raises:
            Rejected: ``bad-lora`` (rank, dropout, target modules).
        """
        import peft  # only LoRA needs it

        config = self._lora_config(spec, rank_max)
        try:
            with seeded(seed, self.device), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # peft warns about deprecations inside transformers
                if self._peft is None:
                    self._peft = peft.get_peft_model(self.model, config, adapter_name=name)
                else:
                    self._peft.add_adapter(name, config)
        except ValueError as error:
            raise Rejected(
                f"LoRA adapter cannot be made: {str(error).splitlines()[0][:300]}", code="bad-lora"
            ) from error
        self._active = ""
        self.model.eval()

    def remove_adapter(self, name: str) -> None:
        if self._peft is None or name not in self._peft.peft_config:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft says which adapter it makes active instead; activate() decides that
            self._peft.delete_adapter(name)
        self._active = ""

    def activate(self, name: str) -> None:
        """Make ``name`` the one adapter that runs and gets gradients; no-op when it is already."""
        if self._active != name:
            assert self._peft is not None
            self._peft.set_adapter(name)
            self._active = name

    def adapter_config(self, name: str) -> peft.PeftConfig:
        assert self._peft is not None
        return self._peft.peft_config[name]

    def adapter_tensors(self, name: str) -> dict[str, Tensor]:
        """The adapter in PEFT's own layout (names without the adapter name)."""
        import peft

        assert self._peft is not None
        tensors: dict[str, Tensor] = peft.get_peft_model_state_dict(
            self._peft, adapter_name=name, save_embedding_layers=False
        )
        return tensors

    def merged(self) -> Any:
        """The model with its one adapter folded into its weights; as it is when it has none. Nothing else after it."""
        if self._peft is None:
            return self.model
        self.model = cast(Any, self._peft).merge_and_unload()
        self._peft = None
        return self.model

    def trainable(self, adapter: str) -> dict[str, nn.Parameter]:
        """The parameters a job trains: its adapter's, or all of them for FFT (``adapter`` empty). Tied ones once."""
        if not adapter:
            return dict(self.model.named_parameters())
        self.activate(adapter)
        marker = f".{adapter}."
        return {
            name.replace(marker, "."): parameter
            for name, parameter in self.model.named_parameters()
            if marker in name and parameter.requires_grad
        }

    @contextmanager
    def adapter_dropout(self, adapter: str, dropout: float, seed: int) -> Iterator[None]:
        """Switch the adapter's own dropout on, seeded; the base keeps none. Nothing at all when ``dropout`` is 0."""
        if not adapter or dropout <= 0:
            yield
            return
        from peft.tuners.lora import LoraLayer

        layers = [
            module.lora_dropout[adapter]
            for module in self.model.modules()
            if isinstance(module, LoraLayer) and adapter in module.lora_dropout
        ]
        for layer in layers:
            layer.train()
        try:
            with seeded(seed, self.device):
                yield
        finally:
            for layer in layers:
                layer.eval()

    def _lora_config(self, spec: LoraSpec, rank_max: int) -> peft.LoraConfig:
        if spec.rank < 1 or (rank_max and spec.rank > rank_max):
            bound = f"1 to {rank_max}" if rank_max else "at least 1"
            raise Rejected(f"LoRA rank is {spec.rank}: use {bound}", code="bad-lora")
        if not 0 <= spec.dropout < 1:
            raise Rejected(f"LoRA dropout is {spec.dropout}: use 0 or more, less than 1", code="bad-lora")
        for target in spec.target_modules:
            if not any(name == target or name.endswith(f".{target}") for name in self.linear_names):
                known = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in self.linear_names}))
                raise Rejected(
                    f"LoRA target module {target!r} is no linear layer of this model: it has {known}", code="bad-lora"
                )
        import peft

        targets = spec.target_modules or tuple({name.rsplit(".", 1)[-1]: None for name in self.linear_names})
        return peft.LoraConfig(
            r=spec.rank,
            lora_alpha=spec.alpha,  # type: ignore[arg-type]  # annotated int, used as a number
            lora_dropout=spec.dropout,
            target_modules=sorted(targets),
            bias="none",
            task_type="CAUSAL_LM",
            base_model_name_or_path=self.path,
        )


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Run a block under its own random state and leave the process's as it was."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed % (1 << 63))
        yield


def _finishes(config: Any) -> list[tuple[Callable[[Tensor], Tensor], bool]]:
    """What a model may do to the logits of its head, the likeliest first, and whether that is a soft cap.

    Gemma 2: cap · tanh(logits / cap); Granite divides them, Cohere multiplies them; most do nothing.
    """
    finishes: list[tuple[Callable[[Tensor], Tensor], bool]] = []
    if cap := getattr(config, "final_logit_softcapping", None):
        finishes.append((lambda logits: (logits / cap).tanh() * cap, True))
    if divisor := getattr(config, "logits_scaling", None):
        finishes.append((lambda logits: logits / divisor, False))
    if factor := getattr(config, "logit_scale", None):
        finishes.append((lambda logits: logits * factor, False))
    return [*finishes, (lambda logits: logits, False)]


def _linear_names(model: Any) -> list[str]:
    """Every linear layer but the head, by its full name (GPT-2's Conv1D is one as well)."""
    head = model.get_output_embeddings()
    kinds = (nn.Linear, transformers.pytorch_utils.Conv1D)
    return [name for name, module in model.named_modules() if isinstance(module, kinds) and module is not head]
