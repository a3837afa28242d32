"""A duty: what only one of several replicas does at a time, as a lease by compare-and-swap (L6, E13).

free ─▶ held ─ renewed every 3 s ─ … ─ silent for 10 s by another replica's clock ─▶ that one's
                                     └ its process is gone, on the same machine ───▶ that one's at once
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from openrl_common.errors import Conflict, Rejected, Transient
from openrl_common.liveness import Pulses
from openrl_common.pause import pause
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
        gone: is it known for certain that this holder is no more?
    """

    def __init__(
        self,
        bucket: Bucket[DutyRecord],
        name: str,
        *,
        holder: str,
        clock: Callable[[], float],
        gone: Callable[[str], bool] = lambda holder: False,
    ) -> None:
        self._bucket = bucket
        self._name = name
        self._holder = holder
        self._clock = clock
        self._gone = gone
        self._taken = asyncio.Event()
        self._lost = asyncio.Event()
        self.elsewhere = False
        """Was it another replica's at the last look?"""
        self._pulses = Pulses()
        self._revision = 0
        self._renewals = 0
        self._sent_at: float | None = None

    @property
    def held(self) -> bool:
        return self._sent_at is not None and self._clock() - self._sent_at < DUTY_LAPSE_S

    async def wait_held(self, stopping: asyncio.Event) -> bool:
        """Stand by, while ``keep`` runs, until it is this replica's; False: ``stopping`` came first."""
        while not (self.held or stopping.is_set()):
            self._taken.clear()
            await _either(self._taken, stopping)
        return self.held

    async def wait_lost(self, stopping: asyncio.Event) -> None:
        """For a task group: raises Rejected (``duty-lost``) once another replica has taken it over.

        A replica that is only cut off from the bus has not lost it: it goes on, or finds out when it is back.
        """
        await _either(self._lost, stopping)
        if self._lost.is_set() and not stopping.is_set():
            raise Rejected(self._lost_sentence, code="duty-lost")

    async def confirm(self) -> None:
        """Ask the bucket whose it is, having met a write that nobody here made.

        Raises Transient when it is lost, not Rejected: the message in hand is the successor's to handle (E6).
        """
        entry = await self._bucket.get(self._name)
        if entry is None or entry.value.holder != self._holder:
            self._lost.set()
            raise Transient(self._lost_sentence)

    @property
    def _lost_sentence(self) -> str:
        return f"another replica has taken over ({self._name}): this one starts again as a stand-by"

    async def keep(self, stopping: asyncio.Event) -> None:
        """Renew it, or take it over once its holder has gone silent; hand it back when stopping."""
        while not stopping.is_set():
            try:
                await self.look()
            except Transient as error:
                self._pulses.cut_off()
                log.debug("duty %s: %s", self._name, error)
            await pause(stopping, DUTY_RENEW_S)
        if self.held:
            with contextlib.suppress(Transient, TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._bucket.write(self._name, DutyRecord(renewals=self._renewals + 1), last=self._revision)
        self._sent_at = None

    async def look(self) -> None:
        """One renewal, or one look at who holds it."""
        if self._sent_at is None:
            entry = await self._bucket.get(self._name)
            holder, revision = ("", 0) if entry is None else (entry.value.holder, entry.revision)
            # Its silence begins with the answer: asked in an outage, that may show a renewal sent long after.
            lapsed = self._pulses.lapsed(self._name, revision, self._clock(), limit_s=DUTY_LAPSE_S)
            self.elsewhere = holder not in ("", self._holder) and not lapsed and not self._gone(holder)
            if self.elsewhere:
                return
            self._revision = revision
        now = self._clock()
        self._renewals += 1
        try:
            record = DutyRecord(holder=self._holder, renewals=self._renewals)
            self._revision = await self._bucket.write(self._name, record, last=self._revision)
        except Conflict:
            if self._sent_at is not None:
                entry = await self._bucket.get(self._name)
                if entry is not None and entry.value.holder == self._holder:
                    self._revision = entry.revision  # a renewal given up as lost has landed since (E7)
                    return
                log.info("duty %s is another replica's now", self._name)
                self._lost.set()
            self._sent_at = None
            return
        if self._sent_at is None:
            log.info("duty %s is this replica's now", self._name)
        self._sent_at = now
        self._taken.set()


async def _either(*events: asyncio.Event) -> None:
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()
