"""What the demo sees while it runs: seats per claim over time, and each workload's waits, from the buckets."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from openrl_common.names import short_workload

if TYPE_CHECKING:
    from openrl_client.connection import Client
    from openrl_common.records import ClaimRecord, JobRecord, WorkloadRecord
    from openrl_common.store import Entry, Mirror


class SeatCount(msgspec.Struct, frozen=True):
    """Seats (reservations included) on a claim from ``at`` on (seconds since the start)."""

    at: float
    claim: str
    seats: int
    holders: tuple[str, ...]
    allocated: bool = True
    """False: the claim waits for its devices, which others may hold."""


class ClaimPeak(msgspec.Struct, kw_only=True):
    """``limit`` 0 = no limit. ``max_seats``: the most seats this claim ever had."""

    claim: str
    limit: int
    max_seats: int
    devices: tuple[str, ...] = ()


class Watcher:
    """Mirrors claims, seats, workloads and jobs; keeps what the report needs."""

    def __init__(self, started_at: float) -> None:
        self.started_at = started_at
        self.seats: list[SeatCount] = []
        self.claims: dict[str, ClaimPeak] = {}
        self.workloads: dict[str, WorkloadRecord] = {}
        self.jobs: dict[str, JobRecord] = {}
        self._mirrors: list[Mirror[Any]] = []

    async def start(self, client: Client) -> None:
        store = client.bus.store
        self._mirrors = [
            await store.ledger_claims.mirror(on_change=self._on_claim),
            await store.workloads.mirror(on_change=self._keep(self.workloads)),
            await store.jobs.mirror(on_change=self._keep(self.jobs)),
        ]

    async def close(self) -> None:
        for mirror in self._mirrors:
            await mirror.close()

    @staticmethod
    def _keep(into: dict[str, Any]) -> Callable[[str, Entry[Any] | None], None]:
        def on_change(key: str, entry: Entry[Any] | None) -> None:
            if entry is not None:  # what is deleted stays in the report
                into[key] = entry.value

        return on_change

    def _on_claim(self, claim: str, entry: Entry[ClaimRecord] | None) -> None:
        holders: tuple[str, ...] = ()
        allocated = False
        if entry is not None:
            record = entry.value
            allocated = bool(record.devices)
            holders = tuple(sorted(short_workload(one.workload) for one in record.entries.values()))
            peak = self.claims.setdefault(claim, ClaimPeak(claim=claim, limit=record.limit, max_seats=0))
            peak.limit = record.limit
            peak.max_seats = max(peak.max_seats, record.seats_peak, len(record.entries))
            peak.devices = record.devices or peak.devices
        self.seats.append(SeatCount(round(time.time() - self.started_at, 3), claim, len(holders), holders, allocated))

    def job_phase(self, key: str) -> str:
        record = self.jobs.get(key)
        return "" if record is None else record.phase.value

    def waits_of(self, key: str, now: float) -> list[dict[str, Any]]:
        """Every wait of the two workloads of a job: workload, reason, message, seconds."""
        record = self.jobs.get(key)
        if record is None:
            return []
        waits = []
        for workload in (record.trainer, record.sampler):
            found = self.workloads.get(workload)
            for wait in found.waits if found is not None else ():
                seconds = max(0.0, (wait.until or now) - max(wait.since, record.submitted_at))
                if wait.until is None or wait.until > record.submitted_at:
                    waits.append(
                        {
                            "workload": short_workload(workload),
                            "reason": wait.reason.value,
                            "message": wait.message,
                            "since_s": round(wait.since - self.started_at, 3),
                            "seconds": round(seconds, 3),
                        }
                    )
        return waits

    def standing_reason(self, key: str) -> str:
        """Why a job waits now, empty when it does not."""
        record = self.jobs.get(key)
        for workload in (record.trainer, record.sampler) if record is not None else ():
            found = self.workloads.get(workload)
            if found is not None and found.reason is not None:
                return f"{found.reason.value}: {found.message}"
        return ""

    def seats_of(self, key: str) -> str:
        """The claims of trainer and sampler, shortened, for the live view."""
        record = self.jobs.get(key)
        parts = []
        for workload in (record.trainer, record.sampler) if record is not None else ():
            found = self.workloads.get(workload)
            if found is not None and found.claim:
                parts.append(found.claim.rsplit("-", 1)[-1][:4])
        return " ".join(parts)
