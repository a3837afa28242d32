"""A durable consumer of a stream: pull, hand out (several at once, or one by one in order), settle, until told to stop.

Invariants: no more than ``concurrency`` messages are in a handler; with 1 the stream's order is the handling order
(redeliveries aside); what was pulled and not handled is given back at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import openrl_common.without_websockets  # noqa: F401

import nats.errors
import nats.js.errors
from nats.js import api

from openrl_common import settlement
from openrl_common.pull import NETWORK_ERRORS, Lost, Puller, heed_cancellation

if TYPE_CHECKING:
    from openrl_common.bus import Bus
    from openrl_common.connection import Received

_DELIVER_POLICY_IS_FIXED = 10012
_ACK_PENDING_MIN = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableConsumer:
    """See ``Bus.consume`` for the fields."""

    bus: Bus
    stream: str
    durable: str
    subjects: list[str]
    handler: settlement.Handler
    concurrency: int
    ack_wait_s: float
    max_deliver: int
    bound: asyncio.Event | None
    from_now: bool
    forgotten_after_s: float

    async def run(self) -> None:
        """Until cancelled, or the bus is stopping."""
        puller = self.bus.new_puller(
            self.stream, self._ensure, capacity=2 * self.concurrency if self.concurrency > 1 else 1
        )
        await puller.start()
        rest: list[Received] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                stop = tasks.create_task(stop_on(self.bus.stopping))
                try:
                    await self._hand_out(puller, tasks, stop, rest)
                finally:
                    stop.cancel()
        finally:
            self.bus.forget_puller(puller)
            for message in [*await puller.stop(), *rest]:
                with contextlib.suppress(*NETWORK_ERRORS, nats.errors.Error):
                    await message.nak()

    async def _hand_out(
        self, puller: Puller, tasks: asyncio.TaskGroup, stop: asyncio.Task[None], rest: list[Received]
    ) -> None:
        """To the handlers as they come, until ``stop`` is done; one that came too late is put into ``rest``."""
        slots = asyncio.Semaphore(self.concurrency)

        async def handle(message: Received) -> None:
            try:
                await settlement.handle(
                    self.bus, message, self.handler,
                    stream=self.stream, durable=self.durable, max_deliver=self.max_deliver,
                )  # fmt: skip
            finally:
                puller.done()
                slots.release()

        while not self.bus.stopping.is_set():
            heed_cancellation()
            await slots.acquire()
            message = await puller.take()
            if message is None:
                taking = asyncio.ensure_future(puller.next())
                try:
                    await asyncio.wait({taking, stop}, return_when=asyncio.FIRST_COMPLETED)
                    if not taking.done():
                        return
                    message = taking.result()
                finally:
                    if message is None:
                        taking.cancel()
                        with contextlib.suppress(asyncio.CancelledError, Lost):
                            rest.append(await taking)
            if self.concurrency == 1:
                await handle(message)
            else:
                tasks.create_task(handle(message))

    async def _ensure(self) -> str:
        config = api.ConsumerConfig(
            durable_name=self.durable,
            filter_subjects=self.subjects if len(self.subjects) > 1 else None,
            filter_subject=self.subjects[0] if len(self.subjects) == 1 else None,
            ack_policy=api.AckPolicy.EXPLICIT,
            ack_wait=self.ack_wait_s,
            max_deliver=-1,  # the limit is kept in ``settlement``, where the error class is known
            # Never 1, also where one is handled at a time: an ack that a server restart swallowed would then hold up
            # every later message until its redelivery. The order comes from pulling one at a time.
            max_ack_pending=max(4 * self.concurrency, _ACK_PENDING_MIN),
            deliver_policy=api.DeliverPolicy.NEW if self.from_now else api.DeliverPolicy.ALL,
            inactive_threshold=self.forgotten_after_s or None,
        )
        try:
            await self.bus.jetstream.add_consumer(self.stream, config=config)
        except nats.js.errors.BadRequestError as error:
            if error.err_code != _DELIVER_POLICY_IS_FIXED:  # then the durable exists: use it
                raise
        if self.bound is not None:
            self.bound.set()
        return self.durable


async def stop_on(event: asyncio.Event) -> None:
    """Wait for ``event``; a cancellation is an end like another."""
    with contextlib.suppress(asyncio.CancelledError):
        await event.wait()
