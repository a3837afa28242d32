"""A worker that loads its model inside its first turn, and says so, so that nobody asks it to yield (T3)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from openrl_common import turns as module
from openrl_common.events import EVENT_DECODER, TurnGranted, TurnReleased, TurnRequested, TurnYieldAsked
from openrl_common.memory import MemoryBus
from openrl_common.memory_server import MemoryServer
from openrl_common.quantities import GIB
from openrl_common.records import (
    Residency,
    SeatRecord,
    SeatState,
    TurnRecord,
)
from openrl_common.turns import Moved, Turns
from openrl_common.worker import WorkerContext
from unit.common.test_turns_after_restart import WORKLOAD

MANY = 500
"""Turns of the loop, in which whatever goes on has happened."""


async def a_while() -> None:
    for _ in range(MANY):
        await asyncio.sleep(0)


class Loading:
    """The worker ``a1``, which has the turn 1 and loads in it; the test plays the arbiter."""

    def __init__(self) -> None:
        self.bus = MemoryBus(MemoryServer())
        self.residency = Residency(epoch=1, granted_at=0.0, until=1e12)
        self.loaded = asyncio.Event()
        self.turns = Turns(
            WorkerContext(
                service=cast(Any, None), bus=self.bus, store=self.bus.store, workload=WORKLOAD, assignment="a1",
                node="n1", home=Path("home"), device_bytes=GIB, stopping=self.bus.stopping,
                renewed_at=time.monotonic(),
            ),
            CollectorRegistry(),
        )  # fmt: skip

    async def start(self) -> asyncio.Task[None]:
        seat = SeatRecord(state=SeatState.HELD, incarnation=1, assignment="a1", claim="c1")
        await self.bus.store.ledger_seats.put(WORKLOAD.workload, seat)
        await self.turns.start()

        async def load() -> None:
            async with self.turns.hold():
                await self.loaded.wait()

        loading = asyncio.create_task(load())
        await self.until(lambda: self.said(None))
        await self.show()
        await self.bus.publish(TurnGranted(tenant="t", claim="c1", assignment="a1", epoch=1, until=1e12))
        return loading

    async def show(self, **values: object) -> None:
        """The record, with somebody waiting: whom nobody waits for has no turns."""
        self.residency = replace(self.residency, **values)
        await self.bus.store.turns.put("c1", TurnRecord(residents={"a1": self.residency}, waiting={"a2": 1.0}))

    async def end_the_load(self) -> None:
        async def move() -> Moved:
            return Moved(1, 0.0)

        self.loaded.set()
        self.turns.movers(move, move)

    def events(self) -> list[object]:
        return [EVENT_DECODER.decode(message.data) for message in self.bus.server.streams["OPENRL_EVENTS"].messages]

    def said(self, loading: bool | None) -> list[TurnRequested]:
        return [e for e in self.events() if isinstance(e, TurnRequested) and e.loading is loading]

    async def until(self, found: Callable[[], object]) -> None:
        for _ in range(MANY):
            if found():
                return
            await asyncio.sleep(0)
        raise AssertionError("it did not come about")


@pytest.fixture(autouse=True)
def no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    monkeypatch.setattr(module, "LINGER_S", 0.0)


async def test_T3_a_worker_says_of_its_turn_that_it_loads_and_that_it_can_yield_once_it_has_movers() -> None:
    this = Loading()
    loading = await this.start()
    await this.until(lambda: this.said(True))
    assert {event.epoch for event in this.said(True)} == {1}
    await this.show(loading=True)
    assert not this.said(False)
    await this.end_the_load()
    await loading
    await this.until(lambda: this.said(False))
    assert {event.epoch for event in this.said(False)} == {1}
    await this.show(loading=False, pressed_at=1.0)
    await this.bus.publish(
        TurnYieldAsked(tenant="t", claim="c1", assignment="a1", epoch=1, until=1e12, now=False, asked_at=1.0)
    )
    await this.until(lambda: any(isinstance(event, TurnReleased) for event in this.events()))
    await this.turns.close()


async def test_T3_E5_what_the_record_does_not_show_is_said_again_and_nothing_else() -> None:
    """Words are lost, and one process' word may be written over by a ledger that does not know it."""
    this = Loading()
    loading = await this.start()
    await this.until(lambda: len(this.said(True)) >= 3)
    assert len({event.attempt for event in this.said(True)}) == len(this.said(True))
    await this.show(loading=True)
    await a_while()
    num_said = len(this.said(True))
    await a_while()
    assert len(this.said(True)) == num_said
    await this.end_the_load()
    await loading
    await this.until(lambda: len(this.said(False)) >= 3)
    await this.show(loading=False)
    await a_while()
    num_said = len(this.events())
    await a_while()
    assert len(this.events()) == num_said
    await this.turns.close()


async def test_T1_a_worker_that_can_yield_from_the_outset_says_nothing_of_loads() -> None:
    this = Loading()
    await this.end_the_load()
    await (await this.start())
    await a_while()
    assert not this.said(True)
    assert not this.said(False)
    await this.turns.close()


async def test_T3_both_words_are_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits does so until the worker has said that it can yield."""
    monkeypatch.setattr(module, "LOOK_S", 60.0)
    monkeypatch.setattr(module, "LINGER_S", 60.0)
    this = Loading()
    loading = await this.start()
    await this.until(lambda: this.said(True))
    await this.show(loading=True)
    await this.end_the_load()
    await loading
    await this.until(lambda: this.said(False))
    await this.turns.close()
