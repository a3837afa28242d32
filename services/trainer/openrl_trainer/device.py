"""The thread that runs torch, and the turn to use it.

Invariants: one piece of work at a time; waiters are served in the order they came (R10); without a renewed lease, or
outside its turn on a shared device, the device is not touched (B7, T4); a turn may pass on at a safe boundary, in the
middle of a log entry (T3).

Not here: what the work is (engine.py), who waits with what (job_runner.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

from openrl_common.turns import TurnStopped
from openrl_common.worker import WorkerContext

T = TypeVar("T")

_LEASE_LOOK_S = 0.2


class Device:
    """The one thread that runs torch, and the turn to use it. Waiters are served in the order they came."""

    def __init__(self, context: WorkerContext, thread: ThreadPoolExecutor) -> None:
        self._context = context
        self._thread = thread
        self._turn = asyncio.Lock()

    async def run(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the thread, on the device. Raises TurnStopped."""

        def steps() -> Generator[None, None, T]:
            yield from ()
            return work()

        return await self.run_steps(steps())

    async def run_steps(self, steps: Generator[None, None, T]) -> T:
        """Run a piece of work that pauses at its safe boundaries; there the device may be left for a while (T3)."""
        async with self._turn:
            while not self._context.lease_held:  # noqa: ASYNC110 (time passing changes it, nobody sets it)
                await asyncio.sleep(_LEASE_LOOK_S)
            async with self._context.turn():
                # Once begun, a piece of work ends before the turn passes on, also when its job is cancelled meanwhile.
                running = asyncio.ensure_future(self._to_the_end(steps))
                try:
                    return await asyncio.shield(running)
                except asyncio.CancelledError:
                    await asyncio.wait({running})
                    raise

    async def run_anywhere(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the thread, whoever has the device: imports, moving tensors, dropping them."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _to_the_end(self, steps: Generator[None, None, T]) -> T:
        while True:
            paused, value = await self.run_anywhere(lambda: _next(steps))
            if not paused:
                return cast(T, value)
            try:
                await self._context.boundary()
            except TurnStopped:
                await self.run_anywhere(steps.close)  # torch's modes belong to that thread
                raise


def _next(steps: Generator[None, None, T]) -> tuple[bool, T | None]:
    """One piece, in the thread: whether it paused, else what it returned (StopIteration cannot cross a future)."""
    try:
        next(steps)
    except StopIteration as ended:
        return False, ended.value
    return True, None
