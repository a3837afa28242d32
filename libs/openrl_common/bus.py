"""The bus: publish, consume, tail, request and serve over NATS JetStream.

Invariants: a published event carries a deterministic id, so publishing it twice stores it once within the window, and
handlers are idempotent beyond it (E6); a try that timed out is repeated under the same id until it is known to be
stored (E7); every await on the network has a deadline (E16). What becomes of a delivered message is decided in
``settlement``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import random
import re
import time
import weakref
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import openrl_common.without_websockets  # noqa: F401

import msgspec
import nats
import nats.errors
import nats.js.errors
from nats.js import api

from openrl_common import streams, topology
from openrl_common.connection import WRONG_LAST_SEQUENCE, Connection
from openrl_common.consumer import DurableConsumer
from openrl_common.errors import Conflict, OpenRLError, Rejected, Transient, Unreachable
from openrl_common.events import Event
from openrl_common.pull import JETSTREAM_FAULTS, NETWORK_ERRORS, Lost, Puller, heed_cancellation
from openrl_common.settlement import Delivery, Handler, Outcome, delivery_of
from openrl_common.store import Store
from openrl_common.telemetry import inject_context
from openrl_common.tenancy import TenantConnection, without_password
from openrl_common.unwritten import Unwritten
from openrl_common.wire import PayloadRef

if TYPE_CHECKING:
    from nats.aio.msg import Msg

__all__ = ["Bus", "Delivery", "Handler", "StoredMessage"]

log = logging.getLogger(__name__)

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

_TRY_S = 2.0
_SERVE_CONCURRENCY = 32
_PAYLOAD_S = 120.0
_TAIL_BATCH = 64
_CLOSE_S = 4.0
_INTERRUPTIONS: tuple[type[Exception], ...] = (Lost, *JETSTREAM_FAULTS)
_CONNECT_ERRORS: tuple[type[Exception], ...] = (*NETWORK_ERRORS, nats.errors.Error, OSError, ValueError)
_ERROR_CODE = "openrl-error"
_ENCODING = "openrl-encoding"
"""Of a request: the asker reads answers compressed so. Of an answer: it is."""
_ZLIB = "zlib"
_ANSWER_PLAIN_BYTES_MAX = 256 * 1024
_SUBJECT = re.compile(r"(_INBOX[\w-]*|_R_|openrl\.q)\.[!-)+-=?-~]{1,1024}", re.ASCII)
"""An inbox (of any prefix that begins so; ``_R_``: the server's own, for an asker in another account) or a question:
never a stream, a bucket or JetStream itself, where whoever asks would write with the rights of whoever answers.
Printable ASCII without blanks and wildcards: nothing in it can end the protocol line it is written into."""


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message read from a stream, not delivered by a consumer."""

    subject: str
    body: bytes
    sequence: int


class Bus:
    """A connection with the habits above. Make it with ``connect``, end it with ``close``."""

    on_settled: Callable[[str, Outcome, float, int], None] = staticmethod(lambda *_: None)
    """Told of each settled delivery: durable, outcome, seconds since it was stored, how many are behind it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.jetstream = connection.jetstream(timeout=_TRY_S)
        self.store = Store(self)
        self.stopping = asyncio.Event()
        self.unwritten = Unwritten(self.stopping)
        self.failed = asyncio.Event()
        """Something in the background has ended for good, a mirror for one: what it knew grows old from now on."""
        self.reconnects = 0
        self._pullers: weakref.WeakSet[Puller] = weakref.WeakSet()
        self._subscriptions: list[Any] = []
        self._tasks: set[asyncio.Task[None]] = set()

    # --- life cycle --------------------------------------------------------------------------------------------

    @classmethod
    async def connect(cls, url: str, *, name: str, tenant: str = "", deadline_s: float = 10.0) -> Bus:
        """Connect, and reconnect for ever afterwards. ``tenant``: a client's, which keeps to ``tenancy``.

        Raises:
            Unreachable: no NATS server answered at ``url`` within ``deadline_s``, or it refused the user or password.
        """
        holder: list[Bus] = []
        shown, refused = without_password(url), False

        async def on_reconnect() -> None:
            if holder:
                holder[0]._on_reconnect()

        async def on_error(error: Exception) -> None:
            nonlocal refused
            refused = refused or "authorization" in str(error).lower()
            log.debug("nats error: %r", error)

        async def on_disconnect() -> None:
            if not holder or holder[0].stopping.is_set():
                return  # not there yet, or closing: nothing is lost
            log.warning("nats connection lost, reconnecting url=%s", shown)

        connection = TenantConnection(tenant) if tenant else Connection()
        try:
            async with asyncio.timeout(deadline_s):
                await connection.connect(
                    servers=[url],
                    name=name,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=0.2,  # type: ignore[arg-type]  # seconds; a float works
                    connect_timeout=2,
                    ping_interval=10,
                    max_outstanding_pings=2,
                    drain_timeout=int(_CLOSE_S),
                    pending_size=64 << 20,
                    error_cb=on_error,
                    disconnected_cb=on_disconnect,
                    reconnected_cb=on_reconnect,
                )
        except _CONNECT_ERRORS as error:
            with contextlib.suppress(Exception):
                await connection.close()
            if refused:
                raise Unreachable(
                    f"the NATS server at {shown} refused the user or password",
                    remedy="give both in the address: nats://USER:PASSWORD@HOST:PORT",
                ) from error
            raise Unreachable(
                f"no NATS server answered at {shown} within {deadline_s:g} s",
                remedy="start one with `openrl up`, or name another with --nats-url or OPEN_RL_NATS_URL",
            ) from error
        bus = cls(connection)
        holder.append(bus)
        return bus

    @property
    def connected(self) -> bool:
        return bool(self._connection.is_connected)

    def watch(self, task: asyncio.Task[None]) -> None:
        """Say so, and set ``failed``, when a task of the background ends with an error."""
        task.add_done_callback(self._on_end)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.stopping.is_set():
            log.error("%s has ended", task.get_name(), exc_info=error)
            self.failed.set()

    def _on_reconnect(self) -> None:
        self.reconnects += 1
        log.info("nats connection is back")
        for puller in list(self._pullers):
            puller.interrupt()

    async def close(self, *, within_s: float = _CLOSE_S) -> None:
        """Stop serving, flush what was published, close (E17). Consumers end by cancelling their tasks before.

        A server that does not answer is waited for half of ``within_s`` twice.
        """
        self.stopping.set()
        for subscription in self._subscriptions:
            with contextlib.suppress(*NETWORK_ERRORS, nats.errors.Error):
                await subscription.unsubscribe()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(*NETWORK_ERRORS, nats.errors.Error):
            if self.connected:
                async with asyncio.timeout(within_s / 2):
                    await self._connection.flush()
        try:
            async with asyncio.timeout(within_s / 2):
                await self._connection.close()
        except asyncio.CancelledError:
            heed_cancellation()  # else it is the library's own: it was about to reconnect, and its stream was given up
        except Exception as error:
            log.debug("closing: %r", error)

    async def ensure_topology(
        self,
        stream_configs: tuple[streams.StreamConfig, ...],
        bucket_configs: tuple[streams.BucketConfig, ...],
        *,
        replicas: int,
    ) -> None:
        """Create or update streams, buckets and the payload store; see ``streams.ensure``."""
        await topology.ensure(self.jetstream, stream_configs, bucket_configs, replicas=replicas)

    # --- publishing --------------------------------------------------------------------------------------------

    async def publish(self, event: Event, *, deadline_s: float = 20.0) -> None:
        """Publish an event under its deterministic id.

        Raises:
            Unreachable: not known to be stored within ``deadline_s`` (it may be); publishing again is safe.
            Transient: the server refused it (disk full, limits).
        """
        await self.publish_raw(
            event.subject,
            msgspec.json.encode(event),
            message_id=event.message_id,
            headers={
                "ce-specversion": "1.0",
                "ce-type": str(event.__struct_config__.tag),
                "ce-source": f"openrl/{event.SOURCE}",
                "ce-time": _rfc3339(time.time()),
            },
            deadline_s=deadline_s,
        )

    async def publish_raw(
        self,
        subject: str,
        body: bytes,
        *,
        message_id: str,
        headers: dict[str, str] | None = None,
        ttl_s: float | None = None,
        after: int | None = None,
        deadline_s: float = 20.0,
    ) -> int:
        """Store a message in the stream of ``subject``; return its stream sequence. Errors as ``publish``.

        Args:
            after: stream sequence that the last message of ``subject`` must have (0: there is none).

        Raises:
            Conflict: another message stands there, possibly this one: an earlier try may have landed (E8).
        """
        all_headers = {"ce-id": message_id, "Nats-Msg-Id": message_id, **(headers or {})}
        if after is not None:
            all_headers["Nats-Expected-Last-Subject-Sequence"] = str(after)
        inject_context(all_headers)
        with self.unwritten.during(subject):
            return await self._stored(subject, body, all_headers, ttl_s, after, deadline_s)

    async def _stored(
        self, subject: str, body: bytes, headers: dict[str, str], ttl_s: float | None, after: int | None,
        deadline_s: float,
    ) -> int:  # fmt: skip
        """Try until it is stored; see ``publish_raw``."""
        deadline = time.monotonic() + deadline_s
        tries = 0
        while True:
            tries += 1
            try:
                ack = await self.jetstream.publish(
                    subject,
                    body,
                    timeout=max(0.1, min(_TRY_S, deadline - time.monotonic())),
                    headers=dict(headers),
                    msg_ttl=None if ttl_s is None else max(1, round(ttl_s)),
                )
                return int(ack.seq)
            except NETWORK_ERRORS as error:
                self.unwritten.note(error)
                if time.monotonic() >= deadline:
                    raise Unreachable(
                        f"NATS did not confirm a message on {subject} within {deadline_s:g} s: it may still arrive "
                        "(is the server up, and its disk not full?)"
                    ) from error
                await asyncio.sleep(random.uniform(0.5, 1.0) * min(0.1 * 2**tries, 1.0))
            except nats.js.errors.APIError as error:
                if after is not None and error.err_code in WRONG_LAST_SEQUENCE:
                    raise Conflict(f"{subject}: message {after} is not the last one any more") from error
                raise Transient(
                    f"NATS refused a message on {subject} ({error.description}): look at disk space and the "
                    "JetStream limits"
                ) from error
            except nats.errors.MaxPayloadError as error:
                raise Rejected(
                    f"a message of {len(body)} bytes on {subject} is larger than the NATS server takes",
                    code="too-large",
                ) from error

    def why_unwritten(self) -> str:
        """What is known of why writes are not confirmed, while no answer comes."""
        if not self.connected:
            return "NATS is away, reconnecting"
        return self.unwritten.answer or "NATS is there and does not confirm them, as when its disk is full"

    async def send(self, subject: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        """Core NATS, at most once: answers to inboxes, whose loss the asker's own retry covers.

        ``subject`` comes from the asker: one that is no inbox is not answered.
        """
        if not _SUBJECT.fullmatch(subject):
            log.warning("not answered: %.80r is not an inbox", subject)
            return
        with contextlib.suppress(*NETWORK_ERRORS):
            await self._connection.publish(subject, body, headers=headers)

    async def put_payload(self, body: bytes) -> tuple[str, str]:
        """Store a large body (R7); return its object name and SHA-256. The same body is stored once.

        Raises:
            Transient: the server did not take all of it in time, or has no room for it.
        """
        digest = hashlib.sha256(body).hexdigest()
        try:
            store = await self.jetstream.object_store(streams.PAYLOADS)
            try:
                await store.get_info(digest)
            except nats.js.errors.NotFoundError:
                await store.put(digest, body)
        except JETSTREAM_FAULTS as error:
            raise Transient(f"a payload of {len(body)} bytes was not stored: {error!r}") from error
        return digest, digest

    async def get_payload(self, reference: PayloadRef) -> bytes:
        """Fetch and verify a large body.

        Raises:
            Rejected: ``payload-lost``: it is gone or damaged.
            Transient: the server did not answer in time.
        """
        try:
            store = await self.jetstream.object_store(streams.PAYLOADS)
            info = await store.get_info(reference.object_name)
            if info.size:  # the library waits for ever for parts that are gone: they are older, and expire before it
                await self.jetstream.get_last_msg(f"OBJ_{streams.PAYLOADS}", f"$O.{streams.PAYLOADS}.C.{info.nuid}")
            async with asyncio.timeout(_PAYLOAD_S):
                body = (await store.get(reference.object_name)).data or b""
        except nats.js.errors.NotFoundError as error:
            raise Rejected(
                f"payload {reference.object_name} is not in the store: send it again", code="payload-lost"
            ) from error
        except nats.js.errors.DigestMismatchError as error:
            raise Rejected(f"payload {reference.object_name} is damaged: send it again", code="payload-lost") from error
        except JETSTREAM_FAULTS as error:
            raise Transient(f"payload {reference.object_name} could not be read: {error!r}") from error
        except nats.errors.Error as error:
            raise Rejected(f"payload {reference.object_name} cannot be read: {error}", code="payload-lost") from error
        if hashlib.sha256(body).hexdigest() != reference.digest:
            raise Rejected(f"payload {reference.object_name} has another digest than announced", code="payload-lost")
        return body

    async def delete_payload(self, name: str) -> None:
        """Drop a stored body that nobody will read any more; one that is gone already is no error. Raises Transient."""
        try:
            store = await self.jetstream.object_store(streams.PAYLOADS)
            await store.delete(name)
        except nats.js.errors.NotFoundError:
            return
        except JETSTREAM_FAULTS as error:
            raise Transient(f"payload {name} was not deleted: {error!r}") from error

    async def purge(self, stream: str, subject: str, *, before: int = 0, keep: int = 0) -> None:
        """Drop messages of ``subject`` (wildcards allowed): those before a stream sequence, or all but the newest.

        Raises:
            Transient: the server did not confirm it; doing it again is safe.
        """
        assert (before > 0) != (keep > 0)
        try:
            await self.jetstream.purge_stream(stream, seq=before or None, subject=subject, keep=keep or None)
        except JETSTREAM_FAULTS as error:
            raise Transient(f"stream {stream} was not trimmed: {error!r}") from error

    # --- consuming ---------------------------------------------------------------------------------------------

    def new_puller(
        self, stream: str, ensure: Callable[[], Awaitable[str]], *, capacity: int, ordered: bool = False
    ) -> Puller:
        puller = Puller(self._connection, stream, ensure, capacity=capacity, ordered=ordered)
        self._pullers.add(puller)
        return puller

    def forget_puller(self, puller: Puller) -> None:
        self._pullers.discard(puller)

    async def consume(
        self,
        *,
        stream: str,
        durable: str,
        subjects: list[str],
        handler: Handler,
        concurrency: int = 1,
        ack_wait_s: float = 30.0,
        max_deliver: int = 20,
        bound: asyncio.Event | None = None,
        from_now: bool = False,
        forgotten_after_s: float = 0.0,
    ) -> None:
        """Handle messages of a durable consumer until cancelled or ``stopping`` is set.

        With ``concurrency`` 1 the stream's order is the handling order (redeliveries aside). A message whose handler
        keeps failing goes to the dead letters after ``max_deliver`` deliveries (Transient errors: 1,000). A Bug is
        raised.

        Args:
            bound: set once the consumer exists, for readiness.
            from_now: a new durable starts behind what the stream holds already.
            forgotten_after_s: the server drops the durable when nobody pulled for this long (0: kept for ever).
        """
        await DurableConsumer(
            bus=self, stream=stream, durable=durable, subjects=subjects, handler=handler, concurrency=concurrency,
            ack_wait_s=ack_wait_s, max_deliver=max_deliver, bound=bound, from_now=from_now,
            forgotten_after_s=forgotten_after_s,
        ).run()  # fmt: skip

    async def tail(
        self, *, stream: str, subject: str, start_sequence: int = 1, from_now: bool = False
    ) -> AsyncGenerator[Delivery, None]:
        """Every message of ``subject`` in stream order from ``start_sequence``, then live, across reconnects.

        No acks: the reader keeps its own position. Each message is yielded exactly once.
        """
        position = start_sequence
        while not self.stopping.is_set():
            heed_cancellation()
            policy = api.DeliverPolicy.NEW if from_now and position <= 1 else api.DeliverPolicy.BY_START_SEQUENCE
            start = position

            async def ensure(policy: api.DeliverPolicy = policy, start: int = start) -> str:
                config = api.ConsumerConfig(
                    deliver_policy=policy,
                    opt_start_seq=start if policy is api.DeliverPolicy.BY_START_SEQUENCE else None,
                    ack_policy=api.AckPolicy.NONE,
                    filter_subject=subject,
                    inactive_threshold=60.0,
                    mem_storage=True,
                    num_replicas=1,
                )
                return str((await self.jetstream.add_consumer(stream, config=config)).name)

            puller = self.new_puller(stream, ensure, capacity=_TAIL_BATCH, ordered=True)
            try:
                await puller.start()
                while True:
                    message = await puller.next()
                    puller.done()
                    delivery = delivery_of(message)
                    if delivery.sequence < position:
                        continue
                    position = delivery.sequence + 1
                    yield delivery
            except _INTERRUPTIONS as error:
                log.debug("tail of %s starts again at %d (%r)", subject, position, error)
                await asyncio.sleep(random.uniform(0.05, 0.2))
            finally:
                self.forget_puller(puller)
                await puller.stop()

    async def last(self, *, stream: str, subject: str, deadline_s: float = 10.0) -> StoredMessage | None:
        """The newest message stored on ``subject`` (wildcards allowed), None when there is none. Raises Unreachable."""
        deadline = time.monotonic() + deadline_s
        while True:
            try:
                found = await self.jetstream.get_msg(stream, subject=subject)
                return StoredMessage(found.subject or "", found.data or b"", found.seq or 0)
            except nats.js.errors.NotFoundError:
                return None
            except NETWORK_ERRORS as error:
                if time.monotonic() > deadline:
                    raise Unreachable(f"stream {stream} cannot be read: NATS does not answer") from error
                await asyncio.sleep(0.1)

    @property
    def server_info(self) -> dict[str, Any]:
        """What the server said of itself when it greeted this connection: version, name, cluster, limits."""
        return dict(self._connection._server_info)

    async def jetstream_api(self, call: str, body: bytes = b"", *, timeout_s: float = 3.0) -> dict[str, Any]:
        """One call of the JetStream API as it answers, for looking at a server (``openrl doctor``): ``STREAM.LIST``.

        Raises Unreachable: no answer, or JetStream is not enabled.
        """
        try:
            answer = await self._connection.request(f"$JS.API.{call}", body, timeout=timeout_s)
        except NETWORK_ERRORS as error:
            raise Unreachable(f"JetStream does not answer {call}: is it enabled on the NATS server?") from error
        return msgspec.json.decode(answer.data, type=dict[str, Any])

    # --- request and reply -------------------------------------------------------------------------------------

    def new_inbox(self) -> str:
        return str(self._connection.new_inbox())

    async def subscribe(
        self, subject: str, callback: Callable[[bytes, dict[str, str]], Awaitable[None]], *, queue: str = ""
    ) -> Callable[[], Awaitable[None]]:
        """Core subscription (inboxes). ``callback(body, headers)`` runs one at a time. Returns the unsubscriber."""

        async def on_message(message: Msg) -> None:
            await callback(message.data, dict(message.headers or {}))

        subscription = await self._connection.subscribe(subject, queue=queue, cb=on_message)
        self._subscriptions.append(subscription)

        async def unsubscribe() -> None:
            with contextlib.suppress(*NETWORK_ERRORS, nats.errors.Error, ValueError):
                self._subscriptions.remove(subscription)
                await subscription.unsubscribe()

        return unsubscribe

    async def request(self, subject: str, body: msgspec.Struct, answer: type[T], *, timeout_s: float = 5.0) -> T:
        """Ask a service and wait for its answer.

        Raises:
            Unreachable: nobody serves ``subject``, or no answer within ``timeout_s``.
            Rejected: the service answered with a typed error.
        """
        headers: dict[str, str] = {_ENCODING: _ZLIB}
        inject_context(headers)
        try:
            reply = await self._connection.request(
                subject, msgspec.json.encode(body), timeout=timeout_s, headers=headers
            )
        except nats.errors.NoRespondersError as error:
            raise Unreachable(f"nobody serves {subject}: is the service running? (`openrl up`)") from error
        except NETWORK_ERRORS as error:
            raise Unreachable(
                f"nobody answered {subject} within {timeout_s:g} s: is the service running? (`openrl up`)"
            ) from error
        code = reply.headers.get(_ERROR_CODE)
        if code == "transient":
            raise Transient(reply.data.decode())
        if code:
            raise Rejected(reply.data.decode(), code=code)
        is_compressed = reply.headers.get(_ENCODING) == _ZLIB
        return msgspec.json.decode(zlib.decompress(reply.data) if is_compressed else reply.data, type=answer)

    async def serve(
        self,
        subject: str,
        request_type: type[S],
        handler: Callable[[S], Awaitable[msgspec.Struct]],
        *,
        queue: str = "q",
    ) -> None:
        """Answer requests, several at once (bounded); errors become typed replies. Returns once subscribed.

        A long answer is compressed: lists of thousands of jobs fit what a server takes. One that does not is said.
        """
        slots = asyncio.Semaphore(_SERVE_CONCURRENCY)
        decoder = msgspec.json.Decoder(request_type)

        async def answer(message: Msg) -> None:
            try:
                try:
                    body = msgspec.json.encode(await handler(decoder.decode(message.data or b"{}")))
                    headers = {}
                    if len(body) > _ANSWER_PLAIN_BYTES_MAX and (message.headers or {}).get(_ENCODING) == _ZLIB:
                        body, headers = await asyncio.to_thread(zlib.compress, body, 1), {_ENCODING: _ZLIB}
                    if len(body) > self._connection.max_payload:
                        raise Rejected(
                            f"the answer has {len(body)} bytes, the NATS server takes {self._connection.max_payload}: "
                            "ask for less",
                            code="too-large",
                        )
                except (msgspec.DecodeError, msgspec.ValidationError) as error:
                    body, headers = f"the request is not usable: {error}".encode(), {_ERROR_CODE: "bad-request"}
                except Rejected as error:
                    body, headers = str(error).encode(), {_ERROR_CODE: error.code}
                except Exception as error:
                    if not isinstance(error, OpenRLError):
                        log.error("query failed subject=%s", subject, exc_info=error)
                    body, headers = str(error).encode(), {_ERROR_CODE: "transient"}
                await self.send(message.reply, body, headers or None)
            finally:
                slots.release()

        async def on_message(message: Msg) -> None:
            if not message.reply:
                return
            await slots.acquire()
            task = asyncio.create_task(answer(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._subscriptions.append(await self._connection.subscribe(subject, queue=queue, cb=on_message))


def _rfc3339(moment: float) -> str:
    return f"{_rfc3339_second(int(moment))}.{int(moment % 1 * 1e6):06d}Z"


@functools.lru_cache(maxsize=2)
def _rfc3339_second(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
