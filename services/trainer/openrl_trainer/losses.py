"""Losses over per-token log-probabilities (R8), and the chunked log-probabilities themselves (R3).

Notation for token t of the batch: ``p_t`` its log-probability under the weights being trained, ``q_t`` under the policy
that sampled it, ``A_t`` its advantage, ``w_t`` its weight (0 leaves it out), ``r_t = exp(p_t - q_t)``; no gradient
goes through ``sg``.

Every loss is a **sum over tokens divided by an explicit normalizer**; nothing is averaged silently.

    cross_entropy         -Σ w_t p_t / N
    importance_sampling   -Σ w_t r_t A_t / N                      (policy gradient corrected to the sampling policy:
                                                                   Degris et al. 2012, "Off-Policy Actor-Critic")
    ppo                   -Σ w_t min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t) / N
                                                                  (Schulman et al. 2017, arXiv:1707.06347, equation 7;
                                                                   separate bounds: DAPO, arXiv:2503.14476, equation 10)
    cispo                 -Σ w_t sg(clip(r_t, 1 - low, 1 + high)) A_t p_t / N
                                                                  (MiniMax-M1, arXiv:2506.13585, equations 4 and 5: the
                                                                   weight is clipped, no token loses its gradient;
                                                                   ``clip_low`` 1, the default, is no lower bound)
    dro                   -Σ w_t (A_t p_t - beta/2 (p_t - q_t)²) / N
                                                                  (the policy's half of Direct Reward Optimisation,
                                                                   Richemond et al. 2024, arXiv:2405.19107, token by
                                                                   token, the value being subtracted in A_t already)
    custom                 Σ w_t p_t / N                           (w_t = ∂L/∂p_t of a loss L of the caller's own: the
                                                                   gradient of the parameters is then L's, whatever L)
    kl > 0 adds           +kl Σ w_t (exp(q_t - p_t) - 1 - (q_t - p_t)) / N
                                                                  (the k3 estimate of Schulman 2020, "Approximating KL
                                                                   Divergence"; importance_sampling, ppo, cispo)

Metrics: ``kl`` is the k1 estimate mean(q_t - p_t), ``clip_fraction`` the share of tokens whose gradient the clip
removes (cispo: whose ratio it bounds), ``ratio_max`` the largest r_t; means are over tokens with w_t ≠ 0.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from openrl_common.errors import Rejected
from openrl_common.wire import LOSSES

LOSS_OPTIONS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {"kl": 0.0},
    "ppo": {"clip_low": 0.2, "clip_high": 0.2, "kl": 0.0},
    "cispo": {"clip_low": 1.0, "clip_high": 0.2, "kl": 0.0},
    "dro": {"beta": 0.05},
    "custom": {},
}
"""Options of each loss with their defaults."""
_OPTION_MOST = 1e9
"""torch refuses a bound that float32 does not hold, in the middle of a pass: a group of several ranks ends with it."""
WITHOUT_POLICY = ("cross_entropy", "custom")
"""Losses that look at neither sampling log-probabilities nor advantages."""


def check_loss(loss: str, loss_config: dict[str, float], normalizer: float) -> dict[str, float]:
    """The options to use, defaults filled in.

    Raises:
        Rejected: ``unknown-loss``, ``bad-loss-config`` or ``bad-normalizer``.
    """
    if loss not in LOSS_OPTIONS:
        raise Rejected(f"loss {loss!r} is unknown: use one of {', '.join(LOSSES)}", code="unknown-loss")
    options = dict(LOSS_OPTIONS[loss])
    for name, value in loss_config.items():
        if name not in options:
            known = ", ".join(options) or "none"
            raise Rejected(f"loss {loss} has no option {name!r}: it has {known}", code="bad-loss-config")
        if not 0 <= value <= _OPTION_MOST:
            raise Rejected(f"loss option {name} is {value}: use 0 to {_OPTION_MOST:g}", code="bad-loss-config")
        options[name] = value
    if options.get("clip_low", 0.0) > 1:
        raise Rejected(
            f"loss option clip_low is {options['clip_low']}: use at most 1, a ratio is never negative",
            code="bad-loss-config",
        )
    if not isfinite(normalizer) or normalizer <= 0:
        raise Rejected(f"normalizer is {normalizer}: use a finite number above 0", code="bad-normalizer")
    return options


def token_loss(
    loss: str,
    options: dict[str, float],
    logprobs: Tensor,
    weights: Tensor,
    old: Tensor | None,
    advantages: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss summed over tokens (scalar, not yet divided) and per-token sums for the metrics.

    Args:
        logprobs, weights, old, advantages: shape [tokens]; the losses of WITHOUT_POLICY use the first two.

    Returns:
        The sum, and detached scalars ``kl_sum``, ``clipped``, ``ratio_max`` (none for WITHOUT_POLICY).
    """
    if loss in WITHOUT_POLICY:
        total = (weights * logprobs).sum()
        return (total if loss == "custom" else -total), {}
    assert old is not None
    assert advantages is not None
    ratio = (logprobs - old).exp()
    clipped = torch.zeros_like(ratio, dtype=torch.bool)
    match loss:
        case "ppo":
            objective = ratio * advantages
            bounded = ratio.clamp(1.0 - options["clip_low"], 1.0 + options["clip_high"]) * advantages
            clipped = bounded.detach() < objective.detach()
            objective = torch.minimum(objective, bounded)
        case "cispo":
            weight = ratio.detach().clamp(1.0 - options["clip_low"], 1.0 + options["clip_high"])
            clipped = weight != ratio.detach()
            objective = weight * advantages * logprobs
        case "dro":
            objective = advantages * logprobs - 0.5 * options["beta"] * (logprobs - old).square()
        case _:
            objective = ratio * advantages
    total = -(weights * objective).sum()
    if options.get("kl", 0.0) > 0:
        gap = old - logprobs
        total = total + options["kl"] * (weights * (gap.exp() - 1.0 - gap)).sum()
    with torch.no_grad():
        sums = {"kl_sum": (old - logprobs).sum(), "clipped": clipped.sum(), "ratio_max": ratio.max()}
    return total, sums


class _Chosen(torch.autograd.Function):
    """log softmax(logits)[wanted]: logits [n, vocabulary], wanted [n] → [n].

    As ``gather`` minus ``logsumexp``, whose own backward passes make five tensors of the logits' size; this makes one.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, wanted: Tensor) -> Tensor:
        normalizer = logits.logsumexp(dim=-1)
        ctx.save_for_backward(logits, wanted, normalizer)
        return logits.gather(-1, wanted.unsqueeze(-1)).squeeze(-1) - normalizer

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        logits, wanted, normalizer = ctx.saved_tensors
        # d log p_w / d logits = 1[w] - softmax(logits)
        answer = (logits - normalizer.unsqueeze(-1)).exp_().mul_(-gradient.unsqueeze(-1))
        answer.scatter_add_(-1, wanted.unsqueeze(-1), gradient.unsqueeze(-1))
        return answer, None


def chunked_logprobs(hidden: Tensor, targets: Tensor, head: Callable[[Tensor], Tensor], chunk_tokens: int) -> Tensor:
    """Log-probability of ``targets`` given ``hidden``, never holding more than ``chunk_tokens`` × vocabulary logits.

    With more than one chunk each is recomputed in the backward pass, so that its logits are not kept either.

    Args:
        hidden: [tokens, hidden], the decoder's output at the positions that predict.
        targets: [tokens], token ids.
        head: [n, hidden] → logits [n, vocabulary].
        chunk_tokens: at least 1.

    Returns:
        [tokens], float32 (float64 when the logits are).
    """

    def piece(rows: Tensor, wanted: Tensor) -> Tensor:
        logits = head(rows)
        if logits.dtype is not torch.float64:
            logits = logits.float()
        chosen: Tensor = _Chosen.apply(logits, wanted)
        return chosen

    if hidden.shape[0] <= chunk_tokens:
        return piece(hidden, targets)
    pieces = []
    for start in range(0, hidden.shape[0], chunk_tokens):
        rows, wanted = hidden[start : start + chunk_tokens], targets[start : start + chunk_tokens]
        if torch.is_grad_enabled():
            pieces.append(checkpoint(piece, rows, wanted, use_reentrant=False, preserve_rng_state=False))
        else:
            pieces.append(piece(rows, wanted))
    return torch.cat(pieces)
