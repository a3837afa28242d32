"""Losses against float64 references written from the formulas (R8), chunked log-probabilities (R3)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from openrl_common.errors import Rejected
from openrl_trainer.losses import check_loss, chunked_logprobs, token_loss

LOW, HIGH = 0.1, 0.3


def reference(
    loss: str, kl: float, logprobs: np.ndarray, weights: np.ndarray, old: np.ndarray, advantages: np.ndarray
) -> float:
    """One token at a time, float64, straight from the module's docstring."""
    total = 0.0
    for p, w, q, a in zip(logprobs, weights, old, advantages, strict=True):
        if loss == "cross_entropy":
            total -= w * p
            continue
        ratio = np.exp(p - q)
        if loss == "ppo":
            total -= w * min(ratio * a, min(max(ratio, 1 - LOW), 1 + HIGH) * a)
        else:
            total -= w * ratio * a
        total += kl * w * (np.exp(q - p) - 1 - (q - p))
    return total


@pytest.mark.parametrize("kl", [0.0, 0.5])
@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", "ppo"])
def test_loss_and_gradient_equal_a_float64_reference_R8(loss: str, kl: float) -> None:
    random = np.random.default_rng(3)
    logprobs, old = -random.exponential(2.0, 200), -random.exponential(2.0, 200)
    weights, advantages = random.uniform(0, 2, 200), random.normal(size=200)
    given = {
        "cross_entropy": {},
        "importance_sampling": {"kl": kl},
        "ppo": {"clip_low": LOW, "clip_high": HIGH, "kl": kl},
    }
    options = check_loss(loss, given[loss], 1.0)
    variable = torch.tensor(logprobs, requires_grad=True)
    total, _ = token_loss(loss, options, variable, *(torch.tensor(values) for values in (weights, old, advantages)))
    total.backward()
    expected = reference(loss, kl, logprobs, weights, old, advantages)
    assert total.item() == pytest.approx(expected, rel=1e-12)
    assert variable.grad is not None
    for index in range(0, 200, 17):  # central differences; tokens within reach of a kink are left out
        if (
            loss == "ppo"
            and min(abs(np.exp(logprobs[index] - old[index]) - bound) for bound in (1 - LOW, 1 + HIGH)) < 1e-3
        ):
            continue
        one = slice(index, index + 1)
        up, down = (
            reference(loss, kl, logprobs[one] + nudge, weights[one], old[one], advantages[one])
            for nudge in (1e-6, -1e-6)
        )
        assert variable.grad[index].item() == pytest.approx((up - down) / 2e-6, rel=1e-4, abs=1e-6)


def test_ppo_counts_the_tokens_whose_gradient_the_clip_removes_R8() -> None:
    ratio = torch.tensor([2.0, 2.0, 0.5, 0.5, 1.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    logprobs = ratio.log().requires_grad_()
    total, sums = token_loss("ppo", check_loss("ppo", {}, 1.0), logprobs, torch.ones(5), torch.zeros(5), advantages)
    total.backward()
    assert sums["clipped"].item() == 2
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, 2.0, -0.5, 0.0, -1.0])


def test_chunks_change_neither_value_nor_gradient_R3() -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 50, dtype=torch.float64)
    targets = torch.randint(0, 50, (33,))
    results = []
    for chunk_tokens in (1000, 7):
        hidden = torch.randn(33, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        head.zero_grad()
        logprobs = chunked_logprobs(hidden, targets, head, chunk_tokens)
        (logprobs * torch.arange(33)).sum().backward()
        assert hidden.grad is not None
        assert head.weight.grad is not None
        results.append((logprobs.detach(), hidden.grad, head.weight.grad.clone()))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(whole, chunked, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("loss", "options", "normalizer", "code"),
    [
        ("dpo", {}, 1.0, "unknown-loss"),
        ("ppo", {"clip": 0.2}, 1.0, "bad-loss-config"),
        ("ppo", {"clip_low": -0.1}, 1.0, "bad-loss-config"),
        ("cross_entropy", {"kl": 0.1}, 1.0, "bad-loss-config"),
        ("ppo", {}, 0.0, "bad-normalizer"),
        ("ppo", {}, float("nan"), "bad-normalizer"),
    ],
)
def test_unknown_losses_options_and_normalizers_are_refused_R6(
    loss: str, options: dict[str, float], normalizer: float, code: str
) -> None:
    with pytest.raises(Rejected) as caught:
        check_loss(loss, options, normalizer)
    assert caught.value.code == code
