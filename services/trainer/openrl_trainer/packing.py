"""Which sequences share a forward pass (R2): micro-batches by length under a token budget.

Invariants: every index appears in exactly one micro-batch; rows × longest row of a micro-batch never exceeds the
budget; the result depends on nothing but the arguments, so that a replay packs the same way (R5). Callers put results
back in request order by index.

Not here: splitting one sequence over several passes. A sequence that does not fit is refused by name (check_lengths).
"""

from __future__ import annotations

from collections.abc import Sequence

from openrl_common.errors import Rejected

TOKEN_BUDGET_MAX = 65_536
TOKEN_BUDGET_MIN = 256
_ACTIVATION_VALUES_PER_HIDDEN = 17
"""Values kept for the backward pass per layer, token and hidden unit without attention scores: 34 bytes at 2 bytes a
value (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", equation 1)."""


def pack(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Indices of ``lengths`` (tokens per sequence) grouped so that rows × longest ≤ ``token_budget`` (tokens)."""
    batches: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if not batches or (len(batches[-1]) + 1) * longest > token_budget:
            batches.append([])
            longest = lengths[index]
        batches[-1].append(index)
    return batches


def check_lengths(lengths: Sequence[int], length_max: int, token_budget: int) -> None:
    """Refuse sequences that no forward pass may run.

    Raises:
        Rejected: code ``too-long`` (names the datum and both numbers) or ``bad-datum`` (fewer than 2 tokens).
    """
    for index, length in enumerate(lengths):
        if length < 2:
            raise Rejected(
                f"datum {index} has {length} token(s): at least 2 are needed, one to predict from", code="bad-datum"
            )
        if length > length_max:
            raise Rejected(
                f"datum {index} has {length} tokens, the longest this model takes is {length_max}: shorten it",
                code="too-long",
            )
        if length > token_budget:
            raise Rejected(
                f"datum {index} has {length} tokens, one forward pass takes {token_budget}: shorten it or raise"
                " OPEN_RL_TRAIN_TOKEN_BUDGET",
                code="too-long",
            )


def default_token_budget(
    *, device_bytes: int, resident_bytes: int, hidden: int, layers: int, intermediate: int, value_bytes: int
) -> int:
    """Tokens per forward pass when nobody set a number.

    Half of what the seat declares beyond the resident weights, gradients and optimizer (``resident_bytes``), divided by
    the activations one token leaves behind. It uses the declared bytes and not the bytes free right now, so that a
    restarted trainer packs the same way. ``device_bytes`` 0 (unknown) gives 8,192.
    """
    if device_bytes <= 0:
        return 8_192
    wide = max(hidden, (hidden + intermediate) // 2)
    token_bytes = max(1, layers * wide * _ACTIVATION_VALUES_PER_HIDDEN * value_bytes)
    budget = max(0, device_bytes - resident_bytes) // 2 // token_bytes
    return max(TOKEN_BUDGET_MIN, min(TOKEN_BUDGET_MAX, budget))
