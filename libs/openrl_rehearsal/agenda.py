"""A virtual clock: calls to make, in the order of their moments; equal moments in the order in which they were put.

Invariants: time never goes back; the same calls in the same order give the same run, exactly.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

Call = Callable[..., None]


class Agenda:
    """``now`` is in seconds since the rehearsal began."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_calls = 0
        self._calls: list[tuple[float, int, Call, tuple[Any, ...]]] = []
        self._sequence = count()

    def after(self, delay_s: float, call: Call, *arguments: Any) -> None:
        """Make ``call`` in ``delay_s`` seconds."""
        assert delay_s >= 0, f"a call {delay_s} s in the past"
        heapq.heappush(self._calls, (self.now + delay_s, next(self._sequence), call, arguments))

    def run(self, done: Callable[[], bool], horizon_s: float) -> bool:
        """Make calls until ``done``. False: none was left, or the next one lies beyond ``horizon_s``."""
        while not done():
            if not self._calls or self._calls[0][0] > horizon_s:
                return False
            self.now, _, call, arguments = heapq.heappop(self._calls)
            self.num_calls += 1
            call(*arguments)
        return True
