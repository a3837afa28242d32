"""nats-py's client with another ``request``: a future and a timer.

The client's own waits with ``asyncio.wait_for``, which on Python 3.11 can swallow the cancellation of its caller when
the answer arrives at the same moment (a task that was to end then goes on for ever), and which costs about as much as
the message itself. Every publish, read and write of the bus is a request.

Invariants: a request ends by its answer, by its timer or by its caller's cancellation; nothing is kept of one that is
over, so that a late answer is dropped.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

_NO_RESPONDERS = "503"


class Connection(Client):
    """Use it as nats-py's ``Client``."""

    def __init__(self) -> None:
        super().__init__()
        self._requests: dict[str, asyncio.Future[Msg]] = {}
        self._numbers = itertools.count(1)
        self._answers_to = ""
        self._subscribing = asyncio.Lock()

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,
        old_style: bool = False,
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        """Publish and wait for the answer; ``timeout`` in seconds. ``old_style`` changes nothing.

        Raises:
            nats.errors.NoRespondersError: nobody listens on ``subject``.
            nats.errors.TimeoutError: no answer in time; what was asked may still happen (E7).
        """
        if not self._answers_to:
            await self._subscribe_to_answers()
        token = str(next(self._numbers))
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Msg] = loop.create_future()
        self._requests[token] = answered
        timer = loop.call_later(timeout, self._expire, token)
        try:
            await self.publish(subject, payload, reply=self._answers_to + token, headers=headers)
            message = await answered
        finally:
            timer.cancel()
            self._requests.pop(token, None)
        if not message.data and message.headers and message.headers.get("Status") == _NO_RESPONDERS:
            raise nats.errors.NoRespondersError
        return message

    async def _subscribe_to_answers(self) -> None:
        async with self._subscribing:
            if not self._answers_to:
                inbox = self.new_inbox()
                await self.subscribe(f"{inbox}.*", cb=self._on_answer, pending_msgs_limit=-1)
                self._answers_to = f"{inbox}."

    async def _on_answer(self, message: Msg) -> None:
        answered = self._requests.get(message.subject.rpartition(".")[2])
        if answered is not None and not answered.done():
            answered.set_result(message)

    def _expire(self, token: str) -> None:
        answered = self._requests.get(token)
        if answered is not None and not answered.done():
            answered.set_exception(nats.errors.TimeoutError())
