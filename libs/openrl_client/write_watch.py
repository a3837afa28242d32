"""Says that a client's writes are held up, as by a full disk under NATS: once after some seconds, and when they go on.

Without it the retries are silent, for minutes. Said by logging, which is stderr where nothing else was set up; whoever
tries, when to try again and when to give up are the caller's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)

SAY_AFTER_S = 5.0


class WriteWatch:
    """Of one kind of writes, several of which may be under way.

    Args:
        what: what is held up, as a sentence begins.
        why: what is known of the reason while the server says nothing.
    """

    def __init__(self, what: str, why: Callable[[], str]) -> None:
        self._what = what
        self._why = why
        self._timer: asyncio.TimerHandle | None = None
        self._answer = ""
        self._told = False
        self._num_waiting = 0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around all the tries of somebody's write. When nobody is left, nothing is said any more."""
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1
            if self._num_waiting == 0:
                self._over()

    def tries(self) -> None:
        """A write is tried, for the first time or again."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SAY_AFTER_S, self._say)

    def failed(self, error: Exception) -> None:
        """A try failed and there will be another one; ``error`` is what is known by now."""
        self._answer = str(error)

    def answered(self) -> None:
        """The server took one, or refused it for good."""
        if self._told:
            log.warning("%s: NATS takes them again", self._what)
        self._over()

    def _over(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._answer, self._told = None, "", False

    def _say(self) -> None:
        self._told = True
        log.warning("%s: not stored for %g s, trying on: %s", self._what, SAY_AFTER_S, self._answer or self._why())
