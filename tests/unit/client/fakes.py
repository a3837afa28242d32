"""A bus that keeps what is published and delivers what a test tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from openrl_common.bus import StoredMessage
from openrl_common.errors import Conflict, Unreachable
from openrl_common.store import Entry

Callback = Callable[[bytes, dict[str, str]], Awaitable[None]]


class FakeBucket:
    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    async def get(self, key: str) -> Entry[Any] | None:
        return Entry(key, self.values[key], 1) if key in self.values else None


class FakeStore:
    def __init__(self) -> None:
        self.results = FakeBucket()
        self.jobs = FakeBucket()
        self.workloads = FakeBucket()


class FakeBus:
    def __init__(self) -> None:
        self.store = FakeStore()
        self.published: list[tuple[str, bytes, str]] = []
        self.sent: list[tuple[str, bytes]] = []
        self.payloads: dict[str, bytes] = {}
        self.inboxes: dict[str, Callback] = {}
        self.failures_left = 0
        self._arrived = asyncio.Condition()
        self.on_publish: Callable[[str, bytes], Awaitable[None]] | None = None

    def why_unwritten(self) -> str:
        return "the disk is full"

    def new_inbox(self) -> str:
        return f"_INBOX.{len(self.inboxes)}"

    async def subscribe(self, subject: str, callback: Callback) -> Callable[[], Awaitable[None]]:
        self.inboxes[subject] = callback

        async def unsubscribe() -> None:
            self.inboxes.pop(subject, None)

        return unsubscribe

    async def publish_raw(
        self,
        subject: str,
        body: bytes,
        *,
        message_id: str,
        ttl_s: float | None = None,
        after: int | None = None,
        **_: object,
    ) -> int:
        if self.failures_left:
            self.failures_left -= 1
            raise Unreachable("no answer")
        if after is not None and after != len(self.published):
            raise Conflict("not the last one any more")
        self.published.append((subject, body, message_id))
        async with self._arrived:
            self._arrived.notify_all()
        if self.on_publish is not None:
            await self.on_publish(subject, body)
        return len(self.published)

    async def send(self, subject: str, body: bytes) -> None:
        self.sent.append((subject, body))

    async def last(self, *, stream: str, subject: str) -> StoredMessage | None:
        if not self.published:
            return None
        subject, body, _ = self.published[-1]
        return StoredMessage(subject, body, len(self.published))

    async def put_payload(self, body: bytes) -> tuple[str, str]:
        self.payloads["object"] = body
        return "object", "digest"

    async def wait_published(self, num: int) -> None:
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self.published) >= num)
