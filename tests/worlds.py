"""A world around worker processes on a NATS server: made, and ended with all of them, whatever the test did."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

from openrl_common import streams
from openrl_common.bus import Bus


class World(Protocol):
    """What the tests of trainers and of samplers each have their own of."""

    processes: list[subprocess.Popen[bytes]]

    async def listen(self) -> None: ...


W = TypeVar("W", bound=World)


@asynccontextmanager
async def running(url: str, make: Callable[[Bus], W]) -> AsyncIterator[W]:
    bus = await Bus.connect(url, name="test")
    await streams.ensure(bus)
    world = make(bus)
    await world.listen()
    yield world
    for process in world.processes:
        if process.poll() is None:
            process.kill()
        process.wait()
    await bus.close()
