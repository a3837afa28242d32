"""An in-memory JetStream: streams, last values, deduplication, durable consumers, watchers, core subjects.

It behaves like a nats-server where OpenRL depends on it; ``tests/bus/test_conformance.py`` runs one suite over both:
the expected sequence is checked before deduplication and answers 10071 (E8), a delete leaves a marker that counts as a
revision (E9), an unacknowledged message comes again after its ack wait, a bucket keeps the last value of each key.

It is synchronous and keeps no time of its own: a ``Network`` carries every word between it and a bus, and decides when,
or whether, it arrives. The one here is perfect; the simulator's is not.

Not here: limits on bytes and age, work queues, replication, clustered servers.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import openrl_common.without_websockets  # noqa: F401

from nats.js.errors import APIError, BadRequestError, NotFoundError

from openrl_common import streams

if TYPE_CHECKING:
    from openrl_common.memory import MemoryBus

WRONG_LAST_SEQUENCE = 10071


class Stored:
    """One stored message. ``value``, ``entry``: made once for all readers, because records and events are immutable."""

    __slots__ = ("data", "entry", "headers", "seq", "stored_at", "subject", "value")

    def __init__(self, subject: str, data: bytes, headers: dict[str, str], seq: int, stored_at: float) -> None:
        self.subject = subject
        self.data = data
        self.headers = headers
        self.seq = seq
        self.stored_at = stored_at
        self.value: Any = None
        self.entry: Any = None


class Published(NamedTuple):
    """A confirmation; ``duplicate``: a message with that id was there already."""

    seq: int
    duplicate: bool


class Network:
    """Carries words between buses and the server. This one is perfect: everything arrives, at once, in order."""

    def post(self, delay_s: float, call: Callable[..., object], *arguments: Any) -> None:
        asyncio.get_running_loop().call_later(delay_s, call, *arguments)

    def future(self) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().create_future()

    def ask(self, bus: MemoryBus, apply: Callable[[], Any], answer: asyncio.Future[Any], timeout_s: float) -> None:
        """Carry a request to the server and its answer back."""
        self.post(0.0, self._arrive, bus, apply, answer, timeout_s)

    def tell(self, bus: MemoryBus, call: Callable[..., object], *arguments: Any) -> None:
        """Bus → server, no answer (acks)."""
        self.post(0.0, call, *arguments)

    def push(self, bus: MemoryBus, kind: str, call: Callable[..., object], *arguments: Any) -> None:
        """Server → bus: a consumer's message (kind ``message``) or a batch of changes (kind ``changes``)."""
        self.post(0.0, call, *arguments)

    def landed(self, stream: Stream, message: Stored, before: Stored | None) -> None:
        """A message was stored: where a simulation looks at its invariants."""

    def _arrive(self, bus: MemoryBus, apply: Callable[[], Any], answer: asyncio.Future[Any], timeout_s: float) -> None:
        if bus.server.up:
            settle(answer, *outcome(apply))
        else:
            self.post(timeout_s, settle, answer, None, TimeoutError("the server is away"))


def outcome(apply: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return apply(), None
    except APIError as error:
        return None, error


def settle(answer: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)


@lru_cache(maxsize=65_536)
def matches(pattern: str, subject: str) -> bool:
    """NATS wildcards: ``*`` one token, ``>`` the rest."""
    wanted, given = pattern.split("."), subject.split(".")
    for index, token in enumerate(wanted):
        if token == ">":
            return len(given) > index
        if index >= len(given) or token not in ("*", given[index]):
            return False
    return len(wanted) == len(given)


@lru_cache(maxsize=1024)
def _expression(patterns: tuple[str, ...]) -> Callable[[str], object]:
    """Tells whether a subject matches one of the patterns; one call of C, whatever their number."""
    each = (re.escape(pattern).replace(r"\*", "[^.]+").replace(">", ".+") for pattern in patterns)
    return re.compile("|".join(each)).fullmatch


@dataclass(eq=False)
class Watcher:
    """A live reader of a stream: a mirror or a tail. ``on_lost``: it has to read again from its own position."""

    bus: MemoryBus
    pattern: str
    on_batch: Callable[[list[Stored]], None]
    on_lost: Callable[[], None]
    queue: list[Stored] = field(default_factory=list)
    closed: bool = False

    def __post_init__(self) -> None:
        """Most patterns are a prefix and ``>``: those need no comparison token by token."""
        self.prefix = self.pattern[: min(self.pattern.find(sign) % 1_000 for sign in "*>")]
        self._rest = self.pattern == f"{self.prefix}>"

    def add(self, message: Stored, network: Network) -> None:
        """Take a message whose subject begins with ``prefix``."""
        if self._rest or matches(self.pattern, message.subject):
            self.queue.append(message)
            if len(self.queue) == 1:
                network.push(self.bus, "changes", self._deliver)

    def _deliver(self) -> None:
        batch, self.queue = self.queue, []
        if batch and not self.closed:
            self.on_batch(batch)


class Stream:
    """One stream. A bucket's (``kv``) keeps the last message of each subject only."""

    def __init__(self, name: str, subjects: tuple[str, ...], *, kv: bool, duplicate_window_s: float) -> None:
        self.name = name
        self.subjects = subjects
        self.kv = kv
        self.duplicate_window_s = duplicate_window_s
        self.seq = 0
        self.messages: list[Stored] = []
        self.last: dict[str, Stored] = {}
        self.ids: dict[str, tuple[int, float]] = {}
        self.consumers: dict[str, Consumer] = {}
        self.watchers: list[Watcher] = []

    def store(self, subject: str, data: bytes, headers: dict[str, str], network: Network) -> Published:
        """Append, unless a message with the same id is there already."""
        before = self.last.get(subject)
        expected = headers.get("Nats-Expected-Last-Subject-Sequence")
        if expected is not None and int(expected) != (0 if before is None else before.seq):
            raise BadRequestError(
                code=400, err_code=WRONG_LAST_SEQUENCE, description=f"wrong last sequence: {before and before.seq}"
            )
        message_id = headers.get("Nats-Msg-Id")
        if message_id is not None:
            now = time.monotonic()
            known = self.ids.get(message_id)
            if known is not None and now - known[1] < self.duplicate_window_s:
                return Published(known[0], True)
            self.ids[message_id] = (self.seq + 1, now)
        self.seq += 1
        message = Stored(subject, data, headers, self.seq, time.time())
        self.last[subject] = message
        if not self.kv:
            self.messages.append(message)
        network.landed(self, message, before)
        for watcher in self.watchers:
            if subject.startswith(watcher.prefix):
                watcher.add(message, network)
        for consumer in self.consumers.values():
            consumer.dispatch()
        return Published(self.seq, False)

    def snapshot(self, pattern: str, start_sequence: int) -> list[Stored]:
        if self.kv:
            source = sorted(self.last.values(), key=lambda each: each.seq)
        else:
            source = self.messages[start_sequence - 1 :]
        return [each for each in source if matches(pattern, each.subject)]


@dataclass
class Pending:
    """A delivered message without an ack. ``deliveries`` also tells a late expiry from the present delivery."""

    message: Stored
    deliveries: int
    in_hand: bool = True


class Consumer:
    """A durable pull consumer with explicit acks, shared by its members (E: one per control service)."""

    def __init__(
        self, server: MemoryServer, stream: Stream, subjects: list[str], *, ack_wait_s: float, from_now: bool
    ) -> None:
        self._server = server
        self._stream = stream
        self.wants(subjects)
        self._ack_wait_s = ack_wait_s
        self._cursor = len(stream.messages) if from_now else 0
        self.pending: dict[int, Pending] = {}
        self._again: deque[int] = deque()
        self.members: list[Member] = []

    def wants(self, subjects: list[str]) -> None:
        """The subjects that it delivers, from here on."""
        self._wanted = _expression(tuple(subjects))

    def dispatch(self) -> None:
        """Hand out what there is to members with room, the least busy first."""
        server = self._server
        while (self._again or self._cursor < len(self._stream.messages)) and server.up:
            member = self._free_member()
            pending = None if member is None else self._next()
            if member is None or pending is None:
                return
            member.in_hand += 1
            server.network.push(member.bus, "message", member.arrive, pending.message, pending.deliveries)
            server.network.post(
                self._ack_wait_s * server.ack_wait_factor, self.expire, pending.message.seq, pending.deliveries
            )

    def ack(self, seq: int) -> None:
        self.pending.pop(seq, None)
        self.dispatch()

    def nak(self, seq: int, delay_s: float) -> None:
        pending = self.pending.get(seq)
        if pending is not None:
            self._server.network.post(delay_s, self.expire, seq, pending.deliveries)

    def expire(self, seq: int, deliveries: int) -> None:
        """Deliver again, unless it was acknowledged or delivered again meanwhile."""
        pending = self.pending.get(seq)
        if pending is not None and pending.deliveries == deliveries and pending.in_hand:
            pending.in_hand = False
            self._again.append(seq)
            self.dispatch()

    @property
    def idle(self) -> bool:
        """Nothing is unacknowledged and nothing is left to deliver."""
        return not self.pending and not any(
            self._wanted(each.subject) for each in self._stream.messages[self._cursor :]
        )

    def _free_member(self) -> Member | None:
        chosen: Member | None = None
        for member in self.members:
            if member.in_hand < member.capacity and (chosen is None or member.in_hand < chosen.in_hand):
                chosen = member
        return chosen

    def _next(self) -> Pending | None:
        while self._again:
            pending = self.pending.get(self._again.popleft())
            if pending is not None and not pending.in_hand:
                pending.in_hand = True
                pending.deliveries += 1
                return pending
        messages = self._stream.messages
        while self._cursor < len(messages):
            message = messages[self._cursor]
            self._cursor += 1
            if self._wanted(message.subject):
                pending = self.pending[message.seq] = Pending(message, 1)
                return pending
        return None


class Member:
    """One ``consume`` call: its share of what was delivered."""

    def __init__(self, bus: MemoryBus, capacity: int) -> None:
        self.bus = bus
        self.capacity = capacity
        self.in_hand = 0
        self.start: Callable[[Stored, int], object] | None = None
        """Makes one more handler, with its first message; None until the consumer's name is known at the other end."""
        self.num_handlers = 0
        self.inbox: deque[tuple[Stored, int]] = deque()
        self.idle: list[asyncio.Future[tuple[Stored, int] | None]] = []
        """Handlers with nothing to do: each gets a message, or None when it has to end."""
        self.left: Consumer | None = None
        """The consumer that it has left: what was on its way goes back."""

    def arrive(self, message: Stored, deliveries: int) -> None:
        if self.left is not None:
            self.left.nak(message.seq, 0.0)
            return
        while self.idle:
            waiting = self.idle.pop()
            if not waiting.done():
                waiting.set_result((message, deliveries))
                return
        if self.start is not None and self.num_handlers < self.capacity:
            self.num_handlers += 1
            self.start(message, deliveries)
        else:
            self.inbox.append((message, deliveries))

    def open(self, start: Callable[[Stored, int], object]) -> None:
        self.start = start
        early, self.inbox = self.inbox, deque()
        for message, deliveries in early:
            self.arrive(message, deliveries)

    def leave(self, consumer: Consumer) -> None:
        """Take no more; handlers end with what they have."""
        self.left = consumer
        consumer.members = [each for each in consumer.members if each is not self]
        for waiting in self.idle:
            if not waiting.done():
                waiting.set_result(None)


class MemoryServer:
    """The server: every stream and bucket of ``streams``, made at once."""

    def __init__(self, network: Network | None = None) -> None:
        self.network = network or Network()
        self.up = True
        self.ack_wait_factor = 1.0
        self.streams: dict[str, Stream] = {}
        for config in streams.STREAMS:
            self.streams[config.name] = Stream(
                config.name, config.subjects, kv=False, duplicate_window_s=config.duplicate_window_s
            )
        for bucket in streams.BUCKETS:
            self.streams[f"KV_{bucket.name}"] = Stream(
                f"KV_{bucket.name}", (f"$KV.{bucket.name}.>",), kv=True, duplicate_window_s=0.0
            )
        # Every stream takes all that begins with its first two tokens ("openrl.ev", "$KV.<bucket>").
        self._of_prefix = {
            subject.removesuffix(".>"): stream for stream in self.streams.values() for subject in stream.subjects
        }
        self._of_subject: dict[str, Stream] = {}
        self.payloads: dict[str, bytes] = {}
        self.core: dict[str, list[tuple[MemoryBus, Any]]] = {}
        self.listened = self.wildcards()

    # --- what a client asks ------------------------------------------------------------------------------------

    def publish(self, subject: str, data: bytes, headers: dict[str, str]) -> Published:
        for prefix, wanted, served in self.listened:  # also core subscribers hear what a stream takes
            if subject.startswith(prefix) and wanted(subject):
                for bus, callback in served:
                    self.network.push(bus, "core", callback, data, headers)
        return self._stream_of(subject).store(subject, data, headers, self.network)

    def wildcards(self) -> list[tuple[str, Callable[[str], object], list[tuple[MemoryBus, Any]]]]:
        """Core subscriptions with wildcards, each with what its subjects begin with: they listen to events."""
        return [
            (subject[: subject.find("*")], partial(matches, subject), served)
            for subject, served in self.core.items()
            if served and "*" in subject
        ]

    def last(self, stream: str, pattern: str) -> Stored:
        kept = self.streams[stream]
        found = kept.last.get(pattern)
        if found is None and ("*" in pattern or ">" in pattern):
            found = max(
                (each for each in kept.last.values() if matches(pattern, each.subject)),
                key=lambda each: each.seq,
                default=None,
            )
        if found is None:
            raise NotFoundError(code=404, err_code=10037, description="no message found")
        return found

    def join(
        self, stream: str, durable: str, subjects: list[str], member: Member, *, ack_wait_s: float, from_now: bool
    ) -> Consumer:
        kept = self.streams[stream]
        consumer = kept.consumers.get(durable)
        if consumer is None:
            consumer = kept.consumers[durable] = Consumer(
                self, kept, subjects, ack_wait_s=ack_wait_s, from_now=from_now
            )
        consumer.wants(subjects)
        if member not in consumer.members:
            consumer.members.append(member)
        consumer.dispatch()
        return consumer

    def watch(self, stream: str, watcher: Watcher, start_sequence: int = 1) -> list[Stored]:
        """What is stored now; what comes later goes to the watcher."""
        kept = self.streams[stream]
        if watcher not in kept.watchers:
            kept.watchers.append(watcher)
        return kept.snapshot(watcher.pattern, start_sequence)

    # --- outages and ends --------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Away, as after a kill -9: nothing stored is lost, every watcher is."""
        self.up = False

    def start(self) -> None:
        self.up = True
        self.lose_watchers(None)
        self.dispatch()

    def dispatch(self) -> None:
        for stream in self.streams.values():
            for consumer in stream.consumers.values():
                consumer.dispatch()

    def lose_bucket(self, name: str) -> None:
        """It is gone with all that was in it, and made anew, empty, the next moment."""
        bucket = self.streams[f"KV_{name}"]
        bucket.last.clear()
        bucket.seq = 0
        self.lose_watchers(None, bucket)

    def lose_watchers(self, of: MemoryBus | None, only: Stream | None = None) -> None:
        """Every live reader of one bus, or of all, has to read again."""
        for stream in self.streams.values() if only is None else (only,):
            lost = [watcher for watcher in stream.watchers if of is None or watcher.bus is of]
            stream.watchers = [watcher for watcher in stream.watchers if watcher not in lost]
            for watcher in lost:
                watcher.closed = True
                watcher.on_lost()

    def disconnect(self, bus: MemoryBus) -> None:
        """The other end is gone. What it had in hand is delivered again after its ack wait."""
        for stream in self.streams.values():
            stream.watchers = [watcher for watcher in stream.watchers if watcher.bus is not bus]
            for consumer in stream.consumers.values():
                consumer.members = [member for member in consumer.members if member.bus is not bus]
        for subject, served in list(self.core.items()):
            self.core[subject] = [each for each in served if each[0] is not bus]
        self.listened = self.wildcards()

    def _stream_of(self, subject: str) -> Stream:
        stream = self._of_subject.get(subject)
        if stream is None:
            stream = self._of_prefix.get(subject[: subject.find(".", subject.find(".") + 1)])
            if stream is None:
                raise NotFoundError(code=404, description=f"no stream takes {subject}")
            self._of_subject[subject] = stream
        return stream
