"""A pause that ends early when the service is to stop."""

from __future__ import annotations

import asyncio
import contextlib


async def pause(stopping: asyncio.Event, seconds: float) -> None:
    """Wait ``seconds``, or until ``stopping`` is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stopping.wait()
