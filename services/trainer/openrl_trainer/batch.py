"""From data to tensors: validation of a request's data, and the flat positions at which a loss is taken.

A micro-batch is right-padded ``ids`` [rows, width] and, for every token that counts, the flat index of the position
that predicts it, its target and its per-token figures. Positions without weight never reach the head: a long prompt
costs no logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from openrl_common.errors import Rejected
from openrl_common.wire import Datum
from openrl_trainer.losses import WITHOUT_POLICY
from openrl_trainer.packing import check_lengths

DATA_MAX = 65_536


@dataclass(frozen=True)
class MicroBatch:
    """``positions``, ``targets``, ``weights``, ``old`` and ``advantages`` have one entry per token that counts."""

    ids: Tensor
    positions: Tensor
    targets: Tensor
    weights: Tensor
    old: Tensor | None
    advantages: Tensor | None


def check_data(data: list[Datum], *, vocabulary: int, length_max: int, token_budget: int, loss: str = "") -> None:
    """Refuse data that cannot be run; ``loss`` empty = only log-probabilities are wanted.

    Raises:
        Rejected: ``bad-datum`` or ``too-long``, naming the datum, the value and what is allowed.
    """
    if not 1 <= len(data) <= DATA_MAX:
        raise Rejected(f"the request has {len(data)} data: send 1 to {DATA_MAX}", code="bad-datum")
    check_lengths([len(datum.tokens) for datum in data], length_max, token_budget)
    for index, datum in enumerate(data):
        if min(datum.tokens) < 0 or max(datum.tokens) >= vocabulary:
            odd = next(token for token in datum.tokens if not 0 <= token < vocabulary)
            raise Rejected(
                f"datum {index} has token id {odd}: this model knows 0 to {vocabulary - 1}", code="bad-datum"
            )
        if loss:
            _check_figures(index, datum, loss)
    if loss and not any(any(token_weights(datum)[1:]) for datum in data):
        raise Rejected("no datum has a token with a weight other than 0: there is nothing to learn", code="bad-datum")


def _check_figures(index: int, datum: Datum, loss: str) -> None:
    needs_policy = loss not in WITHOUT_POLICY
    for name, values, needed in (
        ("weights", datum.weights, loss == "custom"),
        ("logprobs", datum.logprobs, needs_policy),
        ("advantages", datum.advantages, needs_policy),
    ):
        if not values and not needed:
            continue
        if len(values) != len(datum.tokens):
            raise Rejected(
                f"datum {index} has {len(values)} {name} for {len(datum.tokens)} tokens: loss {loss} needs one each",
                code="bad-datum",
            )
        if not all(map(isfinite, values)):
            odd = next(value for value in values if not isfinite(value))
            raise Rejected(f"datum {index} has {odd} among its {name}: use finite numbers", code="bad-datum")


def token_weights(datum: Datum) -> list[float]:
    """The loss weight of every token; the first has no prediction and never counts."""
    return datum.weights or [0.0] + [1.0] * (len(datum.tokens) - 1)


def make_micro_batch(data: list[Datum], device: torch.device, loss: str = "") -> MicroBatch | None:
    """Tensors of one micro-batch; ``loss`` empty takes every token. None when no token counts."""
    width = max(len(datum.tokens) for datum in data)
    positions: list[int] = []
    targets: list[int] = []
    weights: list[float] = []
    old: list[float] = []
    advantages: list[float] = []
    for row, datum in enumerate(data):
        row_weights = token_weights(datum) if loss else [1.0] * len(datum.tokens)
        kept = [index for index in range(1, len(datum.tokens)) if row_weights[index] != 0.0]
        positions += [row * width + index - 1 for index in kept]
        targets += [datum.tokens[index] for index in kept]
        weights += [row_weights[index] for index in kept]
        if loss and loss not in WITHOUT_POLICY:
            old += [datum.logprobs[index] for index in kept]
            advantages += [datum.advantages[index] for index in kept]
    if not positions:
        return None
    rows = [datum.tokens + [0] * (width - len(datum.tokens)) for datum in data]
    policy = loss not in ("", *WITHOUT_POLICY)

    def figures(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return MicroBatch(
        ids=torch.tensor(rows, dtype=torch.long, device=device),
        positions=torch.tensor(positions, dtype=torch.long, device=device),
        targets=torch.tensor(targets, dtype=torch.long, device=device),
        weights=figures(weights),
        old=figures(old) if policy else None,
        advantages=figures(advantages) if policy else None,
    )


def make_idle_batch(device: torch.device) -> MicroBatch:
    """One token that counts for nothing: what a rank runs while others have passes left of a sharded model (R14)."""
    nothing = torch.zeros(1, dtype=torch.float32, device=device)
    return MicroBatch(
        ids=torch.zeros((1, 2), dtype=torch.long, device=device),
        positions=torch.zeros(1, dtype=torch.long, device=device),
        targets=torch.zeros(1, dtype=torch.long, device=device),
        weights=nothing,
        old=nothing,
        advantages=nothing,
    )
