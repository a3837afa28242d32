"""``Bus`` and ``Bucket`` over a ``MemoryServer``: same interface, same errors, no sockets.

What decides is the real code: unknown outcomes and delete markers (``Bucket._publish``), publishing until known to be
stored (``Bus.publish_raw``), ack, nak or dead letter by error class (``settlement``). Replaced is only what moves
bytes: the JetStream calls, the pull of a consumer, the reader behind a mirror or a tail, core subjects.

Everything a bus does goes through its server's ``Network``. A bus whose process was killed (``kill``) says nothing more
and hears nothing more: whoever awaits something of it is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import hashlib
import itertools
import random
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec

from openrl_common import settlement
from openrl_common.bus import _ERROR_CODE, Bus
from openrl_common.connection import Delivered, Received
from openrl_common.errors import OpenRLError, Poison, Rejected, Transient, Unreachable
from openrl_common.memory_server import Consumer, Member, MemoryServer, Published, Stored, Watcher
from openrl_common.settlement import Delivery, Handler, delivery_of
from openrl_common.store import Bucket, Entry, Mirror, Old, Store
from openrl_common.unwritten import Unwritten
from openrl_common.wire import PayloadRef

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

Messages = list[Stored]
_ASK_S = 2.0
_CODECS: dict[type[Any], tuple[msgspec.json.Encoder, msgspec.json.Decoder[Any]]] = {}


class _JetStream:
    """The calls of nats-py's context that ``Bus`` and ``Bucket`` make."""

    def __init__(self, bus: MemoryBus) -> None:
        self._bus = bus

    def publish(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = _ASK_S,
        headers: dict[str, str] | None = None,
        msg_ttl: float | None = None,
    ) -> asyncio.Future[Published]:
        return self._bus.ask(functools.partial(self._bus.server.publish, subject, payload, headers or {}), timeout)

    def get_msg(self, stream: str, subject: str, direct: bool = False) -> asyncio.Future[Stored]:
        return self._bus.ask(functools.partial(self._bus.server.last, stream, subject), _ASK_S)


@dataclass(slots=True)
class _Message:
    """What ``settlement.handle`` needs of a ``Received``."""

    bus: MemoryBus
    consumer: Consumer | None
    stored: Stored
    deliveries: int

    @property
    def subject(self) -> str:
        return self.stored.subject

    @property
    def data(self) -> bytes:
        return self.stored.data

    @property
    def headers(self) -> dict[str, str]:
        return self.stored.headers

    @property
    def delivered(self) -> Delivered:
        return Delivered(self.deliveries, self.stored.seq, self.stored.stored_at, 0)

    async def ack(self) -> None:
        if self.consumer is not None:
            self.bus.tell(self.consumer.ack, self.stored.seq)

    async def term(self) -> None:
        await self.ack()

    async def nak(self, delay: float = 0.0) -> None:
        if self.consumer is not None:
            self.bus.tell(self.consumer.nak, self.stored.seq, delay)

    async def in_progress(self) -> None:
        """The simulated ack wait is not extended: a slow handler is delivered again, which must change nothing."""


class MemoryBus(Bus):
    """A bus on a server in this process."""

    def __init__(self, server: MemoryServer, name: str = "memory") -> None:
        self.server = server
        self.name = name
        self.killed = False
        self.cut_off = False
        self.context = contextvars.copy_context()
        self.jetstream = _JetStream(self)  # type: ignore[assignment]
        self.store = MemoryStore(self)
        self.stopping = asyncio.Event()
        self.unwritten = Unwritten(self.stopping)
        self.failed = asyncio.Event()
        self.reconnects = 0
        self.failures: list[tuple[Delivery, BaseException]] = []
        self._pullers = weakref.WeakSet()
        self._subscriptions = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._inboxes = itertools.count()

    @property
    def connected(self) -> bool:
        return self.server.up and not self.killed and not self.cut_off

    def reconnect(self) -> None:
        """After a time in which it was ``cut_off``: whatever follows the server reads again from where it was."""
        self.cut_off = False
        self.server.lose_watchers(self)
        self.server.dispatch()  # a consumer asks anew, also when nothing was stored meanwhile

    def kill(self) -> None:
        """Its process is gone, without a word."""
        self.killed = True
        self.server.disconnect(self)

    async def close(self, *, within_s: float = 0.0) -> None:
        self.stopping.set()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.server.disconnect(self)

    async def ensure_topology(self, *_: Any, **__: Any) -> None:
        """The server has every stream and bucket from the start."""

    def ask(self, apply: Callable[[], Any], timeout_s: float) -> asyncio.Future[Any]:
        """Run ``apply`` at the server, by way of the network. The answer is a TimeoutError when none comes."""
        if self.killed:
            raise asyncio.CancelledError
        network = self.server.network
        answer = network.future()
        network.ask(self, apply, answer, timeout_s)
        return answer

    def tell(self, call: Callable[..., object], *arguments: Any) -> None:
        if not self.killed:
            self.server.network.tell(self, call, *arguments)

    async def ask_until_answered(self, apply: Callable[[], T]) -> T:
        while True:
            try:
                return cast(T, await self.ask(apply, _ASK_S))
            except TimeoutError:
                await asyncio.sleep(0.1)

    # --- payloads ----------------------------------------------------------------------------------------------

    async def put_payload(self, body: bytes) -> tuple[str, str]:
        digest = hashlib.sha256(body).hexdigest()
        self.server.payloads[digest] = body
        return digest, digest

    async def get_payload(self, reference: PayloadRef) -> bytes:
        body = self.server.payloads.get(reference.object_name)
        if body is None:
            raise Rejected(f"payload {reference.object_name} is not in the store: send it again", code="payload-lost")
        if hashlib.sha256(body).hexdigest() != reference.digest:
            raise Rejected(f"payload {reference.object_name} has another digest than announced", code="payload-lost")
        return body

    # --- consuming ---------------------------------------------------------------------------------------------

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
        member = Member(self, concurrency)
        consumer: Consumer = await self.ask_until_answered(
            lambda: self.server.join(stream, durable, subjects, member, ack_wait_s=ack_wait_s, from_now=from_now)
        )
        if bound is not None:
            bound.set()

        async def watched(delivery: Delivery) -> None:
            try:
                await handler(delivery)
            except Exception as error:
                if not isinstance(error, Transient | Rejected):
                    self.failures.append((delivery, error))
                raise

        async def run(stored: Stored, deliveries: int) -> None:
            message = cast(Received, _Message(self, consumer, stored, deliveries))
            try:
                await settlement.handle(self, message, watched, stream=stream, durable=durable, max_deliver=max_deliver)
            finally:
                member.in_hand -= 1
                if not self.killed:
                    consumer.dispatch()

        async def handle(stored: Stored, deliveries: int) -> None:
            """One message after the other: a task for each would cost more than most handlers do."""
            following: tuple[Stored, int] | None = (stored, deliveries)
            while following is not None:
                await run(*following)
                if member.left is not None:
                    return
                if member.inbox:
                    following = member.inbox.popleft()
                else:
                    idle = self.server.network.future()
                    member.idle.append(idle)
                    following = await idle

        context = contextvars.copy_context()
        try:
            async with asyncio.TaskGroup() as tasks:
                member.open(lambda *message: tasks.create_task(handle(*message), context=context.copy()))
                try:
                    await self.stopping.wait()
                finally:
                    member.leave(consumer)
        finally:
            for stored, deliveries in member.inbox:
                await _Message(self, consumer, stored, deliveries).nak()

    async def tail(
        self, *, stream: str, subject: str, start_sequence: int = 1, from_now: bool = False
    ) -> AsyncGenerator[Delivery, None]:
        position = start_sequence
        queue: asyncio.Queue[list[Stored] | None] = asyncio.Queue()
        if from_now:
            position = max(position, self.server.streams[stream].seq + 1)
        while not self.stopping.is_set():
            watcher = Watcher(self, subject, queue.put_nowait, lambda: queue.put_nowait(None))
            batch: Messages | None = await self.ask_until_answered(
                functools.partial(self.server.watch, stream, watcher, position)
            )
            try:
                while batch is not None:
                    for stored in batch:
                        if stored.seq >= position:
                            position = stored.seq + 1
                            yield delivery_of(cast(Any, _Message(self, None, stored, 1)))
                    batch = await queue.get()
            finally:
                watcher.closed = True
                with contextlib.suppress(ValueError):
                    self.server.streams[stream].watchers.remove(watcher)

    # --- core subjects -----------------------------------------------------------------------------------------

    def new_inbox(self) -> str:
        return f"_INBOX.{self.name}.{next(self._inboxes)}"

    async def send(self, subject: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        for bus, callback in self.server.core.get(subject, ())[:1]:
            self.server.network.push(bus, "core", callback, body, headers or {})

    async def subscribe(
        self, subject: str, callback: Callable[[bytes, dict[str, str]], Awaitable[None]], *, queue: str = ""
    ) -> Callable[[], Awaitable[None]]:
        def on_message(body: bytes, headers: dict[str, str]) -> None:
            self._spawn(cast(Any, callback(body, headers)))

        served = (self, on_message)
        self.server.core.setdefault(subject, []).append(served)
        self.server.listened = self.server.wildcards()

        async def unsubscribe() -> None:
            with contextlib.suppress(ValueError):
                self.server.core[subject].remove(served)
            self.server.listened = self.server.wildcards()

        return unsubscribe

    async def request(self, subject: str, body: msgspec.Struct, answer: type[T], *, timeout_s: float = 5.0) -> T:
        if not self.server.core.get(subject):
            raise Unreachable(f"nobody serves {subject}: is the service running? (`openrl up`)")
        inbox = self.new_inbox()
        arrived: asyncio.Future[tuple[bytes, dict[str, str]]] = asyncio.get_running_loop().create_future()

        async def on_answer(data: bytes, headers: dict[str, str]) -> None:
            if not arrived.done():
                arrived.set_result((data, headers))

        unsubscribe = await self.subscribe(inbox, on_answer)
        try:
            await self.send(subject, msgspec.json.encode(body), {"reply": inbox})
            async with asyncio.timeout(timeout_s):
                data, headers = await arrived
        except TimeoutError as error:
            raise Unreachable(f"nobody answered {subject} within {timeout_s:g} s") from error
        finally:
            await unsubscribe()
        code = headers.get(_ERROR_CODE)
        if code == "transient":
            raise Transient(data.decode())
        if code:
            raise Rejected(data.decode(), code=code)
        return msgspec.json.decode(data, type=answer)

    async def serve(
        self,
        subject: str,
        request_type: type[S],
        handler: Callable[[S], Awaitable[msgspec.Struct]],
        *,
        queue: str = "q",
    ) -> None:
        async def on_request(data: bytes, headers: dict[str, str]) -> None:
            try:
                body = msgspec.json.encode(await handler(msgspec.json.decode(data, type=request_type)))
                answer: dict[str, str] = {}
            except msgspec.MsgspecError as error:
                body, answer = f"the request is not usable: {error}".encode(), {_ERROR_CODE: "bad-request"}
            except Rejected as error:
                body, answer = str(error).encode(), {_ERROR_CODE: error.code}
            except OpenRLError as error:
                body, answer = str(error).encode(), {_ERROR_CODE: "transient"}
            await self.send(headers["reply"], body, answer)

        await self.subscribe(subject, on_request)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work, context=self.context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class MemoryMirror(Mirror[T]):
    """A mirror fed by a watcher; lists again when the server was away (E15)."""

    def __init__(
        self, bucket: MemoryBucket[T], prefix: str, on_change: Callable[[str, Entry[T] | None], None] | None
    ) -> None:
        super().__init__(on_change)
        self._bucket = bucket
        self._prefix = prefix
        self._watcher: Watcher | None = None
        self._early: Messages | None = None

    async def open(self) -> None:
        """List and follow. Changes that overtake the list wait for it: the list would take them back."""
        bus = self._bucket.memory_bus
        self._early = []
        self._watcher = watcher = Watcher(bus, f"{self._bucket.root}{self._prefix}>", self._on_batch, self._on_lost)
        stored = await bus.ask_until_answered(lambda: bus.server.watch(self._bucket.stream, watcher))
        if self._watcher is not watcher:
            watcher.closed = True
            return  # the server was away again meanwhile: this list came late, and a younger one is there or comes
        self._replace(self._bucket.entries(stored))
        early, self._early = self._early, None
        self._take(early or [])

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.closed = True
            watchers = self._bucket.memory_bus.server.streams[self._bucket.stream].watchers
            with contextlib.suppress(ValueError):
                watchers.remove(self._watcher)

    def _on_batch(self, batch: Messages) -> None:
        if self._early is not None:
            self._early += batch
            return
        self._bucket.memory_bus.context.copy().run(self._take, batch)

    def _take(self, batch: Messages) -> None:
        bucket, start = self._bucket, len(self._bucket.root)
        for stored in batch:
            key = stored.subject[start:]
            known = self.entries.get(key)
            if known is not None and known.revision >= stored.seq:
                continue
            try:
                entry = bucket.entry(key, stored)
            except Poison:
                continue
            self._apply(key, entry)

    def _on_lost(self) -> None:
        self._bucket.memory_bus._spawn(self._reopen())

    async def _reopen(self) -> None:
        await asyncio.sleep(random.uniform(0.05, 0.2))
        await self.open()


class MemoryBucket(Bucket[T]):
    """The real bucket but for its readers of many keys. Values are decoded once and shared: they are immutable."""

    def __init__(self, bus: Bus, bucket: str, prefix: str, value_type: type[T]) -> None:
        if value_type not in _CODECS:
            _CODECS[value_type] = (msgspec.json.Encoder(), msgspec.json.Decoder(value_type))
        self._bus = bus
        self._stream = f"KV_{bucket}"
        self._name = bucket
        self._root = f"$KV.{bucket}.{prefix}"
        self._encoder, self._decoder = _CODECS[value_type]

    @property
    def memory_bus(self) -> MemoryBus:
        return cast(MemoryBus, self._bus)

    @property
    def stream(self) -> str:
        return self._stream

    @property
    def root(self) -> str:
        return self._root

    async def exists(self) -> bool:
        return self._stream in self.memory_bus.server.streams

    async def get(self, key: str) -> Entry[T] | None:
        stored: Any = await self._last(key, direct=True)
        return None if stored is None else self.entry(key, stored)

    async def list(self, prefix: str = "", *, rest: float = 0.0) -> dict[str, Entry[T]]:
        bus = self.memory_bus
        pattern = f"{self._root}{prefix}>"
        return self.entries(await bus.ask_until_answered(lambda: bus.server.streams[self._stream].snapshot(pattern, 1)))

    async def mirror(
        self, prefix: str = "", on_change: Callable[[str, Entry[T] | None], None] | None = None
    ) -> Mirror[T]:
        mirror = MemoryMirror(self, prefix, on_change)
        await mirror.open()
        await mirror._synced.wait()
        return mirror

    async def written_before(self, moment: float, num_max: int) -> Sequence[Old[T]]:
        bus = self.memory_bus
        pattern = f"{self._root}>"
        stored = await bus.ask_until_answered(lambda: bus.server.streams[self._stream].snapshot(pattern, 1))
        old = [each for each in stored if each.stored_at < moment][:num_max]
        found = []
        for each in old:
            entry = self.entry(each.subject[len(self._root) :], each)
            found.append(Old(each.subject[len(self._root) :], None if entry is None else entry.value, each.seq))
        return found

    async def forget_marker(self, old: Old[T]) -> None:
        bus = self.memory_bus
        last = bus.server.streams[self._stream].last

        def forget() -> None:
            stored = last.get(self._root + old.key)
            if stored is not None and stored.seq <= old.revision:
                del last[self._root + old.key]

        await bus.ask_until_answered(forget)

    def entries(self, messages: Messages) -> dict[str, Entry[T]]:
        found: dict[str, Entry[T]] = {}
        for stored in messages:
            key = stored.subject[len(self._root) :]
            with contextlib.suppress(Poison):
                entry = self.entry(key, stored)
                if entry is not None:
                    found[key] = entry
        return found

    def entry(self, key: str, stored: Stored) -> Entry[T] | None:
        """None for a delete marker. Raises Poison when the stored bytes are not a value."""
        entry: Entry[T] | None = stored.entry
        if entry is None:
            if stored.value is not None:
                entry = Entry(key, stored.value, stored.seq)
            else:
                entry = self._entry(key, stored.data, stored.seq, stored.headers)
            if entry is not None:
                stored.entry, stored.value = entry, entry.value
        return entry


class MemoryStore(Store):
    """Every bucket, in memory."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus, MemoryBucket)
