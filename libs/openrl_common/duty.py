"""A duty: what only one of several replicas does at a time, as a lease by compare-and-swap (L6, E13).

free ─▶ held ─ renewed every 3 s ─ … ─ silent for 10 s by another replica's clock ─▶ that one's
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from openrl_common.errors import Conflict, Transient
from openrl_common.liveness import Pulses
from openrl_common.records import DutyRecord
from openrl_common.store import Bucket

log = logging.getLogger(__name__)

DUTY_RENEW_S = 3.0
DUTY_LAPSE_S = 10.0


class Duty:
    """``keep`` runs beside the work, ``held`` says whether it may be done here and now.

    Work under a duty must still be right when two do it: a replica that was stopped between a look at ``held`` and its
    next write comes too late. Its writes are compare-and-swaps.

    Args:
        holder: unique per process.
        clock: monotonic seconds.
    """

    def __init__(self, bucket: Bucket[DutyRecord], name: str, *, holder: str, clock: Callable[[], float]) -> None:
        self._bucket = bucket
        self._name = name
        self._holder = holder
        self._clock = clock
        self._pulses = Pulses()
        self._revision = 0
        self._renewals = 0
        self._sent_at: float | None = None

    @property
    def held(self) -> bool:
        return self._sent_at is not None and self._clock() - self._sent_at < DUTY_LAPSE_S

    async def keep(self, stopping: asyncio.Event) -> None:
        """Renew it, or take it over once its holder has gone silent; hand it back when stopping."""
        while not stopping.is_set():
            try:
                await self.look()
            except Transient as error:
                self._pulses.cut_off()
                log.debug("duty %s: %s", self._name, error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DUTY_RENEW_S):
                    await stopping.wait()
        if self.held:
            with contextlib.suppress(Transient):
                async with asyncio.timeout(1.0):
                    await self._bucket.write(self._name, DutyRecord(renewals=self._renewals + 1), last=self._revision)
        self._sent_at = None

    async def look(self) -> None:
        """One renewal, or one look at who holds it."""
        now = self._clock()
        entry = None
        if self._sent_at is None:
            entry = await self._bucket.get(self._name)
            holder, revision = ("", 0) if entry is None else (entry.value.holder, entry.revision)
            if holder not in ("", self._holder) and not self._pulses.lapsed(
                self._name, revision, now, limit_s=DUTY_LAPSE_S
            ):
                return
            self._revision = revision
            now = self._clock()
        self._renewals += 1
        try:
            record = DutyRecord(holder=self._holder, renewals=self._renewals)
            self._revision = await self._bucket.write(self._name, record, last=self._revision)
        except Conflict:
            if self._sent_at is not None:
                log.info("duty %s is another replica's now", self._name)
            self._sent_at = None
            return
        if self._sent_at is None:
            log.info("duty %s is this replica's now", self._name)
        self._sent_at = now
