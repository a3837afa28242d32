"""Continuous pull from a JetStream consumer: one bounded buffer, refilled by pull requests.

nats-py's ``fetch`` costs a round trip per batch and waits for the whole batch; here requests are renewed while
messages are being handled. Invariants: at most ``capacity`` messages are requested, buffered or in hand at once;
a lost consumer or connection is noticed by a status, by a reconnect, or at the latest ``_SILENCE_S`` after the last
sign of life, and the consumer is made again with back-off (E14).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import openrl_common.without_websockets  # noqa: F401

import nats.errors
import nats.js.errors

if TYPE_CHECKING:
    from openrl_common.connection import Connection, Received

log = logging.getLogger(__name__)

_EXPIRES_S = 10.0
_SILENCE_S = 12.0
_LOOK_S = 1.0
_BACK_OFF_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0)

NETWORK_ERRORS: tuple[type[Exception], ...] = (
    nats.errors.TimeoutError,
    TimeoutError,
    nats.errors.ConnectionClosedError,
    nats.errors.ConnectionReconnectingError,
    nats.errors.OutboundBufferLimitError,
    nats.errors.NoRespondersError,
    nats.errors.NoServersError,
    nats.errors.StaleConnectionError,
    nats.js.errors.NoStreamResponseError,
    nats.js.errors.ServiceUnavailableError,
    ConnectionError,
)
"""What a call raises when the server is away: the outcome of a write is unknown, a read may be repeated."""


JETSTREAM_FAULTS: tuple[type[Exception], ...] = (*NETWORK_ERRORS, nats.js.errors.APIError)
"""The same, or an error that JetStream itself answered."""


def heed_cancellation() -> None:
    """Raise CancelledError when this task was asked to end; for loops around calls of the client library.

    nats-py waits with ``asyncio.wait_for``, which on Python 3.11 returns the answer and drops a cancellation that came
    in the same turn of the loop. The request is still counted in ``cancelling()``: a loop that would go on for ever
    looks there before each round.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


class Lost(Exception):
    """The pull was interrupted (reconnect or consumer gone): an ordered reader has to start again from its position."""


class Puller:
    """Pulls from the consumer that ``ensure_consumer`` makes or finds; returns its name.

    Args:
        capacity: most messages requested or buffered at once.
        ordered: raise Lost from ``next`` instead of healing silently, so that the reader can restart its consumer
            from its own position.
    """

    def __init__(
        self,
        connection: Connection,
        stream: str,
        ensure_consumer: Callable[[], Awaitable[str]],
        *,
        capacity: int,
        ordered: bool = False,
    ) -> None:
        assert capacity > 0
        self._connection = connection
        self._stream = stream
        self._ensure_consumer = ensure_consumer
        self._capacity = capacity
        self._ordered = ordered
        self._buffer: asyncio.Queue[Received | None] = asyncio.Queue()
        self._consumer = ""
        self._outstanding = 0
        self._in_hand = 0
        self._failures = 0
        self._interrupted = False
        self._seen_at = time.monotonic()
        self._unsubscribe: Callable[[], Awaitable[None]] | None = None
        self._inbox = ""

    async def start(self) -> None:
        self._inbox = self._connection.new_inbox()
        self._unsubscribe = await self._connection.listen(self._inbox, self._on_message)
        self._consumer = await self._ensure_consumer()

    async def stop(self) -> list[Received]:
        """Stop pulling; return what was delivered but never taken, for the caller to nak."""
        if self._unsubscribe is not None:
            with contextlib.suppress(*NETWORK_ERRORS):
                await self._unsubscribe()
        rest: list[Received] = []
        while not self._buffer.empty():
            message = self._buffer.get_nowait()
            if message is not None:
                rest.append(message)
        return rest

    def interrupt(self) -> None:
        """The connection came back: pull requests of the old one are void."""
        self._interrupted = True
        self._buffer.put_nowait(None)

    def done(self) -> None:
        """The taker has finished one message; its place in the capacity is free again."""
        self._in_hand -= 1
        assert self._in_hand >= 0

    async def take(self) -> Received | None:
        """The next message if one is here already, without giving way to other tasks; None: use ``next``.

        Messages that came in one read are so handed out in one go, and what their handlers send goes out in one write.
        """
        if self._interrupted:
            return None
        await self._refill()
        while not self._buffer.empty():
            message = self._buffer.get_nowait()
            if message is not None:
                self._in_hand += 1
                return message
        return None

    async def next(self) -> Received:
        """The next message. Raises Lost when ordered and the position may have been lost."""
        while True:
            heed_cancellation()
            if self._interrupted:
                await self._recover()
            await self._refill()
            try:
                if self._buffer.empty():
                    async with asyncio.timeout(_LOOK_S):
                        message = await self._buffer.get()
                else:  # no timer for what is here already: timers were 15 % of a busy service's work
                    message = self._buffer.get_nowait()
            except TimeoutError:
                if self._outstanding and time.monotonic() - self._seen_at > _SILENCE_S:
                    self._interrupted = True
                continue
            if message is not None:
                self._in_hand += 1
                return message

    async def _refill(self) -> None:
        free = self._capacity - self._outstanding - self._in_hand - self._buffer.qsize()
        if free <= 0 or (self._outstanding and free * 2 < self._capacity):
            return
        body = json.dumps({"batch": free, "expires": int(_EXPIRES_S * 1e9)}).encode()
        self._outstanding += free
        self._seen_at = time.monotonic()
        try:
            await self._connection.publish(
                f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}", body, reply=self._inbox
            )
        except NETWORK_ERRORS:
            self._interrupted = True

    def _on_message(self, message: Received) -> None:
        self._seen_at = time.monotonic()
        status = message.headers.get("Status") if not message.data else None
        if status is None:
            self._outstanding = max(0, self._outstanding - 1)
            self._failures = 0
            self._buffer.put_nowait(message)
            return
        headers = message.headers
        if status in ("404", "408"):
            self._outstanding = max(0, self._outstanding - int(headers.get("Nats-Pending-Messages", self._outstanding)))
            self._buffer.put_nowait(None)  # wake the taker: it renews the request
            return
        if status == "100":
            return
        log.info("pull interrupted stream=%s status=%s %s", self._stream, status, headers.get("Description", ""))
        self.interrupt()

    async def _recover(self) -> None:
        """Make the consumer again, with back-off. The buffer is kept: those messages were delivered."""
        while True:
            heed_cancellation()
            self._interrupted = False
            self._outstanding = 0
            if self._ordered:
                raise Lost
            await asyncio.sleep(_BACK_OFF_S[min(self._failures, len(_BACK_OFF_S) - 1)])
            self._failures += 1
            try:
                self._consumer = await self._ensure_consumer()
            except JETSTREAM_FAULTS as error:
                log.info("consumer not available stream=%s error=%s", self._stream, error)
                continue
            return
