"""Carrying out what placement decided: records first, then events, each record's in the order of the decisions (E6).

Invariants: a write is a compare-and-swap from the revision last seen, and writes the record as it stands now; what
could not be carried out is kept and goes with the next effects, so that memory never runs ahead for good. A new
workload stands in its job's record alone at first: that record stops carrying it only once it has one of its own.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from openrl_common.bus import Bus
from openrl_common.duty import Duty
from openrl_common.errors import Conflict, Transient
from openrl_common.events import Event
from openrl_common.records import JobRecord
from openrl_common.store import Bucket, Entry
from openrl_placement.state import Effects, State

T = TypeVar("T")

_WRITES_AT_ONCE = 64


class Outbox:
    """Carries out effects: records first, events after, each record's effects in the order of their decisions."""

    def __init__(self, bus: Bus, state: State, duty: Duty | None) -> None:
        self._bus = bus
        self._state = state
        self._duty = duty
        self._tails: dict[str, asyncio.Future[None]] = {}
        self._kept: list[Effects] = []
        self._revisions: dict[tuple[int, str], int] = {}
        """Of every record, what was last read or written: the next write is a compare-and-swap from it."""
        self._carried: dict[str, tuple[int, tuple[str, ...]]] = {}
        """Job → incarnation and workloads that its stored record carries."""
        self._alone: dict[str, str] = {}
        """Workload → the job whose stored record alone has it."""
        self._slots = asyncio.Semaphore(_WRITES_AT_ONCE)

    def found(self, bucket: Bucket[T], entry: Entry[T]) -> None:
        """A record that stood there at the start."""
        self._revisions[id(bucket), entry.key] = entry.revision
        if isinstance(entry.value, JobRecord):
            self._note_carried(entry.key, entry.value)

    async def carry_out(self, effects: Effects) -> None:
        """Raises Transient when something could not be written or published; it is then kept for the next call."""
        if self._kept:
            first, *rest = self._kept
            for later in (*rest, effects):
                first.add(later)
            self._kept, effects = [], first
        if not effects:
            return
        keys = _keys(effects)
        before = {tail for key in keys if (tail := self._tails.get(key)) is not None}
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for key in keys:
            self._tails[key] = done
        try:
            if before:
                await asyncio.wait(before)
                if any(keys & _keys(kept) for kept in self._kept):
                    raise Transient("what was decided of these records before is not carried out yet")
            await self._all(
                [self._write(self._bus.store.workloads, key, self._state.workloads) for key in effects.workloads]
            )
            await self._all([self._write_job(key) for key in effects.jobs])
            await self._all([self._write_uncarried(workload, job) for workload, job in effects.carried.items()])
            unique = {event.message_id: event for event in effects.events}
            await self._all([self._publish(event) for event in unique.values()])
        except BaseException:
            self._kept.append(effects)
            raise
        finally:
            done.set_result(None)
            for key in keys:
                if self._tails.get(key) is done:
                    del self._tails[key]

    async def settle(self, event: Event) -> None:
        """Wait until what was decided of this event's records is carried out, by whomever.

        A message that comes twice at once changes nothing the second time, and would be acknowledged while the effects
        of the first are still on their way: with this process they would be lost (E6). Raises Transient when they were
        kept.
        """
        keys = set(_records_of(event))
        if under_way := {tail for key in keys if (tail := self._tails.get(key)) is not None}:
            await asyncio.wait(under_way)
        if any(keys & _keys(kept) for kept in self._kept):
            raise Transient(f"what follows from {event.message_id} is not carried out yet")

    async def _all(self, steps: list[Any]) -> None:
        if len(steps) == 1:
            await steps[0]
        elif steps:
            results = await asyncio.gather(*steps, return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result

    async def _write(self, bucket: Bucket[T], key: str, records: dict[str, T]) -> None:
        async with self._slots:
            while not await self._written(bucket, key, records):
                pass

    async def _write_job(self, key: str) -> None:
        async with self._slots:
            while True:
                record = self._state.jobs.get(key)
                left = self._left_behind(key, record)
                if left:
                    await self._written(self._bus.store.workloads, left[0], self._state.workloads)
                elif await self._written(self._bus.store.jobs, key, self._state.jobs):
                    self._note_carried(key, record)
                    return

    async def _write_uncarried(self, workload: str, job: str) -> None:
        """Its job may have been replaced since, before any record that carries this workload was written."""
        _, carried = self._carried.get(job, (0, ()))
        if workload not in carried:
            await self._write(self._bus.store.workloads, workload, self._state.workloads)

    async def _written(self, bucket: Bucket[T], key: str, records: dict[str, T]) -> bool:
        """Write the record as it stands now (not as it stood at the decision): nothing older can replace it.

        By compare-and-swap, although there is one writer: a write of a killed predecessor, or an own one given up as
        lost, may still be on its way, and would otherwise land on top (E7). False: something did, try again.
        """
        self._look_at_duty()
        place = (id(bucket), key)
        record, last = records.get(key), self._revisions.get(place, 0)
        try:
            if record is not None:
                self._revisions[place] = await bucket.write(key, record, last=last)
            elif last:
                await bucket.delete(key, last=last)
                self._revisions.pop(place, None)
        except Conflict:
            standing = await bucket.get(key)
            if self._duty is not None:
                await self._duty.confirm()  # after the read: what is written from it can replace nothing newer
            self._revisions[place] = 0 if standing is None else standing.revision
            return False
        if bucket is self._bus.store.workloads:
            self._alone.pop(key, None)
        return True

    def _left_behind(self, key: str, record: JobRecord | None) -> list[str]:
        """Workloads that this record of a job would overwrite: they have no other."""
        _, carried = self._carried.get(key, (0, ()))
        kept = {each.workload for each in record.workloads} if record is not None else set()
        return [workload for workload in carried if self._alone.get(workload) == key and workload not in kept]

    def _note_carried(self, key: str, record: JobRecord | None) -> None:
        workloads = tuple(each.workload for each in record.workloads) if record is not None else ()
        if record is None or not workloads:
            self._carried.pop(key, None)
        elif self._carried.get(key) != (record.incarnation, workloads):
            self._carried[key] = record.incarnation, workloads
            self._alone.update(dict.fromkeys(workloads, key))

    async def _publish(self, event: Event) -> None:
        async with self._slots:
            self._look_at_duty()
            await self._bus.publish(event)

    def _look_at_duty(self) -> None:
        """Right before every effect: who was stopped for longer than the lease has a view that is not to be acted on.

        Raises Transient: also while the bus is away, until the lease is renewed.
        """
        if self._duty is not None and not self._duty.held:
            raise Transient("this replica's lease has lapsed: it may have been replaced")


def _keys(effects: Effects) -> set[str]:
    return {*effects.workloads, *effects.jobs, *(key for event in effects.events for key in _records_of(event))}


def _records_of(event: Event) -> list[str]:
    """The keys of the records that an event speaks of: it must not get ahead of their writes."""
    job = getattr(event, "job", None)
    if job is not None:
        return [f"{getattr(event, 'tenant', '')}.{job}"]
    beside = getattr(event, "beside", None)
    return [event.entity_id] if beside is None else [event.entity_id, beside.entity_id]
