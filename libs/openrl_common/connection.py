"""nats-py's client with another ``request`` (a future and a timer) and another decoder of publish acknowledgements.

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

import msgspec
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api

_NO_RESPONDERS = "503"


class _Acknowledgement(msgspec.Struct):
    """What JetStream answers to a publish, as far as it is read here."""

    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: dict[str, Any] | None = None


_ACKNOWLEDGEMENT = msgspec.json.Decoder(_Acknowledgement)


class JetStream(JetStreamContext):
    """nats-py's, with acknowledgements decoded by msgspec: the library's own way was 13 % of a busy ledger's work."""

    async def publish(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float | None = None,
        stream: str | None = None,
        headers: dict[str, Any] | None = None,
        msg_ttl: float | None = None,
    ) -> api.PubAck:
        """As nats-py's; the same errors."""
        extra: dict[str, str] = {}
        if stream is not None:
            extra[api.Header.EXPECTED_STREAM] = stream
        if msg_ttl is not None:
            extra[api.Header.MSG_TTL] = str(int(msg_ttl))
        try:
            answer = await self._nc.request(
                subject,
                payload,
                timeout=self._timeout if timeout is None else timeout,
                headers={**headers, **extra} if headers else extra or None,
            )
        except nats.errors.NoRespondersError as error:
            raise nats.js.errors.NoStreamResponseError from error
        acknowledged = _ACKNOWLEDGEMENT.decode(answer.data)
        if acknowledged.error is not None:
            raise nats.js.errors.APIError.from_error(acknowledged.error)
        return api.PubAck(
            stream=acknowledged.stream, seq=acknowledged.seq, domain=None, duplicate=acknowledged.duplicate or None
        )


class Connection(Client):
    """Use it as nats-py's ``Client``."""

    def __init__(self) -> None:
        super().__init__()
        self._requests: dict[str, asyncio.Future[Msg]] = {}
        self._numbers = itertools.count(1)
        self._answers_to = ""
        self._subscribing = asyncio.Lock()

    def jetstream(self, **options: Any) -> JetStream:
        return JetStream(self, **options)

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
