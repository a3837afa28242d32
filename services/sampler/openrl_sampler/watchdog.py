"""Says when the engine's thread has been at one step for too long (V11): a thread cannot be interrupted, only left.

Written by the engine's thread, read by the event loop: one float, never half of two. What becomes of a stuck engine is
the loop's affair (``engine_loop``). Weight updates are no steps: reading a large version from a slow share takes long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StepWatch:
    """``limit_s``: a step that takes longer is stuck."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s = limit_s
        self._clock = clock
        self._began: float | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around whatever the engine does for its calls."""
        self._began = self._clock()
        try:
            yield
        finally:
            self._began = None

    def check(self) -> str | None:
        """None, or why the engine counts as dead."""
        began = self._began
        taken_s = 0.0 if began is None else self._clock() - began
        if taken_s <= self.limit_s:
            return None
        return f"the engine has been at one step for {taken_s:.1f} s, the limit is {self.limit_s:g} s"
