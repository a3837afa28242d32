"""nats-py's client with another ``request`` (a future and a timer), another decoder of publish acknowledgements, and
subscriptions whose messages are handed over in the read loop (``listen``).

The client's own request waits with ``asyncio.wait_for``, which on Python 3.11 can swallow the cancellation of its
caller when the answer arrives at the same moment (a task that was to end then goes on for ever), and which costs about
as much as the message itself. Every publish, read and write of the bus is a request.

Invariants: a request ends by its answer, by its timer or by its caller's cancellation; nothing is kept of one that is
over, so that a late answer is dropped. What ``listen`` calls must not block and must not raise.

The client's own subscriptions parse the headers of every message, queue it and wake a task for it. Answers and pulled
messages, which are nearly all that a service receives, need none of that.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import openrl_common.without_websockets  # noqa: F401

import msgspec
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api

from openrl_common.group_commit import GroupCommit, Stale, Write

_NO_RESPONDERS = "503"
_HEADER_LINE = b"NATS/1.0"
_V1_TOKENS = 9
_STALE = "wrong last sequence: this connection has written it since"
WRONG_LAST_SEQUENCE = (10071, 10164)
"""Error codes of a condition that does not hold; the second on replicated buckets (E8)."""


class _Acknowledgement(msgspec.Struct):
    """What JetStream answers to a publish, as far as it is read here."""

    seq: int = 0
    batch: str = ""
    count: int = 0
    error: dict[str, Any] | None = None


_ACKNOWLEDGEMENT = msgspec.json.Decoder(_Acknowledgement)


class JetStream(JetStreamContext):
    """nats-py's, with group commit, and with acknowledgements decoded by msgspec (the library's own way was 13 % of a
    busy ledger's work)."""

    def __init__(self, connection: Connection, **options: Any) -> None:
        super().__init__(connection, **options)
        self.commits = GroupCommit(self._send_alone, self._send_group)

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
        expected = headers.get(api.Header.EXPECTED_LAST_SUBJECT_SEQUENCE) if headers else None
        write = Write(
            subject=subject,
            body=payload,
            headers={**(headers or {}), **extra},
            timeout=self._timeout if timeout is None else timeout,
            expected=None if expected is None else int(expected),
        )
        try:
            sequence = await self.commits.publish(write)
        except Stale as error:
            raise nats.js.errors.APIError(code=400, err_code=WRONG_LAST_SEQUENCE[0], description=_STALE) from error
        return api.PubAck(stream="", seq=sequence, domain=None)

    async def _send_alone(self, write: Write) -> int:
        acknowledged = await self._acknowledged(write, write.headers)
        if acknowledged.error is not None:
            raise nats.js.errors.APIError.from_error(acknowledged.error)
        return acknowledged.seq

    async def _send_group(self, writes: Sequence[Write]) -> int | None:
        """One atomic batch (ADR-50): members before the last are not answered, the last one commits."""
        batch = self._nc.new_inbox().rpartition(".")[2]
        for number, write in enumerate(writes[:-1], start=1):
            await self._nc.publish(write.subject, write.body, headers=write.headers | _member(batch, number))
        commit = _member(batch, len(writes)) | {api.Header.BATCH_COMMIT: "1"}
        last = writes[-1]
        acknowledged = await self._acknowledged(last, last.headers | commit)
        if acknowledged.error is not None:
            return None
        if acknowledged.batch != batch or acknowledged.count != len(writes):
            # A server older than 2.12 stores each for itself: whatever became of them, each looks for itself (E7).
            raise nats.errors.TimeoutError
        return acknowledged.seq

    async def _acknowledged(self, write: Write, headers: dict[str, str]) -> _Acknowledgement:
        try:
            answer = await self._nc.request(
                write.subject, write.body, timeout=write.timeout, headers=cast(dict[str, Any], headers) or None
            )
        except nats.errors.NoRespondersError as error:
            raise nats.js.errors.NoStreamResponseError from error
        return _ACKNOWLEDGEMENT.decode(answer.data)


def _member(batch: str, number: int) -> dict[str, str]:
    return {api.Header.BATCH_ID: batch, api.Header.BATCH_SEQUENCE: str(number)}


class Received:
    """A message of ``Connection.listen``. Headers are parsed when they are asked for."""

    __slots__ = ("_connection", "_headers", "_raw_headers", "data", "reply", "subject")

    def __init__(self, connection: Client, subject: str, reply: str, data: bytes, raw_headers: bytes | None) -> None:
        self._connection = connection
        self._raw_headers = raw_headers
        self._headers: dict[str, str] | None = None
        self.subject = subject
        self.reply = reply
        self.data = data

    @property
    def headers(self) -> dict[str, str]:
        if self._headers is None:
            self._headers = _parse_headers(self._raw_headers) if self._raw_headers else {}
        return self._headers

    @property
    def delivered(self) -> Delivered:
        """What the consumer says of it. Raises ValueError when no consumer delivered it."""
        return Delivered.of(self.reply)

    async def ack(self) -> None:
        await self._connection.publish(self.reply)

    async def nak(self, delay: float = 0.0) -> None:
        """Have it delivered again after ``delay`` seconds."""
        options = b" " + json.dumps({"delay": int(delay * 1e9)}).encode() if delay else b""
        await self._connection.publish(self.reply, b"-NAK" + options)

    async def term(self) -> None:
        await self._connection.publish(self.reply, b"+TERM")

    async def in_progress(self) -> None:
        await self._connection.publish(self.reply, b"+WPI")


class Delivered:
    """The figures in a delivered message's reply subject. ``stored_at`` in seconds since the epoch.

    ``$JS.ACK.<stream>.<consumer>.<deliveries>.<stream sequence>.<consumer sequence>.<nanoseconds>.<pending>``, or with
    a domain and an account before the stream.
    """

    __slots__ = ("deliveries", "pending", "sequence", "stored_at")

    def __init__(self, deliveries: int, sequence: int, stored_at: float, pending: int) -> None:
        self.deliveries = deliveries
        self.sequence = sequence
        self.stored_at = stored_at
        self.pending = pending

    @classmethod
    def of(cls, reply: str) -> Delivered:
        tokens = reply.split(".")
        if len(tokens) < _V1_TOKENS or tokens[1] != "ACK":
            raise ValueError(f"{reply!r} is no acknowledgement subject")
        at = 4 if len(tokens) == _V1_TOKENS else 6
        return cls(int(tokens[at]), int(tokens[at + 1]), int(tokens[at + 3]) / 1e9, int(tokens[at + 4]))


def _parse_headers(raw: bytes) -> dict[str, str]:
    """``NATS/1.0[ status[ description]]``, then a line each. A status becomes ``Status`` and ``Description``."""
    first, _, rest = raw.partition(b"\r\n")
    headers: dict[str, str] = {}
    inline = first[len(_HEADER_LINE) :].strip()
    if inline:
        status, _, description = inline.decode("utf-8", "replace").partition(" ")
        headers["Status"] = status
        if description:
            headers["Description"] = description.strip()
    return headers | Client._parse_header_lines(rest)


class Connection(Client):
    """Use it as nats-py's ``Client``."""

    def __init__(self) -> None:
        super().__init__()
        self._listeners: dict[int, Callable[[Received], None]] = {}
        self._requests: dict[str, asyncio.Future[Received]] = {}
        self._numbers = itertools.count(1)
        self._answers_to = ""
        self._subscribing = asyncio.Lock()

    def jetstream(self, **options: Any) -> JetStream:
        return JetStream(self, **options)

    async def listen(self, subject: str, callback: Callable[[Received], None]) -> Callable[[], Awaitable[None]]:
        """Subscribe, and have ``callback`` called with each message as it is read. Returns what ends it."""

        async def never(_: Msg) -> None:
            raise AssertionError("a listened-to subscription hands nothing to its task")

        subscription = await self.subscribe(subject, cb=never)
        self._listeners[subscription._id] = callback

        async def stop() -> None:
            self._listeners.pop(subscription._id, None)
            await subscription.unsubscribe()

        return stop

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        callback = self._listeners.get(sid)
        if callback is None:
            await super()._process_msg(sid, subject, reply, data, headers)
        else:
            callback(Received(self, subject.decode(), reply.decode(), data, headers or None))

    async def request(  # type: ignore[override]  # a Received in place of a Msg
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,
        old_style: bool = False,
        headers: dict[str, Any] | None = None,
    ) -> Received:
        """Publish and wait for the answer; ``timeout`` in seconds. ``old_style`` changes nothing.

        Raises:
            nats.errors.NoRespondersError: nobody listens on ``subject``.
            nats.errors.TimeoutError: no answer in time; what was asked may still happen (E7).
        """
        if not self._answers_to:
            await self._subscribe_to_answers()
        token = str(next(self._numbers))
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Received] = loop.create_future()
        self._requests[token] = answered
        timer = loop.call_later(timeout, self._expire, token)
        try:
            await self.publish(subject, payload, reply=self._answers_to + token, headers=headers)
            message = await answered
        finally:
            timer.cancel()
            self._requests.pop(token, None)
        if not message.data and message.headers.get("Status") == _NO_RESPONDERS:
            raise nats.errors.NoRespondersError
        return message

    async def _subscribe_to_answers(self) -> None:
        async with self._subscribing:
            if not self._answers_to:
                inbox = self.new_inbox()
                await self.listen(f"{inbox}.*", self._on_answer)
                self._answers_to = f"{inbox}."

    def _on_answer(self, message: Received) -> None:
        answered = self._requests.get(message.subject.rpartition(".")[2])
        if answered is not None and not answered.done():
            answered.set_result(message)

    def _expire(self, token: str) -> None:
        answered = self._requests.get(token)
        if answered is not None and not answered.done():
            answered.set_exception(nats.errors.TimeoutError())
