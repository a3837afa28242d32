"""What several suites need."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil

from openrl_launcher import local


async def until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    """Wait until ``condition`` holds; TimeoutError when it does not within ``within_s`` seconds."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 (what is waited for happens in another process)
            await asyncio.sleep(0.01)


def end_workers(home: Path) -> None:
    """Kill what runs on ``home``; wait for the workers of a launcher within this process, which leaves them running."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("OPEN_RL_HOME") == str(home) and process.pid != os.getpid():
                process.kill()
                with contextlib.suppress(psutil.TimeoutExpired):
                    process.wait(5)
    while local._CHILDREN:
        _, child = local._CHILDREN.popitem()
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
        child.wait()
