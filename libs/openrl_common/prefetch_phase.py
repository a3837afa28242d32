"""The ``prefetch`` phase of a worker's start: ``prefetch`` beside whatever else the worker starts with.

    async with prefetching(context, mode):      # the imports need a core, prefetching waits for the network
        await imports()
    await load()

What was decided, how far it is and what it came to is in the worker's ready record (``openrl status``) and its log.
Cancelled, it stops reading and does not wait for a read that hangs.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

from openrl_common.prefetch import Prefetched, PrefetchMode, prefetch
from openrl_common.quantities import format_bytes
from openrl_common.records import Phase
from openrl_common.worker import WorkerContext

log = logging.getLogger(__name__)

_TELL_S = 2.0


@asynccontextmanager
async def prefetching(context: WorkerContext, mode: PrefetchMode) -> AsyncIterator[None]:
    """Prefetch while the block runs and until it is done; raises what :func:`prefetch_phase` does, at its end."""
    task = asyncio.create_task(prefetch_phase(context, mode), name="prefetch")
    try:
        yield
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def prefetch_phase(context: WorkerContext, mode: PrefetchMode) -> Prefetched:
    """Prefetch the checkpoint of the worker's base model.

    Raises:
        Rejected: ``checkpoint-unreadable``, as :func:`prefetch`.
    """
    cancel = threading.Event()
    progress = _Progress()
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
    started_at, started = time.time(), time.monotonic()
    reading = asyncio.get_running_loop().run_in_executor(
        thread,
        lambda: prefetch(Path(context.workload.base_model), mode=mode, report=progress, cancel=cancel),
    )
    try:
        while not (await asyncio.wait({reading}, timeout=_TELL_S))[0]:
            log.info("prefetch: %s", progress)
            await context.note({"prefetch": str(progress)})
        done = reading.result()
    finally:
        cancel.set()
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
