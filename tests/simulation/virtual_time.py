"""Virtual time: an event loop whose clock jumps to the next timer, and a process's view of clocks and randomness.

Invariants: the same seed gives the same run, callback by callback. Nothing of the real clock, the real random
generators or the operating system gets in: ``deterministic`` replaces them for the length of a run, and
``VirtualLoop`` has no selector, no threads and no wall clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import os
import random
import secrets
import time
import uuid
from asyncio import events
from collections.abc import Callable, Iterator
from typing import Any

EPOCH = 1_700_000_000.0
PROCESS: contextvars.ContextVar[Any] = contextvars.ContextVar("process")
"""The simulated process that the running code belongs to; tasks inherit it."""


class Stuck(Exception):
    """Nothing is left to run and nothing is due: a task waits for something that nobody will do."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs what is ready in order; when nothing is, the clock jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.num_steps = 0
        self._timers: list[tuple[float, int, Any, Any]] = []
        self._timer_count = 0

    def time(self) -> float:
        return self.now_s

    def post(self, delay_s: float, call: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        """A timer without a handle: cheaper, and nobody can cancel it."""
        self._timer_count += 1
        heapq.heappush(self._timers, (self.now_s + delay_s, self._timer_count, call, arguments))

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> events.TimerHandle:
        handle = events.TimerHandle(when, callback, args, self, context)
        self._timer_count += 1
        heapq.heappush(self._timers, (when, self._timer_count, handle, None))
        return handle

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> events.TimerHandle:
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> Any:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        process = PROCESS.get(None) if context is None else context.get(PROCESS)
        if process is not None:
            process.own(task)
        return task

    async def _now(self, func: Callable[[], Any]) -> Any:
        await asyncio.sleep(0.001)
        return func()

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        return self.create_task(self._now(lambda: func(*args)))

    def _run_once(self) -> None:
        ready = self._ready  # type: ignore[attr-defined]
        if not ready:
            timers = self._timers
            while True:
                if not timers:
                    raise Stuck(f"nothing left to do at {self.now_s:.3f} s")
                when, _, call, arguments = heapq.heappop(timers)
                if arguments is not None or not call._cancelled:
                    break
            if when > self.now_s:
                self.now_s = when
            self.num_steps += 1
            if arguments is not None:
                call(*arguments)
            else:
                call._run()
        while ready:
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _timer_handle_cancelled(self, handle: events.TimerHandle) -> None:
        """It stays in the heap and is passed over when its time comes."""

    def _process_events(self, event_list: Any) -> None:
        """There is no selector."""

    def _write_to_self(self) -> None:
        """There are no other threads."""


def _skewed_time(loop: VirtualLoop) -> float:
    process = PROCESS.get(None)
    return EPOCH + loop.now_s + (0.0 if process is None else process.skew_s)


@contextlib.contextmanager
def deterministic(loop: VirtualLoop, seed: int) -> Iterator[None]:
    """Replace clocks, random generators and unique ids for the length of a run."""
    source = random.Random(f"ids {seed}")
    state = random.getstate()
    replaced: list[tuple[Any, str, Any]] = [
        (time, "time", lambda: _skewed_time(loop)),
        (time, "monotonic", lambda: EPOCH / 2 + loop.now_s),
        (os, "urandom", source.randbytes),
        (secrets, "token_hex", lambda size=32: source.randbytes(size).hex()),
        (uuid, "uuid4", lambda: uuid.UUID(bytes=source.randbytes(16), version=4)),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    random.seed(seed)
    try:
        for owner, name, new in replaced:
            setattr(owner, name, new)
        yield
    finally:
        for owner, name, old in originals:
            setattr(owner, name, old)
        random.setstate(state)
