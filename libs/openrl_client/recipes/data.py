"""From texts to the Datums of the training log, and the small arithmetic of the recipes. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from openrl_client.tasks import Example
from openrl_common.wire import Datum


def supervised_datum(prompt: list[int], completion: list[int]) -> Datum:
    """A demonstration: loss on the completion (its end token included), none on the prompt."""
    return Datum(tokens=prompt + completion, weights=[0.0] * len(prompt) + [1.0] * len(completion))


def policy_datum(prompt: list[int], completion: list[int], logprobs: list[float], advantage: float) -> Datum:
    """A sampled completion: every token of it carries the advantage; the prompt carries nothing."""
    zeros = [0.0] * len(prompt)
    return Datum(
        tokens=prompt + completion,
        weights=zeros + [1.0] * len(completion),
        logprobs=zeros + logprobs,
        advantages=zeros + [advantage] * len(completion),
    )


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """GRPO's advantages: ``(r - mean) / std`` over one prompt's group (population std; arXiv:2402.03300, 4.1.2).

    A group whose rewards are all the same has no signal: zeros.
    """
    mean = sum(rewards) / len(rewards)
    deviation = (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5
    if deviation < 1e-8:
        return [0.0] * len(rewards)
    return [(reward - mean) / deviation for reward in rewards]


def warmed_up(learning_rate: float, step: int, num_warmup_steps: int) -> float:
    """Linear warm-up: step 0 already learns."""
    return learning_rate * min(1.0, (step + 1) / max(1, num_warmup_steps))


def batches(examples: Sequence[Example], batch: int, randomness: random.Random) -> Iterator[list[Example]]:
    """Batches without end: every example once per pass, each pass in a new order."""
    order: list[Example] = []
    while True:
        while len(order) < batch:
            order.extend(randomness.sample(examples, len(examples)))
        yield order[:batch]
        del order[:batch]
