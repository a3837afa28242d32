"""Virtual time: an event loop whose clock jumps to the next timer, and a process's view of clocks and randomness.

Invariants: the same seed gives the same run, callback by callback. Nothing of the real clock, the real random
generators or the operating system gets in: ``deterministic`` replaces them for the length of a run, and
``VirtualLoop`` has no selector, no threads and no wall clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import heapq
import os
import random
import secrets
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

EPOCH = 1_700_000_000.0
PROCESS: contextvars.ContextVar[Any] = contextvars.ContextVar("process")
"""The simulated process that the running code belongs to; tasks inherit it."""


class Stuck(Exception):
    """Nothing is left to run and nothing is due: a task waits for something that nobody will do."""


class _Call(list[Any]):
    """``[callback, arguments, context]``: what the loop runs, and the handle that asyncio cancels it by.

    A list made in one step of C: ``asyncio.Handle`` costs three Python calls, and a run makes thousands.
    """

    __slots__ = ()

    def cancel(self) -> None:
        self[0] = None


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs what is ready in order; when nothing is, the clock jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.monotonic_s = EPOCH / 2
        self._ready: deque[_Call] = deque()
        self.timers: list[tuple[float, int, Any, Any]] = []
        self.num_timers = 0
        """Made so far: of timers that are due at once the one made first comes first."""
        self._tasks: list[asyncio.Task[Any]] = []

    get_debug = staticmethod(bool)  # False, without a Python call for every future that asyncio makes

    def time(self) -> float:
        return self.now_s

    def post(self, delay_s: float, call: Callable[..., object], *arguments: Any) -> None:
        """A timer without a handle: cheaper, and nobody can cancel it. What it raises ends the run."""
        self.num_timers += 1
        heapq.heappush(self.timers, (self.now_s + delay_s, self.num_timers, call, arguments))

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        call = _Call((callback, args, contextvars.copy_context() if context is None else context))
        self._ready.append(call)
        return call

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        call = _Call((callback, args, contextvars.copy_context() if context is None else context))
        self.num_timers += 1
        heapq.heappush(self.timers, (when, self.num_timers, call, None))
        return call

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> Any:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks.append(task)
        process = PROCESS.get(None) if context is None else context.get(PROCESS)
        if process is not None:
            process.own(task)
        return task

    def unfinished(self) -> list[asyncio.Task[Any]]:
        """As ``asyncio.all_tasks``, which also goes through those of former runs."""
        return [task for task in self._tasks if not task.done()]

    async def _now(self, func: Callable[[], Any]) -> Any:
        await asyncio.sleep(0.001)
        return func()

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        return self.create_task(self._now(lambda: func(*args)))

    def _run_once(self) -> None:
        """Run until something stops the loop: asyncio would call this once for each timer."""
        ready, timers, pop = self._ready, self.timers, heapq.heappop
        while not self._stopping:  # type: ignore[attr-defined]
            if not ready:
                if not timers:
                    raise Stuck(f"nothing left to do at {self.now_s:.3f} s")
                when, _, call, arguments = pop(timers)
                if arguments is not None:
                    if when > self.now_s:
                        self.now_s = when
                        self.monotonic_s = EPOCH / 2 + when
                    call(*arguments)
                elif call[0] is not None:
                    if when > self.now_s:
                        self.now_s = when
                        self.monotonic_s = EPOCH / 2 + when
                    ready.append(call)
            while ready:
                callback, args, context = ready.popleft()
                if callback is not None:
                    try:
                        context.run(callback, *args)
                    except (SystemExit, KeyboardInterrupt):
                        raise
                    except BaseException as error:
                        self.call_exception_handler({"message": f"in {callback!r}", "exception": error})

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
        (time, "time", functools.partial(_skewed_time, loop)),
        (time, "monotonic", functools.partial(getattr, loop, "monotonic_s")),
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
