"""What was decided is carried out before the message that led to it is acknowledged (E6)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from openrl_common.duty import Duty
from openrl_common.errors import Transient
from openrl_common.events import SeatRequested, WorkerExited
from openrl_common.memory import MemoryBus
from openrl_common.memory_server import MemoryServer, Network
from openrl_placement.outbox import Outbox
from openrl_placement.state import Effects
from unit.placement.desk import Desk, node

TRAINER = "default--a--trainer"


class Slow(Network):
    """Keeps what is asked of the server until it is let go."""

    def __init__(self) -> None:
        self.kept: list[tuple[Any, ...]] = []

    def ask(self, bus: MemoryBus, apply: Callable[[], Any], answer: asyncio.Future[Any], timeout_s: float) -> None:
        self.kept.append((bus, apply, answer, timeout_s))

    def let_go(self) -> None:
        for request in self.kept:
            super().ask(*request)


def decided() -> tuple[Desk, Effects, WorkerExited]:
    """A record that is to be written because its worker has exited, and that event."""
    it = Desk()
    it.node(node())
    it.submit("a")
    it.book(it.take(SeatRequested)[0])
    effects = Effects()
    effects.workloads[TRAINER] = None
    exited = WorkerExited(
        tenant="default", workload=TRAINER, assignment="a1", claim=f"c-{TRAINER}", node="n1", exit_code=1
    )
    return it, effects, exited


async def a_few_turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_E6_a_message_that_comes_twice_at_once_waits_for_what_the_first_led_to() -> None:
    it, effects, exited = decided()
    network = Slow()
    outbox = Outbox(MemoryBus(MemoryServer(network)), it.state, None)
    first = asyncio.create_task(outbox.carry_out(effects))
    await a_few_turns()
    again = asyncio.create_task(outbox.settle(exited))
    await a_few_turns()
    assert network.kept, "the write is on its way"
    assert not again.done()
    network.let_go()
    await first
    await again


async def test_E6_a_message_that_comes_again_is_not_acknowledged_while_its_effects_are_kept() -> None:
    it, effects, exited = decided()
    bus = MemoryBus(MemoryServer())
    nobodys = Duty(bus.store.duties, "placement", holder="this one", clock=lambda: 0.0)
    outbox = Outbox(bus, it.state, nobodys)
    with pytest.raises(Transient):
        await outbox.carry_out(effects)
    with pytest.raises(Transient):
        await outbox.settle(exited)
    await nobodys.look()
    await outbox.carry_out(Effects())
    await outbox.settle(exited)
    assert await bus.store.workloads.get(TRAINER) is not None
