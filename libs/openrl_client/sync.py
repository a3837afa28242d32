"""The same client without asyncio (C1): a loop in a background thread, calls block until they are done.

    from openrl_client import sync

    with sync.connect() as client:
        job = client.submit(openrl.JobSpec(name="hello", kind="lora", base_model="/models/qwen3"))
        job.ready()
        update = job.forward_backward(data, loss="cross_entropy")      # in flight at once, as in the async client
        job.optim_step(openrl.AdamParams(learning_rate=1e-4)).result()

Train operations return a handle with ``result()``; everything else returns its value.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from openrl_client.connection import connect as connect_async
from openrl_client.job import Job, PendingVersion
from openrl_client.training import Pending
from openrl_common.names import DEFAULT_TENANT

T = TypeVar("T")


class _Loop:
    """An event loop in its own thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="openrl-client", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=10)
        self.loop.close()


class Handle(Generic[T]):
    """A train operation in flight."""

    def __init__(self, loop: _Loop, pending: Awaitable[T]) -> None:
        self._loop = loop
        self._pending = pending

    def result(self, timeout_s: float | None = None) -> T:
        """Block until the answer. Raises what awaiting it would raise, TimeoutError after ``timeout_s``."""

        async def wait() -> T:
            async with asyncio.timeout(timeout_s):
                return await self._pending

        return self._loop.run(wait())


class Blocking:
    """Wraps an async object: its coroutines block, its train operations return a Handle, its values pass through."""

    def __init__(self, loop: _Loop, target: Any) -> None:
        self._loop = loop
        self._target = target

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        return self._call(value) if callable(value) else value

    def _call(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            async def on_loop() -> Any:
                # Called on the loop: train operations make their futures there.
                result = function(*args, **kwargs)
                return await result if inspect.iscoroutine(result) else result

            result = self._loop.run(on_loop())
            if isinstance(result, Pending | PendingVersion):
                return Handle(self._loop, result)
            if isinstance(result, Job):
                return Blocking(self._loop, result)
            if inspect.isasyncgen(result):
                return self._iterate(result)
            return result

        return call

    def _iterate(self, generator: Any) -> Iterator[Any]:
        end = object()

        async def advance() -> Any:
            return await anext(generator, end)

        while (item := self._loop.run(advance())) is not end:
            yield item


@contextlib.contextmanager
def connect(url: str | None = None, tenant: str = DEFAULT_TENANT, *, home: Path | None = None) -> Iterator[Any]:
    """Open a connection; the client it yields has the methods of ``openrl_client.Client``, blocking."""
    loop = _Loop()
    try:
        manager = connect_async(url, tenant, home=home)
        client = loop.run(manager.__aenter__())
        try:
            yield Blocking(loop, client)
        finally:
            loop.run(manager.__aexit__(None, None, None))
    finally:
        loop.stop()
