"""Which sequences share a forward pass (R2): micro-batches by length under a token budget.

A pass costs something whatever is in it, and padding costs what tokens cost: a micro-batch ends at the budget, or when
its padding would cost more than a pass of its own for the shorter ones.

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
_PASS_TOKENS = {"cpu": 128, "cuda": 1024}
"""As many tokens as take about the time of an empty pass: measured on a CPU (the demo's model), estimated for GPUs."""


def padding_limit(device_type: str, *, sharded: bool) -> int:
    """The padding tokens of a micro-batch at most. A pass of a sharded model gathers all of it: no limit there."""
    return TOKEN_BUDGET_MAX if sharded else _PASS_TOKENS.get(device_type, _PASS_TOKENS["cuda"])


def pack(lengths: Sequence[int], token_budget: int, padding_max: int = TOKEN_BUDGET_MAX) -> list[list[int]]:
    """Indices of ``lengths`` (tokens per sequence) grouped so that rows × longest ≤ ``token_budget`` (tokens).

    Padding of a group is at most ``padding_max`` tokens.
    """
    batches: list[list[int]] = []
    longest = padding = 0
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        padding += longest - lengths[index]
        if not batches or (len(batches[-1]) + 1) * longest > token_budget or padding > padding_max:
            batches.append([])
            longest, padding = lengths[index], 0
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


def share(
    lengths: Sequence[int], token_budget: int, padding_max: int = TOKEN_BUDGET_MAX, *, rank: int = 0, count: int = 1
) -> tuple[list[list[int]], int]:
    """The micro-batches of one of ``count`` ranks (R14), and how many the rank with the most has.

    Sequences are dealt longest first, back and forth, so that all ranks get about the same number of tokens; each packs
    its own. One rank's share is what :func:`pack` gives.
    """
    hands: list[list[int]] = [[] for _ in range(count)]
    for place, index in enumerate(sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))):
        turn, hand = divmod(place, count)
        hands[hand if turn % 2 == 0 else count - 1 - hand].append(index)
    packed = [pack([lengths[index] for index in hand], token_budget, padding_max) for hand in hands]
    mine = [[hands[rank][place] for place in batch] for batch in packed[rank]]
    return mine, max(len(batches) for batches in packed)
