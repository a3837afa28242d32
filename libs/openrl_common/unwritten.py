"""Which writes were never confirmed when their service ended: said in its last lines, for whoever looks for them (E17).

A write that ends with an answer, whatever it says, is not here, nor is one that its caller gave up before the end.
Nothing acknowledged hangs on it: what caused the write is delivered, or derived from the store, again (E5, E6).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from openrl_common.errors import Unreachable

_NAMED_MAX = 8


class Unwritten:
    """Of one bus. ``stopping``: set when its service is to end."""

    def __init__(self, stopping: asyncio.Event) -> None:
        self._stopping = stopping
        self._subjects: set[str] = set()
        self.answer = ""
        """What the server said when it last took none, empty while it says nothing."""

    def note(self, error: Exception) -> None:
        """A try failed with ``error`` and is repeated."""
        self.answer = str(getattr(error, "description", "") or "")

    @contextlib.contextmanager
    def during(self, subject: str) -> Iterator[None]:
        """Around the tries of one write."""
        self._subjects.add(subject)
        try:
            yield
        except (asyncio.CancelledError, Unreachable):
            if not self._stopping.is_set():
                self._subjects.discard(subject)
            raise
        except BaseException:
            self._subjects.discard(subject)
            raise
        self._subjects.discard(subject)

    def __str__(self) -> str:
        """Their subjects, a few by name; empty when there are none."""
        named = sorted(subject.removeprefix("$KV.") for subject in self._subjects)
        more = f" and {len(named) - _NAMED_MAX} more" if len(named) > _NAMED_MAX else ""
        return ", ".join(named[:_NAMED_MAX]) + more
