"""``openrl bench bus``: what the bus and the store do on this machine, through the same calls as the services.

Every figure is operations a second at a stated number in flight; the server syncs every write (E18), as in
``openrl up``.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from openrl_client.bench.figures import milliseconds, percentile
from openrl_client.bench.machine import Machine, StorePlace, describe, store_place
from openrl_client.home import Progress
from openrl_common import streams
from openrl_common.bus import Bus, Delivery
from openrl_common.nats_server import NatsServer
from openrl_common.records import NodeBudget

IN_FLIGHT = (1, 16, 128)
_CONSUME_CONCURRENCY = 64
_CONSUME_DEADLINE_S = 120.0


class _Echo(msgspec.Struct, frozen=True):
    number: int = 0


class BusReport(msgspec.Struct, frozen=True, kw_only=True):
    """Operations a second; the keys of the dictionaries are the number in flight."""

    publish_per_s: dict[int, float]
    write_per_s: dict[int, float]
    read_per_s: dict[int, float]
    consume_per_s: float
    request_p50_ms: float
    request_p99_ms: float
    messages: int
    store: StorePlace
    machine: Machine


async def measure(store: Path | None, *, num_messages: int, progress: Progress) -> BusReport:
    """Measure on an embedded server of its own. Raises Rejected when the store is in memory."""
    place = store_place(store)
    Path(place.path).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="openrl-bench-", dir=place.path) as scratch:
        async with NatsServer(Path(scratch) / "nats") as server:
            bus = await Bus.connect(server.url, name="openrl-bench")
            try:
                await streams.ensure(bus)
                return await _measure(bus, num_messages, place, progress)
            finally:
                await bus.close()


async def _measure(bus: Bus, num_messages: int, place: StorePlace, progress: Progress) -> BusReport:
    budgets = bus.store.ledger_nodes

    async def publish(number: int) -> None:
        await bus.publish_raw(f"openrl.ev.bench._fleet.bench.{number}.done", b"{}", message_id=f"bench:{number}")

    async def write(number: int) -> None:
        await budgets.write(f"bench-{number}", NodeBudget(), last=0)

    async def read(number: int) -> None:
        await budgets.get(f"bench-{number % num_messages}")

    async def echo(body: _Echo) -> _Echo:
        return body

    publishes, writes, reads = {}, {}, {}
    for index, in_flight in enumerate(IN_FLIGHT):
        first = index * num_messages
        publishes[in_flight] = await _rate(publish, range(first, first + num_messages), in_flight)
        writes[in_flight] = await _rate(write, range(first, first + num_messages), in_flight)
        reads[in_flight] = await _rate(read, range(first, first + num_messages), in_flight)
        progress(
            f"{in_flight} in flight: {publishes[in_flight]:.0f} publishes, {writes[in_flight]:.0f} compare-and-swaps, "
            f"{reads[in_flight]:.0f} reads a second"
        )
    consumed = await _consume(bus, num_messages * len(IN_FLIGHT))
    progress(f"consumed {consumed:.0f} a second")
    await bus.serve("openrl.q.bench.echo", _Echo, echo)
    asked: list[float] = []
    for number in range(min(num_messages, 1000)):
        began = time.perf_counter()
        await bus.request("openrl.q.bench.echo", _Echo(number), _Echo)
        asked.append(time.perf_counter() - began)
    return BusReport(
        publish_per_s=publishes,
        write_per_s=writes,
        read_per_s=reads,
        consume_per_s=consumed,
        request_p50_ms=milliseconds(percentile(asked, 50)),
        request_p99_ms=milliseconds(percentile(asked, 99)),
        messages=num_messages,
        store=place,
        machine=describe(),
    )


async def _rate(operation: Callable[[int], Awaitable[None]], numbers: range, in_flight: int) -> float:
    """Run ``operation`` once per number, ``in_flight`` at a time; operations a second."""
    left = iter(numbers)

    async def worker() -> None:
        for number in left:
            await operation(number)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(in_flight):
            tasks.create_task(worker())
    return round(len(numbers) / (time.perf_counter() - began), 1)


async def _consume(bus: Bus, num_expected: int) -> float:
    """Messages a second through a durable consumer with acks."""
    num_seen = 0
    done = asyncio.Event()

    async def handle(delivery: Delivery) -> None:
        nonlocal num_seen
        num_seen += 1
        if num_seen >= num_expected:
            done.set()

    began = time.perf_counter()
    consuming = asyncio.create_task(
        bus.consume(
            stream=streams.EVENTS.name, durable="bench", subjects=["openrl.ev.bench.>"], handler=handle,
            concurrency=_CONSUME_CONCURRENCY,
        )
    )  # fmt: skip
    try:
        async with asyncio.timeout(_CONSUME_DEADLINE_S):
            await done.wait()
        return round(num_expected / (time.perf_counter() - began), 1)
    finally:
        consuming.cancel()
        await asyncio.gather(consuming, return_exceptions=True)
