"""Workload and ClaimLedger objects: what the bus says, for ``kubectl get`` (K5). A mirror: edits change nothing.

Writes are few: each object waits a moment after a change, so that a burst of phases is one write, and what has not
changed is not written. Objects of what is over are deleted; an edit by hand is overwritten at the next full pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec

from openrl_common.bus import Bus
from openrl_common.errors import Rejected, Transient
from openrl_common.names import short_workload
from openrl_common.records import ClaimRecord, ClaimState, TurnRecord, WorkloadPhase, WorkloadRecord
from openrl_common.store import Entry, Mirror
from openrl_launcher.kubernetes.api import Absent, KubeApi
from openrl_launcher.kubernetes.manifests import MANAGED, SELECTOR
from openrl_launcher.kubernetes.settings import KubernetesSettings

log = logging.getLogger(__name__)

VERSION = "openrl.io/v1alpha1"
DELAY_S = 1.0
FULL_PASS_S = 60.0
_WRITERS = 4
_PAUSE_PER_WRITE = 9.0
_PAUSE_MAX_S = 1.0
_RETRY_S = 2.0
_OVER = (WorkloadPhase.FINISHED, WorkloadPhase.FAILED)
KEEP_S = 300.0
"""A workload that is over is shown for so long."""


def pause_s(write_s: float) -> float:
    """How long a writer rests after a write that took ``write_s``: nine times as long, a second at most.

    An idle API server answers in milliseconds and is written to some eighty times a second; one that is busy, with
    whosever requests, is left alone but for four writes a second: a burst of thousands is shown a little later, and
    each of them in fewer writes.
    """
    return min(_PAUSE_MAX_S, _PAUSE_PER_WRITE * write_s)


class _Meta(msgspec.Struct):
    name: str


class _Item(msgspec.Struct):
    metadata: _Meta
    spec: dict[str, Any] = {}


class _List(msgspec.Struct):
    items: list[_Item]


class StatusMirror:
    """``start`` in the service's task group, ``close`` afterwards. ``writes`` counts requests."""

    def __init__(self, bus: Bus, api: KubeApi, settings: KubernetesSettings) -> None:
        self._store = bus.store
        self._api = api
        self._namespace = settings.namespace
        self._workloads: dict[str, WorkloadRecord] = {}
        self._claims: dict[str, ClaimRecord] = {}
        self._turns: dict[str, TurnRecord] = {}
        self._written: dict[tuple[str, str], dict[str, Any]] = {}
        self._due: dict[tuple[str, str], float] = {}
        self._busy: set[tuple[str, str]] = set()
        self._changed = asyncio.Event()
        self._mirrors: list[Mirror[Any]] = []

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        self._mirrors = [
            await self._store.workloads.mirror(on_change=self._follow("workloads", self._workloads)),
            await self._store.turns.mirror(on_change=self._follow("claimledgers", self._turns)),
        ]
        for _ in range(_WRITERS):
            tasks.create_task(self._write(), name="mirror")
        tasks.create_task(self._full_passes(), name="mirror: full passes")

    async def close(self) -> None:
        for mirror in self._mirrors:
            await mirror.close()

    def note_claim(self, claim: str, record: ClaimRecord | None) -> None:
        """From the launcher's live copy: a second one of the same bucket would be sent and decoded again."""
        if record is None:
            self._claims.pop(claim, None)
        else:
            self._claims[claim] = record
        self._mark("claimledgers", claim, DELAY_S)

    def _follow(self, kind: str, records: dict[str, Any]) -> Callable[[str, Entry[Any] | None], None]:
        def on_change(key: str, entry: Entry[Any] | None) -> None:
            if entry is None:
                records.pop(key, None)
            else:
                records[key] = entry.value
            self._mark(kind, key, DELAY_S)

        return on_change

    def _mark(self, kind: str, name: str, delay_s: float) -> None:
        self._due.setdefault((kind, name), time.monotonic() + delay_s)
        self._changed.set()

    # --- what stands there --------------------------------------------------------------------------------------------

    def _wanted(self, kind: str, name: str) -> dict[str, Any] | None:
        if kind == "workloads":
            workload = self._workloads.get(name)
            over = workload is not None and workload.phase in _OVER and time.time() - (workload.ended_at or 0) > KEEP_S
            return None if workload is None or over else workload_spec(workload)
        claim = self._claims.get(name)
        if claim is None or claim.state is ClaimState.GONE:
            return None
        return claim_spec(claim, self._turns.get(name, TurnRecord()))

    # --- writing ------------------------------------------------------------------------------------------------------

    async def _write(self) -> None:
        while True:
            key = await self._next()
            began = time.monotonic()
            try:
                await self._bring_up_to_date(*key)
            except Transient as error:
                log.info("%s %s is not mirrored yet: %s", *key, error)
                self._mark(*key, _RETRY_S)
            except Rejected as error:
                log.error("%s %s is not mirrored: %s", *key, error)
            finally:
                self._busy.discard(key)
            await asyncio.sleep(pause_s(time.monotonic() - began))

    async def _next(self) -> tuple[str, str]:
        while True:
            self._changed.clear()
            now = time.monotonic()
            # in the order of marking, which is nearly that of falling due
            key, due = next(((key, due) for key, due in self._due.items() if key not in self._busy), (None, now + 60.0))
            if key is not None and due <= now:
                del self._due[key]
                self._busy.add(key)
                return key
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(due - now):
                    await self._changed.wait()

    async def _bring_up_to_date(self, kind: str, name: str) -> None:
        wanted = self._wanted(kind, name)
        path = f"/apis/{VERSION}/namespaces/{self._namespace}/{kind}"
        if wanted is None:
            if self._written.pop((kind, name), None) is not None:
                with contextlib.suppress(Absent):
                    await self._api.call("DELETE", f"{path}/{name}")
            return
        if self._written.get((kind, name)) == wanted:
            return
        body = {
            "apiVersion": VERSION,
            "kind": "Workload" if kind == "workloads" else "ClaimLedger",
            "metadata": {"name": name, "namespace": self._namespace, "labels": MANAGED},
            "spec": wanted,
        }
        await (self._api.apply if (kind, name) in self._written else self._api.ensure)(path, body)
        self._written[kind, name] = wanted

    async def _full_passes(self) -> None:
        """What stands there against what should: leftovers of an earlier launcher, edits by hand, lost writes."""
        while True:
            for kind, records in (("workloads", self._workloads), ("claimledgers", self._claims)):
                with contextlib.suppress(Transient):
                    path = f"/apis/{VERSION}/namespaces/{self._namespace}/{kind}"
                    data = await self._api.call("GET", path, query={"labelSelector": SELECTOR})
                    found = {item.metadata.name: item.spec for item in msgspec.json.decode(data, type=_List).items}
                    for name in found.keys() | records.keys():
                        if name in found:
                            self._written[kind, name] = found[name]
                        else:
                            self._written.pop((kind, name), None)
                        if found.get(name) != self._wanted(kind, name):
                            self._mark(kind, name, 0.0)
            await asyncio.sleep(FULL_PASS_S)


def workload_spec(record: WorkloadRecord) -> dict[str, Any]:
    """What ``kubectl get workloads`` shows, and who it is. Empty values are left out."""
    shown = {
        "workload": short_workload(record.workload),
        "tenant": record.tenant,
        "owner": record.owner_name,
        "role": str(record.shape.role),
        "kind": str(record.kind),
        "phase": str(record.phase),
        "claim": record.claim,
        "node": record.node,
        "reason": "" if record.reason is None else str(record.reason),
        "message": record.message,
        "submittedAt": _timestamp(record.submitted_at),
        "since": _timestamp(record.since) if record.since else "",
    }
    return {key: value for key, value in shown.items() if value}


def claim_spec(record: ClaimRecord, turns: TurnRecord) -> dict[str, Any]:
    """What ``kubectl get claimledgers`` shows: counts as numbers, 0 = no limit."""
    return {
        "state": str(record.state),
        "node": record.node,
        "devices": list(record.devices),
        "seats": len(record.entries),
        "limit": record.limit,
        "resident": len(turns.residents),
        "waiting": len(turns.waiting),
        "workloads": sorted(short_workload(entry.workload) for entry in record.entries.values()),
    }


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
