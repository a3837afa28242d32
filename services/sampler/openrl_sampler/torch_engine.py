"""The torch engine: a transformers model, a key-value cache and continuous batching, behind the engine port.

One step = prefill of waiting prompts that fit, then one token for every running sequence. Sequences of one adapter run
as one batch, whatever their settings; adapters take turns within the step. New calls join at the next step.

Invariants:
- the samples of one prompt share its prefill;
- a call's adapter version is fixed when it is added, and that adapter stays loaded until its last sequence ended;
- every token carries the version of the weights that were resident in its step.

- parked, weights and caches are off the device and running calls stand still; they go on as if nothing had been (T5).

Left out against vLLM: paged memory, prefix caching, tensor parallelism.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

import torch
from torch import Tensor

from openrl_common.errors import Bug, Rejected
from openrl_common.parking import Left, Parking
from openrl_common.prefetch import Prefetch
from openrl_common.records import WeightsRecord
from openrl_common.weights import WeightsManifest
from openrl_sampler.adapter_shelf import Adapter
from openrl_sampler.calls import Call, Calls
from openrl_sampler.engine import Applied, GenerateCall, Generated
from openrl_sampler.memory_share import check_room
from openrl_sampler.streamed import Plan
from openrl_sampler.torch_adapters import Adapters
from openrl_sampler.torch_batch import Block, Forward, prefill
from openrl_sampler.torch_model import ResidentModel, TorchOptions
from openrl_sampler.torch_rows import Batch, Pending, TorchRow, without_score_only
from openrl_sampler.torch_sampling import Draws, Settings, choose
from openrl_sampler.torch_weights import Loaded, Meter, free_bytes, plan_update, write_update
from openrl_sampler.weights_layers import Layer, Resident, check_manifest, layers_again, layers_of


class TorchEngine(Calls):
    """See ``engine.Engine`` for the port."""

    name = "torch"
    can_park = True

    def __init__(self, options: TorchOptions) -> None:
        super().__init__(options.kind, options.max_adapters, keeps_running=options.keeps_running)
        self._options = options
        self.load_parts: dict[str, float] = {}
        self.max_model_len = 0
        self.vocabulary_size = 0
        self._pending: deque[Pending] = deque()
        self._batches: dict[str, Batch] = {}
        self._parking: Parking | None = None

    # --- loading -------------------------------------------------------------------------------------------------

    def load(self, prefetch: Prefetch | None = None) -> None:
        self._resident = ResidentModel(self._options, prefetch)
        self._device = self._resident.device
        self._forward = Forward(self._resident.model)
        self._adapters = Adapters(self._resident.model, self._options.max_rank)
        self._shelf.loaded.clear()
        self.max_model_len = self._resident.max_model_len
        self.vocabulary_size = self._resident.vocabulary_size

    # --- calls ---------------------------------------------------------------------------------------------------

    def check(self, call: GenerateCall) -> None:
        if call.params.stop:
            self._resident.tokenizer.need_for_stop_strings()
        longest = max(len(prompt) for prompt in call.prompts) + call.params.max_tokens
        most = self._resident.kv_tokens_max
        if longest > most:
            raise Rejected(f"a sequence of {longest} tokens does not fit: the seat holds {most}", code="too-long")

    def add(self, call: GenerateCall) -> None:
        owner = self._open(call, self._resident.eos, self._resident.tokenizer.decode, [])
        for index, prompt in enumerate(call.prompts):
            # As many samples of one prompt as may run together, their keys and values included (V4).
            fit = self._resident.kv_tokens_max // (len(prompt) + call.params.max_tokens)
            most = max(1, min(self._options.max_num_seqs, fit))
            for first in range(0, call.params.n, most):
                self._pending.append(Pending(owner, index, first, min(most, call.params.n - first)))

    def _forget(self, owners: set[Call]) -> None:
        self._pending = deque(p for p in self._pending if p.owner not in owners)
        for batch in list(self._batches.values()):
            self._keep(batch, [i for i, row in enumerate(batch.rows) if row.owner not in owners])

    @property
    def num_sequences(self) -> int:
        return self._num_running + sum(p.num_samples for p in self._pending)

    @property
    def _num_running(self) -> int:
        return sum(len(batch.rows) for batch in self._batches.values())

    @property
    def room(self) -> int:
        return max(0, self._options.max_num_seqs - self.num_sequences)

    # --- steps ---------------------------------------------------------------------------------------------------

    def step(self) -> list[Generated]:
        if self._superseded:
            return self._collect()
        with torch.inference_mode():
            # Running sequences first: what is prefilled below has its first token by then and goes on at the next step.
            for batch in list(self._batches.values()):
                self._decode_step(batch)
            for adapter, group in self._admit().items():
                self._prefill(adapter, group)
        return self._collect()

    def _decode_step(self, batch: Batch) -> None:
        self._activate(batch.rows[0].owner.adapter)
        logits = batch.block.step(self._forward)
        tokens = self._draw(batch.rows, logits, batch.settings)
        batch.block.chose(tokens)
        self._keep(batch, self._still_open(batch.rows))

    def _draw(self, rows: list[TorchRow], logits: Tensor, settings: Settings) -> Tensor:
        """Choose a token per row and write it into the rows; a row whose logits are not finite fails its call."""
        uniforms = [0.0] * len(rows) if settings.all_greedy else [row.draws.next() for row in rows]
        tokens, logprobs = choose(
            logits, settings, torch.tensor(uniforms, dtype=torch.float64, device=self._device)[:, None]
        )
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            version = row.owner.version if row.owner.adapter else self._full_version
            row.add(token, logprob, version)
        return tokens

    def _still_open(self, rows: list[TorchRow]) -> list[int]:
        """Indices of rows that go on; the others are written into their call's results."""
        stay = []
        for index, row in enumerate(rows):
            reason = "length" if row.owner.error else row.owner.stop.reason(row.tokens)
            if not reason:
                stay.append(index)
                continue
            row.end(reason)
        return stay

    def _keep(self, batch: Batch, stay: list[int]) -> None:
        if len(stay) == len(batch.rows):
            return
        adapter = batch.rows[0].owner.adapter
        batch.rows = [batch.rows[index] for index in stay]
        if not batch.rows:
            del self._batches[adapter]
            return
        batch.block.keep(torch.tensor(stay, device=self._device))
        batch.settings = self._settings(batch.rows)

    def _settings(self, rows: list[TorchRow]) -> Settings:
        return Settings.of([row.owner.call.params for row in rows], self.vocabulary_size, self._device)

    def _admit(self) -> dict[str, list[Pending]]:
        """Waiting prompts that start now, by adapter: in order, while sequences and keys and values fit."""
        groups: dict[str, list[Pending]] = {}
        running = self._num_running
        sizes = {adapter: (len(batch.rows), batch.final_len) for adapter, batch in self._batches.items()}
        while self._pending:
            pending = self._pending[0]
            adapter = pending.owner.adapter
            count, final_len = sizes.get(adapter, (0, 0))
            grown = {**sizes, adapter: (count + pending.num_samples, max(final_len, pending.final_len))}
            full = running + pending.num_samples > self._options.max_num_seqs
            full |= sum(count * length for count, length in grown.values()) > self._resident.kv_tokens_max
            if full and running:
                break
            self._pending.popleft()
            sizes = grown
            running += pending.num_samples
            groups.setdefault(adapter, []).append(pending)
        return groups

    def _prefill(self, adapter: str, group: list[Pending]) -> None:
        self._activate(adapter)
        tops = [p.owner.call.params.prompt_top_logprobs for p in group if p.owner.scores is not None]
        prefilled = prefill(
            self._forward,
            [p.prompt for p in group],
            self._device,
            budget=self._options.prefill_tokens,
            top=min(max(tops), self.vocabulary_size) if tops else None,
        )
        for index, pending in enumerate(group):
            if prefilled.scores is not None:
                pending.take_scores(prefilled.scores, index)
        group, kept = without_score_only(group)
        if not group:
            return
        rows, parents = self._rows(group, kept)
        source = torch.tensor(parents, device=self._device)
        settings = self._settings(rows)
        tokens = self._draw(rows, prefilled.logits[source], settings)
        stay = self._still_open(rows)
        if not stay:
            return
        if len(stay) < len(rows):
            chosen = torch.tensor(stay, device=self._device)
            source, tokens = source[chosen], tokens[chosen]
            rows = [rows[index] for index in stay]
        self._join(adapter, rows, Block.start(prefilled, source, tokens))

    @staticmethod
    def _rows(group: list[Pending], kept: list[int]) -> tuple[list[TorchRow], list[int]]:
        rows, parents = [], []
        for pending, parent in zip(group, kept, strict=True):
            for sample in range(pending.first_sample, pending.first_sample + pending.num_samples):
                draws = Draws(pending.owner.call.seed, pending.prompt_index, sample)
                rows.append(TorchRow(pending.owner, pending.prompt_index, sample, draws=draws))
                parents.append(parent)
        return rows, parents

    def _join(self, adapter: str, rows: list[TorchRow], block: Block) -> None:
        batch = self._batches.get(adapter)
        if batch is None:
            self._batches[adapter] = Batch(rows, block, self._settings(rows))
            return
        batch.block.join(block)
        batch.rows.extend(rows)
        batch.settings = self._settings(batch.rows)

    # --- weights -------------------------------------------------------------------------------------------------

    def apply_full(self, job: str, record: WeightsRecord, manifest: WeightsManifest, directory: Path) -> Applied:
        meter = Meter(self._device)
        layers, shapes = layers_of(record, manifest, directory, self._full)
        planned = self._plan(layers)
        meter.look()
        self._check_room(planned, manifest)
        self._supersede(record.version)
        try:
            touched = self._write(planned, layers, meter)
        except Exception as error:
            self._rebuild(error)
            raise Rejected(
                f"weights {directory} broke off while they were written: {error}", code="weights-torn"
            ) from error
        self._full = Resident(record, shapes)
        return Applied(seconds=meter.seconds, peak_extra_bytes=meter.peak_extra_bytes, touched_share=touched)

    def _check_room(self, planned: Plan | Loaded, manifest: WeightsManifest) -> None:
        """Raises Rejected when what is to be streamed does not fit (V6); what was loaded whole is there already."""
        if isinstance(planned, Plan):
            need = self._options.headroom_bytes or min(self._options.chunk_bytes, manifest.largest_tensor_bytes)
            check_room(need, free_bytes(self._device, self._options.device_bytes, self._on_device()), "streamed")

    def _plan(self, layers: list[Layer]) -> Plan | Loaded:
        return plan_update(self._resident.model, layers)

    def _write(self, planned: Plan | Loaded, layers: list[Layer], meter: Meter) -> float:
        return write_update(planned, layers, chunk_bytes=self._options.chunk_bytes, meter=meter)

    def _rebuild(self, cause: Exception) -> None:
        """After a write that broke off: the model from its files again, then the version that served before (V8)."""
        try:
            self.load()
            if self._full.record is not None:
                layers, _ = layers_again(self._full.record)
                self._write(self._plan(layers), layers, Meter(self._device))
        except Exception as error:
            raise Bug(f"the engine cannot be rebuilt after a torn weight update ({cause}): {error}") from error

    def apply_lora(self, job: str, record: WeightsRecord, manifest: WeightsManifest, directory: Path) -> Applied:
        meter = Meter(self._device)
        self._take_adapter(Adapter(job, record, manifest, directory))
        return Applied(seconds=meter.seconds, peak_extra_bytes=meter.peak_extra_bytes)

    def _load_adapter(self, adapter: Adapter) -> None:
        check_manifest(adapter.record, adapter.manifest, adapter.directory, "lora")
        self._adapters.load(adapter.name, adapter.manifest, adapter.directory)

    def _unload_adapter(self, name: str) -> None:
        self._adapters.drop(name)

    # --- leaving the device (T5) ---------------------------------------------------------------------------------

    def park(self, path: Path) -> Left:
        if self._parking is None:
            self._parking = Parking(torch, self._device, path)
        return self._parking.park(self._on_device())

    def _on_device(self) -> list[Tensor]:
        return [*self._weights(), *(tensor for batch in self._batches.values() for tensor in batch.block.tensors())]

    def _weights(self) -> list[Tensor]:
        return [*self._resident.model.parameters(), *self._resident.model.buffers()]

    def resume_weights(self) -> Left:
        assert self._parking is not None
        return self._parking.restore(self._weights())

    def resume_cache(self) -> Left:
        assert self._parking is not None
        return self._parking.restore()

    def _activate(self, adapter: str) -> None:
        self._adapters.activate(adapter)
