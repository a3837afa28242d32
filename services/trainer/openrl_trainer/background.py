"""One job's work behind its training: writing versions, states and checkpoints while the next entries run (R12).

Invariants: pieces run one after the other, in the order in which they were given; at most ``WAITING_MAX`` are given and
not finished, the next giver waits (each holds a copy of the weights); a piece that fails ends the job's runner, which
reads its task group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

WAITING_MAX = 2
"""One being written and one waiting for that."""

Spawn = Callable[[Coroutine[Any, Any, None]], object]


class Background:
    """``spawn`` starts a task of the runner's task group."""

    def __init__(self, spawn: Spawn) -> None:
        self._spawn = spawn
        self._room = asyncio.Semaphore(WAITING_MAX)
        self._turn = asyncio.Lock()  # serves waiters in the order they came
        self._unfinished = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def room(self) -> None:
        """Wait until another piece may be given: before the copy that it will hold is made."""
        async with self._room:
            return

    async def give(self, piece: Callable[[], Awaitable[None]]) -> None:
        await self._room.acquire()
        self._unfinished += 1
        self._idle.clear()
        self._spawn(self._run(piece))

    async def idle(self) -> None:
        """Wait until everything given is finished."""
        await self._idle.wait()

    async def _run(self, piece: Callable[[], Awaitable[None]]) -> None:
        try:
            async with self._turn:
                await piece()
        finally:
            self._unfinished -= 1
            if self._unfinished == 0:
                self._idle.set()
            self._room.release()
