"""Keeps the engine on the newest weights of the jobs it serves, and tells what became of each version.

openrl_weights and openrl_jobs are the truth; their mirrors wake the engine loop, and a wait for a version reads the
bucket itself from time to time (E5, E15). Versions published while another was applied are skipped. The announcements
(WeightsApplied, WeightsRejected) leave apart from the engine loop: a bus outage must not stop generation.

A version is read and verified beside generation (``look_ahead``); only what was found sound is due for the device,
where it is applied in the time that writing takes. Called by the engine loop only, so an update lies between two bursts
of steps (V5).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypedDict, TypeVar

from openrl_common.errors import Rejected, Transient
from openrl_common.events import SamplerDisagreed, WeightsApplied, WeightsRejected
from openrl_common.records import JobKind, JobRecord, WeightsRecord
from openrl_common.store import Entry, Mirror
from openrl_common.weights import WeightsManifest, read_manifest
from openrl_common.worker import WorkerContext
from openrl_sampler.attached import AttachedJobs
from openrl_sampler.engine import Applied, Engine
from openrl_sampler.metrics import Metrics
from openrl_sampler.updates import Failure, due, failed, job_key, next_retry_at

log = logging.getLogger(__name__)
T = TypeVar("T")
_ANNOUNCEMENTS_MAX = 256
Announcement = WeightsApplied | WeightsRejected | SamplerDisagreed


class InThread(Protocol):
    """Runs work in the engine's thread."""

    def __call__(self, work: Callable[[], T]) -> Awaitable[T]: ...


class _Identity(TypedDict):
    tenant: str
    job: str
    incarnation: int
    version: int


class WeightsKeeper:
    """``wake`` is set whenever something changed that the engine loop should look at."""

    def __init__(
        self, context: WorkerContext, engine: Engine, in_thread: InThread, wake: asyncio.Event, metrics: Metrics
    ) -> None:
        self._context = context
        self._engine = engine
        self._in_thread = in_thread
        self._wake = wake
        self._metrics = metrics
        self._lora = context.workload.kind is JobKind.LORA
        self._attached = AttachedJobs(context.workload)
        self._records: dict[str, WeightsRecord] = {}
        self._failures: dict[str, Failure] = {}
        self._served: frozenset[str] = frozenset()
        self._announcements: asyncio.Queue[Announcement | None] = asyncio.Queue(_ANNOUNCEMENTS_MAX)
        self._mirrors: list[Mirror[Any]] = []
        self._looking: dict[str, asyncio.Task[None]] = {}
        self._sound: dict[str, WeightsRecord] = {}
        """Looked through, not applied yet. A newer version does not take it away before it is sound itself: where
        versions come faster than they can be looked through, none would ever be applied."""
        self.blocked: set[str] = set()
        """Job keys whose update waits for running calls that insist on the present version."""

    # --- what is known -------------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Start the mirrors; complete when this returns. Raises Unreachable."""
        store = self._context.store
        if self._lora:
            self._mirrors.append(await store.jobs.mirror(on_change=self._saw_job))
        self._mirrors.append(await store.weights.mirror(on_change=self._saw_weights))

    async def close(self) -> None:
        for task in self._looking.values():
            task.cancel()
        for mirror in self._mirrors:
            await mirror.close()

    @property
    def jobs(self) -> frozenset[str]:
        """Keys of the jobs served here."""
        return self._attached.keys

    @property
    def retry_at(self) -> float | None:
        return next_retry_at(self._failures)

    def why_behind(self, job: str) -> str:
        failure = self._failures.get(job)
        return f"version {failure.version} was rejected: {failure.why}" if failure else ""

    def _saw_job(self, key: str, entry: Entry[JobRecord] | None) -> None:
        if entry is None:
            self._attached.gone(key)
        else:
            self._attached.saw(key, entry.value, entry.revision)
        self._wake.set()

    def _saw_weights(self, key: str, entry: Entry[WeightsRecord] | None) -> None:
        if entry is None:
            return
        known, record = self._records.get(key), entry.value
        if known is None or (record.incarnation, record.version) > (known.incarnation, known.version):
            self._records[key] = record
            self._wake.set()

    async def look(self, keys: set[str]) -> None:
        """Read the weights records of ``<tenant>.<job>`` keys, whatever the mirror says."""
        for key in keys:
            try:
                self._saw_weights(key, await self._context.store.weights.get(key))
            except Transient as error:
                log.warning("weights of %s not read: %s", key, error)

    async def look_for_job(self, key: str) -> None:
        """The mirror may be behind a client that has read the job's record already."""
        if self._lora and (entry := await self._context.store.jobs.get(key)):
            self._saw_job(key, entry)

    # --- updates -------------------------------------------------------------------------------------------------

    def _due(self) -> dict[str, WeightsRecord]:
        keys = self._attached.keys
        applied = {key: self._engine.version(key) for key in keys}
        chosen = due(self._records.values(), keys, applied, self._failures, time.time())
        return {job_key(r.tenant, r.job, r.incarnation): r for r in chosen}

    def look_ahead(self) -> bool:
        """Begin to look through what is due and was not yet; ``wake`` is set when that is done.

        Returns:
            Whether ``apply_due`` would touch the device now.
        """
        for key, record in self._due().items():
            if self._sound.get(key) != record and key not in self._looking:
                self._looking[key] = asyncio.create_task(self._look_through(key, record))
        left = self._lora and bool(self._served - self._attached.keys)
        return left or any(not self._engine.pinned(key) for key in self._sound if key in self._attached.keys)

    async def looked_ahead(self) -> None:
        """Whatever is due now has been looked through."""
        self.look_ahead()
        await asyncio.gather(*self._looking.values())

    async def _look_through(self, key: str, record: WeightsRecord) -> None:
        try:
            await asyncio.to_thread(look_through, self._engine, record)
        except Rejected as error:
            self._reject(key, record, error)
        except Exception as error:  # tried again with delays like any other: it must not become a tight loop
            log.exception("weights cannot be looked through job=%s version=%d", key, record.version)
            self._reject(key, record, Rejected(f"{type(error).__name__}: {error}", code="weights-manifest"))
        else:
            self._sound[key] = record
        finally:
            del self._looking[key]
            self._wake.set()

    async def apply_due(self) -> None:
        """Bring every job that can be to its newest version; drop the adapters of jobs that left."""
        engine, keys = self._engine, self._attached.keys
        if self._lora and (left := self._served - keys):
            await self._in_thread(lambda: _drop(engine, left))
        self._served = keys
        for gone in (self._failures.keys() | self._sound.keys()) - keys:
            self._failures.pop(gone, None)
            self._sound.pop(gone, None)
        self.blocked.clear()
        for key in list(self._sound):
            if engine.pinned(key):
                self.blocked.add(key)
            else:
                await self._apply(key, self._sound.pop(key))

    async def _apply(self, key: str, record: WeightsRecord) -> None:
        try:
            applied = await self._in_thread(lambda: apply(self._engine, key, record))
        except Rejected as error:
            self._reject(key, record, error)
            return
        if key in self._failures and self._failures[key].version <= record.version:
            del self._failures[key]
        self._metrics.count_update(applied)
        log.info(
            "weights applied job=%s version=%d format=%s seconds=%.3f peak_extra_bytes=%d touched_share=%.4f",
            key, record.version, record.format, applied.seconds, applied.peak_extra_bytes, applied.touched_share,
        )  # fmt: skip
        self.announce_later(
            WeightsApplied(
                assignment=self._context.assignment,
                seconds=applied.seconds,
                peak_extra_bytes=applied.peak_extra_bytes,
                **_identity(record),
            )
        )

    def _reject(self, key: str, record: WeightsRecord, error: Rejected) -> None:
        self._failures[key] = failed(self._failures.get(key), record.version, str(error), time.time())
        self._metrics.updates.labels("rejected").inc()
        log.warning("weights rejected job=%s version=%d: %s", key, record.version, error)
        self.announce_later(WeightsRejected(why=str(error), assignment=self._context.assignment, **_identity(record)))

    # --- announcements -------------------------------------------------------------------------------------------

    def announce_later(self, event: Announcement) -> None:
        if self._announcements.qsize() < _ANNOUNCEMENTS_MAX - 1:  # one place is kept for the end mark
            self._announcements.put_nowait(event)

    def stop_announcing(self) -> None:
        self._announcements.put_nowait(None)

    async def announce(self) -> None:
        """Publish what happened, in order, until ``stop_announcing``."""
        while (event := await self._announcements.get()) is not None:
            try:
                await self._context.bus.publish(event)
            except Transient as error:
                log.warning("not announced: %s", error)


def _identity(record: WeightsRecord) -> _Identity:
    return _Identity(tenant=record.tenant, job=record.job, incarnation=record.incarnation, version=record.version)


def look_through(engine: Engine, record: WeightsRecord) -> None:
    """Read all that applying the version would read. Raises Rejected."""
    with _readable(record) as (manifest, directory):
        engine.look_through(record, manifest, directory)


@contextmanager
def _readable(record: WeightsRecord) -> Iterator[tuple[WeightsManifest, Path]]:
    """The announced manifest and its directory. A file that goes while it is read is Rejected; past the first write
    engines raise no OSError."""
    manifest, directory = read_manifest(record.manifest, record.digest), Path(record.manifest).parent
    try:
        yield manifest, directory
    except OSError as error:
        raise Rejected(f"weights {directory} cannot be read: {error}", code="weights-missing") from error


def _drop(engine: Engine, jobs: frozenset[str]) -> None:
    for job in jobs:
        engine.drop_lora(job)


def apply(engine: Engine, job: str, record: WeightsRecord) -> Applied:
    """Hand the announced version to the engine. Raises Rejected."""
    with _readable(record) as (manifest, directory):
        method = engine.apply_lora if record.format == "lora" else engine.apply_full
        return method(job, record, manifest, directory)
