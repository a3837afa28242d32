"""Filters and draws against plain reference computations (V10)."""

from __future__ import annotations

import math

import pytest
import torch

from openrl_common.wire import SamplingParams
from openrl_sampler.torch_sampling import Draws, Settings, choose

CPU = torch.device("cpu")
NUM_DRAWS = 20_000


def _kept(logits: list[float], params: SamplingParams) -> set[int]:
    """Reference: which tokens may come, one filter after the other on plain lists."""
    scaled = [value / params.temperature for value in logits]
    total = sum(math.exp(value) for value in scaled)
    probabilities = {index: math.exp(value) / total for index, value in enumerate(scaled)}
    most = max(probabilities.values())
    kept = {index: p for index, p in probabilities.items() if p >= params.min_p * most}
    ordered = sorted(kept, key=lambda index: -kept[index])[: params.top_k or None]
    left = sum(kept[index] for index in ordered)
    chosen, before = set(), 0.0
    for index in ordered:
        if before < params.top_p * left:
            chosen.add(index)
        before += kept[index]
    return chosen


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.6),
        SamplingParams(min_p=0.2),
        SamplingParams(top_k=5, top_p=0.7, min_p=0.05, temperature=1.5),
        SamplingParams(top_k=1),
    ],
)
def test_v10_tokens_come_with_the_frequency_of_the_filtered_distribution(params: SamplingParams) -> None:
    logits = [0.3, 2.0, -1.0, 1.5, 0.0, -3.0, 1.0]
    rows = torch.tensor([logits]).expand(NUM_DRAWS, -1)
    uniforms = (torch.arange(NUM_DRAWS, dtype=torch.float64)[:, None] + 0.5) / NUM_DRAWS
    tokens, logprobs = choose(rows, Settings.of([params] * NUM_DRAWS, len(logits), CPU), uniforms)
    full = torch.log_softmax(torch.tensor(logits) / params.temperature, -1)
    kept = _kept(logits, params)
    expected = torch.tensor([math.exp(full[index]) if index in kept else 0.0 for index in range(len(logits))])
    found = torch.bincount(tokens, minlength=len(logits)) / NUM_DRAWS
    assert found.tolist() == pytest.approx((expected / expected.sum()).tolist(), abs=2 / NUM_DRAWS + 1e-6)
    assert torch.equal(logprobs, full[tokens]), "logprobs are of the distribution before the filters"


def test_v10_rows_of_one_batch_keep_their_own_settings() -> None:
    params = [SamplingParams(temperature=0.0), SamplingParams(top_k=1), SamplingParams(), SamplingParams(top_p=0.01)]
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    tokens, logprobs = choose(logits, Settings.of(params, 50, CPU), torch.full((4, 1), 0.999, dtype=torch.float64))
    best = logits.argmax(-1)
    assert [bool(value) for value in tokens == best] == [True, True, False, True]
    assert torch.allclose(logprobs, torch.log_softmax(logits, -1)[torch.arange(4), tokens])


def test_v10_a_token_without_probability_never_comes() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]] * 3)
    uniforms = torch.tensor([[0.0], [0.5], [1.0 - 2.0**-40]], dtype=torch.float64)
    tokens, _ = choose(logits, Settings.of([SamplingParams()] * 3, 5, CPU), uniforms)
    assert tokens.tolist() == [1, 3, 3]


def test_v10_draws_depend_on_seed_prompt_and_sample_only() -> None:
    def draws(*key: int) -> list[float]:
        source = Draws(*key)
        return [source.next() for _ in range(200)]

    assert draws(1, 2, 3) == draws(1, 2, 3)
    assert len({tuple(draws(*key)) for key in ((1, 2, 3), (2, 2, 3), (1, 3, 2), (1, 2, 4), (2**63 - 1, 0, 0))}) == 5
    assert all(0 <= value < 1 for value in draws(0, 0, 0))
