"""The vLLM engine behind the engine port: vLLM schedules, pages and samples; this module keeps calls, versions,
adapters.

Every sample of a call is a request of its own inside vLLM (its prompt's blocks are shared by prefix caching), so that a
seeded sample draws the same numbers whatever it is batched with. Stop strings are looked for here, with the same rule
as in the torch engine.

Invariants:
- every token carries the version that was resident when its step was asked for;
- after a full update nothing computed with older weights is read again: running calls are kept, and their keys and
  values are computed anew (V5: the prefix cache is reset, its answer checked);
- a LoRA version is a vLLM adapter of its own name and number, never one that is loaded over (V9);
- an update that breaks off past its first write is undone by streaming what served before; if that fails, Bug (V8).

On a GPU the device is left by vLLM's sleep mode; keys and values are dropped there and computed anew, calls go on.
vLLM has no sleep mode on CPUs: ``can_park`` says so, and ``park`` refuses.

Left out: data and pipeline parallelism, quantised weights, multimodal models.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from openrl_common.errors import Bug, Rejected
from openrl_common.parking import Left
from openrl_common.prefetch import Prefetch
from openrl_common.records import JobKind, WeightsRecord
from openrl_common.tensors import read_checkpoint
from openrl_common.weights import WeightsManifest
from openrl_sampler.adapter_shelf import Adapter
from openrl_sampler.calls import Call, Calls, Row
from openrl_sampler.engine import Applied, GenerateCall, Generated
from openrl_sampler.memory_share import check_room, kv_cache_bytes, memory_share, update_bytes
from openrl_sampler.seeds import seed_of
from openrl_sampler.tokenizer import Tokenizer
from openrl_sampler.vllm_options import VllmOptions, engine_arguments, sizes_of
from openrl_sampler.weights_layers import Layer, Resident, check_manifest, layers_again, layers_of

log = logging.getLogger(__name__)


class VllmEngine(Calls):
    """See ``engine.Engine`` for the port."""

    name = "vllm"

    def __init__(self, options: VllmOptions) -> None:
        super().__init__(options.kind, options.max_adapters, keeps_running=options.keeps_running)
        self._options = options
        self.can_park = False
        self.max_model_len = 0
        self.vocabulary_size = 0
        self.kv_tokens_max = 0
        self.update_method = options.update_method if options.kind is JobKind.FFT else ""
        if self.update_method == "reload":
            self.weights_formats = "full"
        self.load_parts: dict[str, float] = {}
        self.cache_state = ""
        self._engine: Any = None
        self._rows: dict[str, Row] = {}
        self._lora_requests: dict[str, Any] = {}  # by adapter name; their numbers are never used twice
        self._num_adapters = 0

    # --- loading -------------------------------------------------------------------------------------------------

    def load(self, prefetch: Prefetch | None = None) -> None:
        from vllm.platforms import current_platform

        if prefetch is not None:
            prefetch.wait_for_all()  # its loader would read what is not there yet in steps of its own
        self._on_cpu = current_platform.is_cpu()
        self.can_park = not self._on_cpu
        started = time.perf_counter()
        try:
            self._checkpoint = read_checkpoint(self._options.model_path)
            num_compiled = _num_compiled()
            with self._starting():
                self._engine = self._make(current_platform)
            num_compiled = _num_compiled() - num_compiled
        except Rejected:
            raise
        except Exception as error:  # vLLM raises many kinds for models and settings that it cannot serve
            raise Rejected(
                f"vLLM cannot serve base model {self._options.model_path}: {type(error).__name__}: {error}",
                code="bad-model",
            ) from error
        config = self._engine.vllm_config
        self.max_model_len = config.model_config.max_model_len
        self.vocabulary_size = config.model_config.get_vocab_size()
        self.kv_tokens_max = config.cache_config.num_gpu_blocks * config.cache_config.block_size
        self._tokenizer = Tokenizer(self._options.model_path)
        self._eos = self._tokenizer.eos()
        self._prepare()
        compiling = float(config.compilation_config.compilation_time)
        if compiling:
            self.load_parts["compile"] = compiling
        if num_compiled and self.cache_state in ("warm", "seeded"):
            log.warning("the compile cache was %s, and yet vLLM compiled again", self.cache_state)
            self.cache_state = "stale"
        log.info(
            "vLLM serves %s: %.1f s, of them %.1f compiling (cache %s), %d tokens of keys and values, updates %s",
            self._options.model_path, time.perf_counter() - started, compiling, self.cache_state or "none",
            self.kv_tokens_max, self.update_method or "by adapters",
        )  # fmt: skip

    @contextmanager
    def _starting(self) -> Iterator[None]:
        """Hold the compile cache (V1) and say in the start's phases what it was."""
        if self._options.cache is None:
            yield
            return
        with self._options.cache.starting() as state:
            yield
        self.cache_state = state

    def _make(self, platform: Any) -> Any:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments = engine_arguments(self._options, self._checkpoint, on_cpu=self._on_cpu)
        started = time.perf_counter()
        # The first time on a machine this inspects the model's class in a process of its own.
        config = EngineArgs(**arguments).create_engine_config()
        self.load_parts["configure"] = time.perf_counter() - started
        model, options = config.model_config, self._options
        value_bytes = model.dtype.itemsize
        heads = model.get_num_kv_heads(config.parallel_config)
        layers = model.get_num_layers(config.parallel_config)
        self._sizes = sizes_of(
            self._checkpoint,
            options,
            value_bytes=value_bytes,
            kv_bytes_per_token=2 * heads * model.get_head_size() * layers * value_bytes,
        )
        block = config.cache_config.block_size
        one = -(-model.max_model_len // block) * block
        update = self._update_bytes() if options.kind is JobKind.FFT else 0
        total = platform.get_device_total_memory()
        share = memory_share(options.device_bytes, total, options.memory_share)
        config.cache_config.gpu_memory_utilization = share
        seat = options.device_bytes
        if options.memory_share or not (seat or self._on_cpu):  # with a size for keys and values vLLM heeds no share
            seat = int(share * total)
        config.cache_config.kv_cache_memory_bytes = kv_cache_bytes(
            seat,
            self._sizes,
            update=update,
            most_tokens=(options.max_num_seqs + 1) * one,
            least_tokens=one + block,
        )
        return LLMEngine.from_vllm_config(config, disable_log_stats=True)

    def _prepare(self) -> None:
        """Adapt every rank. Raises Rejected when updates cannot be applied as the seat was counted for (M3)."""
        full = self._options.kind is JobKind.FFT
        answers = self.rpc("openrl_prepare", str(self._options.model_path), full)
        if problem := next((one.problem for one in answers if one.problem), ""):
            raise Rejected(problem, code="bad-engine")
        if captured := max(one.capture_seconds for one in answers):
            self.load_parts["capture"] = captured
        if not full:
            return
        why = next((one.not_streamable for one in answers if one.not_streamable), "")
        self._num_planned = max(1, answers[0].planned_elements)
        self._streamable = not why
        if self.update_method == "streamed" and why:
            raise Rejected(
                f"updates of {self._options.model_path} cannot be streamed: {why}; use --update-method reload",
                code="bad-setting",
            )

    def close(self) -> None:
        """Give memory and worker processes back; the engine is not used after it."""
        if self._engine is not None:
            self._engine.engine_core.shutdown()
            self._engine = None

    def rpc(self, method: str, *arguments: Any, **named: Any) -> list[Any]:
        """Ask every rank; one answer of each."""
        answers: list[Any] = self._engine.collective_rpc(method, args=arguments, kwargs=named)
        return answers

    @property
    def failure(self) -> str:
        """A rank's process that died is noticed by vLLM's monitor, also while nothing runs."""
        if getattr(self._engine.model_executor, "is_failed", False):
            return "a process of the vLLM engine has died"
        return ""

    # --- calls ---------------------------------------------------------------------------------------------------

    def check(self, call: GenerateCall) -> None:
        if call.params.stop:
            self._tokenizer.need_for_stop_strings()
        longest = max(len(prompt) for prompt in call.prompts) + call.params.max_tokens
        if longest > self.kv_tokens_max:
            raise Rejected(
                f"a sequence of {longest} tokens does not fit: the seat holds {self.kv_tokens_max}", code="too-long"
            )
        if not call.params.max_tokens and longest >= self.max_model_len:
            raise Rejected(
                f"a prompt of {longest} tokens is as long as the model: vLLM scores at most {self.max_model_len - 1}",
                code="too-long",
            )

    def add(self, call: GenerateCall) -> None:
        owner = self._open(call, self._eos, self._tokenizer.decode, [0.0])
        try:
            for prompt_index, prompt in enumerate(call.prompts):
                for sample_index in range(call.params.n):
                    self._add_row(owner, prompt_index, sample_index, prompt)
        except Exception as error:  # whatever vLLM raises on one request, before any step: the call's own fault
            self.abort(call.request)
            raise Rejected(f"vLLM does not take this: {error}", code="bad-params") from error

    def _add_row(self, owner: Call, prompt_index: int, sample_index: int, prompt: list[int]) -> None:
        from openrl_sampler.vllm_params import of_sample

        params = owner.call.params
        scores = sample_index == 0 and params.scores_prompt
        if not params.max_tokens and not scores:  # the first sample scores the prompt for all
            Row(owner, prompt_index, sample_index).end("length")
            return
        seed = None if params.seed is None else seed_of(params.seed, prompt_index, sample_index)
        name = f"{owner.call.request}/{prompt_index}/{sample_index}"
        self._rows[name] = Row(owner, prompt_index, sample_index)
        self._engine.add_request(
            name,
            {"prompt_token_ids": prompt},
            of_sample(params, seed, stop_token_ids=owner.stop.token_ids, scores=scores),
            lora_request=self._lora_requests.get(owner.adapter),
        )

    def _forget(self, owners: set[Call]) -> None:
        names = [name for name, row in self._rows.items() if row.owner in owners]
        for name in names:
            del self._rows[name]
        if names:
            self._engine.abort_request(names)

    @property
    def num_sequences(self) -> int:
        return len(self._rows)

    @property
    def room(self) -> int:
        return max(0, self._options.max_num_seqs - len(self._rows))

    # --- steps ---------------------------------------------------------------------------------------------------

    def step(self) -> list[Generated]:
        if self._superseded:
            return self._collect()
        if self._rows:
            resident = self._full_version
            for output in self._engine.step():
                row = self._rows.get(output.request_id)
                if row is not None:
                    self._take(output.request_id, row, output, row.owner.version if row.owner.adapter else resident)
        return self._collect()

    def _take(self, name: str, row: Row, output: Any, version: int) -> None:
        """New tokens of one sample, and the scores of its prompt when they come."""
        owner = row.owner
        if row.sample_index == 0 and output.prompt_logprobs:
            _take_scores(owner, row.prompt_index, output.prompt_logprobs)
        completion = output.outputs[0]
        if not owner.call.params.max_tokens:
            if completion.finish_reason is not None:
                self._close(name, row, "length")
            return
        logprobs = completion.logprobs.logprobs if completion.token_ids else ()
        for token, logprob in zip(completion.token_ids, logprobs, strict=True):
            row.add(int(token), float(logprob), version)
            if reason := owner.stop.reason(row.tokens):
                if completion.finish_reason is None:  # a stop string: vLLM would go on
                    self._engine.abort_request([name])
                self._close(name, row, reason)
                return

    def _close(self, name: str, row: Row, reason: str) -> None:
        del self._rows[name]
        row.end(reason)

    # --- weights -------------------------------------------------------------------------------------------------

    def apply_full(self, job: str, record: WeightsRecord, manifest: WeightsManifest, directory: Path) -> Applied:
        started = time.perf_counter()
        layers, shapes = layers_of(record, manifest, directory, self._full)
        need = self._update_bytes(manifest.largest_tensor_bytes // self._options.num_devices)
        check_room(need, min(self.rpc("openrl_free_bytes", self._options.device_bytes)), self.update_method)
        if self.update_method == "streamed":
            peak, touched = self._stream(layers, record.version)
        else:
            peak, touched = self._load(layers, record.version)
        self._full = Resident(record, shapes)
        self._forget_cached()
        return Applied(seconds=time.perf_counter() - started, peak_extra_bytes=peak, touched_share=touched)

    def _update_bytes(self, largest_tensor_bytes: int = 0) -> int:
        """``largest_tensor_bytes``: of the files to apply, which may be wider than the parameters (float32)."""
        options, sizes = self._options, self._sizes
        return update_bytes(
            options.update_method,
            replace(sizes, largest_tensor_bytes=max(sizes.largest_tensor_bytes, largest_tensor_bytes)),
            chunk_bytes=options.chunk_bytes,
            headroom_bytes=options.headroom_bytes,
        )

    def _forget_cached(self) -> None:
        """Nothing computed with other weights is read again, nor what running calls have computed (V5)."""
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise Bug("vLLM did not reset its prefix cache after a weight update")

    def _stream(self, layers: list[Layer], version: int) -> tuple[int, float]:
        """Plan on every rank, then write on every rank (V13). Returns the largest peak, and the share of elements."""
        directory = layers[-1].directory
        self._check_fit(layers)
        self._supersede(version)
        written = self._write(layers)
        if problem := next((one.error for one in written if one.error), ""):
            self._undo(problem)
            raise Rejected(f"weights {directory} broke off while they were written: {problem}", code="weights-torn")
        share = sum(one.elements for one in written) / (len(written) * self._num_planned)
        return max(one.peak_extra_bytes for one in written), share

    def _check_fit(self, layers: list[Layer]) -> None:
        """Before the first write of every method (V8). Raises Rejected."""
        problem = self._plan(layers) if self._streamable else self._unlike_base(layers[0])
        if problem:
            raise Rejected(f"weights {layers[-1].directory} do not fit the model: {problem}", code="weights-shape")

    def _unlike_base(self, layer: Layer) -> str:
        """Of a model whose loader cannot be planned: its versions have the tensors of its own files."""
        wanted = {name: tensor.shape for name, tensor in self._checkpoint.tensors.items()}
        found = {name: tuple(shape) for name, (_, shape) in layer.shapes.items()}
        wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        return f"tensor {wrong[0]!r} has shape {found.get(wrong[0])}, not {wanted.get(wrong[0])}" if wrong else ""

    def _plan(self, layers: list[Layer]) -> str:
        """A delta goes on with the plan of what is resident."""
        if layers[0].delta:
            return ""
        return next((why for why in self.rpc("openrl_plan", layers[0].shapes) if why), "")

    def _write(self, layers: list[Layer]) -> list[Any]:
        return self.rpc("openrl_write", layers, self._options.chunk_bytes)

    def _undo(self, cause: str) -> None:
        """After a write that broke off: stream what served before, all of it (V8)."""
        record = self._full.record
        try:
            layers = [self._base_layer()] if record is None else layers_again(record)[0]
            problem = self._plan(layers) or next((one.error for one in self._write(layers) if one.error), "")
            self._forget_cached()
        except Exception as error:
            raise Bug(f"what served before a torn weight update ({cause}) cannot be restored: {error}") from error
        if problem:
            raise Bug(f"what served before a torn weight update ({cause}) cannot be restored: {problem}")

    def _base_layer(self) -> Layer:
        held = self._checkpoint
        return Layer(
            directory=str(held.directory),
            delta=False,
            files={name: path.name for name, path in held.files.items()},
            shapes={name: (tensor.dtype, tensor.shape) for name, tensor in held.tensors.items()},
        )

    def _load(self, layers: list[Layer], version: int) -> tuple[int, float]:
        """vLLM's own loaders: whole versions reloaded, deltas as patches. One that breaks off leaves parameters without
        memory, or a mix: the process must end. Returns the largest peak, and the share of elements."""
        if self.update_method == "reload" and layers[-1].delta:
            raise Rejected(
                f"weights {layers[-1].directory} are a delta: --update-method reload takes whole ones",
                code="weights-format",
            )
        self._check_fit(layers)
        self._supersede(version)
        peak, elements = 0, 0
        for layer in layers:
            try:
                method = "openrl_patch" if layer.delta else "openrl_reload"
                loaded = self.rpc(method, layer)
                problem = next((one.error for one in loaded if one.error), "")
            except Exception as error:
                raise Bug(f"vLLM's load of {layer.directory} broke off: {error}") from error
            if problem:
                raise Bug(f"vLLM's load of {layer.directory} broke off: {problem}")
            peak = max(peak, *(one.peak_extra_bytes for one in loaded))
            elements += loaded[0].elements
        return peak, elements / self._checkpoint.num_elements

    # --- adapters ------------------------------------------------------------------------------------------------

    def apply_lora(self, job: str, record: WeightsRecord, manifest: WeightsManifest, directory: Path) -> Applied:
        started = time.perf_counter()
        self._take_adapter(Adapter(job, record, manifest, directory))
        return Applied(seconds=time.perf_counter() - started, peak_extra_bytes=0)

    def _load_adapter(self, adapter: Adapter) -> None:
        """Under a number that no adapter had before. Raises Rejected; the others are as they were."""
        check_manifest(adapter.record, adapter.manifest, adapter.directory, "lora")
        from vllm.lora.request import LoRARequest

        self._num_adapters += 1
        request = LoRARequest(adapter.name, self._num_adapters, str(adapter.directory))
        try:
            loaded = self._engine.add_lora(request)
        except Exception as error:  # whatever vLLM raises on an adapter that does not fit the model
            raise Rejected(f"adapter {adapter.directory} does not fit: {error}", code="weights-shape") from error
        if not loaded:
            raise Bug(f"vLLM did not load adapter {adapter.name}")
        self._lora_requests[adapter.name] = request

    def _unload_adapter(self, name: str) -> None:
        self._engine.remove_lora(self._lora_requests.pop(name).lora_int_id)

    # --- leaving the device (T5) ---------------------------------------------------------------------------------

    def park(self, path: Path) -> Left:
        """vLLM's sleep: weights to host memory, keys and values dropped; running calls are kept and computed anew."""
        if not self.can_park:
            raise Bug("vLLM has no sleep mode on a CPU: this engine cannot leave its device")
        return self._moved(lambda: self._engine.sleep(level=1, mode="keep"))

    def resume_weights(self) -> Left:
        return self._moved(lambda: self._engine.wake_up(tags=["weights"]))

    def resume_cache(self) -> Left:
        return self._moved(lambda: self._engine.wake_up(tags=["kv_cache"]))

    def _moved(self, move: Any) -> Left:
        before, started = self._held_bytes(), time.perf_counter()
        move()
        seconds, after = time.perf_counter() - started, self._held_bytes()
        return Left(bytes=abs(before - after), seconds=seconds, freed_bytes=before - after, held_bytes=after)

    def _held_bytes(self) -> int:
        return max(self.rpc("openrl_held_bytes"))


def _num_compiled() -> int:
    """Models that vLLM has compiled in this process so far; one that it found on disk is none."""
    from vllm.compilation.counter import compilation_counter

    return int(compilation_counter.num_aot_compiles)


def _take_scores(owner: Call, prompt_index: int, found: Any) -> None:
    """vLLM has no entry for the first token; at the others the prompt's own comes first, then the likeliest ones."""
    if owner.scores is None or owner.tops is None:
        return
    width = 1 + owner.call.params.prompt_top_logprobs
    tokens, values = found.token_ids, [float(value) for value in found.logprobs]
    owner.scores[prompt_index] = [0.0, *values[::width]]
    owner.tops[prompt_index] = [
        [], *(list(zip(tokens[i + 1 : i + width], values[i + 1 : i + width], strict=True))
              for i in range(0, len(values), width))
    ]  # fmt: skip
