"""Deleting what ``core.retention`` calls over, and the delete markers that are left of it: one replica's duty (L6).

A deletion is a compare-and-swap from the revision that was found old: what somebody writes meanwhile stays. It leaves a
marker, which mirrors see; the marker itself is dropped a day later. Each pass does a bounded number.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter

from openrl_common.bus import Bus
from openrl_common.duty import Duty
from openrl_common.errors import Conflict, Transient
from openrl_common.pause import pause
from openrl_common.records import ClaimState, LeaseState
from openrl_common.store import Bucket, Old
from openrl_ledger.core.retention import is_over

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Retention:
    """``keep_s``: how long a record of what is over is kept; ``markers_s``: a delete marker. ``num_max``: a pass."""

    keep_s: float = 8 * 86_400.0
    markers_s: float = 86_400.0
    every_s: float = 600.0
    num_max: int = 500


class Retirer:
    """``watch`` lasts until the bus is stopping; ``look`` is one pass over every bucket."""

    def __init__(self, bus: Bus, retention: Retention, registry: CollectorRegistry) -> None:
        self._bus = bus
        self._retention = retention
        self._forgotten = Counter(
            "openrl_ledger_records_forgotten", "Records of what is over, deleted", ["bucket"], registry=registry
        )

    async def watch(self, duty: Duty) -> None:
        while not self._bus.stopping.is_set():
            await pause(self._bus.stopping, self._retention.every_s)
            if duty.held and self._bus.connected:
                try:
                    await self.look(time.time())
                except Transient as error:
                    log.warning("old records are left for the next pass: %s", error)

    async def look(self, now: float) -> int:
        """Returns how many records and markers were dropped."""
        store, keep = self._bus.store, self._retention
        num = 0
        for name in ("ledger_seats", "ledger_claims", "leases", "cuts", "ready"):
            bucket: Bucket[Any] = getattr(store, name)
            for old in await bucket.written_before(now - keep.keep_s, keep.num_max):
                if old.value is not None and await self._is_over(name, old):
                    with contextlib.suppress(Conflict):
                        await bucket.delete(old.key, last=old.revision)
                        self._forgotten.labels(name).inc()
                        num += 1
        for name in (
            "ledger_seats",
            "ledger_claims",
            "leases",
            "cuts",
            "ready",
            "turns",
            "workers",
            "jobs",
            "workloads",
        ):
            bucket = getattr(store, name)
            for old in await bucket.written_before(now - keep.markers_s, keep.num_max):
                if old.value is None:
                    await bucket.forget_marker(old)
                    num += 1
        if num:
            log.info("%d records and markers of what is over are forgotten", num)
        return num

    async def _is_over(self, name: str, old: Old[Any]) -> bool:
        if name == "ready":  # a worker's own word: over with its lease
            lease = await self._bus.store.leases.get(old.key)
            return lease is None or lease.value.state is LeaseState.TOMBSTONE
        if name == "cuts" and is_over(old.value):
            claim = await self._bus.store.ledger_claims.get(old.key)
            return claim is None or claim.value.state is ClaimState.GONE
        return is_over(old.value)
