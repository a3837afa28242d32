"""A running batch of sequences with their keys and values: prefill, one decode step, join, leave. Needs torch.

Sequences of different lengths share one left-padded block: column j of ``mask`` says which rows have a token there.
Because padding is on the left, all sequences end in the last column, so a step appends one column, a joining batch is
padded to the same width, and a leaving sequence takes its row (and then common padding) with it.

Invariants: ``mask`` (B, L) and every layer's keys and values (B, heads, L, head size) agree in B and L; the newest
token of a row has been chosen but is not in the block yet (it enters at the next step).

Left out: paging, and sharing of equal prefixes between calls (samples of one prompt do share its prefill).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

SCORED_TOKENS_AT_ONCE = 1024
"""Prompt positions whose logits over the vocabulary are held at the same time."""


class Forward:
    """Calls a transformers causal language model with a mask that costs little to build.

    A model of full attention only takes a ready (B, 1, Q, K) boolean mask; others get the (B, K) mask and derive
    their own (sliding windows).
    """

    def __init__(self, model: Any) -> None:
        parameters = inspect.signature(model.forward).parameters
        self._model = model
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._trims = "logits_to_keep" in parameters
        config = model.config.get_text_config(decoder=True)
        layers = getattr(config, "layer_types", None) or ["full_attention"]
        self._ready_mask = set(layers) == {"full_attention"} and not getattr(config, "sliding_window", None)
        self._ready_mask &= getattr(config, "_attn_implementation", "") == "sdpa"

    def __call__(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Any, *, all_logits: bool) -> Tensor:
        """Logits (B, Q or 1, V) for ``tokens`` (B, Q) at ``positions`` (B, Q); ``mask`` (B, K) covers all."""
        arguments: dict[str, Any] = {self._cache_name: cache}
        if self._trims and not all_logits:
            arguments["logits_to_keep"] = 1
        attention = self._attention(mask, tokens.shape[1]) if self._ready_mask else mask.long()
        logits: Tensor = self._model(
            input_ids=tokens, attention_mask=attention, position_ids=positions, use_cache=True, **arguments
        ).logits
        return logits if all_logits else logits[:, -1:]

    @staticmethod
    def _attention(mask: Tensor, num_queries: int) -> Tensor:
        if num_queries == 1:
            return mask[:, None, None, :]
        num_keys = mask.shape[1]
        causal = torch.ones(num_queries, num_keys, dtype=torch.bool, device=mask.device).tril(num_keys - num_queries)
        itself = torch.eye(num_queries, dtype=torch.bool, device=mask.device)
        itself = torch.nn.functional.pad(itself, (num_keys - num_queries, 0))
        # Padding attends to itself: a row of a softmax without any key would be NaN and spread through its value.
        return (mask[:, None, None, :] & causal) | itself


class Prefilled:
    """What prefill leaves: the block, per prompt the logits after its last token, and scores when somebody asked."""

    def __init__(self, cache: Any, mask: Tensor, logits: Tensor, scores: Scores | None) -> None:
        self.cache = cache
        self.mask = mask
        self.logits = logits
        self.scores = scores


class Scores:
    """Of B prompts, left-padded to L: ``logprobs`` of their tokens (B, L), entry 0 of a prompt is 0; the ``top``
    likeliest tokens at each place and their logprobs (B, L, top), likeliest first."""

    def __init__(self, shape: tuple[int, int], top: int, device: torch.device) -> None:
        self.top = top
        self.logprobs = torch.zeros(shape, device=device)
        self.top_tokens = torch.zeros(*shape, top, dtype=torch.int64, device=device)
        self.top_logprobs = torch.zeros(*shape, top, device=device)

    def take(self, logits: Tensor, tokens: Tensor, start: int, end: int) -> None:
        """Logits (B, end - start, V): position j predicts token j + 1; the prompt's last column scores nothing."""
        last = min(end, tokens.shape[1] - 1)
        if last <= start:
            return
        logprobs = torch.log_softmax(logits[:, : last - start].float(), dim=-1)
        places = slice(start + 1, last + 1)
        self.logprobs[:, places] = logprobs.gather(-1, tokens[:, places, None])[..., 0]
        if self.top:
            found = logprobs.topk(self.top)
            self.top_tokens[:, places], self.top_logprobs[:, places] = found.indices, found.values


def prefill(
    forward: Forward, prompts: Sequence[list[int]], device: torch.device, *, budget: int, top: int | None
) -> Prefilled:
    """Run the prompts through the model in column chunks of at most ``budget`` tokens.

    ``top``: score them, with so many of the likeliest tokens at each place; None: do not.
    """
    from transformers import DynamicCache

    width = max(len(prompt) for prompt in prompts)
    tokens = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    mask = torch.arange(width, device=device) >= (width - lengths)[:, None]
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache()
    score = top is not None
    if score:
        budget = min(budget, SCORED_TOKENS_AT_ONCE)
    chunk = max(1, budget // len(prompts))
    scores = Scores((len(prompts), width), top, device) if top is not None else None
    logits = torch.empty(0)
    for start in range(0, width, chunk):
        end = min(start + chunk, width)
        logits = forward(tokens[:, start:end], positions[:, start:end], mask[:, :end], cache, all_logits=score)
        if scores is not None:
            scores.take(logits, tokens, start, end)
    if scores is not None:
        first = (width - lengths)[:, None]
        scores.logprobs.masked_fill_(torch.arange(width, device=device) <= first, 0.0)
    return Prefilled(cache, mask, logits[:, -1], scores)


class Block:
    """Keys, values, mask and positions of running sequences. Rows are in the order of the caller's list."""

    def __init__(self, cache: Any, mask: Tensor, last: Tensor, positions: Tensor) -> None:
        self._cache = cache
        self._mask = mask
        self._last = last
        self._positions = positions

    @staticmethod
    def start(prefilled: Prefilled, rows: Tensor, chosen: Tensor) -> Block:
        """``rows`` (B,): which prompt each sequence continues; ``chosen`` (B,): its first token."""
        same = len(rows) == len(prefilled.mask) and bool((rows == torch.arange(len(rows), device=rows.device)).all())
        mask = prefilled.mask
        if not same:
            mask = mask[rows]
            _each_layer(prefilled.cache, lambda tensor: tensor[rows])
        return Block(prefilled.cache, mask, chosen[:, None], mask.sum(-1, keepdim=True))

    def tensors(self) -> Iterator[Tensor]:
        """Everything it holds on the device."""
        yield from (self._mask, self._last, self._positions)
        for layer in self._cache.layers:
            if layer.is_initialized:
                yield from (layer.keys, layer.values)

    def step(self, forward: Forward) -> Tensor:
        """Take the newest tokens in and return the logits after them, (B, V)."""
        self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=True)
        return forward(self._last, self._positions, self._mask, self._cache, all_logits=False)[:, -1]

    def chose(self, tokens: Tensor) -> None:
        """The tokens (B,) drawn from what ``step`` returned."""
        self._last = tokens[:, None]
        self._positions = self._positions + 1

    def keep(self, rows: Tensor) -> None:
        """Only these rows stay; padding that all of them share goes too."""
        mask = self._mask[rows]
        padding = int(mask.shape[1] - mask.sum(-1).max())
        self._mask = mask[:, padding:]
        _each_layer(self._cache, lambda tensor: tensor[rows, :, padding:])
        self._last, self._positions = self._last[rows], self._positions[rows]

    def join(self, other: Block) -> None:
        """Append the rows of ``other``, which must not be used again."""
        width = max(self._mask.shape[1], other._mask.shape[1])
        mine, theirs = width - self._mask.shape[1], width - other._mask.shape[1]
        pad = torch.nn.functional.pad
        self._mask = torch.cat([pad(self._mask, (mine, 0)), pad(other._mask, (theirs, 0))])
        for layer, joining in zip(self._cache.layers, other._cache.layers, strict=True):
            if layer.is_initialized:
                layer.keys = torch.cat([pad(layer.keys, (0, 0, mine, 0)), pad(joining.keys, (0, 0, theirs, 0))])
                layer.values = torch.cat([pad(layer.values, (0, 0, mine, 0)), pad(joining.values, (0, 0, theirs, 0))])
        self._last = torch.cat([self._last, other._last])
        self._positions = torch.cat([self._positions, other._positions])


def _each_layer(cache: Any, change: Any) -> None:
    for layer in cache.layers:
        if layer.is_initialized:
            layer.keys, layer.values = change(layer.keys), change(layer.values)
