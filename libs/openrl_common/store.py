"""Typed key-value buckets with compare-and-swap and live mirrors. KV is the truth (E5).

Invariants: ``write`` either raises, or the value is stored at the returned revision; a write whose answer was lost is
resolved by reading back the id stored with it (E7, E8), never assumed to have failed. A mirror lists again after every
reconnect (E15): it lags, it never misses for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import time
from collections.abc import Awaitable, Callable, MutableSequence, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import openrl_common.without_websockets  # noqa: F401

import msgspec
import nats.js.errors
from nats.js import api

from openrl_common import records, wire
from openrl_common.connection import WRONG_LAST_SEQUENCE
from openrl_common.errors import Conflict, Poison, Transient, UnknownOutcome, Unreachable
from openrl_common.pull import JETSTREAM_FAULTS, NETWORK_ERRORS, Lost, Puller, heed_cancellation

if TYPE_CHECKING:
    from openrl_common.bus import Bus

log = logging.getLogger(__name__)

T = TypeVar("T")

_WRITE_ID = "Openrl-Write-Id"
_TRY_S = 2.0
_DEADLINE_S = 20.0
_LIST_BATCH = 512
_LIST_SLICE = 32
_LIST_TRIES = 50
_INTERRUPTIONS: tuple[type[Exception], ...] = (Lost, *JETSTREAM_FAULTS)


@dataclass(frozen=True, slots=True)
class Entry(Generic[T]):
    """A value and the revision at which it stands (for ``write(last=…)``)."""

    key: str
    value: T
    revision: int


@dataclass(frozen=True, slots=True)
class Old(Generic[T]):
    """What nobody has written for long. ``value`` None: a delete marker."""

    key: str
    value: T | None
    revision: int


class Mirror(Generic[T]):
    """A live copy of the keys under a prefix. ``entries`` may lag behind the bucket; a CAS tells."""

    def __init__(self, on_change: Callable[[str, Entry[T] | None], None] | None) -> None:
        self.entries: dict[str, Entry[T]] = {}
        self._on_change = on_change
        self._task: asyncio.Task[None] | None = None
        self._synced = asyncio.Event()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def learn(self, entry: Entry[T]) -> None:
        """Take in what the caller has just written or read, without waiting for the bucket to say so."""
        self._apply(entry.key, entry)

    def _replace(self, listed: dict[str, Entry[T]]) -> None:
        """A fresh list: what vanished becomes a deletion, what is newer becomes a change."""
        for gone in self.entries.keys() - listed.keys():
            self._apply(gone, None)
        for key, entry in listed.items():
            self._apply(key, entry)
        self._synced.set()

    def _apply(self, key: str, entry: Entry[T] | None) -> None:
        known = self.entries.get(key)
        if entry is None:
            if known is None:
                return
            del self.entries[key]
        else:
            if known is not None and known.revision >= entry.revision:
                return
            self.entries[key] = entry
        if self._on_change is not None:
            self._on_change(key, entry)


class Bucket(Generic[T]):
    """One typed view of a KV bucket: the keys under ``prefix``, given and returned without it."""

    def __init__(self, bus: Bus, bucket: str, prefix: str, value_type: type[T]) -> None:
        self._bus = bus
        self._stream = f"KV_{bucket}"
        self._name = bucket
        self._root = f"$KV.{bucket}.{prefix}"
        self._encoder = msgspec.json.Encoder()
        self._decoder = msgspec.json.Decoder(value_type)

    async def exists(self) -> bool:
        """Is the bucket itself there? Raises Unreachable when the server does not say."""
        try:
            await self._bus.jetstream.stream_info(self._stream)
        except nats.js.errors.NotFoundError:
            return False
        except JETSTREAM_FAULTS as error:
            raise Unreachable(f"NATS does not say whether bucket {self._name} exists ({error!r})") from error
        return True

    async def get(self, key: str) -> Entry[T] | None:
        """The current entry, None when there is none. Raises Poison when the stored bytes are not a value."""
        message = await self._last(key, direct=True)
        return None if message is None else self._entry(key, message.data, message.seq or 0, message.headers)

    async def write(self, key: str, value: T, *, last: int) -> int:
        """Compare-and-swap; ``last=0`` means the key must not exist, also over a delete marker (E9).

        Returns:
            The new revision.

        Raises:
            Conflict: another revision stands there. UnknownOutcome: the same, and an earlier try may have landed.
            Unreachable: no answer before the deadline; the outcome is unknown.
        """
        return await self._publish(key, self._encoder.encode(value), last=last, headers={})

    async def put(self, key: str, value: T) -> int:
        """Write unconditionally: for keys that have exactly one writer."""
        return await self._publish(key, self._encoder.encode(value), last=None, headers={})

    async def delete(self, key: str, *, last: int | None = None) -> None:
        await self._publish(key, b"", last=last, headers={"KV-Operation": "DEL"})

    async def keep_newest(self, prefix: str, num: int) -> None:
        """Drop all but the ``num`` values written last among the keys under ``prefix``. Raises Transient."""
        await self._bus.purge(self._stream, f"{self._root}{prefix}>", keep=num)

    async def list(self, prefix: str = "", *, rest: float = 0.0) -> dict[str, Entry[T]]:
        """Every entry whose key begins with ``prefix``, which must be empty or end in a dot.

        Args:
            rest: pauses in between, in multiples of what the entries take: a long list then leaves the loop to others.
        """
        for _ in range(_LIST_TRIES):
            try:
                return await self._read_all(prefix, None, rest)
            except _INTERRUPTIONS:
                await asyncio.sleep(0.2)
        raise Unreachable(f"bucket {self._name} cannot be listed: NATS does not answer")

    async def mirror(
        self, prefix: str = "", on_change: Callable[[str, Entry[T] | None], None] | None = None
    ) -> Mirror[T]:
        """A live copy, already complete when this returns. ``on_change(key, entry or None)`` runs on the loop."""
        mirror: Mirror[T] = Mirror(on_change)
        mirror._task = asyncio.create_task(self._follow(prefix, mirror), name=f"mirror {self._name} {prefix}")
        waiter = asyncio.create_task(mirror._synced.wait())
        done, _ = await asyncio.wait({mirror._task, waiter}, timeout=_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
        waiter.cancel()
        if mirror._task in done:
            mirror._task.result()
        if not mirror._synced.is_set():
            await mirror.close()
            raise Unreachable(f"bucket {self._name} cannot be read: NATS does not answer")
        self._bus.watch(mirror._task)
        return mirror

    async def written_before(self, moment: float, num_max: int) -> Sequence[Old[T]]:
        """What has not been written since ``moment`` (Unix seconds, the server's clock), the oldest first.

        Raises Transient when the bucket cannot be read.
        """
        info: list[api.ConsumerInfo] = []
        puller = self._bus.new_puller(self._stream, self._reader("", info), capacity=64, ordered=True)
        found: list[Old[T]] = []
        try:
            await puller.start()
            left = info[-1].num_pending or 0
            while left > 0 and len(found) < num_max:
                message = await puller.next()
                puller.done()
                delivered = message.delivered
                if delivered.stored_at >= moment:
                    break
                key = message.subject[len(self._root) :]
                with contextlib.suppress(Poison):
                    entry = self._entry(key, message.data, delivered.sequence, message.headers)
                    found.append(Old(key, None if entry is None else entry.value, delivered.sequence))
                left = min(left - 1, delivered.pending)
            return found
        except _INTERRUPTIONS as error:
            raise Transient(f"bucket {self._name} was not read to its end: {error!r}") from error
        finally:
            self._bus.forget_puller(puller)
            await puller.stop()
            await self._drop_reader(info)

    async def forget_marker(self, old: Old[T]) -> None:
        """Drop a delete marker for good; whatever was written over it stays. Raises Transient."""
        try:
            await self._bus.jetstream.purge_stream(self._stream, subject=self._root + old.key, seq=old.revision + 1)
        except JETSTREAM_FAULTS as error:
            raise Transient(f"bucket {self._name}, key {old.key}: its marker was not dropped ({error!r})") from error

    # --- internals ---------------------------------------------------------------------------------------------

    def _entry(self, key: str, data: bytes | None, revision: int, headers: dict[str, str] | None) -> Entry[T] | None:
        if headers and (headers.get("KV-Operation") in ("DEL", "PURGE") or "Nats-Marker-Reason" in headers):
            return None
        try:
            return Entry(key, self._decoder.decode(data or b""), revision)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise Poison(f"bucket {self._name}, key {key}: the stored value is not usable ({error})") from error

    async def _last(self, key: str, *, direct: bool) -> api.RawStreamMsg | None:
        deadline = time.monotonic() + _DEADLINE_S
        while True:
            try:
                return await self._bus.jetstream.get_msg(self._stream, subject=self._root + key, direct=direct)
            except nats.js.errors.NotFoundError:
                return None
            except NETWORK_ERRORS as error:
                if time.monotonic() > deadline:
                    raise Unreachable(f"bucket {self._name} cannot be read: NATS does not answer") from error
                await asyncio.sleep(0.1)

    async def _publish(self, key: str, body: bytes, *, last: int | None, headers: dict[str, str]) -> int:
        with self._bus.unwritten.during(self._root + key):
            return await self._stored(key, body, last=last, headers=headers)

    async def _stored(self, key: str, body: bytes, *, last: int | None, headers: dict[str, str]) -> int:
        """Publish, resolving unknown outcomes.

        A try that timed out may still be sent after a reconnect. With ``last`` a second try cannot land twice: it
        meets the first one's revision. So try again, and on "wrong last sequence" look whose write stands there.
        """
        write_id = os.urandom(9).hex()
        headers = {**headers, _WRITE_ID: write_id}
        if last is not None:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(last)
        deadline = time.monotonic() + _DEADLINE_S
        unknown = False
        while True:
            try:
                ack = await self._bus.jetstream.publish(self._root + key, body, timeout=_TRY_S, headers=dict(headers))
                return int(ack.seq)
            except NETWORK_ERRORS as error:
                unknown = True
                if time.monotonic() > deadline:
                    raise Unreachable(
                        f"bucket {self._name}, key {key}: no answer to a write, it may have landed"
                    ) from error
                await asyncio.sleep(random.uniform(0.05, 0.25))
            except nats.js.errors.APIError as error:
                if error.err_code not in WRONG_LAST_SEQUENCE:
                    raise Transient(
                        f"bucket {self._name}, key {key}: NATS refused the write ({error.description}); "
                        "look at disk space and the JetStream limits"
                    ) from error
                if last == 0 and not unknown and await self._replace_marker(key, headers):
                    continue
                if unknown:
                    standing = await self._last(key, direct=False)
                    if standing is not None and (standing.headers or {}).get(_WRITE_ID) == write_id:
                        assert standing.seq is not None
                        return int(standing.seq)
                    raise UnknownOutcome(f"bucket {self._name}, key {key}: changed by another writer") from error
                raise Conflict(f"bucket {self._name}, key {key}: changed by another writer") from error

    async def _replace_marker(self, key: str, headers: dict[str, str]) -> bool:
        """``last=0`` over a delete marker: expect the marker's own revision, so that nothing live is replaced (E9)."""
        standing = await self._last(key, direct=False)
        if standing is None or (standing.headers or {}).get("KV-Operation") not in ("DEL", "PURGE"):
            return False
        if headers["Nats-Expected-Last-Subject-Sequence"] == str(standing.seq):
            return False
        headers["Nats-Expected-Last-Subject-Sequence"] = str(standing.seq)
        return True

    async def _read_all(self, prefix: str, live: Mirror[T] | None, rest: float = 0.0) -> dict[str, Entry[T]]:
        """Read the last value of every key; with ``live`` hand the list over and go on with changes until Lost."""
        info: list[api.ConsumerInfo] = []
        listed: dict[str, Entry[T]] = {}
        puller = self._bus.new_puller(self._stream, self._reader(prefix, info), capacity=_LIST_BATCH, ordered=True)
        try:
            await puller.start()
            num_keys = left = info[-1].num_pending or 0
            seen: set[str] = set()
            taken, began = 0, time.monotonic()
            while left > 0:
                key, entry, pending = await self._next_change(puller)
                if entry is not None:
                    listed[key] = entry
                else:
                    listed.pop(key, None)
                # A key that is written meanwhile moves behind all others, and may come twice: each counts once. (The
                # server's own count is short by some that were written meanwhile, so it tells only the very end.)
                left = left - (key not in seen) if pending else 0
                seen.add(key)
                taken += 1
                if taken % _LIST_SLICE == 0:  # a buffer full of entries is decoded without a pause otherwise
                    # What moves on while this reads is caught up with, not followed at a distance.
                    await asyncio.sleep(rest * (time.monotonic() - began) if taken < num_keys else 0)
                    began = time.monotonic()
            if live is not None:
                live._replace(listed)
                while True:
                    heed_cancellation()
                    key, entry, _ = await self._next_change(puller, live)
                    live._apply(key, entry)
            return listed
        finally:
            self._bus.forget_puller(puller)
            await puller.stop()
            await self._drop_reader(info)

    def _reader(self, prefix: str, info: MutableSequence[api.ConsumerInfo]) -> Callable[[], Awaitable[str]]:
        """What makes a consumer of the last values under ``prefix``, in stream order, and notes it in ``info``."""

        async def ensure() -> str:
            config = api.ConsumerConfig(
                deliver_policy=api.DeliverPolicy.LAST_PER_SUBJECT,
                ack_policy=api.AckPolicy.NONE,
                filter_subject=f"{self._root}{prefix}>",
                inactive_threshold=60.0,
                mem_storage=True,
                num_replicas=1,
            )
            info.append(await self._bus.jetstream.add_consumer(self._stream, config=config))
            return str(info[-1].name)

        return ensure

    async def _drop_reader(self, info: Sequence[api.ConsumerInfo]) -> None:
        if info:
            with contextlib.suppress(*JETSTREAM_FAULTS):
                await self._bus.jetstream.delete_consumer(self._stream, info[-1].name)

    async def _next_change(self, puller: Puller, live: Mirror[T] | None = None) -> tuple[str, Entry[T] | None, int]:
        """Key, entry (None: deleted, or not usable, which is logged) and how many messages are pending behind it.

        What ``live`` has learned already is not decoded again.
        """
        message = await puller.next()
        puller.done()
        key = message.subject[len(self._root) :]
        delivered = message.delivered
        known = live.entries.get(key) if live is not None else None
        if known is not None and known.revision >= delivered.sequence:
            return key, known, delivered.pending
        # A live value has a body, and a mirror sees no other headers than a marker's: none are parsed for it.
        headers = message.headers if not message.data else None
        try:
            return key, self._entry(key, message.data, delivered.sequence, headers), delivered.pending
        except Poison as error:
            log.error("%s", error)
            return key, None, delivered.pending

    async def _follow(self, prefix: str, mirror: Mirror[T]) -> None:
        while True:
            heed_cancellation()
            try:
                await self._read_all(prefix, mirror)
            except _INTERRUPTIONS as error:
                log.debug("mirror of %s lists again (%r)", self._name, error)
            await asyncio.sleep(random.uniform(0.05, 0.2))


class Store:
    """Every bucket, typed. A view's keys are without their prefix."""

    def __init__(self, bus: Bus, make: Callable[[Bus, str, str, type[Any]], Bucket[Any]] | None = None) -> None:
        def view(bucket: str, prefix: str, value_type: type[T]) -> Bucket[T]:
            return (make or Bucket)(bus, bucket, prefix, value_type)

        self.jobs = view("openrl_jobs", "", records.JobRecord)
        self.workloads = view("openrl_workloads", "", records.WorkloadRecord)
        self.ledger_seats = view("openrl_ledger", "seat.", records.SeatRecord)
        self.ledger_claims = view("openrl_ledger", "claim.", records.ClaimRecord)
        self.ledger_nodes = view("openrl_ledger", "node.", records.NodeBudget)
        self.ledger_meta = view("openrl_ledger", "meta.", records.LedgerIdentityRecord)
        self.duties = view("openrl_ledger", "duty.", records.DutyRecord)
        self.turns = view("openrl_turns", "", records.TurnRecord)
        self.nodes = view("openrl_nodes", "", records.NodeRecord)
        self.cuts = view("openrl_claims", "claim.", records.CutRecord)
        self.devices = view("openrl_claims", "dev.", records.DeviceHold)
        self.workers = view("openrl_workers", "", records.WorkerRecord)
        self.leases = view("openrl_leases", "lease.", records.LeaseRecord)
        self.ready = view("openrl_ready", "", records.ReadyRecord)
        self.weights = view("openrl_weights", "", records.WeightsRecord)
        self.results = view("openrl_results", "", wire.TrainResult)
        self.checkpoints = view("openrl_checkpoints", "", records.CheckpointRecord)
