"""The ``prefetch`` phase of a worker's start: ``Prefetch`` beside whatever else the worker starts with.

    async with prefetching(context, mode) as prefetch:
        await imports()                         # they need a core, prefetching waits for the network
        await load(prefetch)                    # as the tensors arrive; or after ``await prefetch.whole()``

What was decided, how far it is and what it came to is in the worker's ready record (``openrl status``) and its log.
Cancelled, it stops reading and does not wait for a read that hangs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

from openrl_common.prefetch import Prefetch, Prefetched, PrefetchMode
from openrl_common.quantities import format_bytes
from openrl_common.records import Phase
from openrl_common.worker import WorkerContext

log = logging.getLogger(__name__)

_TELL_S = 2.0


class Prefetching(Prefetch):
    """The prefetching of a worker, and its end as an event."""

    task: asyncio.Task[Prefetched]

    async def whole(self) -> None:
        """Wait until nothing will be read any more. Raises as ``run``."""
        await asyncio.shield(self.task)


@asynccontextmanager
async def prefetching(context: WorkerContext, mode: PrefetchMode) -> AsyncIterator[Prefetching]:
    """Prefetch the checkpoint of the worker's base model while the block runs, and until it is done.

    Raises:
        Rejected: ``checkpoint-unreadable``, as :class:`Prefetch`, at the end of the block.
    """
    progress = _Progress()
    prefetch = Prefetching(Path(context.workload.base_model), mode=mode, report=progress)
    prefetch.task = asyncio.create_task(_phase(context, prefetch, progress), name="prefetch")
    try:
        yield prefetch
        await prefetch.task
    finally:
        prefetch.end()
        prefetch.task.cancel()
        await asyncio.gather(prefetch.task, return_exceptions=True)


async def _phase(context: WorkerContext, prefetch: Prefetch, progress: _Progress) -> Prefetched:
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
    started_at, started = time.time(), time.monotonic()
    reading = asyncio.get_running_loop().run_in_executor(thread, prefetch.run)
    try:
        while not (await asyncio.wait({reading}, timeout=_TELL_S))[0]:
            log.info("prefetch: %s", progress)
            await context.note({"prefetch": str(progress)})
        done = reading.result()
    finally:
        prefetch.end()
        thread.shutdown(wait=False, cancel_futures=True)
    seconds = time.monotonic() - started
    context.phases.append(Phase(name="prefetch", started_at=started_at, seconds=seconds, detail=str(done)))
    log.info("%s", done)
    await context.note({"prefetch": str(done)})
    return done


class _Progress:
    """The last report of the reading threads; a tuple, so that it is never half of two."""

    def __init__(self) -> None:
        self._at = (0, 0)

    def __call__(self, read_bytes: int, total_bytes: int) -> None:
        self._at = (read_bytes, total_bytes)

    def __str__(self) -> str:
        read_bytes, total_bytes = self._at
        return f"{format_bytes(read_bytes)} of {format_bytes(total_bytes)} read" if total_bytes else "looking"
