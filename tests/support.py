"""What several suites need."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    """Wait until ``condition`` holds; TimeoutError when it does not within ``within_s`` seconds."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 (what is waited for happens in another process)
            await asyncio.sleep(0.01)
