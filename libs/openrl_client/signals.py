"""Ctrl-C and its kin while a system runs in this process: an orderly end, and never half of one."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Signals:
    """Turns the first SIGINT, SIGTERM or SIGHUP into a cancellation of the task that entered; a second, before the
    ending has begun, kills everything at once; during the ending (``deaf``) they are ignored."""

    def __init__(self, kill_now: Callable[[], None]) -> None:
        self.deaf = False
        self._kill_now = kill_now
        self._previous: dict[int, Any] = {}
        self._task: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._count = 0

    def install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._previous[number] = signal.signal(number, self._on_signal)

    def restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.deaf:
            return
        self._count += 1
        if self._count > 1:
            self._kill_now()
        previous = self._previous.get(signal.SIGINT)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(signal.SIGINT, frame)  # asyncio.run's own: cancels the main task, then raises KeyboardInterrupt
        elif self._loop is not None and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)
