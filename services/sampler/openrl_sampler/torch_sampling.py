"""From logits to tokens, for a whole batch of different settings at once (V10). Needs torch, no model.

A token is drawn by inverting the cumulative distribution at one uniform number per sequence and step. The numbers come
from a counter-based generator of the sequence alone, so a seeded sequence draws the same ones whatever it is batched
with; what is left of batch effects is the rounding of the logits themselves.

Filters, in this order, each on what the one before left, renormalised (the order of vLLM): min-p, top-k, top-p.
Returned logprobs are of the distribution after the temperature and before the filters; at temperature 0 (greedy) of
the model's own distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from openrl_common.wire import SamplingParams

_DRAWS_AT_ONCE = 64
_BELOW_ONE = 1.0 - 2.0**-40
"""Uniform numbers stay this far below 1, so that u × total < total also after rounding."""


class Draws:
    """Uniform numbers in [0, 1) of one sequence: a function of (seed, prompt index, sample index) only."""

    __slots__ = ("_buffer", "_generator")

    def __init__(self, seed: int, prompt_index: int, sample_index: int) -> None:
        key = numpy.array([seed, prompt_index << 32 | sample_index], dtype=numpy.uint64)
        self._generator = numpy.random.Generator(numpy.random.Philox(key=key))
        self._buffer: list[float] = []

    def next(self) -> float:
        if not self._buffer:
            self._buffer = (self._generator.random(_DRAWS_AT_ONCE) * _BELOW_ONE).tolist()
            self._buffer.reverse()
        return self._buffer.pop()


@dataclass(frozen=True, slots=True)
class Settings:
    """Sampling settings of B sequences as tensors of shape (B, 1); the flags say what may be skipped."""

    temperature: Tensor
    greedy: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    any_greedy: bool
    all_greedy: bool
    any_filter: bool
    plain_temperature: bool

    @staticmethod
    def of(params: Sequence[SamplingParams], vocabulary_size: int, device: torch.device) -> Settings:
        def column(values: list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)

        greedy = [p.temperature == 0 for p in params]
        return Settings(
            temperature=column([p.temperature or 1.0 for p in params], torch.float32),
            greedy=column([float(value) for value in greedy], torch.bool),
            top_k=column([min(p.top_k or vocabulary_size, vocabulary_size) for p in params], torch.int64),
            top_p=column([p.top_p for p in params], torch.float64),
            min_p=column([p.min_p for p in params], torch.float32),
            any_greedy=any(greedy),
            all_greedy=all(greedy),
            any_filter=any(p.top_k or p.top_p < 1.0 or p.min_p for p in params),
            plain_temperature=all(p.temperature in (0.0, 1.0) for p in params),
        )


def choose(logits: Tensor, settings: Settings, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits: (B, V), any floating type.
        uniforms: (B, 1) float64 in [0, 1).

    Returns:
        tokens (B,) int64 and their logprobs (B,) float32; a logprob is NaN where the logits of the row are not finite.
    """
    logits = logits.float()
    scaled = logits if settings.plain_temperature else logits / settings.temperature
    logprobs = torch.log_softmax(scaled, dim=-1)
    if settings.all_greedy:
        tokens = logits.argmax(-1, keepdim=True)
    else:
        kept = _filtered(logprobs, settings) if settings.any_filter else logprobs
        cumulative = kept.exp().to(torch.float64).cumsum(-1)
        tokens = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
        tokens = tokens.clamp(max=logits.shape[-1] - 1)
        if settings.any_greedy:
            tokens = torch.where(settings.greedy, logits.argmax(-1, keepdim=True), tokens)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)


def _filtered(logprobs: Tensor, settings: Settings) -> Tensor:
    """``logprobs`` (B, V) with -inf where a filter says no; the most likely token always stays."""
    ordered, index = logprobs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    keep = (ordered >= ordered[:, :1] + settings.min_p.log()) & (rank < settings.top_k)
    probabilities = torch.where(keep, ordered, -torch.inf).exp().to(torch.float64)
    cumulative = probabilities.cumsum(-1)
    before = cumulative - probabilities
    keep &= before < settings.top_p * cumulative[:, -1:]
    keep[:, 0] = True
    kept = torch.where(keep, ordered, -torch.inf)
    return torch.empty_like(kept).scatter_(1, index, kept)
