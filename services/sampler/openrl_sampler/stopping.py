"""When a completion ends: stop ids (eos among them), stop strings, length. Pure; the decoder comes in as a function.

A stop string is looked for in the decoded tail of the completion only, never in the prompt. The token that completes
it is part of the completion. The tail is long enough because a token that decodes to less than one character is one
of at most four bytes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Decode = Callable[[Sequence[int]], str]
_BYTES_PER_CHARACTER_MAX = 4


@dataclass(frozen=True, slots=True)
class StopRule:
    """One per call. ``decode`` is only needed with ``strings``."""

    token_ids: frozenset[int]
    max_tokens: int
    strings: tuple[str, ...] = ()
    decode: Decode | None = None

    def reason(self, tokens: list[int]) -> str:
        """``stop``, ``length`` or, while the completion goes on, an empty string. ``tokens``: non-empty completion."""
        if tokens[-1] in self.token_ids or (self.strings and self._has_string(tokens)):
            return "stop"
        return "length" if len(tokens) >= self.max_tokens else ""

    def _has_string(self, tokens: list[int]) -> bool:
        assert self.decode is not None, "stop strings need a decoder"
        longest = max(len(text) for text in self.strings)
        tail = self.decode(tokens[-(longest + 1) * _BYTES_PER_CHARACTER_MAX :])
        return any(text in tail for text in self.strings)
